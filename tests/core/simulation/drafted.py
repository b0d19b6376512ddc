"""Runs with drafts, of an engine on a clock of the test's own."""

from collections.abc import Callable
from typing import Any

from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Executed, Propose, Submit
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.simulation.oracle import Oracle
from tests.core.simulation.clocked import Run, config, request


def drafting(drafter: str = DEVICE, drafts: int = 3, **changes: Any) -> EngineConfig:
    how = Speculation(drafter=drafter, drafts=drafts, adaptive=False)
    return config(speculation=how, **changes)


def by_device(depth: int = 1, tokens: int = 24) -> Run:
    """Two samples with drafts of a draft model, most of which are right."""
    run = Run(drafting(depth=depth))
    wanted = request("a", 5, tokens), request("b", (9, 9, 9), tokens)
    run.turn(*map(Submit, wanted))
    run.drain()
    return run


def by_host(wrong: int = 3, depth: int = 1) -> Run:
    """Three samples, of which the host drafts for two what comes, but one in `wrong`."""
    run = Run(drafting(HOST, depth=depth))
    wanted = [request("a", 5, 24), request("b", (9, 9, 9), 24), request("c", 4, 24)]
    truth = {one.id: (*one.prompt, *solo(one)) for one in wanted}
    run.turn(*map(Submit, wanted))
    while run.state.requests:
        proposed = list[Propose]()
        coming = collected(run)
        for i, name in enumerate(run.state.running.ids):
            known = run.state.running.known[i] + coming.get(name, 0)
            right = truth[name[0]][known : known + 3]
            if name[0] != "c" and right:
                reported = tuple(
                    (token + 1) % 50 if (known + k) % wrong == 0 else token
                    for k, token in enumerate(right)
                )
                proposed.append(Propose(*name, known, reported))
        run.turn(*proposed)
    return run


def solo(one: Request) -> tuple[int, ...]:
    """What a request is answered, without drafts."""
    run = Run(config())
    run.turn(Submit(one))
    run.drain()
    emits = (c for turn in run.turns for c in turn.transition.commands)
    return tuple(
        token
        for emit in emits
        if isinstance(emit, Emit)
        for tokens in emit.tokens
        for token in tokens
    )


def collected(run: Run) -> dict[SampleId, int]:
    """How many tokens each sample has of the step that ends next, which ends here."""
    if not run.oracle.plans:
        return {}
    plan = run.oracle.plans[0]
    done = run.oracle.collect()
    assert isinstance(done, Executed)
    run.oracle.plans.appendleft(plan)
    run.oracle.collect = _once(run.oracle, done)  # type: ignore[method-assign]  # of one
    names = dict(zip(run.state.running.run_ids, run.state.running.ids, strict=True))
    each = zip(plan.run_ids, done.yields, strict=True)
    return {names[gen]: len(tokens) for gen, tokens in each if gen in names}


def _once(oracle: Oracle, done: Executed) -> Callable[[], Executed]:
    def collect() -> Executed:
        del oracle.collect  # the class's own again
        oracle.plans.popleft()
        return done

    return collect
