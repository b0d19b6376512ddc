"""Bugs planted on purpose: what broke in real engines, put into a copy of this core.

A checker that never fails proves nothing. Each record below changes a few lines of the core into
what a real engine once did; `hunt` then runs the swarm on that copy, in a process of its own, until
an invariant, the oracle or the world objects. The references are issues and pull requests of vLLM
(v#) and SGLang (s#), advisories, and two bugs that a prototype of this engine fell into; where
there is none, a kind of bug that all engines share.

`python -m tests.core.planted` prints what caught each of them, and after how many turns.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Final
from unittest.mock import patch

from attrs import asdict, frozen

import minfer

WORLDS: Final = 300  # a bug must show in so many seeded worlds; the sound core passes them all
TURNS: Final = 60  # of one world before it is healed and drained
_CPU_SECONDS: Final = 10  # of one world, after which a turn counts as endless: 500 times the usual


@frozen
class Bug:
    """A few lines of one module of the core, and what they become."""

    name: str
    seen: str  # where a real engine did this
    file: str
    old: str  # occurs exactly once in the file
    new: str


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
        "commit.py",
        "    state = open_fences(state, plan.step)",
        "    state = open_fences(state, plan.step) if any(new) else state",
    ),
    Bug(
        "hit stolen before it is pinned",
        "v#37076, v#37164: allocation evicts the prefix that was just looked up",
        "admit.py",
        "    low, hit, prefix, leaf = _hit(config, state, draft, seq.keys, full)\n"
        "    needs = -(-known // size) - hit\n"
        "    new = draft.take(needs) if needs + spare <= draft.available else None\n",
        "    low, hit, prefix, leaf = _hit(config, state, Draft(state.blocks), seq.keys, full)\n"
        "    needs = -(-known // size) - hit\n"
        "    new = draft.take(needs) if needs + spare <= draft.available else None\n"
        "    draft.hold(leaf)\n",
    ),
    Bug(
        "block visible before it is written",
        "v#41400: prompt blocks are findable once planned, not once computed",
        "commit.py",
        "upto[i] = done[run.gens[i]]",
        "upto[i] = min(run.sched[i], run.base[i]) // size",
    ),
    Bug(
        "retired before it is written",
        "v#41400, s#36475: what a cancelled step was going to write is published",
        "lifecycle.py",
        "upto = committed(config, state, i) // config.block_size",
        "upto = run.sched[i] // config.block_size",
    ),
    Bug(
        "last sampled token counted as KV",
        "v#38624: the token just sampled has no KV yet, its block is published",
        "commit.py",
        "{i: (run.known[i] - 1) // size for i in some}",
        "{i: run.known[i] // size for i in some}",
    ),
    Bug(
        "fork reads a tail not yet computed",
        "v#41400, v#53936: a sample copies its sibling's prompt while that is being filled",
        "admit.py",
        "if committed(config, state, sibling) < shared:",
        "if state.running.known[sibling] < shared:",
    ),
    Bug(
        "leak of duplicates",
        "s#11970, s#6888: blocks whose content is cached already are neither kept nor freed",
        "lifecycle.py",
        "return (leaf,), twins + table[new.stop :]",
        "return (leaf,), table[new.stop :]",
    ),
    Bug(
        "leaf of a fenced sequence is never let go",
        "v#46283: cancelled while something is in flight, the cached prefix stays pinned",
        "lifecycle.py",
        "_give_back(draft, fence.held, fence.private)",
        "draft.give(fence.private)",
    ),
    Bug(
        "double free",
        "sglang-jax #982: blocks just given to the cache are freed as well",
        "lifecycle.py",
        "return (leaf,), twins + table[new.stop :]",
        "return (leaf,), twins + table[new.start :]",
    ),
    Bug(
        "rank lost on preemption",
        "v#41951: who was preempted queues up behind all others",
        "lifecycle.py",
        "    return evolve(state, waiting=state.waiting.insert(back), held=None), reason",
        "    back = evolve(back, place=(seq.place[0], state.arrivals, seq.sample))\n"
        "    state = evolve(state, arrivals=state.arrivals + 1)\n"
        "    return evolve(state, waiting=state.waiting.insert(back), held=None), reason",
    ),
    Bug(
        "output lost on preemption",
        "v#38624: tokens are sampled and sent a second time after a preemption",
        "lifecycle.py",
        "    back = evolve(seq, preempted=",
        "    seq = state.running.seqs[i]\n    back = evolve(seq, preempted=",
    ),
    Bug(
        "whole prompt hit",
        "s#22819: the prompt ends at a block end, all of it is cached, nothing is computed",
        "admit.py",
        "full = (known - 1) // size",
        "full = known // size",
    ),
    Bug(
        "salt left out of the key",
        "CVE-2025-46570, v#44701: tenants and adapters share blocks",
        "keys.py",
        "parent = out[-1] if out else root",
        'parent = out[-1] if out else b""',
    ),
    Bug(
        "salt left out of the root",
        "CVE-2025-46570: the salt is accepted and never looked at",
        "keys.py",
        'parts = (b"minfer.kv.1", fingerprint, salt)',
        'parts = (b"minfer.kv.1", fingerprint, salt[:0])',
    ),
    Bug(
        "parent left out of the key",
        "CVE-2025-25183 (colliding keys): equal tokens after different prefixes",
        "keys.py",
        'return sha256(parent + array("I", tokens).tobytes()).digest()',
        'return sha256(array("I", tokens).tobytes()).digest()',
    ),
    Bug(
        "tokens after the stop are sent",
        "v#3574, s#11462: what was sampled past the stop token reaches the client",
        "commit.py",
        "kept[i] = new[i][: ends[i][0]]",
        "kept[i] = new[i]",
    ),
    Bug(
        "results of a stale generation",
        "v#48245, v#38624: the row has a new owner, the old one's token goes to it",
        "commit.py",
        "new = aligned(plan.gens, run.gens, yields, thresholds.aligned_window)",
        "got = dict(zip(plan.rows, yields, strict=True))\n"
        "        new = tuple(map(got.get, run.rows, repeat(())))",
    ),
    Bug(
        "copy lost with its plan",
        "prototype: after a failed step a fork counts the tail as KV that was to be copied",
        "lifecycle.py",
        "return run.chains[i].sealed * config.block_size if copied else start",
        "return start",
    ),
    Bug(
        "last chunk of one token",
        "prototype: the prompt's last token alone in a chunk is taken for a decode row",
        "schedule.py",
        "if run.gens[i] not in idle:\n",
        "if run.gens[i] not in idle and run.base[i] - run.sched[i] > 1:\n",
    ),
    Bug(
        "fence ignored",
        "v#46283: blocks are freed while a step in flight still writes to them",
        "lifecycle.py",
        "        if until is None:\n",
        "        if until is None or blocks[1]:\n",
    ),
    Bug(
        "fence opens a step early",
        "v#26400: blocks of the last of several steps in flight are freed when the first is done",
        "lifecycle.py",
        "until = state.inflight[-1].step if state.inflight else None",
        "until = state.inflight[0].step if state.inflight else None",
    ),
    Bug(
        "neighbour's seed",
        "v#51226: a row samples by the parameters of the row beside it",
        "schedule.py",
        "opens.append(Open(at, seq.request, seq.sample, run.tables[i][:]))",
        "opens.append(Open(at, run.seqs[at].request, seq.sample, run.tables[i][:]))",
    ),
    Bug(
        "one stream for all samples",
        "fan-out: the samples of one request draw the same noise",
        "schedule.py",
        "opens.append(Open(at, seq.request, seq.sample, run.tables[i][:]))",
        "opens.append(Open(at, seq.request, 0, run.tables[i][:]))",
    ),
    Bug(
        "everybody waits for blocks",
        "v#45388: sequences that each hold a part of what they need wait for each other",
        "grow.py",
        "if state.fences or len(run) == 1:",
        "if state.fences or len(run) >= 1:",
    ),
    Bug(
        "preemption cascade",
        "v#49674, v#49675: blocks behind fences do not count, so the next one is preempted too",
        "grow.py",
        "if state.fences or len(run) == 1:",
        "if len(run) == 1:",
    ),
    Bug(
        "first in rank preempted",
        "v#41951, v#54644: the one that has waited and computed longest gives way",
        "grow.py",
        "victim = choice if 0 < choice < len(run) else len(run) - 1",
        "victim = 0",
    ),
    Bug(
        "equals displace each other",
        "v#49674: requests of one priority take turns in throwing each other out",
        "policies.py",
        "return waiting < running",
        "return waiting <= running",
    ),
    Bug(
        "one token past the block end",
        "s#22819: the table grows when position k*size has been planned, not before",
        "grow.py",
        "now = [i for i, end in ends.items() if run.sched[i] >= end]",
        "now = [i for i, end in ends.items() if run.sched[i] > end]",
    ),
    Bug(
        "no block for the last position",
        "s#22819: a limit one past a block end never gets its block",
        "grow.py",
        "if end < run.last[i]",
        "if end + 1 < run.last[i]",
    ),
    Bug(
        "parent evicted before its child",
        "s#22819, s#20010: an inner node of the tree is thrown out, its children stay findable",
        "blocks.py",
        "                if not kids:\n                    self.idle[last_use] = leaf\n",
        "                self.idle[last_use] = leaf\n",
    ),
    Bug(
        "hit stays evictable",
        "v#37164: a cached block that somebody took up again is still listed as idle",
        "blocks.py",
        "            if not kids:\n                del self.idle[ticket]\n",
        "",
    ),
    Bug(
        "growth lost",
        "diffs instead of state: a second growth in one step replaces the first",
        "grow.py",
        "grown = {**grown, **more_grown}",
        "grown = more_grown",
    ),
    Bug(
        "resumed row is not sent again",
        "diffs instead of state: after a preemption the device keeps its old table",
        "schedule.py",
        "if start == run.starts[i]:",
        "if start == run.starts[i] and not seq.preempted:",
    ),
    Bug(
        "successors of a failed step go on",
        "v#50265: only the failed step is taken back, not those planned on top of it",
        "commit.py",
        "touched = {gen for plan in state.inflight for gen in plan.gens}",
        "touched = blamed",
    ),
    Bug(
        "failed step keeps its positions",
        "v#50265: what was planned stays counted although it never ran",
        "lifecycle.py",
        '("seqs", "gens", "starts", "base", "sched", "ripe", "chains", "tails", "fresh")',
        '("seqs", "gens", "starts", "base", "ripe", "chains", "tails", "fresh")',
    ),
    Bug(
        "short yield counted in full",
        "v#48245: positions reserved ahead are not given back when fewer tokens come",
        "commit.py",
        "sched = tuple(map(sub, sched, map(short.get, run.gens, repeat(0))))",
        "del short",
    ),
    Bug(
        "decodes beyond the budget",
        "budgets: running rows are not counted against that of tokens",
        "schedule.py",
        "- (len(run) - len(idle))",
        "",
    ),
    Bug(
        "cancel leaves siblings waiting",
        "v#51629: of n samples only the first is taken out of the line",
        "engine.py",
        "for sample in samples:",
        "for sample in list(samples)[:1]:",
    ),
    Bug(
        "cancel leaves siblings running",
        "v#51629: of n samples only the first that runs is ended",
        "engine.py",
        "state, ended = end(config, state, running)",
        "state, ended = end(config, state, dict(list(running.items())[:1]))",
    ),
    Bug(
        "never fits, waits for ever",
        "v#39734, v#35541: a request longer than the whole cache is queued and blocks the line",
        "engine.py",
        "if needs > config.num_blocks:",
        "if needs > 4 * config.num_blocks:",
    ),
    Bug(
        "reserve kept from the only request",
        "v#39734, v#45388: the watermark holds even when nobody else could free a block",
        "admit.py",
        "spare = max(config.watermark, more) if len(state.running) + others else 0",
        "spare = max(config.watermark, more)",
    ),
    Bug(
        "context limit off by one",
        "limits: one token more than the model's maximum length",
        "lifecycle.py",
        "last = min(len(request.prompt) + request.max_tokens, config.max_model_len) - 1",
        "last = min(len(request.prompt) + request.max_tokens - 1, config.max_model_len)",
    ),
    Bug(
        "repeat beyond the limit",
        "limits: several steps in one plan, the length is looked at after them",
        "grow.py",
        "min(config.max_repeat, last - sched, len(table) * size - sched)",
        "min(config.max_repeat, len(table) * size - sched)",
    ),
    Bug(
        "two terminal words",
        "s#36475, s#36552: given up after failures, the sequence decodes on and ends again",
        "commit.py",
        "    state, finished = end(config, state, lost)\n",
        "    _, finished = end(config, state, lost)\n",
    ),
    Bug(
        "side table outlives the request",
        "v#51629: what was noted about a sample is never cleared",
        "lifecycle.py",
        "    state = evolve(state, requests=requests, policy=policy, faults=faults)\n",
        "    state = evolve(state, requests=requests, policy=policy)\n",
    ),
    Bug(
        "poison is retried for ever",
        "one bad request fatal to all: its failures are not counted, so it is retried for ever",
        "commit.py",
        "faults[run.ids[i]] = faults.get(run.ids[i], 0) + 1",
        "faults[run.ids[i]] = 1",
    ),
    Bug(
        "neighbours blamed",
        "one bad request fatal to all: whoever shares its steps ends with it",
        "schedule.py",
        "if count >= few and",
        "if count > 9 and",
    ),
    Bug(
        "results of a skipped step",
        "v#48245, s#36475: the answer to a later step is taken for that to the first",
        "commit.py",
        "if event.step != plan.step:",
        "if event.step < plan.step:",
    ),
    Bug(
        "newcomer behind all others",
        "v#41951: who comes back from a preemption runs at the end of the batch's order",
        "sequence.py",
        'at = bisect(run.seqs, one.seqs[0].place, key=attrgetter("place"))',
        "at = len(run)",
    ),
    Bug(
        "window ends a block late",
        "any engine: blocks that the next query still reads are taken for out of the window",
        "lifecycle.py",
        "    low = outside(position, config.window, config.block_size)\n",
        "    low = outside(position + config.block_size, config.window, config.block_size)\n",
    ),
    Bug(
        "hit without its window",
        "any engine: a prefix counts as cached though a block of its last window is gone",
        "blocks.py",
        "outside(hit * block_size, window, block_size)",
        "outside((hit + 1) * block_size, window, block_size)",
    ),
    Bug(
        "given back twice",
        "any engine: what left the window is let go again at each block",
        "lifecycle.py",
        "    for block in table[chain.low : min(low, sealed)]:\n",
        "    for block in table[: min(low, sealed)]:\n",
    ),
    Bug(
        "private block behind the window leaks",
        "any engine: what was never published is forgotten when it leaves the window",
        "lifecycle.py",
        "    draft.give(table[max(chain.low, sealed) : low])\n",
        "",
    ),
    Bug(
        "fork of a block that is gone",
        "any engine: a tail is copied from a block that its owner has given back",
        "admit.py",
        "run.chains[sibling].low <= full == hit",
        "run.chains[sibling].low <= 2 * full + 1 and full == hit",
    ),
)


# --- in the copy's process ------------------------------------------------------------------------


def hunt(worlds: int) -> Caught | None:
    """Run the swarm of the minfer that is imported here until something objects."""
    from tests.core import world

    smoke()
    signal.signal(signal.SIGVTALRM, _endless)
    turns, step = 0, vars(world)["step"]

    def counted(*args: object) -> object:
        nonlocal turns
        turns += 1
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
    from random import Random

    from minfer.config import EngineConfig
    from minfer.request import Request
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


# --- in the tests' process ------------------------------------------------------------------------


def plant(bug: Bug | None, folder: Path) -> None:
    """Copy the core, what executes for it and its hostile world to `folder`, with one bug."""
    core, here = Path(minfer.__file__).parent, Path(__file__).parent
    for source, target, names in (
        (core, "minfer", [path.name for path in core.glob("*.py")]),
        (core / "effects", "minfer/effects", ["__init__.py", "executor.py"]),
        (here.parent, "tests", ["__init__.py"]),
        (here, "tests/core", ["__init__.py", "world.py", "planted.py"]),
    ):
        (folder / target).mkdir(parents=True)
        for name in names:
            shutil.copyfile(source / name, folder / target / name)
    if bug is not None:
        path = folder / "minfer" / bug.file
        text = path.read_text()
        if text.count(bug.old) != 1:
            raise LookupError(f"{bug.name}: its text is {text.count(bug.old)} times in {bug.file}")
        path.write_text(text.replace(bug.old, bug.new))


def find(bug: Bug | None, worlds: int = WORLDS) -> Caught | None:
    """What catches the bug; None if nothing does. The sound core, too, can be hunted."""
    with tempfile.TemporaryDirectory() as name:
        plant(bug, Path(name))
        # A fixed hash seed: the world chooses among names in the order of maps.
        env = {**os.environ, "PYTHONPATH": name, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "tests.core.planted", "--hunt", str(worlds)]
        done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{bug and bug.name}: the hunt itself failed\n{done.stderr}")
        said = json.loads(done.stdout)
        if not Path(said["core"]).samefile(Path(name) / "minfer"):
            raise RuntimeError(f"hunted in {said['core']}, not in the copy")
    return Caught(**said["caught"]) if said["caught"] else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Which planted bugs are caught, and by what.")
    parser.add_argument("--worlds", type=int, default=WORLDS, help="at most, for each bug")
    parser.add_argument("--hunt", type=int, metavar="WORLDS", help="here, in the core as it is")
    args = parser.parse_args()
    if args.hunt is not None:
        caught = hunt(args.hunt)
        core = str(Path(minfer.__file__).parent)
        print(json.dumps({"core": core, "caught": caught and asdict(caught)}))
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda bug: find(bug, args.worlds), (None, *BUGS)))
    print(f"{'bug':42} {'caught by':18} {'turns':>6} {'worlds':>6}  message")
    names = ("(none: the core as it is)", *(bug.name for bug in BUGS))
    for name, got in zip(names, results, strict=True):
        row = (got.law, got.turns, got.worlds, got.message[:70]) if got else ("-", "", "", "")
        print(f"{name:42} {row[0]:18} {row[1]:>6} {row[2]:>6}  {row[3]}".rstrip())
    found = sum(got is not None for got in results[1:])
    print(f"{found} of {len(BUGS)} caught; the sound core: {results[0] or 'no objection'}")
    return 0 if found == len(BUGS) and results[0] is None else 1


if __name__ == "__main__":
    sys.exit(main())
