"""What drafts are worth: how many are accepted, by proposer, on text that is new.

The bundled pair continues held-out Python files: the first tokens of a window are the
prompt, the model writes on. For every proposer, greedily and at temperature 1:

    acceptance    accepted drafts over proposed drafts; the token after them is the
                  target's own and counts as neither
    by place      the same for a row's first draft, its second ...: a draft counts as
                  accepted only if all before it were
    mean length   tokens of a row in a step in which it had drafts
    per step      tokens of a row in any of its decode steps, those without drafts too

The draft model's noise is its target's. So of drafts that are judged (all before them
were accepted) at least (1 - TV) / (1 + TV) are accepted, and 1 - TV is the most that any
rule could accept. Both are means over the positions at which drafts were judged, of the
two models' distributions there, as transformers computes them.

At temperature 1 the same by the other rule, rejection sampling: of a model's drafts
1 - TV should be accepted. `bench/speculation_rules` does that by its pure functions, too.

By the default rule outputs must equal those without drafts: all is in float32, and it is
an error if not. `--head FOLDER` measures an EAGLE-3 head alone (bench/train_head.py).
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field, frozen
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.held_out import held_out_texts
from bench.results import run, show
from bench.speculation_rules import by_rejection
from minfer import LLM, RequestOutput, SamplingParams
from minfer.analysis.drafts import SampleDrafts, sample_drafts, tally_of, valid_steps
from minfer.effects.models.architecture.draft_head import EAGLE3
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.setup.speculation_settings import (
    DRAFT_MODEL,
    SAME,
    STANDARD,
    WITHOUT_HEADS,
)
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records import acceptance
from minfer.records.state import EngineState, Turn

PROMPT: Final = 192  # tokens
ROWS: Final = 16  # that run at once
TEMPERATURES: Final = (0.0, 1.0)
Ids = list[list[int]]


@define
class Counted:
    """What an engine does with drafts, noted turn by turn."""

    drafts: list[SampleDrafts] = field(factory=list)
    rows: int = 0  # of decode steps
    tokens: int = 0  # of these

    def __call__(self, turn: Turn) -> None:
        """As a driver's record is told."""
        self.drafts += sample_drafts(turn.before, turn.events, turn.transition)
        running = set(turn.before.running.run_ids)
        for step in valid_steps(turn.before, turn.events, turn.transition):
            filling = {fill.index for fill in step.plan.fills}
            for row, gen in enumerate(step.plan.run_ids):
                if gen in running and row not in filling and step.yields[row]:
                    self.rows += 1
                    self.tokens += len(step.yields[row])

    def close(self, state: EngineState) -> None:
        """As a driver's record must."""

    def figures(self) -> dict[str, Any]:
        tally = tally_of(self.drafts)
        return {
            "proposed": sum(tally.proposed),
            "accepted": sum(tally.accepted),
            "acceptance": round(tally.rate, 4),
            "by place": [round(share, 4) for share in tally.by_place],
            "mean length": round(tally.mean_length, 3),
            "tokens per target step": round(self.tokens / max(1, self.rows), 3),
            "decode steps of a row": self.rows,
            "of these with drafts": tally.rows,
        }


def windows(count: int) -> Ids:
    """Beginnings of stretches of held-out files, spread over all of them."""
    tokenizer = Tokenizer(bundled_folder())
    texts = [tokenizer.encode(text) for text in held_out_texts()]
    all_windows = [
        text[start : start + PROMPT]
        for text in texts
        for start in range(0, len(text) - PROMPT, PROMPT)
    ]
    if len(all_windows) < count:
        raise SystemExit(f"--prompts: there are {len(all_windows)} windows")
    return [all_windows[len(all_windows) * i // count] for i in range(count)]


@frozen
class Ran:
    """What came of prompts."""

    texts: Ids  # prompt and output
    seen: Counted


def ran(prompts: Ids, temperature: float, tokens: int, config: Any) -> Ran:
    """All prompts, by an engine that speculates so."""
    params = [
        SamplingParams(
            temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=number
        )
        for number in range(len(prompts))
    ]
    settings: Mapping[str, Any] = {"dtype": "float32", "max_num_seqs": ROWS}
    with LLM(speculative_config=config, **settings) as llm:
        llm.worker.driver.record = seen = Counted()
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return Ran([_whole(*pair) for pair in zip(prompts, outputs, strict=True)], seen)


def _whole(prompt: list[int], output: RequestOutput) -> list[int]:
    [completion] = output.outputs
    return [*prompt, *completion.token_ids]


class Pair:
    """Both models, by transformers."""

    def __init__(self) -> None:
        folders = bundled_folder(), bundled_folder("draft")
        read = AutoModelForCausalLM.from_pretrained
        self.models = [read(folder, dtype=torch.float32) for folder in folders]

    @torch.inference_mode()
    def distances(self, text: list[int], temperature: float) -> Tensor:
        """TV of the distributions of the token at each place of a text but its first."""
        model_logits = [
            model(torch.tensor([text])).logits[0, :-1] for model in self.models
        ]
        if not temperature:
            target, draft = (logits.argmax(-1) for logits in model_logits)
            return torch.ne(target, draft).double()
        target, draft = (
            (logits.double() / temperature).softmax(-1) for logits in model_logits
        )
        return torch.abs(target - draft).sum(-1) / 2


def distances(pair: Pair, speculated: Ran, temperature: float) -> Any:
    """Acceptance of drafts that were judged, beside what distributions there allow."""
    far = [pair.distances(text, temperature) for text in speculated.texts]
    values, accepted = list[float](), 0
    for drafts in speculated.seen.drafts:
        count = acceptance.counted_drafts(drafts.proposed, drafts.accepted)
        start = drafts.known - 1
        text_distances = far[int(drafts.id)][start : start + count].tolist()
        values += text_distances  # without what was drafted behind the text's end
        accepted += min(drafts.accepted, len(text_distances))
    tv = torch.tensor(values, dtype=torch.float64)
    return {
        "judged": len(tv),
        "accepted": round(accepted / len(tv), 4),
        "(1 - TV) / (1 + TV)": round(float(((1 - tv) / (1 + tv)).mean()), 4),
        "1 - TV": round(float((1 - tv).mean()), 4),
    }


def config_of(method: str, drafts: int, rule: str = SAME) -> dict[str, Any]:
    return {
        "method": method,
        "num_speculative_tokens": drafts,
        "adaptive": False,
        "rejection_sample_method": rule,
    }


def by_coins(prompts: Ids, pair: Pair, args: argparse.Namespace) -> dict[str, Any]:
    """All proposers at temperature 1, by rejection sampling."""
    results: dict[str, Any] = {}
    for method in WITHOUT_HEADS:
        config = config_of(method, args.drafts, STANDARD)
        speculated = ran(prompts, 1.0, args.tokens, config)
        results[method] = speculated.seen.figures()
        if method == DRAFT_MODEL:
            results[method]["judged drafts"] = distances(pair, speculated, 1.0)
        show({f"{method}, temperature 1, rejection sampling": results[method]})
    return results


def by_head(prompts: Ids, args: argparse.Namespace) -> dict[str, Any]:
    """A head at each temperature, by the default rule."""
    config = config_of(EAGLE3, args.drafts) | {"model": str(args.head)}
    results: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        plain = ran(prompts, temperature, args.tokens, None)
        speculated = ran(prompts, temperature, args.tokens, config)
        if speculated.texts != plain.texts:
            raise SystemExit("a head: outputs differ from those without drafts")
        results[f"temperature {temperature:g}"] = speculated.seen.figures()
    show(results)
    return {"drafts": args.drafts, "prompts": len(prompts), "same noise": results}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    prompts = windows(args.prompts)
    if args.head is not None:
        return by_head(prompts, args)
    pair = Pair()
    results: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        plain = ran(prompts, temperature, args.tokens, None)
        for method in WITHOUT_HEADS:
            speculated = ran(
                prompts, temperature, args.tokens, config_of(method, args.drafts)
            )
            if speculated.texts != plain.texts:
                raise SystemExit(f"{method}: outputs differ from those without drafts")
            figures = speculated.seen.figures()
            if method == DRAFT_MODEL:
                figures["judged drafts"] = distances(pair, speculated, temperature)
            label = f"{method}, temperature {temperature:g}"
            results[label] = figures
            show({label: figures})
    coins = by_coins(prompts, pair, args)
    rejected = by_rejection(pair.models, prompts[:: args.sparse], args)
    for method, figures in rejected.items():
        show({f"{method}, rejection sampling by pure functions": figures})
    return {
        "drafts": args.drafts,
        "prompts": len(prompts),
        "prompt tokens": PROMPT,
        "output tokens": args.tokens,
        "dtype": "float32",
        "same noise": results,
        "rejection sampling, temperature 1": coins,
        "rejection sampling, temperature 1, by pure functions": rejected,
    }


if __name__ == "__main__":
    options = {
        "--prompts": 128,
        "--tokens": 128,
        "--drafts": 4,
        "--sparse": {
            "type": int,
            "default": 8,
            "help": "of as many prompts one is for the pure functions",
        },
        "--head": {"type": Path, "default": None, "help": "an EAGLE-3 head's folder"},
        "--seed": 0,
    }
    run("speculation", measure, options)
