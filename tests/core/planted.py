"""Bugs planted on purpose: what broke in real engines, put into this core as it is
imported.

A checker that never fails proves nothing. Each record below changes an expression or a
few statements of one function into what a real engine once did, in the syntax tree, so
that no layout matters; `hunt` then runs the swarm on that core, in a process of its own,
until an invariant, the oracle or the world objects. The references are issues and pull
requests of vLLM (v#) and SGLang (s#), advisories, and two bugs that a prototype of this
engine fell into; where there is none, a kind of bug that all engines share. `ESCAPED` are
small bugs that the swarm lets live, or once did: each has tests that find it at once.

`python -m tests.core.planted` prints what caught each of them, and after how many turns.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from types import FrameType
from typing import Final
from unittest.mock import patch

from attrs import asdict, frozen

from tests.mutation.catalogue import tree_of
from tests.mutation.loader import install
from tests.mutation.planting import planted

# Nothing of minfer is imported up here: a bug has to be planted before.

# a bug must show in so many seeded worlds; the sound core passes them all
WORLDS: Final = 400
TURNS: Final = 60  # of one world before it is healed and drained
ROOT: Final = Path(__file__).resolve().parents[2]
# after which a turn counts as endless: hundreds of times as long as the longest
_CPU_SECONDS: Final = 30


@frozen
class Bug:
    """An expression or statements in one function of the core, and what they become."""

    name: str
    seen: str  # where a real engine did this
    file: str
    function: str  # qualified name
    old: str  # source; occurs exactly once in the function
    new: str
    tests: str = ""  # a file of tests/core that catches it; else the swarm does

    def plant(self) -> None:
        """Have the core imported with this bug. Raises LookupError if its
        place is gone.
        """
        module = "minfer." + self.file.removesuffix(".py").replace("/", ".")
        install({module: lambda tree: planted(tree, self.function, self.old, self.new)})

    def check(self) -> None:
        """Raise LookupError unless what is to be changed is there, once."""
        planted(tree_of(self.file), self.function, self.old, self.new)


@frozen
class Caught:
    """What objected to a bug: the law, its message, and the turns and worlds it took."""

    law: str
    message: str
    turns: int
    worlds: int


BUGS: Final = (
    Bug(
        "cancelled final step pins blocks",
        "v#26400, v#29987: a step whose rows were all cancelled is not taken for an end",
        "planning/commit.py",
        "_commit_results",
        "free_fenced_blocks(state, plan.step)",
        "free_fenced_blocks(state, plan.step) if any(new) else state",
    ),
    Bug(
        "hit stolen before it is pinned",
        "v#37076, v#37164: allocation evicts the prefix that was just looked up",
        "planning/admit.py",
        "_allocate",
        (
            "hit = take_hit("
            "config, state, change, seq.keys, readable_blocks(seq, full))\n"
            "working: Pages = ()\n"
            "origin = ROOT\n"
            "if config.state_group:\n"
            "    working, origin = take_working_state(config, change, hit, num_known)\n"
            "tables = _take_tables("
            "config, change, hit, num_known, max_tokens, "
            "len(state.running) + num_newcomers)"
        ),
        (
            "unheld = Transaction(state.blocks)\n"
            "hit = take_hit("
            "config, state, unheld, seq.keys, readable_blocks(seq, full))\n"
            "working: Pages = ()\n"
            "origin = ROOT\n"
            "if config.state_group:\n"
            "    working, origin = take_working_state(config, change, hit, num_known)\n"
            "tables = _take_tables("
            "config, change, hit, num_known, max_tokens, "
            "len(state.running) + num_newcomers)\n"
            "change.prefix.hold(hit.leaf)"
        ),
    ),
    Bug(
        "block visible before it is written",
        "v#41400: prompt blocks are findable once planned, not once computed",
        "planning/commit.py",
        "_publishable",
        "upto[i] = computed[run.run_ids[i]]",
        "upto[i] = min(run.scheduled[i], run.num_known_at_admission[i]) // size",
    ),
    Bug(
        "retired before it is written",
        "v#41400, s#36475: what a cancelled step was going to write is published",
        "lifecycle/retire.py",
        "retire",
        "release_sequence(config, change, run, i, sure)",
        "release_sequence(config, change, run, i, run.scheduled[i])",
    ),
    Bug(
        "last sampled token counted as KV",
        "v#38624: the token just sampled has no KV yet, its block is published",
        "planning/commit.py",
        "_publishable",
        "{i: (run.known[i] - 1) // size for i in deferrable}",
        "{i: run.known[i] // size for i in deferrable}",
    ),
    Bug(
        "fork reads a tail not yet computed",
        "v#41400, v#53936: a sample copies its sibling's prompt while that is being "
        "filled",
        "planning/admit.py",
        "admit",
        "committed(config, state, sibling) < shared",
        "state.running.known[sibling] < shared",
    ),
    Bug(
        "leak of duplicates",
        "s#11970, s#6888: blocks whose content is cached already are neither kept nor "
        "freed",
        "lifecycle/retire.py",
        "release_sequence",
        "private += flattened(twins)",
        "()",
    ),
    Bug(
        "leaf of a fenced sequence is never let go",
        "v#46283: cancelled while something is in flight, the cached prefix stays pinned",
        "lifecycle/retire.py",
        "free_fenced_blocks",
        "free_blocks(change, fence)",
        "change.pool.release(fence.private)",
    ),
    Bug(
        "double free",
        "sglang-jax #982: blocks just given to the cache are freed as well",
        "lifecycle/retire.py",
        "release_sequence",
        "private += flattened(twins)",
        "private += table[have * pages : end * pages]",
    ),
    Bug(
        "rank lost on preemption",
        "v#41951: who was preempted queues up behind all others",
        "lifecycle/preempt.py",
        "preempt",
        "return evolve(state, waiting=state.waiting.insert(back), blocked=None), reason",
        (
            "back = evolve(back, place=(seq.place[0], state.arrivals, seq.sample))\n"
            "state = evolve(state, arrivals=state.arrivals + 1)\n"
            "waiting = state.waiting.insert(back)\n"
            "return evolve(state, waiting=waiting, blocked=None), reason"
        ),
    ),
    Bug(
        "output lost on preemption",
        "v#38624: tokens are sampled and sent a second time after a preemption",
        "lifecycle/preempt.py",
        "preempt",
        "seq = _with_history(config, state.running, i)",
        "seq = state.running.seqs[i]",
    ),
    Bug(
        "whole prompt hit",
        "s#22819: the prompt ends at a block end, all of it is cached, nothing is "
        "computed",
        "planning/admit.py",
        "_allocate",
        "full = (num_known - 1) // size",
        "full = num_known // size",
    ),
    Bug(
        "salt left out of the key",
        "CVE-2025-46570, v#44701: tenants and adapters share blocks",
        "blocks/keys.py",
        "extend_keys",
        "parent = extended[-1] if extended else root",
        'parent = extended[-1] if extended else b""',
    ),
    Bug(
        "parent left out of the key",
        "CVE-2025-25183 (colliding keys): equal tokens after different prefixes",
        "blocks/keys.py",
        "block_key",
        'return sha256(parent + array("I", tokens).tobytes()).digest()',
        'return sha256(array("I", tokens).tobytes()).digest()',
    ),
    Bug(
        "tokens after the stop are sent",
        "v#3574, s#11462: what was sampled past the stop token reaches the client",
        "planning/commit.py",
        "_drop_after_ends",
        "yields[i] = new[i][: ends[i][0]]",
        "yields[i] = new[i]",
    ),
    Bug(
        "results of a stale generation",
        "v#48245, v#38624: the row has a new owner, the old one's token goes to it",
        "planning/commit.py",
        "_advance",
        (
            "new = align_yields(plan.run_ids, run.run_ids, yields, "
            "thresholds.ALIGNED_WINDOW)"
        ),
        (
            "got = dict(zip(plan.rows, yields, strict=True))\n"
            "new = tuple(map(got.get, run.rows, repeat(())))"
        ),
    ),
    Bug(
        "copy lost with its plan",
        "prototype: after a failed step a fork counts the tail as KV that was to be "
        "copied",
        "lifecycle/committed.py",
        "all_committed",
        "block * size if into else start",
        "start",
    ),
    Bug(
        "last chunk of one token",
        "prototype: the prompt's last token alone in a chunk is taken for a decode row",
        "planning/schedule.py",
        "_share_tokens",
        "run.run_ids[i] not in builder.skipped",
        (
            "run.run_ids[i] not in builder.skipped and run.num_known_at_admission[i] "
            "- run.scheduled[i] > 1"
        ),
    ),
    Bug(
        "fence ignored",
        "v#46283: blocks are freed while a step in flight still writes to them",
        "lifecycle/retire.py",
        "retire",
        "last_step is None",
        "last_step is None or blocks[1]",
    ),
    Bug(
        "fence opens a step early",
        "v#26400: blocks of the last of several steps in flight are freed when the "
        "first is done",
        "lifecycle/retire.py",
        "retire",
        "last_step = state.inflight[-1].step if state.inflight else None",
        "last_step = state.inflight[0].step if state.inflight else None",
    ),
    Bug(
        "neighbour's seed",
        "v#51226: a row samples by the parameters of the row beside it",
        "planning/build_plan.py",
        "_open",
        "row_sampling(seq.request, seq.sample)",
        "row_sampling(run.seqs[chunk.at].request, seq.sample)",
    ),
    Bug(
        "one stream for all samples",
        "fan-out: the samples of one request draw the same noise",
        "planning/build_plan.py",
        "_open",
        "row_sampling(seq.request, seq.sample)",
        "row_sampling(seq.request, 0)",
    ),
    Bug(
        "everybody waits for blocks",
        "v#45388: sequences that each hold a part of what they need wait for each other",
        "planning/grow.py",
        "_grow_or_preempt",
        "pages_coming(state) or len(run) == 1 or window_blocks_coming(config, state)",
        "pages_coming(state) or len(run) >= 1",
    ),
    Bug(
        "preemption cascade",
        "v#49674, v#49675: blocks behind fences do not count, so the next one is "
        "preempted too",
        "planning/grow.py",
        "_grow_or_preempt",
        "pages_coming(state) or len(run) == 1 or window_blocks_coming(config, state)",
        "len(run) == 1 or window_blocks_coming(config, state)",
    ),
    Bug(
        "first in rank preempted",
        "v#41951, v#54644: the one that has waited and computed longest gives way",
        "planning/grow.py",
        "_grow_or_preempt",
        "victim, state = consult.victim(config, state)",
        "victim = 0",
    ),
    Bug(
        "equals displace each other",
        "v#49674: requests of one priority take turns in throwing each other out",
        "policies/consult.py",
        "may_preempt",
        "if first > running:\n    return False, state",
        "if first[0] == running[0]:\n    return True, state",
    ),
    Bug(
        "one token past the block end",
        "s#22819: the table grows when position k*size has been planned, not before",
        "planning/grow.py",
        "grow",
        "now = [i for i, end in ends.items() if run.scheduled[i] >= end]",
        "now = [i for i, end in ends.items() if run.scheduled[i] > end]",
    ),
    Bug(
        "no block for the last position",
        "s#22819: a limit one past a block end never gets its block",
        "planning/grow.py",
        "grow",
        "end < run.last_index[i]",
        "end + 1 < run.last_index[i]",
    ),
    Bug(
        "parent evicted before its child",
        "s#22819, s#20010: an inner node of the tree is thrown out, its children stay "
        "findable",
        "blocks/prefix.py",
        "PrefixChange.release",
        ("if not children:\n    self._list_idle(leaf, last_use)"),
        "self._list_idle(leaf, last_use)",
    ),
    Bug(
        "hit stays evictable",
        "v#37164: a cached block that somebody took up again is still listed as idle",
        "blocks/prefix.py",
        "PrefixChange.hold",
        ("if not children:\n    self._unlist_idle(last_use)"),
        "",
    ),
    Bug(
        "growth lost",
        "diffs instead of state: a second growth in one step replaces the first",
        "planning/grow.py",
        "grow_for_drafts",
        "grown = {**grown, **_merge_growth(grown, more_grown)}",
        "grown = more_grown",
    ),
    Bug(
        "growth told in part",
        "diffs instead of state: of what a table gets twice in a step, the last is told",
        "planning/grow.py",
        "grow_for_drafts",
        "_merge_growth(grown, more_grown)",
        "more_grown",
    ),
    Bug(
        "resumed row is not sent again",
        "diffs instead of state: after a preemption the device keeps its old table",
        "planning/build_plan.py",
        "build_plan",
        "c.start == run.starts[c.i]",
        "c.start == run.starts[c.i] and not run.seqs[c.i].preempted",
    ),
    Bug(
        "successors of a failed step go on",
        "v#50265: only the failed step is taken back, not those planned on top of it",
        "planning/discard.py",
        "discard",
        "touched = {run_id for plan in state.inflight for run_id in plan.run_ids}",
        "touched = blamed",
    ),
    Bug(
        "failed step keeps its positions",
        "v#50265: what was planned stays counted although it never ran",
        "lifecycle/preempt.py",
        "restart",
        (
            "run = edited(\n"
            "    run,\n"
            "    run_ids={i: run_id for run_id, i in "
            "enumerate(spots, state.next_run_id)},\n"
            "    starts=starts,\n"
            "    num_known_at_admission={i: run.known[i] for i in spots},\n"
            "    scheduled=starts,\n"
            "    publish_at={\n"
            "        i: publish_mark(config, run.known[i] // size, run.last_index[i])\n"
            "        for i in spots\n"
            "    },\n"
            ")"
        ),
        (
            "run = edited(\n"
            "    run,\n"
            "    run_ids={i: run_id for run_id, i in "
            "enumerate(spots, state.next_run_id)},\n"
            "    starts=starts,\n"
            "    num_known_at_admission={i: run.known[i] for i in spots},\n"
            "    publish_at={\n"
            "        i: publish_mark(config, run.known[i] // size, run.last_index[i])\n"
            "        for i in spots\n"
            "    },\n"
            ")"
        ),
    ),
    Bug(
        "short yield counted in full",
        "v#48245: positions reserved ahead are not given back when fewer tokens come",
        "planning/commit.py",
        "_advance",
        "scheduled = tuple(map(sub, scheduled, map(short.get, run.run_ids, repeat(0))))",
        "del short",
    ),
    Bug(
        "decodes beyond the budget",
        "budgets: running rows are not counted against that of tokens",
        "planning/schedule.py",
        "_share_tokens",
        "budget - (len(run) - len(builder.skipped))",
        "budget",
    ),
    Bug(
        "cancel leaves siblings waiting",
        "v#51629: of n samples only the first is taken out of the line",
        "lifecycle/stop.py",
        "_samples_of",
        "waiting_sample(state, (stop.id, sample))",
        "waiting_sample(state, (stop.id, sample)) if sample == samples[0] else None",
    ),
    Bug(
        "cancel leaves siblings running",
        "v#51629: of n samples only the first that runs is ended",
        "lifecycle/stop.py",
        "_samples_of",
        "sorted(running)",
        "sorted(running)[:1]",
    ),
    Bug(
        "never fits, waits for ever",
        "v#39734, v#35541: a request longer than the whole cache is queued and blocks "
        "the line",
        "lifecycle/arrive.py",
        "rejection_reason",
        "needs > config.num_blocks",
        "needs > 4 * config.num_blocks",
    ),
    Bug(
        "reserve kept from the only request",
        "v#39734, v#45388: the watermark holds even when nobody else could free a block",
        "planning/prefix_hit.py",
        "pages_if_uncached",
        "0 if runs_alone else max(config.watermark, one_more * config.block_pages)",
        "max(config.watermark, one_more * config.block_pages)",
    ),
    Bug(
        "context limit off by one",
        "limits: one token more than the model's maximum length",
        "lifecycle/seat.py",
        "new_columns",
        "last = request.most_known(config.max_model_len) - 1",
        "last = request.most_known(config.max_model_len + 1) - 1",
    ),
    Bug(
        "two terminal words",
        "s#36475, s#36552: given up after failures, the sequence decodes on and ends "
        "requeue_rank",
        "planning/discard.py",
        "_end_failed_samples",
        "state, finished = end_samples(config, state, leavers)",
        "_, finished = end_samples(config, state, leavers)",
    ),
    Bug(
        "stored block is not held",
        "a block is evicted and overwritten while it is copied to host memory",
        "tiers/store.py",
        "_begin",
        "device.prefix.pin(run.keys[-1])",
        "None",
    ),
    Bug(
        "loaded block is not held in the tier",
        "the host tier reuses a page while it is copied to the device",
        "planning/load.py",
        "_begin",
        "tier.prefix.hold(run.keys[-1])",
        "None",
    ),
    Bug(
        "lost load is taken for loaded",
        "a failed transfer of KV is reported, and its blocks are used",
        "tiers/finish.py",
        "_write",
        "lost or broken",
        "broken",
    ),
    Bug(
        "pages of a lost transfer leak",
        "a failed transfer of KV keeps its pages",
        "tiers/finish.py",
        "_write",
        "change.pool.release(flattened(path.pages))",
        "None",
    ),
    Bug(
        "child without its parent in the tier",
        "a block is kept whose prefix is gone: its pages are never found",
        "tiers/finish.py",
        "_write",
        "path.parent != ROOT and path.parent not in change.prefix.nodes",
        "False",
    ),
    Bug(
        "blocks are loaded for ever",
        "a request whose blocks are evicted again waits for another load, and another",
        "planning/admission.py",
        "_chooses_source",
        "seq.chosen or not builder.config.has_tiers",
        "not builder.config.has_tiers",
    ),
    Bug(
        "block is overwritten while it is written to disk",
        "a block is evicted while it is stored by its key: its file has another content",
        "tiers/store.py",
        "_store_in_external",
        "device.prefix.pin(run.keys[-1])",
        "None",
    ),
    Bug(
        "missing blocks are asked for again and again",
        "what the external store lost is believed to be there",
        "tiers/finish.py",
        "_after",
        "keys.discard(transfer.keys)",
        "keys.add(transfer.keys, 1000)",
        tests="tiers/test_external.py",
    ),
    Bug(
        "failed store is believed",
        "what a full disk did not take is believed to be there",
        "tiers/finish.py",
        "_after",
        "return evolve(tiers, external_queue=Queue())",
        "return _after_external_store(config, tiers, transfer.keys)",
        tests="tiers/test_external.py",
    ),
    Bug(
        "blocks fetched for other keys",
        "blocks are fetched in another order than their pages",
        "planning/load.py",
        "_begin",
        "FetchBlocks(transfer.number, transfer.keys, blocks)",
        "FetchBlocks(transfer.number, transfer.keys[::-1], blocks)",
    ),
    Bug(
        "load over what a plan copies",
        "a transfer that is not ordered after the steps writes a block that one still "
        "reads",
        "planning/load.py",
        "_begin",
        "allocated is None or not copied.isdisjoint(allocated.pages)",
        "allocated is None",
        tests="tiers/test_tiers.py",
    ),
    Bug(
        "load evicts the window of its own hit",
        "room for blocks that are loaded is made of those that the same hit needs",
        "planning/load.py",
        "_begin",
        "_present(config, state, seq.keys, source.blocks)",
        "tuple([run.parent for run in source.runs if run.parent])",
    ),
    Bug(
        "stop ends who waits nearby",
        "a sample that has ended is looked up by its place, which another has now",
        "records/state.py",
        "waiting_sample",
        "seq is not None and seq.id == name",
        "seq is not None",
        tests="lifecycle/test_kept_places.py",
    ),
    Bug(
        "preempted to a place that is taken",
        "two wait at one place: the queue finds the other one",
        "lifecycle/preempt.py",
        "preempt",
        "rank != seq.place[0] and place_is_taken(state, place)",
        "False",
        tests="lifecycle/test_preempt.py",
    ),
    Bug(
        "load for the wrong page",
        "pages of the tier are copied to the device in another order",
        "planning/load.py",
        "_begin",
        "pages_of(host.prefix, transfer.keys)",
        "pages_of(host.prefix, transfer.keys)[::-1]",
    ),
    Bug(
        "side table outlives the request",
        "v#51629: what was noted about a sample is never cleared",
        "lifecycle/ending.py",
        "_count_ended",
        "evolve(state, requests=requests.finish(), faults=faults, tiers=tiers)",
        "evolve(state, requests=requests.finish(), tiers=tiers)",
    ),
    Bug(
        "poison is retried for ever",
        "one bad request fatal to all: its failures are not counted, so it is retried "
        "for ever",
        "planning/discard.py",
        "discard",
        "faults[run.ids[i]] = faults.get(run.ids[i], 0) + 1",
        "faults[run.ids[i]] = 1",
    ),
    Bug(
        "neighbours blamed",
        "one bad request fatal to all: whoever shares its steps ends with it",
        "lifecycle/pausing.py",
        "suspects",
        "count >= min_failures",
        "count > 9",
    ),
    Bug(
        "pause outlives the sample",
        "v#51629: what was noted about a sample is never cleared",
        "lifecycle/ending.py",
        "_count_ended",
        "evolve(state, paused=state.paused - ended)",
        "state",
    ),
    Bug(
        "paused rows are planned",
        "a mask that takes long keeps the whole batch waiting",
        "lifecycle/pausing.py",
        "paused_rows",
        "run.scheduled[i] + 1 >= run.num_known_at_admission[i] or run.ids[i] in isolated",
        "run.ids[i] in isolated",
    ),
    Bug(
        "a paused prompt yields",
        "the last input of a prompt is planned, though its mask is not there",
        "planning/schedule.py",
        "_share_tokens",
        "run.num_known_at_admission[i] - run.scheduled[i] - (run.ids[i] in state.paused)",
        "run.num_known_at_admission[i] - run.scheduled[i]",
    ),
    Bug(
        "a paused newcomer yields",
        "a mask is wanted of who was let in, though the host is not ready for it",
        "planning/admission.py",
        "_add_to_step",
        (
            "seat.num_known_at_admission[0] - seat.scheduled[0] - (name in "
            "builder.state.paused)"
        ),
        "seat.num_known_at_admission[0] - seat.scheduled[0]",
    ),
    Bug(
        "who waits cannot be paused",
        "what comes before its request runs is late news",
        "lifecycle/pausing.py",
        "apply_pauses",
        "running.get(name) or waiting_sample(state, name)",
        "running.get(name)",
    ),
    Bug(
        "paused for good",
        "a mask comes, and its row is not planned again",
        "lifecycle/pausing.py",
        "apply_pauses",
        "paused.discard(name)",
        "paused.discard(seq)",
    ),
    Bug(
        "results of a skipped step",
        "v#48245, s#36475: the answer to a later step is taken for that to the first",
        "planning/commit.py",
        "commit",
        "event.step != plan.step",
        "event.step < plan.step",
    ),
    Bug(
        "newcomer behind all others",
        "v#41951: who comes back from a preemption runs at the end of the batch's order",
        "records/sequence.py",
        "_place_among",
        'return bisect(run.seqs, row.seqs[0].place, key=attrgetter("place"))',
        "return len(run)",
    ),
    Bug(
        "window ends a block late",
        "any engine: blocks that the next query still reads are taken for out of the "
        "window",
        "lifecycle/publish.py",
        "_publish_groups",
        "outside(sure, group.window, config.block_size)",
        "outside(sure + config.block_size, group.window, config.block_size)",
    ),
    Bug(
        "hit without its window",
        "any engine: a prefix counts as cached though a block of its last window is gone",
        "blocks/window.py",
        "lookup_window",
        "-(-(window - 1) // block_size)",
        "max(0, -(-(window - 1) // block_size) - 1)",
    ),
    Bug(
        "given back twice",
        "any engine: what left the window is let go again at each block",
        "lifecycle/publish.py",
        "_publish_window",
        "keys[first : min(num_outside, sealed)]",
        "keys[: min(num_outside, sealed)]",
    ),
    Bug(
        "private block behind the window leaks",
        "any engine: what was never published is forgotten when it leaves the window",
        "lifecycle/publish.py",
        "_publish_window",
        "change.pool.release(table[max(first, sealed) * pages : num_outside * pages])",
        "()",
    ),
    Bug(
        "a sink block is given back",
        "any engine with sink tokens: the first blocks leave with the window",
        "lifecycle/publish.py",
        "_publish_window",
        "max(low, sinks)",
        "low",
    ),
    Bug(
        "sink blocks stay when their sequence leaves",
        "any engine with sink tokens: only the window of who leaves is given back",
        "lifecycle/publish.py",
        "held_keys",
        "unreleased(chain.keys, 0, chain.sealed[g], chain.low[g], sinks)",
        "chain.keys[chain.low[g] : chain.sealed[g]]",
    ),
    Bug(
        "a private sink block counts as published",
        "any engine with sink tokens: a twin of another's block is taken for it once the "
        "window is past",
        "lifecycle/publish.py",
        "_publish_window",
        "sealed if sealed < sinks else max(sealed, num_outside)",
        "max(sealed, num_outside)",
    ),
    Bug(
        "window slides with what is planned",
        "a kind: blocks are released behind steps in flight, which may fail or be cut",
        "lifecycle/publish.py",
        "_publish_groups",
        "outside(sure, group.window, config.block_size)",
        "outside(run.scheduled[i], group.window, config.block_size)",
    ),
    Bug(
        "hit of one group is not the hit of all",
        "a kind: one window shortens a hit, and what another reads then is not looked at",
        "planning/prefix_hit.py",
        "_find_blocks",
        "hit != before",
        "before < 0",
    ),
    Bug(
        "group left out of the key",
        "a kind: layers of one group find the KV of another's under the same content",
        "blocks/keys.py",
        "group_keys",
        "tuple([bytes((group,)) + key for key in keys]) if group else keys",
        "keys",
    ),
    Bug(
        "one page of a bundle is published",
        "a kind: of a block of several pages the first is kept, and the others are lost",
        "lifecycle/publish.py",
        "_publish_window",
        "bundles(table[sealed * pages : count * pages], pages)",
        "bundles(table[sealed:count], 1)",
    ),
    Bug(
        "tail of one group is copied",
        "a kind: a fork copies the partial block of the first layers alone",
        "planning/admit.py",
        "_sibling_tail",
        "zip(sources, targets, strict=True)",
        "[*zip(sources, targets, strict=True)][:1]",
    ),
    Bug(
        "table of another group grows",
        "a kind: pages go to the table of the first layers",
        "planning/grow.py",
        "_extend_tables",
        "Grow(run.rows[i], first, pages, g)",
        "Grow(run.rows[i], first, pages)",
    ),
    Bug(
        "a window holds the chunks of all steps in flight",
        "a kind: what a window saves is lost to running ahead",
        "planning/schedule.py",
        "_bound_prefill",
        "committed[i] + budget + budget // 4 - run.scheduled[i]",
        "committed[i] + config.depth * budget - run.scheduled[i]",
    ),
    Bug(
        "computed anew without what left the window",
        "a kind: a restart from the beginning reads blocks that were released",
        "lifecycle/preempt.py",
        "restart",
        "anew and config.by_chunk",
        "False",
        "lifecycle/test_preempt.py",
    ),
    Bug(
        "one block of a window is enough",
        "a kind: a sequence is admitted that can never have its whole window",
        "records/config.py",
        "CacheGroup.most_blocks",
        "min(blocks, span + self.sink_blocks(block_size))",
        "min(blocks, 1)",
    ),
    Bug(
        "mean of what the cache left to be computed",
        "a kind: a cached prefix has no hidden states, and is missing from a mean",
        "planning/prefix_hit.py",
        "readable_blocks",
        "full if seq.reads_cache else 0",
        "full",
    ),
    Bug(
        "what is computed anew is published while it may be",
        "a kind: a row that begins again rewrites blocks that others read",
        "planning/commit.py",
        "_publishable",
        "not run.seqs[i].request.recomputes_prompt",
        "True",
    ),
    Bug(
        "pooled prompt ends with its first chunk",
        "a kind: the embedding of a long prompt is that of its beginning",
        "planning/commit.py",
        "_prompt_only_ends",
        "upto[run.run_ids[i]] == run.num_known_at_admission[i]",
        "run.seqs[i].request.prompt_only is not None",
    ),
    Bug(
        "vector of a neighbour",
        "a kind: results are read by their places in the batch of now",
        "planning/commit.py",
        "_kept_pooled",
        "dict(zip(plan.run_ids, pooled, strict=True))",
        "dict(zip(run.run_ids, pooled))",
    ),
    Bug(
        "rejected drafts are taken back one short",
        "a kind: positions that drafts had reserved are given back, but for one",
        "planning/commit.py",
        "_advance",
        (
            "short = dict(zip(plan.run_ids, map(sub, plan.max_sampled_tokens, "
            "sizes), strict=True))"
        ),
        (
            "short = dict(zip(plan.run_ids, map(sub, plan.max_sampled_tokens, "
            "sizes), strict=True))\n"
            "drafts = {plan.run_ids[one.index] for one in plan.drafts}\n"
            "short = {g: max(0, n - (g in drafts)) for g, n in short.items()}"
        ),
    ),
    Bug(
        "drafts displace a prompt",
        "a kind: a step's tokens go to drafts before they go to prompts",
        "planning/schedule.py",
        "_share_tokens",
        "extra = max(0, min(builder.room // cost, left - 1))",
        (
            "drafts = config.speculation.drafts if config.speculation else 0\n"
            "extra = max(0, min((builder.room - drafts) // cost, left - 1))"
        ),
    ),
    Bug(
        "drafts that a device has no room for",
        "a kind: a row with many drafts beside rows with few, that only together fit",
        "planning/plan_drafts.py",
        "_fitting",
        "min(number, depth)",
        "number",
    ),
    Bug(
        "drafts that pay and have no room",
        "a kind: the same, where there are as many as pay",
        "speculate/length.py",
        "_rectangles",
        "min(int(min(size - load, room)) // depth, rows)",
        "min((size - load) // depth, int(min(99, room)), rows)",
    ),
    Bug(
        "drafts beyond the table",
        "a kind: the KV of drafts is written where a table has no block",
        "planning/plan_drafts.py",
        "_in_tables",
        (
            "table_blocks(builder.config, tables[spots[place]]) * size "
            "- scheduled[place] - 1"
        ),
        "table_blocks(builder.config, tables[spots[place]]) * size - scheduled[place]",
    ),
    Bug(
        "drafts where tables end soon",
        "a kind: that a table ends is seen when the row is there, not its drafts",
        "planning/plan_drafts.py",
        "_in_tables",
        "map(gt, ends, map(run.grow_at.__getitem__, spots))",
        "map(gt, scheduled, map(run.grow_at.__getitem__, spots))",
    ),
    Bug(
        "drafts beyond the last token",
        "a kind: what was accepted goes past max_tokens",
        "planning/plan_drafts.py",
        "_candidates",
        "map(sub, map(sub, run.last_index, run.scheduled), ones(len(run)))",
        "map(sub, run.last_index, run.scheduled)",
    ),
    Bug(
        "the host's drafts beyond the last token",
        "a kind: what was accepted goes past max_tokens",
        "planning/plan_drafts.py",
        "_proposed_for",
        "map(sub, run.last_index, run.known)",
        "map(add, map(sub, run.last_index, run.known), ones(len(run)))",
    ),
    Bug(
        "stale drafts are verified",
        "a kind: drafts are taken though more is known by now than when they were made",
        "planning/plan_drafts.py",
        "_proposed_for",
        "map(eq, map(_known, proposed), run.known)",
        "(old <= now for old, now in zip(map(_known, proposed), run.known))",
    ),
    Bug(
        "drafts are used twice",
        "a kind: what was proposed stays after the step that it was for",
        "planning/plan_drafts.py",
        "_drop_proposals",
        "evolve(drafting, proposals=Map())",
        "drafting",
    ),
    Bug(
        "planned behind the host's drafts",
        "a kind: the next step begins where all drafts would have been accepted",
        "planning/plan_drafts.py",
        "waits_for_results",
        "any(plan.drafts for plan in state.inflight)",
        "False",
    ),
    Bug(
        "drafts of the host do not wait",
        "a kind: what was proposed is late for each step, and never used",
        "planning/plan_drafts.py",
        "waits_for_results",
        "any(_numbers(spec_config, state, drafters, other_inputs, room, prompts))",
        "False",
    ),
    Bug(
        "drafts behind what is in flight",
        "a kind: what was proposed is verified at the wrong positions",
        "planning/plan_drafts.py",
        "_drafters",
        "spec_config.drafter == HOST and builder.state.inflight",
        "False",
    ),
    Bug(
        "rejected drafts are published",
        "a kind: blocks count as full up to what was planned",
        "planning/commit.py",
        "_publishable",
        "{i: (run.known[i] - 1) // size for i in deferrable}",
        "{i: (run.known[i] - 1 + sum(map(len, (d.tokens for d in plan.drafts)))) // size"
        " for i in deferrable}",
    ),
    Bug(
        "records of who has ended",
        "v#51629: what was noted about a sample is never cleared",
        "lifecycle/ending.py",
        "_count_ended",
        "state = evolve(state, drafting=reduce(Drafting.without, ended, state.drafting))",
        "",
    ),
    Bug(
        "proposals of who has ended",
        "v#51629: what was noted about a sample is never cleared",
        "records/drafting.py",
        "Drafting.without",
        "proposals = proposals.delete(name)",
        "pass",
    ),
    Bug(
        "a draft model's drafts for who is bound to the host",
        "a kind: masks are made for tokens that the host does not know",
        "planning/plan_drafts.py",
        "may_draft",
        "request.needs_host_mask and drafter != HOST",
        "False",
    ),
    Bug(
        "drafts for who waits for its mask",
        "a kind: steps of others wait for drafts that nobody can use yet",
        "planning/plan_drafts.py",
        "_proposed_for",
        "is_chosen and name not in paused",
        "is_chosen",
    ),
    Bug(
        "rows with drafts are not sampled apart",
        "a kind: a grammar is not heeded where its text is drafted",
        "planning/build_plan.py",
        "_deferred_rows",
        "[i for i in bound if max_sampled[i]]",
        "[i for i in bound if max_sampled[i] == 1]",
    ),
    Bug(
        "drafts for a prompt",
        "a kind: a row that is being filled has drafts behind its chunk",
        "planning/plan_drafts.py",
        "_drafters",
        "builder.skipped.union(builder.shares)",
        "builder.skipped",
    ),
    Bug(
        "drafts for who sits out",
        "a kind: the batch has drafts of rows that it has not",
        "planning/plan_drafts.py",
        "_drafters",
        "builder.skipped.union(builder.shares)",
        "set(builder.shares)",
    ),
    Bug(
        "drafts beyond the budget",
        "budgets: drafts are not counted against that of tokens",
        "planning/plan_drafts.py",
        "_in_rank_order",
        "room -= granted",
        "pass",
    ),
    Bug(
        "drafts in steps of many rows",
        "a kind: verification slows a busy batch down, though it was switched off there",
        "planning/plan_drafts.py",
        "_drafters",
        "0 < spec_config.rows < len(run) - len(builder.skipped)",
        "0 < spec_config.rows < len(run) - len(builder.skipped) - 1",
    ),
    Bug(
        "blocks are kept from drafts",
        "a kind: drafts are cut at each block's end, though blocks are free",
        "planning/grow.py",
        "grow_for_drafts",
        "wants and pages <= left",
        "wants and pages < left",
    ),
    Bug(
        "what is proposed for strangers",
        "a kind: a proposal that nobody asked for stays for ever",
        "speculate/proposing.py",
        "_unusable_cause",
        "(proposal.id, proposal.sample) not in running",
        "False",
    ),
    Bug(
        "drafts from outside the vocabulary",
        "a kind: an embedding is looked up that is not there",
        "speculate/proposing.py",
        "_unusable_cause",
        "max(proposal.tokens) >= config.vocab_size",
        "max(proposal.tokens) > config.vocab_size",
    ),
    # --- states of recurrent layers ---
    Bug(
        "state under the key of another position",
        "a kind: the state after a prompt is kept under its last token but one",
        "planning/saves.py",
        "_publish",
        "chain.keys[position // config.block_size - 1]",
        "chain.keys[max(0, position // config.block_size - 2)]",
    ),
    Bug(
        "state kept although its block is gone",
        "a kind: a state that is no child of its block outlives it",
        "planning/states.py",
        "block_before_state",
        "ROOT if group is None else group_key(content, group)",
        "ROOT",
    ),
    Bug(
        "state evicted before it is copied",
        "a kind: a newcomer's start state is not held until its plan is complete",
        "planning/start_state.py",
        "take_working_state",
        "return (allocated.pages if allocated else ()), origin",
        "if origin:\n"
        "    change.prefix.release(origin)\n"
        "return (allocated.pages if allocated else ()), origin",
    ),
    Bug(
        "state overwritten while a row that starts reads it",
        "a kind: a kept state becomes a working state, though another row starts from it",
        "planning/start_state.py",
        "take_working_state",
        "origin and not is_live(change.prefix, origin)",
        "origin",
    ),
    Bug(
        "state published before its step is over",
        "a kind: a later plan's state can be found once an earlier plan is committed",
        "planning/commit.py",
        "_commit_results",
        "if plan.saves:\n    state = keep_states(config, state, plan)",
        "for later in (plan, *state.inflight):\n"
        "    if later.saves:\n"
        "        state = keep_states(config, state, later)",
    ),
    Bug(
        "state of a failed step kept",
        "a kind: what a failed step was to save is published",
        "planning/saves.py",
        "release_saves",
        "change.pool.release(tuple(pages))",
        "change.prefix.publish_state(b'', b'\\x01' + bytes(32), tuple(pages))",
    ),
    Bug(
        "state not copied",
        "a kind: the state of a hit is not copied, and the row starts from what is there",
        "planning/saves.py",
        "copy_start_states",
        "copies += [Copy(*pages, config.block_size) "
        "for pages in zip(sources, working, strict=True)]",
        "copies += []",
    ),
    Bug(
        "state saved at a position that drafts made uncertain",
        "a kind: the state after rejected drafts is kept as that of accepted ones",
        "planning/plan_drafts.py",
        "_candidates",
        "1 + config.depth",
        "2",
    ),
    Bug(
        "drafts lead to where a state is saved",
        "a kind: the state is saved in the step that verifies them, accepted or not",
        "planning/plan_drafts.py",
        "_candidates",
        "map(sub, map(sub, save_at, run.scheduled), repeat(ahead))",
        "map(sub, map(sub, save_at, run.scheduled), repeat(1))",
    ),
    Bug(
        "the host's drafts lead to where a state is saved",
        "a kind: the state is saved in the step that verifies them, accepted or not",
        "planning/plan_drafts.py",
        "_proposed_for",
        "map(sub, map(sub, save_at, run.known), ones(len(run)))",
        "map(sub, save_at, run.known)",
    ),
    Bug(
        "rejected drafts stay in a state",
        "a kind: KV of rejected drafts is overwritten, a state is not",
        "simulation/oracle.py",
        "Oracle._verified",
        "self._set_state(row, state)",
        "self._set_state(row, states[-1])",
    ),
    Bug(
        "accepted drafts are missing in a state",
        "a kind: a state is moved on by the row's last token alone",
        "simulation/oracle.py",
        "Oracle._verified",
        "self._set_state(row, state)",
        "self._set_state(row, states[0])",
    ),
    Bug(
        "row restarts in place with a state that ran on",
        "a kind: a failed step's inputs are taken twice by the working state",
        "planning/discard.py",
        "discard",
        "if config.state_group:\n"
        "    state = evolve(release_saves(state), faults=tuple(faults.items()))\n"
        "    failed = _end_failed_samples(config, state, faults, error, reason)\n"
        "    return _preempt_touched(config, failed, touched)",
        "if config.state_group:\n    state = release_saves(state)",
    ),
    Bug(
        "pages of a save lost with its row",
        "a kind: a row leaves while its state is saved, and nobody frees the copy",
        "planning/saves.py",
        "keep_states",
        "change.pool.release(save.pages)",
        "None",
    ),
    Bug(
        "checkpoint dropped while it is held",
        "a kind: the next checkpoint takes the place of one from which a row starts",
        "planning/saves.py",
        "_publish",
        "checkpoint in prefix.nodes and not is_live(prefix, checkpoint)",
        "checkpoint in prefix.nodes",
        tests="planning/test_saves.py",
    ),
    Bug(
        "hit without a state",
        "a kind: blocks of attention layers are hit where no state was kept",
        "planning/prefix_hit.py",
        "find_hit",
        "hit and group_key(keys[hit - 1], config.state_group) not in prefix.nodes",
        "False",
    ),
    Bug(
        "window forgotten behind a state",
        "a kind: the hit is cut to a state, before which blocks of a window are gone",
        "planning/prefix_hit.py",
        "find_hit",
        "_find_blocks(config, prefix, keys, hit).blocks if config.by_chunk else hit",
        "hit",
    ),
    Bug(
        "tail copied without its state",
        "a kind: a fork starts behind a partial block, the state of which nobody has",
        "planning/admit.py",
        "_allocate",
        "has_tail and hit.blocks == full and not config.state_group",
        "has_tail and hit.blocks == full",
    ),
    Bug(
        "chunk runs past the position of a save",
        "a kind: a prompt's chunk is not cut where its state is to be kept",
        "planning/states.py",
        "bound_chunk",
        "return inputs if goes_on else save_at - start, run",
        "return inputs, run",
    ),
    Bug(
        "chunk runs past two positions of saves",
        "a kind: a chunk keeps one state inside it, and the other is never kept",
        "planning/states.py",
        "bound_chunk",
        "_may_be_inside(config, inputs) and "
        "(_following_save(config, state, run, i) > start + inputs)",
        "_may_be_inside(config, inputs)",
        "planning/test_states.py",
    ),
    Bug(
        "state behind a chunk kept as that inside it",
        "a kind: the plan names no position inside the chunk",
        "planning/saves.py",
        "add_saves",
        "states.save_at if states.save_at < scheduled[i] else 0",
        "0",
    ),
    Bug(
        "state inside a chunk under the key of its end",
        "a kind: a hit starts from a state that lacks the tokens before it",
        "planning/saves.py",
        "keep_states",
        "plan.saved_at(save)",
        "(plan.starts[save.index] + plan.num_scheduled_tokens[save.index])"
        " // config.block_size * config.block_size",
    ),
    Bug(
        "state loaded as a block",
        "a kind: a state that comes from a tier is published as a block of the chain",
        "tiers/finish.py",
        "_write",
        "is_state(path.keys[0], change.prefix.state_group)",
        "False",
    ),
    Bug(
        "working state lost with its row",
        "a kind: the pages of the state of a row that leaves are not freed",
        "lifecycle/retire.py",
        "release_sequence",
        "private + run.tables[i][config.state_group][:]",
        "private",
    ),
    Bug(
        "more states than their share",
        "a kind: states push out the blocks that they are of use with",
        "planning/saves.py",
        "_PageTaker._is_full",
        "kept > most_state_pages(self.config)",
        "False",
    ),
    Bug(
        "state of another row saved",
        "a kind: a save names the row by its place among the running, not in the plan",
        "planning/saves.py",
        "add_saves",
        "i - bisect_left(out, i)",
        "min(i, len(run) - len(out) - 1)",
    ),
    Bug(
        "all states of a step saved at once",
        "a kind: 256 rows end their prompts in one step, which copies 19 GB",
        "planning/saves.py",
        "add_saves",
        "taker.take(states) if len(saves) < most else ()",
        "taker.take(states)",
    ),
    Bug(
        "checkpoints of the first rows alone",
        "a kind: of rows that are due together the last ones are skipped again and again",
        "planning/states.py",
        "most_urgent_first",
        "states.last - states.save_at",
        "i",
        "planning/test_saves.py",
    ),
    Bug(
        "skipped state counted as saved",
        "a kind: a row whose checkpoint was skipped waits its turn as if it had one",
        "planning/saves.py",
        "add_saves",
        "states.save_at if pages else states.last",
        "states.save_at",
        "planning/test_saves.py",
    ),
    Bug(
        "state of a pushed prompt not kept",
        "a kind: a resumed request's state is kept behind its output, and the engine "
        "that is to decode waits for that at the end of its prompt",
        "planning/states.py",
        "next_save",
        "points.append((len(seq.request.prompt) - 1) // size)",
        "points.append(end)",
    ),
    Bug(
        "state of a prompt skipped for a checkpoint",
        "a kind: samples of a request compute its prompt once each, as others decode",
        "planning/states.py",
        "most_urgent_first",
        "states.save_at < run.num_known_at_admission[i]",
        "True",
        "planning/test_saves.py",
    ),
    Bug(
        "adapter left out of the root",
        "equal prompts of two adapters share blocks",
        "blocks/keys.py",
        "root_key",
        "(*fields, adapter.encode()) if adapter else fields",
        "fields",
    ),
    Bug(
        "slot written under a step in flight",
        "a load begins while a step in flight still reads the slot",
        "lifecycle/adapter_use.py",
        "is_unused",
        "slot.loading or slot.users or read",
        "slot.loading or slot.users",
    ),
    Bug(
        "slot of running samples taken",
        "the least recently used adapter is evicted while rows use it",
        "lifecycle/adapter_use.py",
        "is_unused",
        "slot.loading or slot.users or read",
        "slot.loading or read",
    ),
    Bug(
        "two loads into one slot",
        "a slot is given again while its first load is on its way",
        "lifecycle/adapter_use.py",
        "is_unused",
        "slot.loading or slot.users or read",
        "slot.users or read",
    ),
    Bug(
        "admitted before the adapter is there",
        "rows read a slot while it is written",
        "planning/adapter_loads.py",
        "_is_loading",
        "state.adapters.slots[index].loading",
        "False",
    ),
    Bug(
        "failed load leaves its waiters",
        "requests wait for ever for an adapter whose load failed: others are ended",
        "lifecycle/adapters.py",
        "_end_waiting",
        "seq.request.adapter == event.adapter",
        "seq.request.adapter == event.adapter and not seq.preempted",
    ),
    Bug(
        "failed load counts as loaded",
        "the slot keeps the adapter whose load failed",
        "lifecycle/adapters.py",
        "_end_waiting",
        "state.adapters.with_slot(index, AdapterSlot())",
        "state.adapters.with_slot(index, AdapterSlot(event.adapter))",
    ),
    Bug(
        "use of a slot not ended",
        "a preempted or ended sample counts as a user of its slot for ever",
        "lifecycle/retire.py",
        "retire",
        "end_uses(state, [run.seqs[i].request.adapter for i in leaving])",
        "state.adapters",
    ),
    Bug(
        "most recently used slot taken",
        "the eviction order is the wrong way round",
        "planning/adapter_loads.py",
        "_least_recently_used",
        "min(unused)[-1]",
        "max(unused)[-1]",
    ),
    Bug(
        "slot of the row's number",
        "a row reads the slot with the number of its row, not that of its adapter",
        "planning/build_plan.py",
        "_open",
        "state.adapters.slot_of(seq.request.adapter)",
        "run.rows[i] if seq.request.adapter else -1",
    ),
    Bug(
        "no end of a stay",
        "a busy adapter keeps its slot while others starve",
        "planning/adapter_loads.py",
        "_close_slots",
        "slot.passes < builder.max_passes",
        "slot.passes >= 0",
    ),
    Bug(
        "dropped adapter kept",
        "an unloaded adapter stays in its slot when its last row has ended",
        "lifecycle/adapter_use.py",
        "end_uses",
        "slot.dropped and not users",
        "slot.dropped and users",
    ),
    Bug(
        "prefill beside decode rows has no bound",
        "a long prompt holds up the tokens of all others",
        "planning/prefill_budget.py",
        "step_load",
        "load.budget_within(config.itl_target)",
        "load.budget",
    ),
    Bug(
        "target leaves no room for prompts",
        "a target below a decode step's duration: prompts wait until nothing decodes",
        "records/policy.py",
        "Load.budget_within",
        "max(self.min_prefill_tokens, tokens)",
        "tokens",
    ),
)

_OUTSIDE = "mutants of a reader from outside: 22 of 127 lived, this among them"
_LET = "an attack on the tests: 43 of 108 small bugs lived, this among them"
ESCAPED: Final = (
    Bug(
        "a tier whose costs are not known is never loaded from",
        _OUTSIDE,
        "planning/load.py",
        "_best",
        "source.seconds <= source.recompute",
        "source.seconds < source.recompute",
        "planning/test_load.py",
    ),
    Bug(
        "stores are counted as loads",
        _OUTSIDE,
        "planning/load.py",
        "_sources",
        "tiers.transfers_of(kind)",
        "[transfer for transfer in tiers.transfers if transfer.kind[-5:] == kind[-5:]]",
        "planning/test_load.py",
    ),
    Bug(
        "loads of the other tier are counted",
        _OUTSIDE,
        "planning/load.py",
        "_sources",
        "tiers.transfers_of(kind)",
        "[transfer for transfer in tiers.transfers if transfer.kind.to_device]",
        "planning/test_load.py",
    ),
    Bug(
        "a preempted sequence does not choose again",
        _OUTSIDE,
        "lifecycle/preempt.py",
        "preempt",
        "evolve(seq, preempted=seq.preempted + 1, place=place, chosen=False)",
        "evolve(seq, preempted=seq.preempted + 1, place=place)",
        "planning/test_load.py",
    ),
    Bug(
        "a lost load empties a queue of stores",
        _OUTSIDE,
        "tiers/finish.py",
        "_after",
        "return evolve(tiers, host=host)",
        "return evolve(tiers, host=host, host_queue=tiers.host_queue if not lost else "
        "Queue())",
        "tiers/test_finish.py",
    ),
    Bug(
        "a lost store empties the queue of the other tier",
        _OUTSIDE,
        "tiers/finish.py",
        "_after",
        "evolve(tiers, external_queue=Queue())",
        "evolve(tiers, host_queue=Queue())",
        "tiers/test_finish.py",
    ),
    Bug(
        "a store empties the queue behind it",
        _OUTSIDE,
        "tiers/finish.py",
        "_after",
        "Queue[Key]() if lost else tiers.host_queue",
        "Queue[Key]()",
        "tiers/test_finish.py",
    ),
    Bug(
        "what is on its way is not sent to another engine",
        _OUTSIDE,
        "tiers/finish.py",
        "_after_external_store",
        "tiers.external_queue.extended(repeated, config.num_blocks)",
        "tiers.external_queue",
        "tiers/test_external.py",
    ),
    Bug(
        "blocks before those that were sent are believed to be there",
        _OUTSIDE,
        "lifecycle/arrive.py",
        "_Arrivals._note_kv_transfer",
        "blocks[first:]",
        "blocks",
        "tiers/test_external.py",
    ),
    Bug(
        "blocks of windows are not stored",
        _OUTSIDE,
        "blocks/prefix.py",
        "PrefixChange.publish_alone",
        "self.unstored is not None",
        "self.unstored",
        "tiers/test_store.py",
    ),
    Bug(
        "the prompt of a beam ends where its request's does",
        _OUTSIDE,
        "planning/build_plan.py",
        "_open",
        "seq.request.num_prompt_tokens",
        "len(seq.request.prompt)",
        "planning/test_build_plan.py",
    ),
    Bug(
        "a decode row is counted as prefill",
        _OUTSIDE,
        "routing/replica_events.py",
        "load_report",
        "num_known - num_scheduled > 1",
        "num_known - num_scheduled > 0",
        "routing/test_replica_events.py",
    ),
    Bug(
        "a row that waits for results is taken off the prefill",
        _OUTSIDE,
        "routing/replica_events.py",
        "load_report",
        "num_known - num_scheduled > 1",
        "num_known - num_scheduled != 1",
        "routing/test_replica_events.py",
    ),
    Bug(
        "the state between two segments is not compared",
        _OUTSIDE,
        "journal/replay.py",
        "Journal._join",
        "self._check(self.state, head.state_digest, name)",
        "None",
        "journal/test_replay.py",
    ),
    Bug(
        "a journal that lacks its last turn is closed",
        _OUTSIDE,
        "journal/replay.py",
        "Journal._read_mark",
        "kind == b'E' and number == self.count",
        "kind == b'E'",
        "journal/test_reading.py",
    ),
    Bug(
        "a journal that lacks the turn of a digest is whole",
        _OUTSIDE,
        "journal/replay.py",
        "Journal._read_mark",
        "kind == b'S' and number <= self.count",
        "kind == b'S'",
        "journal/test_replay.py",
    ),
    Bug(
        "sets are written in the order of their hashes",
        _OUTSIDE,
        "journal/codec.py",
        "dump",
        "[dump(item) for item in sorted(value)]",
        "[dump(item) for item in value]",
        "journal/test_codec.py",
    ),
    Bug(
        "maps are written in the order of their hashes",
        _OUTSIDE,
        "journal/codec.py",
        "dump",
        "[[dump(key), dump(value[key])] for key in sorted(value)]",
        "[[dump(key), dump(value[key])] for key in value]",
        "journal/test_codec.py",
    ),
    Bug(
        "of equal continuations the last is the best",
        _OUTSIDE,
        "sampling/beam.py",
        "_rank_candidates",
        "sorted(candidates, key=attrgetter('logprob'), reverse=True)",
        "sorted(candidates, key=attrgetter('logprob'))[::-1]",
        "sampling/test_beam.py",
    ),
    Bug(
        "of equal hypotheses the later ones are kept",
        _OUTSIDE,
        "sampling/beam.py",
        "_best_hypotheses",
        "(*hypotheses, *new)",
        "(*new, *hypotheses)",
        "sampling/test_beam.py",
    ),
    Bug(
        "a search goes on for an equal score",
        _OUTSIDE,
        "sampling/beam.py",
        "_is_over",
        "best_score <= hypotheses[-1].score",
        "best_score < hypotheses[-1].score",
        "sampling/test_beam.py",
    ),
    Bug(
        "a replica at its bound gets one more",
        _OUTSIDE,
        "routing/policies.py",
        "PrefixHash.choose",
        "live[name] < bound",
        "live[name] <= bound",
        "routing/test_policies.py",
    ),
    Bug(
        "a second choice is at its bound",
        _OUTSIDE,
        "routing/policies.py",
        "PrefixHash.choose",
        "count < bound",
        "count <= bound",
        "routing/test_policies.py",
    ),
    Bug(
        "the bound of loads leaves this request out",
        _OUTSIDE,
        "routing/policies.py",
        "PrefixHash.choose",
        "sum(live.values()) + 1",
        "sum(live.values())",
        "routing/test_policies.py",
    ),
    Bug(
        "the bound of loads is rounded down",
        _OUTSIDE,
        "routing/policies.py",
        "PrefixHash.choose",
        "math.ceil",
        "math.floor",
        "routing/test_policies.py",
    ),
    Bug(
        "hit without its sink tokens",
        "any engine with sink tokens: a prefix counts as cached though its first block, "
        "which is evicted last, is gone",
        "planning/prefix_hit.py",
        "_find_blocks",
        "lookup_window(prefix, keys, hit, group.window, size, g, sinks)",
        "lookup_window(prefix, keys, hit, group.window, size, g)",
        "blocks/test_sinks.py",
    ),
    Bug(
        "no drafts under a grammar",
        "a kind: forced text is generated token by token",
        "planning/plan_drafts.py",
        "may_draft",
        "request.needs_host_mask and drafter != HOST",
        "request.needs_host_mask",
        "planning/test_plan_drafts.py",
    ),
    Bug(
        "least recently used goes with its child",
        _OUTSIDE,
        "blocks/prefix.py",
        "PrefixChange.evict",
        "last_use > oldest or len(evicted) >= count",
        "len(evicted) >= count",
        "blocks/test_prefix.py",
    ),
    Bug(
        "most recently used goes with its child",
        _OUTSIDE,
        "blocks/prefix.py",
        "PrefixChange.evict",
        "last_use > oldest or len(evicted) >= count",
        "last_use < oldest or len(evicted) >= count",
        "blocks/test_prefix.py",
    ),
    Bug(
        "a search hopes for length where that is worse",
        _OUTSIDE,
        "sampling/beam.py",
        "_is_over",
        "params.early_stopping == NEVER and params.length_penalty > 0",
        "params.early_stopping == NEVER",
        "sampling/test_beam.py",
    ),
    Bug(
        "a paused suspect is filled",
        _OUTSIDE,
        "lifecycle/pausing.py",
        "paused_rows",
        "run.scheduled[i] + 1 >= run.num_known_at_admission[i] or run.ids[i] in isolated",
        "run.scheduled[i] + 1 >= run.num_known_at_admission[i]",
        "lifecycle/test_pausing.py",
    ),
    Bug(
        "rows in need keep their positions when another gives way",
        _OUTSIDE,
        "planning/grow.py",
        "_grow_or_preempt",
        "{i - (i > victim): n for i, n in upto.items() if i != victim}",
        "{i: n for i, n in upto.items() if i != victim}",
        "planning/test_grow.py",
    ),
    Bug(
        "a window slides by full blocks",
        _OUTSIDE,
        "lifecycle/publish.py",
        "_publish_groups",
        "outside(sure, group.window, config.block_size)",
        "outside(count * config.block_size, group.window, config.block_size)",
        "lifecycle/test_publish.py",
    ),
    Bug(
        "newcomers are not in rank order",
        _OUTSIDE,
        "planning/schedule.py",
        "_admit",
        "builder.newcomers.sort(key=lambda newcomer: newcomer.seat.seqs[0].place)",
        "None",
        "planning/test_schedule.py",
    ),
    Bug(
        "a good step clears the faults of those in the next",
        _OUTSIDE,
        "planning/commit.py",
        "_update_statistics",
        "positions(run, set(plan.run_ids))",
        (
            "positions(run, {run_id for one in (plan, *state.inflight) for run_id in "
            "one.run_ids})"
        ),
        "planning/test_discard.py",
    ),
    Bug(
        "a first sample computes its prompt again behind its output",
        _OUTSIDE,
        "records/sequence.py",
        "Sequence.reads_cache",
        "self.sample > 0 or len(self.history) > len(self.request.prompt)",
        "self.sample > 0",
        "records/test_sequence.py",
    ),
    Bug(
        "empty runs of free blocks",
        "a kind: what is evicted for a newcomer leaves a trace in each state",
        "blocks/pool.py",
        "PoolChange.release",
        "self.spare and len(self.spare) + len(pages) > self.run",
        "len(self.spare) + len(blocks) > self.run",
        "testing/test_size_laws.py",
    ),
    # The swarm meets it less than once in 300 worlds.
    Bug(
        "fork of a block that is gone",
        "any engine: a tail is copied from a block that its owner has given back",
        "planning/admit.py",
        "_sibling_tail",
        "max(run.chains[sibling].low) > full",
        "max(run.chains[sibling].low) > 2 * full + 1",
        "planning/test_admit.py",
    ),
    Bug(
        "salt left out of the root",
        "CVE-2025-46570: the salt is accepted and never looked at",
        "blocks/keys.py",
        "root_key",
        'fields = (b"minfer.kv.1", fingerprint, salt)',
        'fields = (b"minfer.kv.1", fingerprint, salt[:0])',
        "blocks/test_keys.py",
    ),
    Bug(
        "neighbour's table taken unseen",
        _LET,
        "planning/prefix_hit.py",
        "_pages_of_chain",
        "len(tables[g]) > end and tables[g][end - 1] == last",
        "len(tables[g]) > end",
        "planning/test_admit.py",
    ),
    Bug(
        "displacement compares the first that runs",
        _LET,
        "policies/consult.py",
        "may_preempt",
        "state.running.seqs[-1].place",
        "state.running.seqs[0].place",
        "policies/test_consult.py",
    ),
    Bug(
        "results aligned within their window alone",
        _LET,
        "planning/commit.py",
        "align_yields",
        "before[i] in right or before[i] in now[j:]",
        "before[i] in right",
        "planning/test_commit.py",
    ),
    Bug(
        "faults are never cleared",
        _LET,
        "planning/commit.py",
        "_update_statistics",
        "f[0] not in ran",
        "f[0] is not ran",
        "planning/test_discard.py",
    ),
    Bug(
        "a good step clears everybody's faults",
        _LET,
        "planning/commit.py",
        "_update_statistics",
        "tuple(f for f in state.faults if f[0] not in ran)",
        "()",
        "planning/test_discard.py",
    ),
    Bug(
        "empty results are accepted",
        _LET,
        "planning/commit.py",
        "_flaw",
        "all(map(ge, sizes, min_sampled))",
        "True",
        "planning/test_commit.py",
    ),
    Bug(
        "stop ids of newcomers alone",
        _LET,
        "planning/schedule.py",
        "_admit",
        "{seq.request.stop_ids for seq in run.seqs}",
        "{one.seat.seqs[0].request.stop_ids for one in builder.newcomers}",
        "planning/test_schedule.py",
    ),
    Bug(
        "held, and never looked at again",
        _LET,
        "planning/admission.py",
        "_delay_by_policy",
        "state = builder.state",
        "state = builder.state\n"
        "if state.blocked and state.blocked.cause == 'blocks' and len(state.running):\n"
        "    if state.blocked.place == state.waiting.first().place:\n"
        "        return True",
        "test_stories.py",
    ),
    Bug(
        "a bucket's head is not found",
        _LET,
        "records/waiting.py",
        "WaitingQueue._spot",
        "bisect_right(self.buckets, place, key=lambda bucket: bucket[0].place)",
        "bisect_left(self.buckets, place, key=lambda bucket: bucket[0].place)",
        "records/test_waiting.py",
    ),
    Bug(
        "token ids cut to 16 bits",
        _LET,
        "blocks/keys.py",
        "block_key",
        "array('I', tokens)",
        "array('I', [token & 0xFFFF for token in tokens])",
        "blocks/test_keys.py",
    ),
    Bug(
        "the latest used goes first",
        _LET,
        "blocks/prefix.py",
        "PrefixChange.evict",
        "oldest = pop_least(self.words)",
        "oldest = max(self.idle)\ndrop(self.words, oldest)",
        "blocks/test_ownership.py",
    ),
    Bug(
        "finish for another sample",
        _LET,
        "lifecycle/stop.py",
        "_samples_of",
        "(stop.sample,)",
        "(0,)",
        "lifecycle/test_stop.py",
    ),
    # Many things have to meet in one world.
    Bug(
        "a paused copy is lost",
        "a copy goes with the plan that opens a row, and no plan opens it",
        "planning/admit.py",
        "_copied_tail",
        "seq.id not in state.paused and not skips_as_suspect(config, state, seq.id)",
        "True",
        "lifecycle/test_pausing.py",
    ),
    Bug(
        "all wait for who is paused and has to run alone",
        "one bad request fatal to all: a suspect that cannot run lets nobody run",
        "planning/schedule.py",
        "isolated_generation",
        "sample in run.ids and sample not in state.paused",
        "sample in run.ids",
        "lifecycle/test_pausing.py",
    ),
    Bug(
        "who has to run alone comes back beside others",
        "one bad request fatal to all: its next failure is a neighbour's, too",
        "planning/admission.py",
        "_add_to_step",
        (
            "0 if skips_as_suspect(builder.config, builder.state, name) "
            "else min(max_tokens, inputs)"
        ),
        "min(max_tokens, inputs)",
        "lifecycle/test_pausing.py",
    ),
    Bug(
        "mean of what was computed since a failure",
        "a kind: what was summed before a step failed is lost with its row",
        "lifecycle/preempt.py",
        "restart",
        "dict.fromkeys(anew, 0)",
        "{}",
        "planning/test_pooled.py",
    ),
    Bug(
        "idle time counts as a step's",
        "the first step after a pause seems to take as long as the pause",
        "planning/build_plan.py",
        "build_plan",
        "config.itl_target is not None and not state.inflight",
        "False",
        tests="planning/test_prefill_budget.py",
    ),
    Bug(
        "prompts that wait do not count",
        "by the load, a burst is computed as slowly as one prompt",
        "planning/prefill_budget.py",
        "step_load",
        "prompt_tokens += len(waiting) * len(waiting.first().history)",
        "prompt_tokens += 0",
        tests="planning/test_prefill_budget.py",
    ),
    Bug(
        "decode rows are preempted for single tokens",
        "an urgent prompt preempts row after row until its first chunk has room",
        "planning/admission.py",
        "_preempt_for_tokens",
        "builder.bounded and run.run_ids[-1] not in builder.shares",
        "False",
        tests="planning/test_prefill_budget.py",
    ),
)


# --- in the bug's process ---------------------------------------------------------------


def hunt(worlds: int) -> Caught | None:
    """Run the swarm of the minfer that is imported here until something objects."""
    from tests.core import world

    smoke()
    signal.signal(signal.SIGVTALRM, _endless)
    turns, step = 0, vars(world)["step"]

    def counted(*args: object) -> object:
        nonlocal turns
        turns += 1
        signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_SECONDS)
        return step(*args)

    with patch.object(world, "step", counted):
        for seed in range(worlds):
            signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_SECONDS)
            try:
                world.run_swarm(seed, TURNS)
            except Exception as error:  # whatever it is, it was noticed
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                return Caught(_law(error), _message(error), turns, seed + 1)
    return None


def smoke() -> None:
    """A single request with room for everything comes out right, planted bug or not."""
    from minfer.records.config import EngineConfig
    from minfer.records.request import Request
    from tests.core.world import VOCAB, World

    config = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=4, vocab_size=VOCAB)
    world = World(config, Random(1))
    world.submit(Request(id="only", prompt=(1, 2, 3, 4, 5, 6), max_tokens=9))
    world.drain()
    assert world.ended["only", 0].length == 9


def _endless(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise TimeoutError(f"no end in sight after {_CPU_SECONDS} s")


def _law(error: Exception) -> str:
    """The law that broke: named by the error, or else by where it came from."""
    if law := getattr(error, "law", None):
        return str(law)
    if isinstance(error, TimeoutError):
        return "progress"
    place = Path(traceback.extract_tb(error.__traceback__)[-1].filename).stem
    return {"world": "whole run", "oracle": "executor contract"}.get(place, "total")


def _message(error: Exception) -> str:
    text = str(error).removeprefix(f"{getattr(error, 'law', '')}: ").splitlines()
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return kind + (text[0] if text else "")


# --- in the tests' process --------------------------------------------------------------


def find(bug: Bug | None, worlds: int = WORLDS) -> Caught | None:
    """What catches the bug; None if nothing does. The sound core, too, can be hunted."""
    # A fixed hash seed: the world chooses among names in the order of maps.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    name = [f"--plant={json.dumps(asdict(bug))}"] if bug else []
    what = [f"--pytest={bug.tests}"] if bug and bug.tests else [f"--hunt={worlds}"]
    command = [sys.executable, "-m", "tests.core.planted", *name, *what]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if bug and bug.tests and done.returncode in (0, 1):
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        return Caught(bug.tests, failed[0].partition("::")[2], 0, 0) if failed else None
    if done.returncode:
        raise RuntimeError(f"{bug and bug.name}: the hunt itself failed\n{done.stderr}")
    said = json.loads(done.stdout)
    return Caught(**said) if said else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Which planted bugs are caught, and by what."
    )
    parser.add_argument(
        "--worlds", type=int, default=WORLDS, help="at most, for each bug"
    )
    parser.add_argument("--sample", type=int, help="so many bugs, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--plant", metavar="BUG", help="by name, or as JSON: have the core with it"
    )
    parser.add_argument(
        "--hunt", type=int, metavar="WORLDS", help="here, in the core as it is"
    )
    parser.add_argument(
        "--pytest", metavar="FILE", help="run these tests of the core, here"
    )
    args = parser.parse_args()
    if args.plant:
        named = {bug.name: bug for bug in (*BUGS, *ESCAPED)}
        (named.get(args.plant) or Bug(**json.loads(args.plant))).plant()
    if args.pytest:
        import pytest

        path = str(ROOT / "tests" / "core" / args.pytest)
        return int(pytest.main(["-x", "-q", "--all", "-p", "no:cacheprovider", path]))
    if args.hunt is not None:
        caught = hunt(args.hunt)
        print(json.dumps(caught and asdict(caught)))
        return 0
    bugs = [*BUGS, *ESCAPED]
    if args.sample is not None:
        bugs = Random(args.seed).sample(bugs, args.sample)
    return _all(bugs, args.worlds)


def _all(bugs: list[Bug], worlds: int) -> int:
    """Print what catches each; 0 if something does, and the sound core passes all worlds
    that it took.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        caught = list(pool.map(lambda bug: find(bug, worlds), bugs))
    most = max((got.worlds if got else worlds for got in caught), default=worlds)
    results = [find(None, max(1, most)), *caught]
    print(f"{'bug':42} {'caught by':18} {'turns':>6} {'worlds':>6}  message")
    names = ("(none: the core as it is)", *(bug.name for bug in bugs))
    for name, got in zip(names, results, strict=True):
        row = (
            (got.law, got.turns, got.worlds, got.message[:70])
            if got
            else ("-", "", "", "")
        )
        print(f"{name:42} {row[0]:18} {row[1]:>6} {row[2]:>6}  {row[3]}".rstrip())
    found = sum(got is not None for got in results[1:])
    print(
        f"{found} of {len(bugs)} caught; the sound core: {results[0] or 'no objection'}"
    )
    return 0 if found == len(bugs) and results[0] is None else 1


if __name__ == "__main__":
    sys.exit(main())
