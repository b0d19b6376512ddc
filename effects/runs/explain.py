"""`minfer explain`: where one request's time went, and why, from a journal. Imports no
torch.

The parts of a sample add up to its latency, which begins with the turn that took the
request in.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from attrs import asdict

from minfer.config import EngineConfig
from minfer.effects.live.journal_files import read_journal
from minfer.runs.explain import Explanation, Life, UnknownRequestError
from minfer.runs.explain import explain as explained
from minfer.runs.journal import JournalError
from minfer.runs.redact import redacted_config

SIZES: Final = (1, 8, 16, 32, 64, 128, 256)  # of blocks, for which hits are told
_PART: Final = (
    "kind",
    "cause",
    "behind",
    "preempted",
    "turns",
    "seconds",
    "steps",
    "tokens",
    "others",
)
_IN: Final = "steps {steps:,}, its tokens {tokens:,}, those of others {others:,}"
_WORDS: Final = {
    "before": "before the journal begins",
    "line": "first in line, waiting for: {cause}",
    "behind": "behind others in line, who waited for: {cause}",
    "prefill": f"prefill: {_IN}",
    "queued": "let in, while a step before its own ran",
    "stalled": "running, but in no step",
    "recompute": f"prefill of what it lost: {_IN}",
    "decode": f"decode: {_IN}",
    "failed": "in steps that failed, or behind them",
    "Held": "first in line, held for: {cause}",
    "Admitted": "let in; of {known:,} tokens {hit:,} were cached, {copied:,} copied",
    "Preempted": "{id!r} ({sample}) gave way for {by[0]!r} ({by[1]}): KV of "
    "{computed:,} tokens",
    "Voided": "step {step} failed with it: {error!r}",
    "gap": "longest time between outputs: {0}, turn {since:,} to {turn:,}, when step "
    "{step} "
    "ended: {tokens:,} tokens in {rows:,} rows",
    "prefix": "Prefix: {hit:,} of {known:,} tokens were cached; block {block:,} at "
    "token {hit:,} ",
    "evicted": "had been, and was evicted",
    "pending": "was another's too, but not cached yet",
    "passed": "was computed, and was evicted or given back behind the window",
    "differs": "begins as another's, but goes on differently",
    "new": "was never there",
    "": "is the first that may not be: one token is always computed",
    "shared": "\n  with one of {earlier:,} sequences of its cache salt it shares "
    "{shared:,} tokens;"
    " {computed:,} had KV\n  hit by block size, had nothing been evicted: ",
}


def explain_options(parser: argparse.ArgumentParser) -> None:
    """What `minfer explain` takes."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a journal, or a folder of them"
    )
    parser.add_argument("request", metavar="REQUEST", help="a request's id")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def explain(options: argparse.Namespace) -> int:
    """Explain a request; returns the exit code. Raises JournalError."""
    journal, name = read_journal(options.file), options.request
    try:
        one = explained(journal.config, journal.turns(), name)
    except UnknownRequestError as error:
        try:  # clients are told a request's id without the number of the prompt
            one = explained(journal.config, journal.turns(), f"{name}-0")
        except UnknownRequestError:
            raise JournalError(f"{options.file}: {error}") from None
    found = figures(journal.config, one)
    print(json.dumps(found) if options.json else "\n".join(_story(found)))
    return 0


def figures(config: EngineConfig, one: Explanation) -> dict[str, Any]:
    """An explanation in JSON's own types. Times are in seconds, lengths in tokens."""
    lives = [_sample(life) for life in sorted(one.lives, key=lambda life: life.id)]
    told = {"id": one.request.id, "prompt": len(one.request.prompt), "samples": lives}
    told |= {"max_tokens": one.request.max_tokens, "prefix": None}
    if (it := one.prefix) is None:
        return told
    size, most, end = config.block_size, it.known - 1, it.hit + config.block_size
    gone = (
        "passed" if config.window else "evicted"
    )  # not all that passes a window was published
    why = (
        ""
        if end > most
        else gone
        if it.cached >= end
        else "pending"
        if it.shared >= end
        else "differs"
        if it.shared > it.hit
        else "new"
    )
    # Without token ids, prefixes are known by whole blocks only.
    sizes = SIZES if config != redacted_config(config) else (2 * size, 4 * size)
    would = {
        each: min(it.computed, most) // each * each for each in sorted({*sizes, size})
    }
    return told | {
        "prefix": asdict(it) | {"block": it.hit // size, "why": why, "would": would}
    }


def _sample(life: Life) -> dict[str, Any]:
    order, gap = [*_WORDS].index, life.gap
    spent = sorted(
        life.parts.items(), key=lambda one: (one[0][3], order(one[0][0]), one[0])
    )
    told = asdict(
        life, filter=lambda field, _: field.name not in ("parts", "reasons", "gap")
    )
    told["parts"] = [dict(zip(_PART, where + more, strict=True)) for where, more in spent]
    told["reasons"] = [
        {"turn": at, "is": type(r).__name__, **asdict(r)} for at, r in life.reasons
    ]
    if gap is None:
        return told | {"gap": None}
    run, plan = gap[2].before.running, gap[2].before.inflight[0]  # the step that ended it
    ids = dict(zip(run.gens, run.ids, strict=True))
    fills = [(len(f.tokens), ids.get(plan.gens[f.index])) for f in plan.fills]
    chunk, who = max(
        (f for f in fills if f[1] != life.id), key=lambda f: f[0], default=(0, None)
    )
    when = {"seconds": gap[0], "since": gap[1], "turn": gap[2].number, "step": plan.step}
    work = {
        "rows": len(plan.gens),
        "tokens": sum(plan.counts),
        "chunk": chunk,
        "chunk_of": who,
    }
    return told | {"gap": when | work}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _story(found: dict[str, Any]) -> Iterator[str]:
    """What was found, in plain words."""
    yield (
        "Request {id!r}: {prompt:,} prompt tokens, {max_tokens:,} to come at most"
    ).format(**found)
    for one in found["samples"]:
        begin, end = one["arrived"], one["end"] or {"error": ""}
        first = (
            "" if one["first"] is None else f", the first at {_ms(one['first'] - begin)}"
        )
        words = (
            f"Sample {one['id'][1]}: {_ms(one['upto'] - begin)} until turn "
            f"{one['turn']:,}: "
        )
        error = ": {error!r}" if end["error"] else ""
        ended = "{reason!r}, {length:,} tokens" if one["end"] else "goes on"
        yield f"{words}{ended}{first}{error}".format(**end)
        for part in one["parts"]:
            words = _WORDS["behind" if part["behind"] else part["kind"]].format(**part)
            after = (
                f" (after preemption {part['preempted']})" if part["preempted"] else ""
            )
            yield f"{_ms(part['seconds']):>16} {part['turns']:>7,} turns  {words}{after}"
        for reason in one["reasons"]:
            more = (
                " ({needs:,} needed, {available:,} available)"
                if reason.get("needs")
                else ""
            )
            if words := _WORDS.get(reason["is"], ""):
                yield f"  turn {reason['turn']:,}: {words}{more}".format(**reason)
        if gap := one["gap"]:
            whose = repr(gap["chunk_of"][0]) if gap["chunk_of"] else "one that has left"
            chunk = (
                f", {gap['chunk']:,} of them a chunk of {whose}" if gap["chunk"] else ""
            )
            yield "  " + _WORDS["gap"].format(_ms(gap["seconds"]), **gap) + chunk
    if prefix := found["prefix"]:
        would = ", ".join(f"{size}: {hit:,}" for size, hit in prefix["would"].items())
        words = "".join(_WORDS[key] for key in ("prefix", prefix["why"], "shared"))
        yield words.format(**prefix) + would
