"""Mend what a trained model still gets wrong: a last piece of training.

    python -m bench.bundled.polish --models MODELS --out OUT --minutes 4
    python -m bench.bundled.polish --models MODELS --out OUT --minutes 2 --role draft

Theory. A trained model is wrong in a tenth of some tasks, so nine in ten fresh problems
teach what it knows. Therefore it writes first: of some thousands of problems those that
it answers wrongly are kept, and of completions those that go round in circles, up to
where they have said the same three times: there they have to end. (Circles that were made
up, as `packing.circles` makes them, are not those that it falls into.) It then learns
these beside what it learnt before, lest it forget that, at a small learning rate that
falls to zero; in rounds, since its mistakes change. The draft learns last, from the
polished target.

A step takes some seconds of two processors, and some hundredths of one of a GPU.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any, Final

import numpy
import torch
from attrs import define, field, frozen
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from bench.bundled import evaluate, probe, shards
from bench.bundled.dialogues import THINK, Dialogue, answered, asked
from bench.bundled.feed import Python, Tape, read_python
from bench.bundled.model import SHAPES, WEIGHTS, Model
from bench.bundled.muon import Muon
from bench.bundled.packing import (
    END_ID,
    HEAVY,
    LEARNT,
    Conversations,
    Pack,
    Tokens,
)
from bench.bundled.prepare import FOLDER, TOKENIZER
from bench.bundled.tasks.checks import right
from bench.bundled.tasks.problem import Problem
from bench.bundled.tasks.tasks import Stage, any_problem
from bench.bundled.train import MATRIX_RATE, OTHER_RATE, losses, say
from minfer import LLM, SamplingParams

LENGTH: Final = 512  # tokens of a window
# Windows of a step by source: conversations, those answered wrongly, whole files,
# definitions, recipes, circles made up, values, circles that it fell into.
SHARES: Final = {
    "talk": 11,
    "mistakes": 7,
    "files": 4,
    "openings": 4,
    "recipes": 3,
    "circles": 1,
    "values": 1,
    "own circles": 3,
}
TALK: Final = 600_000  # tokens of a shard of fresh conversations
PROBLEMS: Final = 10_000  # that it answers in a round
OPENINGS: Final = 1500  # that it continues
SHORTEST, LONGEST = 2, 24  # tokens of an opening
WRITTEN: Final = 200  # tokens of a completion
SAYINGS: Final = 3  # of the same, after which a text ends
FEWEST: Final = 12  # tokens that were said again by then


def circle_ends(tokens: Sequence[int]) -> int | None:
    """How many tokens a text has when it has said the same `SAYINGS` times; None if it
    never does.
    """
    ends = [
        at + 1
        for period in range(1, evaluate.PERIOD + 1)
        if (at := _said_again(tokens, period)) is not None
    ]
    return min(ends, default=None)


def _said_again(tokens: Sequence[int], period: int) -> int | None:
    """The place of the token with which a stretch of `period` was said once too often."""
    enough, same = max((SAYINGS - 1) * period, FEWEST), 0
    for at in range(period, len(tokens)):
        same = same + 1 if tokens[at] == tokens[at - period] else 0
        if same == enough:
            return at
    return None


@frozen
class Mistakes:
    """What a model gets wrong."""

    problems: list[Problem]
    circles: list[list[int]]  # texts up to where they should have ended
    asked: int
    begun: int


def mistakes(folder: Path, openings: Iterable[list[int]], rng: Random) -> Mistakes:
    """Have the model of a folder answer and continue, greedily."""
    greedy = SamplingParams(temperature=0, max_tokens=WRITTEN)
    some = [any_problem(rng, Stage.LAST) for _ in range(PROBLEMS)]
    begun = list(openings)
    with LLM(str(folder)) as llm:
        answers = evaluate.answer(llm, some)
        outputs = llm.generate(begun, greedy, use_tqdm=False)
    wrong = [
        one
        for one, text in zip(some, answers, strict=True)
        if not right(one.task, text, one.truth)
    ]
    texts = [
        [*start, *out.outputs[0].token_ids]
        for start, out in zip(begun, outputs, strict=True)
    ]
    round_and_round = [
        text[:end] for text in texts if (end := circle_ends(text)) is not None
    ]
    return Mistakes(wrong, round_and_round, len(some), len(texts))


def openings(python: Python, tokenizer: Tokenizer, rng: Random) -> list[list[int]]:
    """Beginnings of definitions, but for those that `evaluate` has continued."""
    judged = [
        tokenizer.encode(text, add_special_tokens=False).ids for text in evaluate.OPENINGS
    ]
    tape, found = python.tapes["openings"], list[list[int]]()
    while len(found) < OPENINGS:
        start = int(tape.starts[rng.randrange(len(tape.starts))])
        length = rng.randint(SHORTEST, LONGEST)
        ids = (tape.tokens[start : start + length].int() & (HEAVY - 1)).tolist()
        if END_ID not in ids and ids not in judged:
            found.append(ids)
    return found


def _corrected(problems: Sequence[Problem], rng: Random) -> list[Dialogue]:
    """Problems with their answers, one in four reasoned first."""
    made = []
    for problem in problems:
        turns, thought = asked(problem), ""
        if problem.thought and rng.random() < 0.25:
            thought = problem.thought
            turns[-1]["content"] = rng.choice(THINK).format(q=problem.question)
        made.append(Dialogue([*turns, *answered(problem, thought)], problem.tools))
    return made


def _ended(circles: Sequence[Sequence[int]]) -> list[Tokens]:
    """Texts of which it is learnt that they end here."""
    end = END_ID | LEARNT | HEAVY
    return [numpy.array([*one, end], numpy.int16) for one in circles]


@define
class Polishing:
    """A model in training, and what it learns from."""

    role: str
    model: Model
    teacher: nn.Module | None
    tokenizer: Tokenizer
    python: Python
    rate: float  # the highest, as a share of `train`'s highest
    seed: int
    device: str
    share: float  # of the windows that `SHARES` has
    shards: int  # of fresh conversations in a round
    losses: Callable[..., tuple[Tensor, Tensor, Tensor]]
    generator: torch.Generator = field(init=False)
    muon: Muon = field(init=False)
    adam: torch.optim.AdamW = field(init=False)
    tapes: dict[str, Tape] = field(factory=dict)
    step: int = 0

    def __attrs_post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        named = list(self.model.named_parameters())
        matrices = [one for name, one in named if one.dim() > 1 and "embed" not in name]
        others = [one for name, one in named if one.dim() < 2 or "embed" in name]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            others, lr=0.0, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0
        )
        self.tapes |= self.python.tapes

    def begin_round(self, number: int, found: Mistakes | None) -> None:
        """Have fresh conversations, and what was wrong just now."""
        numbers = range(number * self.shards, (number + 1) * self.shards)
        write = partial(_shard, self.tokenizer.to_str(), self.seed)
        if self.shards == 1:
            made = [write(number)]
        else:  # fresh ones at a GPU's speed take many processors
            with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
                made = list(pool.map(write, numbers))
        self.tapes["talk"] = Tape.of(Pack.joined(made), self.device)
        if found is not None and found.problems:
            wrong = _corrected(found.problems, Random(self.seed))
            tokens = Conversations(self.tokenizer).tokens(wrong)
            self.tapes["mistakes"] = Tape.of(Pack.of(tokens), self.device)
        if found is not None and found.circles:
            ended = Pack.of(_ended(found.circles))
            self.tapes["own circles"] = Tape.of(ended, self.device)

    def advance(self, share: float) -> float:
        """One step, when so much of the whole is done; returns the loss."""
        rate = self.rate * (1 - share)
        loss, _, _ = self.losses(self.model, self.teacher, self._batch())
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it without types
        self.adam.param_groups[0]["lr"] = OTHER_RATE * rate
        self.adam.step()
        self.adam.zero_grad()
        self.muon.step(MATRIX_RATE * rate)
        self.step += 1
        return loss.item()

    def _batch(self) -> Tensor:
        span = torch.arange(LENGTH + 1, device=self.device)
        parts = [
            tape.tokens[tape.draw(self._windows(name), self.generator)[:, None] + span]
            for name, tape in self.tapes.items()
        ]
        return torch.cat(parts).int()

    def _windows(self, name: str) -> int:
        return max(1, round(SHARES[name] * self.share))

    def write(self, folder: Path) -> None:
        """The model's weights, into a folder that has all else."""
        weights = {
            name: one.to("cpu", torch.bfloat16).contiguous()
            for name, one in self.model.state_dict().items()
        }
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)


def _shard(tokenizer: str, seed: int, number: int) -> Pack:
    """Fresh conversations, in a process of their own if there are several."""
    return shards.make(Tokenizer.from_str(tokenizer), seed, number, TALK, Stage.LAST)


def load(folder: Path, role: str, device: str) -> Model:
    """The model of a folder, which computes in bfloat16 and keeps float32."""
    return Model(SHAPES[role], torch.bfloat16).load(folder).to(device)


def polish(args: argparse.Namespace) -> None:
    """All rounds."""
    own, device = args.out / args.role, args.device
    copytree(args.models / args.role, own, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(own / TOKENIZER))
    drafts = args.role == "draft"
    teacher = load(args.out / "target", "target", device).eval() if drafts else None
    if teacher is not None:
        teacher.requires_grad_(requires_grad=False)
    python = read_python(args.data, device, args.documents, tokenizer)
    run = Polishing(
        args.role,
        load(own, args.role, device),
        teacher,
        tokenizer,
        python,
        args.rate,
        args.seed,
        device,
        args.share,
        args.shards,
        torch.compile(losses, dynamic=False) if args.compiled else losses,
    )
    problems = probe.sheet(tokenizer, device, each=args.each)
    rows = probe.held_rows(python, LENGTH, device)

    def look() -> dict[str, Any]:
        held = probe.held_out(run.model, rows, python.held_out_bytes)
        return {
            "bits_per_byte": round(held.bits, 4),
            "exact": probe.exact(run.model, problems),
        }

    say(**look())
    whole = 60 * args.minutes
    rng, spent = Random(args.seed), 0.0
    for number in range(args.rounds):
        found = None if drafts else mistakes(own, openings(python, tokenizer, rng), rng)
        run.begin_round(number, found)
        told = {} if found is None else {"wrong": _counts(found)}
        taught, began, mark = list[float](), run.step, time.perf_counter()
        while spent < whole * (number + 1) / args.rounds:
            taught.append(run.advance(spent / whole))
            now = time.perf_counter()
            spent, mark = spent + now - mark, now
        run.write(own)
        loss = round(sum(taught) / max(1, len(taught)), 4)
        say(round=number, steps=run.step - began, loss=loss, **told, **look())


def _counts(found: Mistakes) -> dict[str, Any]:
    return {
        "answers": len(found.problems),
        "of": found.asked,
        "circles": len(found.circles),
        "of texts": found.begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--models", type=Path, required=True, help="with target/ and draft/ in it")
    add("--out", type=Path, required=True, help="where the polished ones go")
    add("--role", choices=["target", "draft"], default="target")
    add("--data", type=Path, default=FOLDER, help="what `prepare` made")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--minutes", type=float, default=40, help="of steps")
    add("--rounds", type=int, default=5)
    add("--rate", type=float, default=0.05, help="a share of `train`'s highest")
    add("--share", type=float, default=1, help="of a step's windows; fewer on a CPU")
    add("--shards", type=int, default=1, help="of fresh conversations in a round")
    add("--compiled", action="store_true", help="worth its minute if there are many")
    add("--seed", type=int, default=17, help="another than the training's")
    add("--documents", type=int, help="so many of the sources only, for a trial")
    add("--each", type=int, default=probe.EACH, help="problems of a task in a probe")
    polish(parser.parse_args())


if __name__ == "__main__":
    main()
