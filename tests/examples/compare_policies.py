"""Compare a policy of your own with first come, first served, over eight loads."""

from typing import Any

from minfer.analysis.paired import paired_difference
from minfer.effects.runs.costs import H200
from minfer.effects.runs.report import Report
from minfer.effects.runs.trace_files import read_trace
from minfer.policy import FirstCome, Policy, Rank
from minfer.records.config import EngineConfig
from minfer.records.request import Request
from minfer.simulation.simulate import Simulated, Simulation

LOAD = "poisson:rate=40,requests=80,prompt=300,output=30,spread=1"


class ShortPromptsFirst(FirstCome):
    def rank(self, state: Any, request: Request, _: float) -> tuple[Rank, Any]:
        return (float(len(request.prompt)),), state  # lower goes first


def simulate(policy: Policy, seed: int) -> dict[str, Any]:
    """The figures of one load: those of `minfer simulate --json`."""
    trace = read_trace(f"{LOAD},seed={seed}")
    config = EngineConfig(
        num_blocks=4000, max_num_seqs=4, max_model_len=max(trace.sizes), policy=policy
    )
    report = Report(config, ttft=1.0)  # good: a first token within a second
    arrivals = report.note_arrivals(trace.arrivals(config.block_size))
    simulation = Simulation(config, Simulated(trace.lengths), H200, arrivals)
    report.fold_spans(simulation.spans())  # or fold each of simulation.turns()
    return report.figures()


seeds = range(8)
usual = [simulate(FirstCome(), seed) for seed in seeds]
own = [simulate(ShortPromptsFirst(), seed) for seed in seeds]
for q in ("p50", "p99"):
    before, after = ([run["ttft"][q] for run in runs] for runs in (usual, own))
    found = paired_difference(before, after)
    verdict = "differs" if found.excludes_zero else "noise"
    interval = f"[{found.low:+.3f}, {found.high:+.3f}]"
    print(f"TTFT {q}: {found.median:+.3f} s {interval} {verdict}")
print("policy overrides:", sum(run["overrides"]["count"] for run in own))
