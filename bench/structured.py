"""Outputs that must look like something: that they do, and what it costs.

Without a shape, on the CPU: --count generations of the bundled model under JSON schemas
by a seed, regular expressions, grammars and choices. Whatever ends by itself is held
against the constraint by independent code (jsonschema, `re`, a parser of its own); what
was cut must be a beginning of it.

With `--device cuda --shape 1.5B`, random weights and a vocabulary of that size: the time
of a token with a constraint and without, alone and beside others; and the longest waits
of 32 streams while hostile grammars come.
"""

import argparse
import contextlib
import json
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
from attrs import frozen

from bench.results import percentiles, run, show, spread
from bench.schemas import Maker
from minfer import LLM, RequestError, RequestOutput, SamplingParams, StructuredOutputs
from minfer.effects.text.grammars.grammar_library import GrammarError

MAX_TOKENS = 800
AT_ONCE = 64
PROMPT = "def main():\n    "


@frozen
class Case:
    """A constraint, and who judges of what came of it."""

    constraint: StructuredOutputs
    fits: Callable[[str], bool]


FORMATS = jsonschema.FormatChecker(["uuid", "ipv4", "email"])
TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
)


@FORMATS.checks("date", ValueError)
def is_date(text: object) -> bool:
    """RFC 3339 has a year 0000, a leap year; Python has none."""
    if isinstance(text, str):
        date.fromisoformat("2000" + text[4:] if text[:4] == "0000" else text)
    return True


@FORMATS.checks("time")
def is_time(text: object) -> bool:
    """RFC 3339, as the library has it with a package more."""
    return not isinstance(text, str) or TIME.fullmatch(text) is not None


def schema_case(maker: Maker) -> Case:
    schema = maker.schema()
    checker = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
    return Case(
        StructuredOutputs(json=schema), lambda text: checker.is_valid(json.loads(text))
    )


def regex_case(rng: random.Random) -> Case:
    atoms = [
        "[a-z]",
        "[A-Z_]",
        "[0-9]",
        "(def|class|if)",
        "x",
        " ",
        "\\.",
        "é",
        "[^a-z\\n]",
    ]
    counts = ["", "?", "{2}", "{1,5}", "{0,3}", "{3,7}"]
    pieces = [rng.choice(atoms) + rng.choice(counts) for _ in range(rng.randrange(2, 7))]
    half = len(pieces) // 2
    regex = f"({''.join(pieces[:half])}|-){{1,3}}{''.join(pieces[half:])};"
    return Case(
        StructuredOutputs(regex=regex), lambda text: bool(re.fullmatch(regex, text))
    )


def grammar_case(rng: random.Random) -> Case:
    """Nested brackets around words, of kinds and depths that differ."""
    pairs = rng.sample(["()", "[]", "{}", "<>"], rng.randrange(1, 4))
    word = rng.choice(["[a-z]{1,6}", "[0-9]{1,4}", "(yes|no)"])
    rules = " | ".join(f'"{left}" list "{right}"' for left, right in map(tuple, pairs))
    lists = 'item | item "," item'
    text = f"start: {rules}\nlist: {lists}\nitem: WORD | start\nWORD: /{word}/"
    if rng.random() < 0.3 and word != "[a-z]{1,6}":  # the other form of grammars
        last = (
            '"yes" | "no"' if word == "(yes|no)" else " ".join(["[0-9]"] + ["[0-9]?"] * 3)
        )
        text = (
            f"root ::= {rules}\nlist ::= {lists}\nitem ::= word | root\nword ::= {last}"
        )
    return Case(
        StructuredOutputs(grammar=text),
        lambda text: nested(text, pairs, word),
    )


def nested(text: str, pairs: Sequence[str], word: str) -> bool:
    """Whether a text is such brackets."""
    return is_nested(
        text,
        "|".join(
            f"{re.escape(left)}(?:{word}|W)(?:,(?:{word}|W))?{re.escape(right)}"
            for left, right in map(tuple, pairs)
        ),
    )


def is_nested(text: str, pair: str) -> bool:
    """Whether a text is brackets within each other and nothing beside them: the
    innermost, which are as the expression `pair` says, become a word W, again and again.
    """
    while text != "W":
        less = re.sub(pair, "W", text)
        if less == text:
            return False
        text = less
    return True


def choice_case(rng: random.Random) -> Case:
    words = [
        "yes",
        "no",
        "maybe",
        "def",
        "class ",
        "a b",
        "é",
        '"quoted"',
        "x\ny",
        "[0-9]",
    ]
    choice = rng.sample(words, rng.randrange(2, 8))
    return Case(StructuredOutputs(choice=choice), lambda text: text in choice)


def cases(kind: str, count: int, seed: int) -> tuple[list[Case], dict[str, int]]:
    """Cases of a kind that can be compiled, and the keywords of their schemas."""
    rng = random.Random(f"{kind} {seed}")
    maker = Maker(rng)
    makers: dict[str, Callable[[], Case]] = {
        "json": lambda: schema_case(maker),
        "regex": lambda: regex_case(rng),
        "grammar": lambda: grammar_case(rng),
        "choice": lambda: choice_case(rng),
    }
    return [makers[kind]() for _ in range(count)], maker.used


def is_beginning(llm: LLM, case: Case, tokens: Sequence[int]) -> bool:
    """Whether tokens are allowed one after the other, by a matcher of their own."""
    try:
        llm.grammars.get(case.constraint).matcher().advance(tokens)
    except GrammarError:
        return False
    return True


def of_kind(llm: LLM, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """What came of a kind's cases."""
    wanted, used = cases(kind, args.count, args.seed)
    good = [case for case in wanted if compiles(llm, case)]
    tally = {"asked": len(wanted), "refused": len(wanted) - len(good)}
    tally |= {"ended": 0, "ended_and_fits": 0, "cut": 0, "cut_and_begins": 0, "failed": 0}
    began = time.monotonic()
    for start in range(0, len(good), AT_ONCE):
        batch = good[start : start + AT_ONCE]
        outputs = llm.generate(
            [PROMPT] * len(batch), [params(case, start) for case in batch], use_tqdm=False
        )
        for case, output in zip(batch, outputs, strict=True):
            count(llm, tally, case, output)
    tally["share_that_ended"] = tally["ended"] / len(good)  # type: ignore[assignment]
    result: dict[str, Any] = {**tally, "seconds": time.monotonic() - began}
    show({kind: result})
    return result | ({"keywords": dict(sorted(used.items()))} if used else {})


def compiles(llm: LLM, case: Case) -> bool:
    try:
        llm.grammars.get(case.constraint)
    except GrammarError as error:
        print(f"refused: {error}: {case.constraint.text}", flush=True)
        return False
    return True


def params(case: Case, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=1,
        max_tokens=MAX_TOKENS,
        seed=seed,
        structured_outputs=case.constraint,
    )


def count(llm: LLM, tally: dict[str, int], case: Case, output: RequestOutput) -> None:
    completion = output.outputs[0]
    match completion.finish_reason:
        case "stop":
            tally["ended"] += 1
            fits = case.fits(completion.text)
            tally["ended_and_fits"] += fits
            if not fits:
                print(
                    f"does not fit: {case.constraint.text}\n    {completion.text!r}",
                    flush=True,
                )
        case "length":
            tally["cut"] += 1
            tally["cut_and_begins"] += is_beginning(llm, case, completion.token_ids)
        case _:
            tally["failed"] += 1
            print(f"failed: {completion.error}: {case.constraint.text}", flush=True)


def on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    with LLM(device="cpu", num_gpu_blocks_override=1024, max_num_seqs=AT_ONCE) as llm:
        kinds = ("json", "regex", "grammar", "choice")
        return {kind: of_kind(llm, kind, args) for kind in kinds}


# --- what it costs ----------------------------------------------------------------------

LENGTH = 128  # output tokens
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "size": {"type": "integer"},
        "kind": {"enum": ["file", "folder", "link"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
# Masks of the first schema take some ten microseconds, of the others hundreds and more:
# texts of bounded length are what is hard.
ENDLESS: dict[str, StructuredOutputs | None] = {
    "free": None,
    "json": StructuredOutputs(json={"type": "array", "items": RECORD, "minItems": 1000}),
    "bounded json": StructuredOutputs(
        json={"type": "array", "items": ITEM, "minItems": 1000}
    ),
    "regex": StructuredOutputs(regex=r"([a-z]{2,9}[ ,.\n])*"),
}
HOSTILE = (
    StructuredOutputs(grammar='start: s\ns: s s s | s s | "a" | ""'),
    StructuredOutputs(regex="x?a{20000}"),
    StructuredOutputs(regex="(.*,){30}P"),
    StructuredOutputs(regex="(a{1000}){1000}"),
    StructuredOutputs(json={"enum": [f"{i:0100d}" for i in range(500)]}),
    StructuredOutputs(
        json={
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(1500)},
        }
    ),
)


def vocabulary(folder: Path, size: int) -> None:
    """Beside a model without one, a tokenizer: the bundled one's tokens, and words of
    letters, digits and blanks up to that size.
    """
    from minfer.effects.setup.folders import bundled_folder

    tokenizer = json.loads((bundled_folder() / "tokenizer.json").read_text("utf-8"))
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    rng = random.Random(0)
    syllables = ["Ġ", "ing", "er", "th", "an", '"', ":", ",", "0", "1", "st", "re", "io"]
    syllables += "abcdefghijklmnopqrstuvwxyz"
    while len(vocab) < size - 300:  # some ids have no token, as in Qwen2.5
        word = "".join(
            rng.choices(
                [*syllables, *"abcdefghijklmnopqrstuvwxyz"], k=rng.randrange(2, 7)
            )
        )
        vocab.setdefault(word, len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")


def of_shape(args: argparse.Namespace, folder: Path) -> LLM:
    from bench.gpu_workloads import Lab

    model = Path(Lab(folder).model(args.shape))
    vocabulary(model, json.loads((model / "config.json").read_text())["vocab_size"])
    return LLM(str(model), load_format="dummy", device=args.device, max_num_seqs=256)


def endless(kind: str) -> SamplingParams:
    return SamplingParams(
        temperature=1,
        max_tokens=LENGTH,
        ignore_eos=True,
        structured_outputs=ENDLESS[kind],
    )


def per_token(outputs: Sequence[RequestOutput]) -> list[float]:
    """Milliseconds of a token after the first, for each request."""
    milliseconds = []
    for output in outputs:
        times = output.metrics
        spent = (times.last_token_time or 0) - (times.first_token_time or 0)
        milliseconds.append(1e3 * spent / (len(output.outputs[0].token_ids) - 1))
    return milliseconds


def costs(llm: LLM, rounds: int) -> dict[str, Any]:
    """Milliseconds of a token, by batch and by who is in it."""
    results: dict[str, Any] = {}
    for batch in (1, 32, 128):
        for kinds in (
            ["free"],
            ["json"],
            ["bounded json"],
            ["regex"],
            ["free", "json"],
            ["free", "regex"],
        ):
            if len(kinds) > batch:
                continue
            row_kinds = [kinds[i % len(kinds)] for i in range(batch)]
            runs: dict[str, list[float]] = {kind: [] for kind in kinds}
            for number in range(rounds + 1):
                prompts = [[5 + i, number, *range(60)] for i in range(batch)]
                outputs = llm.generate(
                    prompts, [endless(kind) for kind in row_kinds], use_tqdm=False
                )
                for kind in kinds if number else ():
                    kind_outputs = [
                        o for o, k in zip(outputs, row_kinds, strict=True) if k == kind
                    ]
                    runs[kind].append(median(per_token(kind_outputs)))
            for kind, values in runs.items():
                name = f"batch {batch}: {kind}"
                if len(kinds) > 1:
                    name += f" among {' and '.join(kinds)}"
                results[name] = spread(values)
                show({name: results[name]})
    return results


def waits(llm: LLM, *, hostile: bool) -> dict[str, float]:
    """Milliseconds from token to token of 32 streams, while others come or do not."""
    gaps: list[float] = []
    over = threading.Event()

    def trouble() -> None:
        while not over.is_set():
            for constraint in HOSTILE:
                sampling = SamplingParams(max_tokens=64, structured_outputs=constraint)
                with contextlib.suppress(RequestError):
                    llm.generate([[7, 8, 9]], sampling, use_tqdm=False)
                if over.is_set():
                    return

    thread = threading.Thread(target=trouble)
    if hostile:
        thread.start()
    free = SamplingParams(temperature=1, max_tokens=1000, ignore_eos=True)
    last: dict[str, float] = {}
    for output in llm.stream([[i, *range(60)] for i in range(32)], free):
        now = time.perf_counter()
        if output.request_id in last:
            gaps.append(1e3 * (now - last[output.request_id]))
        last[output.request_id] = now
    over.set()
    if hostile:
        thread.join()
    return {**percentiles(gaps), "max": max(gaps)}


def on_device(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, of_shape(args, Path(folder)) as llm:
        began = time.monotonic()
        llm.warm_grammars()
        results: dict[str, Any] = {"vocabulary_seconds": time.monotonic() - began}
        results["ms_per_token"] = costs(llm, args.rounds)
        for name, hostile in (("alone", False), ("beside hostile grammars", True)):
            waits(llm, hostile=hostile)  # the first time with graphs
            results[f"ms between tokens of 32 streams, {name}"] = result = waits(
                llm, hostile=hostile
            )
            show({name: result})
        return results


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return on_device(args) if args.shape else on_cpu(args)


if __name__ == "__main__":
    options = {
        "--count": 500,
        "--seed": 0,
        "--shape": "",
        "--device": "cpu",
        "--rounds": 5,
    }
    run("structured", measure, options)
