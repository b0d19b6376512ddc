"""`minfer explain`: where one request's time went, and why, from a journal. Imports no
torch.

The parts of a sample add up to its latency, which begins with the turn that took the
request in. A client's id may stand for several requests, of several runs
(`minfer.effects.live.request_names`): then each of them is explained.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

from minfer.analysis.explain import Explanation, explain_each, unknown_request
from minfer.analysis.lives import Gap, Life, Phase, TimeSpent
from minfer.analysis.prefixes import PrefixComparison
from minfer.effects.live.journal.journal_files import RunFiles, all_runs_in
from minfer.effects.live.request_names import (
    answer_of,
    names_matching,
    request_of,
    resumption_of,
    searches_matching,
)
from minfer.effects.runs.explain_list import (
    MAX_LISTED,
    ListedRequest,
    by_time,
    lines,
    list_requests,
)
from minfer.effects.runs.explain_list import figures as listed_figures
from minfer.effects.runs.explain_routing import (
    place_lines,
    place_of,
    routing_lines,
    routing_of,
)
from minfer.effects.runs.explain_search import render_search, search_figures
from minfer.effects.runs.explain_verdict import verdict
from minfer.effects.runs.explain_words import cause_of
from minfer.effects.runs.policy_overrides import (
    counts_of,
    strict_option,
    warn_of_overrides,
)
from minfer.effects.runs.recorded import machine_of, note_torn, read_each, wire_name
from minfer.effects.runs.report import draft_figures
from minfer.effects.runs.run_verdict import run_verdict
from minfer.journal.format import JournalError
from minfer.journal.overrides import OverrideCounts
from minfer.journal.redact import redacted_config
from minfer.journal.replay import Journal
from minfer.records.config import EngineConfig
from minfer.records.tiers import TransferKind
from minfer.values.checks import ConfigError
from minfer.values.texts import counted

SIZES: Final = (1, 8, 16, 32, 64, 128, 256)  # of blocks, for which hits are shown
_IN: Final = "{num_steps} with {tokens:,} of its tokens and {others:,} of others"
_KINDS: Final = {  # of time, in the order in which most samples have them first
    "before": "before the journal begins",
    "behind": "behind others in the queue, whose head waited for {waited_for}",
    "line": "head of the queue, waiting for {waited_for}",
    "queued": "admitted, while a step before its own ran",
    "prefill": f"prefill: {_IN}",
    "recompute": f"prefill of what it lost: {_IN}",
    "decode": f"decode: {_IN}",
    "stalled": "running, but in no step",
    "failed": "in steps that failed, or behind them",
}
_REASONS: Final = {
    "QueueBlocked": "head of the queue, waiting for {waited_for}",
    "Admitted": "admitted; of {known:,} tokens {hit:,} were cached",
    "Loading": "waits for {more:,} blocks from {tier}{costs}",
    "Recomputing": "computes {more:,} blocks that {tier} has{costs}",
    "AdapterLoading": "its adapter is loaded into slot {slot}",
    "SlotBlocked": "waits for a slot for its adapter: {used} are used, {loading} loading",
    "Preempted": "{who} was preempted {why}: it released the KV of {computed:,} tokens",
    "WindowMissed": (
        "block {block:,} (counted from 0) was not cached in layer group {group}, which "
        "has a window: of {cached:,} cached blocks those before it were used"
    ),
    "StateMissed": (
        "the last state of its recurrent layers was kept behind block {block:,} "
        "(counted from 0): of {cached:,} cached blocks those before it were used"
    ),
    "Discarded": "step {step} failed with it: {error!r}",
}
_COSTS: Final = ": {0} to load them, {1} to compute them, as expected"
_GAP: Final = (
    "  longest time between outputs: {0}, turn {since:,} to {turn:,}, whose step had "
    "{num_tokens} of {num_samples}"
)
_DRAFTS: Final = (
    "  drafts: {accepted:,} of {proposed:,} accepted ({rate:.0%}), in {num_steps} "
    "that brought {length:.2f} tokens each"
)
_OVERRIDES: Final = (
    "Until then {count:,} answers of the scheduling policy could not be used, the first "
    "in turn {turn:,}: {method} {why}"
)
_PREFIX: Final = (
    "{title}: {hit:,} of {known:,} tokens were cached; the next block (tokens {hit:,} to "
    "{last:,}, counted from 0) {because}"
)
_BEST_MATCH: Final = (
    "  the best match among {num_earlier} with its cache salt shares {num_shared}"
)
_SIZES: Final = "  hit by block size, had nothing been evicted: {sizes}"
_BECAUSE: Final = {  # reasons why the first missing block was missing
    "evicted": "had been cached, and was evicted",
    "pending": "was another's too, but not cached yet",
    "passed": "was computed, and was evicted or given back behind the window",
    "window": "was not cached in layer group {missed}, which has a window",
    "state": "was cached, but no state of the recurrent layers was kept behind it",
    "differs": "begins as another's, but goes on differently",
    "new": "is in no earlier request",
    "": "cannot be: one token is always computed",
}


def explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minfer explain`."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="a journal, or the folder of --journal: all runs in it, also of replicas",
    )
    parser.add_argument(
        "request",
        metavar="REQUEST",
        nargs="?",
        help="the id of an answer, such as chatcmpl-42, of a beam search, or of a "
        "request as the list names it; without it, requests are listed",
    )
    parser.add_argument(
        "--slowest",
        type=_count,
        metavar="N",
        help="without REQUEST: list the N requests that took longest (default: the "
        f"{MAX_LISTED} that waited longest, and were preempted most)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    strict_option(parser)


def _count(text: str) -> int:
    """A number of requests. Raises argparse.ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def explain(options: argparse.Namespace) -> int:
    """Explain a request, or list them; returns the exit code. Raises JournalError,
    PolicyOverrideError, and ConfigError for options that do not go together.
    """
    name = options.request
    if name is not None and options.slowest is not None:
        raise ConfigError("--slowest lists requests; leave it or REQUEST out")
    if name is None:
        return _list_requests(options)
    # Engines that died, and those that continued their requests, have a run each.
    runs = all_runs_in(options.file)
    explain_run = partial(_explain_in, name=name, strict=options.strict_policy)
    explanations_by_run, code = read_each(runs, explain_run)
    explanations = [
        explanation for requests in explanations_by_run for explanation in requests
    ]
    explanations.sort(key=lambda explanation: resumption_of(explanation["id"]))
    ids = {request_of(explanation["id"]) for explanation in explanations} or {name}
    routing = routing_of(options.file, ids)
    if not (explanations or routing):
        raise _unknown_request(options.file, runs, name)
    if options.json:
        first, *other_explanations = explanations or [{}]
        print(json.dumps({**first, "others": other_explanations, "routing": routing}))
    else:
        sections = [routing_lines(routing, explanations), *map(_render, explanations)]
        print("\n\n".join(filter(None, ("\n".join(section) for section in sections))))
    if not explanations:
        replicas = " and ".join(sorted({decision["replica"] for decision in routing}))
        raise JournalError(
            f"{options.file}: no engine's journal here has {name!r}: that of replica "
            f"{replicas} is missing or cut short, or the request ended before "
            "an engine took it"
        )
    return code


def _unknown_request(path: Path, runs: Sequence[RunFiles], name: str) -> JournalError:
    """The error for a request that is in no journal of a folder."""
    ids = list[str]()
    for run in runs:
        with suppress(JournalError):  # it has been printed
            ids += run.open().request_ids()
    error = unknown_request(name, ids)
    return JournalError(f"{path}: {error}; minfer explain {path} lists all")


def _list_requests(options: argparse.Namespace) -> int:
    """List the requests of every run; returns the exit code. Raises JournalError."""

    def find(run: RunFiles) -> _Listing:
        journal = run.open()
        strict = options.strict_policy
        overrides = counts_of(journal.config.policy, strict=strict)
        turns = overrides.fold_turns(journal.turns())
        config = journal.config
        requests = list_requests(config, turns, run.name, machine_of(journal))
        warn_of_overrides(run.name, config.policy, overrides)
        note_torn(journal)
        return _Listing(config, requests)

    listings, code = read_each(all_runs_in(options.file), find)
    listed = [request for listing in listings for request in listing.requests]
    if options.json:
        chosen = sorted(listed, key=by_time)[: options.slowest]
        print(json.dumps(listed_figures(listed if options.slowest is None else chosen)))
        return code
    for line in _verdicts(listings):
        print(line)
    print("\n".join(lines(listed, str(options.file), options.slowest)))
    return code


@frozen
class _Listing:
    """The requests of a run."""

    config: EngineConfig
    requests: list[ListedRequest]


def _verdicts(listings: Sequence[_Listing]) -> Iterator[str]:
    """The verdict on runs; where they have several configurations, on each of these."""
    by_config: list[_Listing] = []
    for listing in listings:
        for known in by_config:
            if known.config == listing.config:
                known.requests.extend(listing.requests)
                break
        else:
            by_config.append(_Listing(listing.config, [*listing.requests]))
    for listing in by_config:
        if len(by_config) > 1 and listing.requests:
            yield f"run {listing.requests[0].run}:"
        yield from run_verdict(listing.config, listing.requests)


def _explain_in(run: RunFiles, name: str, *, strict: bool) -> list[dict[str, Any]]:
    """The figures of all requests of a run that `name` stands for, with where it ran: the
    rounds of a search together. Raises JournalError; and PolicyOverrideError, if
    `strict`.
    """
    if not run.contains(answer_of(name)):
        return []
    journal = run.open()
    overrides = counts_of(journal.config.policy, strict=strict)
    explanations = _requests_in(journal, name, overrides)
    warn_of_overrides(run.name, journal.config.policy, overrides)
    if not explanations:
        journal.request_ids(strict=True)  # raises if it is where the file is damaged
    note_torn(journal)
    counts = {"overrides": overrides.figures()}
    return [
        {**explanation, **counts, **place_of(run, journal)}
        for explanation in explanations
    ]


def _requests_in(
    journal: Journal, name: str, overrides: OverrideCounts
) -> list[dict[str, Any]]:
    """The figures of requests; `overrides` counts those of all turns that were read."""
    ids = [*journal.request_ids()]
    searches = [] if name in ids else searches_matching(name, ids)
    if searches:
        first, *others = searches
        turns = overrides.fold_turns(journal.turns())
        return [
            search_figures(turns, first),
            *(search_figures(journal.turns(), search) for search in others),
        ]
    names = names_matching(name, ids)
    turns = overrides.fold_turns(journal.turns())
    explanations = explain_each(journal.config, turns, names) if names else ()
    return [figures(journal.config, explanation) for explanation in explanations]


def figures(config: EngineConfig, explanation: Explanation) -> dict[str, Any]:
    """An explanation as JSON values. Times are in seconds, lengths in tokens."""
    lives = sorted(explanation.lives, key=lambda life: life.id)
    found = {
        "id": explanation.request.id,
        "prompt": len(explanation.request.prompt),
        "priority": explanation.request.priority,
        "samples": [_sample(life) for life in lives],
        "max_tokens": explanation.request.max_tokens,
        "prefix": None
        if explanation.prefix is None
        else _prefix(config, explanation.prefix),
    }
    return {**found, "verdict": verdict(config, found)}


def _prefix(config: EngineConfig, prefix: PrefixComparison) -> dict[str, Any]:
    """The cached prefix of sample 0, and what it would be with other block sizes."""
    size, max_hit = config.block_size, prefix.known - 1
    # Without token ids, prefixes are known by whole blocks only.
    sizes = SIZES if config != redacted_config(config) else (2 * size, 4 * size)
    # What was loaded may have been computed before the run, or elsewhere.
    reachable = min(max(prefix.computed, prefix.hit), max_hit)
    would = {
        block_size: reachable // block_size * block_size
        for block_size in sorted({*sizes, size})
    }
    windowed = any(group.window for group in config.groups)
    cause = _cause_of_miss(prefix, size, windowed=windowed)
    return {
        "sample": 0,
        **asdict(prefix),
        "size": size,
        "block": prefix.hit // size,
        "why": cause,
        "would": would,
    }


def _cause_of_miss(prefix: PrefixComparison, size: int, *, windowed: bool) -> str:
    """Why the first missing block, of `size` tokens, was missing; a key of `_BECAUSE`."""
    end = prefix.hit + size
    if end > prefix.known - 1:
        return ""
    if prefix.lacked_state:
        return "state"
    if prefix.missed is not None:
        return "window"
    if prefix.cached >= end:  # not all that leaves a window was published
        return "passed" if windowed else "evicted"
    if prefix.shared >= end:
        return "pending"
    return "differs" if prefix.shared > prefix.hit else "new"


def _sample(life: Life) -> dict[str, Any]:
    separate = ("parts", "reasons", "gap", "last", "drafts")
    fields = asdict(life, filter=lambda field, _: field.name not in separate)
    fields["last"] = [life.last.turn, life.last.time] if life.last else [0, 0.0]
    spent = sorted(life.parts.items(), key=_order)
    fields["parts"] = [asdict(category) | asdict(amount) for category, amount in spent]
    fields["reasons"] = [
        {"turn": turn, "is": wire_name(r), **asdict(r)} for turn, r in life.reasons
    ]
    fields["drafts"] = draft_figures(life.drafts) if life.drafts.rows else None
    fields["gap"] = None if life.gap is None else _gap(life, life.gap)
    return fields


def _order(entry: tuple[Phase, TimeSpent]) -> tuple[int, int, str]:
    """The order of parts: from preemption to preemption, as most happen first."""
    category, _ = entry
    kind = "behind" if category.behind else category.kind
    return category.preempted, [*_KINDS].index(kind), category.cause


def _gap(life: Life, gap: Gap) -> dict[str, Any]:
    """The longest time between two outputs, with the step that ended it and the longest
    prefill chunk of another sample in that.
    """
    before = gap.turn.before
    plan = before.inflight[0]
    ids = dict(zip(before.running.run_ids, before.running.ids, strict=True))
    chunks = [
        (len(fill.tokens), ids.get(plan.run_ids[fill.index])) for fill in plan.fills
    ]
    other_chunks = [chunk for chunk in chunks if chunk[1] != life.id]
    chunk, chunk_sample = max(other_chunks, key=lambda pair: pair[0], default=(0, None))
    return {
        "seconds": gap.seconds,
        "since": gap.since,
        "turn": gap.turn.number,
        "step": plan.step,
        "rows": len(plan.run_ids),
        "tokens": sum(plan.num_scheduled_tokens),
        "chunk": chunk,
        "chunk_of": chunk_sample,
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _render(explanation: dict[str, Any]) -> Iterator[str]:
    lines = (
        render_search(explanation)
        if "rounds" in explanation
        else _render_request(explanation)
    )
    yield next(lines)
    yield from place_lines(explanation)
    yield from lines
    if first := explanation["overrides"]["first"]:
        yield _OVERRIDES.format(count=explanation["overrides"]["count"], **first)


def _render_request(explanation: dict[str, Any]) -> Iterator[str]:
    """The explanation, in plain words."""
    yield (
        f"Request {explanation['id']!r}: "
        f"{counted(explanation['prompt'], 'prompt token')}, at most "
        f"{counted(explanation['max_tokens'], 'output token')}"
    )
    yield from explanation["verdict"]["lines"]
    has_several = len(explanation["samples"]) > 1
    for sample in explanation["samples"]:
        title = f"Sample {sample['id'][1]}: in" if has_several else "In"
        yield f"{title} all {_sample_heading(sample)}"
        yield from map(_part_line, sample["parts"])
        yield from _reason_lines(sample["reasons"])
        if drafts := sample["drafts"]:
            yield _DRAFTS.format(**drafts, num_steps=counted(drafts["rows"], "step"))
        if sample["gap"]:
            yield _gap_line(sample["gap"])
    if prefix := explanation["prefix"]:
        yield from _prefix_lines(
            prefix, f"Prefix of sample {prefix['sample']}" if has_several else "Prefix"
        )


def _sample_heading(sample: dict[str, Any]) -> str:
    """The latency of a sample, its end, and its finish reason."""
    begin, end = sample["arrived"], sample["end"]
    text = f"{_ms(sample['upto'] - begin)}, until turn {sample['turn']:,}: "
    text += f"{end['reason']!r}, {counted(end['length'], 'token')}" if end else "goes on"
    if sample["first"] is not None:
        text += f", the first at {_ms(sample['first'] - begin)}"
    return text + (f": {end['error']!r}" if end and end["error"] else "")


def _part_line(spent: dict[str, Any]) -> str:
    """A line for a kind of time and its amount."""
    kind = "behind" if spent["behind"] else spent["kind"]
    waited_for = cause_of(spent["cause"]).waited_for.format(**spent)
    num_steps, turns = counted(spent["steps"], "step"), spent["turns"]
    words = _KINDS[kind].format(waited_for=waited_for, num_steps=num_steps, **spent)
    times = spent["preempted"]
    after = f" (after preemption {times})" if times else ""
    unit = "turn " if turns == 1 else "turns"
    return f"{_ms(spent['seconds']):>16} {turns:>7,} {unit}  {words}{after}"


def _reason_lines(reasons: list[dict[str, Any]]) -> Iterator[str]:
    for reason in reasons:
        if words := _REASONS.get(reason["is"], ""):
            if reason.get("needs"):
                words += " ({needs:,} needed, {available:,} available)"
            if reason.get("copied"):
                words += ", {copied:,} copied"
            facts = {
                **reason,
                **_tier(reason),
                **_waited_for(reason),
                **_preempted(reason),
            }
            yield f"  turn {reason['turn']:,}: " + words.format(**facts)


def _preempted(reason: dict[str, Any]) -> dict[str, str]:
    """What the words say of who was preempted, and why."""
    if "by" not in reason:
        return {}
    name, by = (reason["id"], reason["sample"]), tuple(reason["by"])
    own = "as it had no free block, or its step failed"
    return {
        "who": _sample_name(*name),
        "why": own if name == by else f"for {_sample_name(*by)}",
    }


def _sample_name(request: str, sample: int) -> str:
    """A sample in words; most requests have one only."""
    return f"sample {sample} of {request!r}" if sample else repr(request)


def _waited_for(reason: dict[str, Any]) -> dict[str, str]:
    """What the words say of what the head of the queue waits for, if it does."""
    if "cause" not in reason:
        return {}
    return {"waited_for": cause_of(reason["cause"]).waited_for.format(**reason)}


def _tier(reason: dict[str, Any]) -> dict[str, Any]:
    """What the words say of a tier, if a reason is about one."""
    if "recompute" not in reason:
        return {}
    from_host = reason["kind"] == TransferKind.LOAD_FROM_HOST
    tier = "host memory" if from_host else "disk or another engine"
    seconds = reason["seconds"], reason["recompute"]
    # Blocks of another engine are always loaded: nothing is expected of that.
    costs = _COSTS.format(*map(_ms, seconds)) if any(seconds) else ""
    return {"tier": tier, "more": reason["blocks"] - reason["hit"], "costs": costs}


def _gap_line(gap: dict[str, Any]) -> str:
    """The longest time between outputs."""
    tokens, samples = counted(gap["tokens"], "token"), counted(gap["rows"], "sample")
    fields = _GAP.format(
        _ms(gap["seconds"]), num_tokens=tokens, num_samples=samples, **gap
    )
    if not gap["chunk"]:
        return fields
    owner = repr(gap["chunk_of"][0]) if gap["chunk_of"] else "one that has left"
    return f"{fields}, {gap['chunk']:,} of them a chunk of {owner}"


def _prefix_lines(prefix: dict[str, Any], title: str) -> Iterator[str]:
    """Lines for the cached prefix, why it ended, the request that shares most of it, and
    the hits with other block sizes.
    """
    because = _BECAUSE[prefix["why"]].format(**prefix)
    last = min(prefix["hit"] + prefix["size"], prefix["known"]) - 1
    yield _PREFIX.format(title=title, because=because, last=last, **prefix)
    if prefix["earlier"]:
        line = _BEST_MATCH.format(
            num_earlier=counted(prefix["earlier"], "earlier request"),
            num_shared=counted(prefix["shared"], "token"),
        )
        computed = f"; {prefix['computed']:,} of them had been computed by then"
        yield line + (computed if prefix["shared"] else "")
    if any(prefix["would"].values()):
        sizes = ", ".join(f"{size}: {hit:,}" for size, hit in prefix["would"].items())
        yield _SIZES.format(sizes=sizes)
