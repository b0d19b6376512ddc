"""What one client's abuse costs its neighbours: `minfer serve` under each attack.

Well-behaved clients stream; beside them attackers do, again and again, what once stalled
everybody. For each attack, twice: under attack, and in a control in which as many
processors' time is burnt without sending anything. Told are the gaps between two parts of
a neighbour's stream (its 99th percentile and the longest), the longest that a probe (a
body of 8 KB for one token) and a request of /health waited, memory before the attack and
at its end, and memory, descriptors and blocks `--after` seconds later.

Attackers and neighbours are different clients: without keys a server tells them apart by
their addresses. Who cannot be told from its neighbours cannot be bounded for their sake.

    python -m bench.abuse                                  # the bundled model on the CPU
    python -m bench.abuse --shape 7B --pin 9 4 3           # on a GPU, processors parted
    python -m bench.abuse --tree ../other --no-control     # another tree's server
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy
from attrs import field, frozen

from bench.abuse.attacks import ADDRESS, ATTACKS, HOST, besiege
from bench.abuse.server import Server, pinned, served, write_checkpoint
from bench.results import ROOT, show, write

SECONDS: Final = 6.0  # of each attack
WARM_UP_SECONDS: Final = 15.0  # seconds
MAX_CALM_SECONDS: Final = 40.0  # seconds at most until nothing of an attack is left
SLICE_SECONDS: Final = 0.01  # seconds: what the control burns and rests in
BENCH: Final = [sys.executable, "-m"]


@frozen
class Cores:
    """Which processors are whose; none: all are everybody's."""

    server: Sequence[int] = ()
    clients: Sequence[int] = ()
    attackers: Sequence[int] = ()


@frozen
class Neighbours:
    """Processes of well-behaved clients."""

    processes: list[subprocess.Popen[str]] = field(factory=list)

    def seen(self) -> dict[str, Any]:
        """What all of them saw since the last time."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        reports = []
        for process in self.processes:
            assert process.stdout is not None
            reports.append(json.loads(process.stdout.readline()))
        seen = {
            name: [value for report in reports for value in report[name]]
            for name in ("gaps", "firsts", "probes", "healths")
        }
        return {
            "itl_p99_ms": percentile(seen["gaps"], 99),
            "longest_gap_ms": percentile(seen["gaps"], 100),
            "ttft_p99_ms": percentile(seen["firsts"], 99),
            "longest_probe_ms": percentile(seen["probes"], 100),
            "longest_health_ms": percentile(seen["healths"], 100),
            "gaps": len(seen["gaps"]),
            "broken": sum(report["broken"] for report in reports),
        }


def percentile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return round(1000 * float(numpy.percentile(values or [0.0], share)), 2)


@frozen
class Siege:
    """A server, its neighbours, and what is done to them."""

    server: Server
    neighbours: Neighbours
    cores: Cores
    seconds: float
    after: float  # seconds from an attack's end until memory is read

    def attack(self, name: str) -> dict[str, Any]:
        """The figures of one attack, and of the server after it."""
        self.neighbours.seen()
        before = self.server.memory()
        report = self._attackers("--attack", name)
        seen = self.neighbours.seen()
        at_end = self.server.memory()
        calm_after = self.calm()
        time.sleep(self.after)
        return {
            "attack": name,
            **seen,
            "attackers_got": report["answers"],
            "attackers_cpu": round(report["cpu"], 2),  # processors
            "calm_after_s": calm_after,
            "memory_before_mb": before,
            "memory_at_end_mb": at_end,
            **self.rest(),
        }

    def control(self, processors: float) -> dict[str, Any]:
        """The same figures while `processors` cores are busy, and nothing is sent."""
        self.neighbours.seen()
        self._attackers("--burn", str(processors))
        return self.neighbours.seen()

    def _attackers(self, *arguments: str) -> dict[str, Any]:
        command = [*BENCH, "bench.abuse", *arguments, "--port", str(self.server.port)]
        command += ["--seconds", str(self.seconds)]
        process = subprocess.run(
            pinned(command, self.cores.attackers),
            stdout=subprocess.PIPE,
            check=True,
            cwd=ROOT,
        )
        report: dict[str, Any] = json.loads(process.stdout)
        return report

    def calm(self) -> float | None:
        """Seconds until only the neighbours are served; None: not in time."""
        began = time.monotonic()
        while (spent := time.monotonic() - began) < MAX_CALM_SECONDS:
            try:
                load = self.server.load()
            except OSError:  # it does not answer in time
                continue
            calm_now = (
                load["num_requests_running"] <= 2 * len(self.neighbours.processes) * 8
            )
            if calm_now and not load["num_requests_waiting"]:
                return round(spent, 1)
            time.sleep(0.2)
        return None

    def rest(self) -> dict[str, Any]:
        """What the server holds."""
        return {
            "memory_mb": self.server.memory(),
            "descriptors": self.server.descriptors(),
            "blocks_used": round(self.server.load()["kv_cache_usage_perc"], 4),
        }


def burn(processors: float, seconds: float) -> None:
    """Spend this share of one processor's time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        slice_end = time.monotonic() + SLICE_SECONDS * min(processors, 1.0)
        while time.monotonic() < slice_end:
            pass
        time.sleep(SLICE_SECONDS * max(0.0, 1.0 - processors))


def attack_as_child(options: argparse.Namespace) -> None:
    """Be the attackers, and print what they got and what it cost them."""
    began = time.process_time()
    answers: dict[str, int] = {}
    if options.burn is not None:
        burn(options.burn, options.seconds)
    else:
        answers = asyncio.run(besiege(options.port, options.attack, options.seconds))
    spent = time.process_time() - began
    print(json.dumps({"answers": answers, "cpu": spent / options.seconds}))


def cores_of(counts: Sequence[int]) -> Cores:
    """Processors for the server, its neighbours and the attackers, in order."""
    if not counts:
        return Cores()
    processors = sorted(os.sched_getaffinity(0))
    server, clients, attackers = counts
    if server + clients + attackers > len(processors):
        raise SystemExit(f"--pin {counts}: there are {len(processors)} processors")
    begin = server + clients
    return Cores(
        processors[:server],
        processors[server:begin],
        processors[begin : begin + attackers],
    )


def neighbours(
    stack: ExitStack, port: int, options: argparse.Namespace, cores: Cores
) -> Neighbours:
    """Processes that stream."""
    streams_each = options.streams // options.processes
    processes = []
    for number in range(options.processes):
        command = [
            *BENCH,
            "bench.abuse.neighbours",
            str(port),
            str(number * streams_each),
        ]
        running = subprocess.Popen(
            pinned([*command, str(streams_each)], cores.clients),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        stack.callback(running.kill)
        processes.append(running)
    return Neighbours(processes)


def siege(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All attacks on one server."""
    cores = cores_of(options.pin)
    rows = []
    with ExitStack() as stack:
        server_options = list(options.options)
        if options.shape:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_checkpoint(folder, options.shape)
            server_options += ["--model", str(folder), "--load-format", "dummy"]
            server_options += ["--max-model-len", "2048"]
        server = stack.enter_context(
            served(options.tree.resolve(), cores.server, server_options)
        )
        crowd = neighbours(stack, server.port, options, cores)
        time.sleep(WARM_UP_SECONDS)
        scene = Siege(server, crowd, cores, options.seconds, options.after)
        for name in options.attacks:
            row = scene.attack(name)
            if not options.no_control:
                row["control"] = control = scene.control(row["attackers_cpu"])
                row["itl_p99_ratio"] = row["itl_p99_ms"] / (control["itl_p99_ms"] or 1)
            show(row)
            rows.append(row)
    return rows


def main() -> int:
    """Attack, print a line for each attack, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--shape", help="of a model with random weights; else bundled")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument(
        "--after", type=float, default=0.0, help="seconds, until memory is read"
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--processes", type=int, default=4, help="of neighbours")
    parser.add_argument(
        "--pin",
        type=int,
        nargs=3,
        default=(),
        metavar=("SERVER", "CLIENTS", "ATTACKERS"),
        help="processors of each",
    )
    parser.add_argument("--attacks", nargs="+", default=[*ATTACKS], choices=[*ATTACKS])
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--folder", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--name", default="abuse", help="of the result file")
    parser.add_argument("options", nargs="*", help="of minfer serve, after --")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--burn", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack or options.burn is not None:
        attack_as_child(options)
        return 0
    rows = siege(options)
    facts = {"shape": options.shape or "bundled", "streams": options.streams}
    facts |= {"seconds": options.seconds, "pinned": list(options.pin)}
    facts |= {"neighbours_are": HOST, "attackers_are": ADDRESS}  # clients, by address
    facts |= {"options": list(options.options)}
    write(options.name, {**facts, "attacks": rows}, folder=options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
