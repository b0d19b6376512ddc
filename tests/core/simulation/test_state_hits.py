"""What is hit of prompts that share a beginning, where layers keep a state: the sizes are
those of Qwen3-Next-80B-A3B, 64 tokens a block, and 50 blocks as large as a state.
"""

from random import Random

import pytest

from minfer.engine import step
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Admitted, Event, Execute, Executed, Submit, Tick
from minfer.records.request import Request
from minfer.records.state import initial
from minfer.simulation.simulate import Simulated

BLOCK = 64
VARYING = (5120, 4992, 5056, 5120, 4928, 5056, 4992, 5120)


def hits(lengths: tuple[int, ...], budget: int) -> list[float]:
    """Prompts that share so many of their first tokens with the first one, asked one
    after another: which share of these is hit, from the second prompt on.
    """
    config = EngineConfig(
        num_blocks=20_000,
        block_size=BLOCK,
        max_model_len=32_768,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        groups=(CacheGroup(), CacheGroup(state=True, pages=50)),
    )
    rng, base = Random(7), tuple(range(max(lengths)))
    state, executor, shares = initial(config), Simulated(), list[float]()
    for number, length in enumerate((max(lengths), *lengths)):
        own = tuple(rng.randrange(10**6, 10**7) for _ in range(rng.randint(99, 700)))
        request = Request(id=f"{number}", prompt=base[:length] + own, max_tokens=40)
        events: tuple[Event, ...] = (Tick(0.0), Submit(request))
        while events:
            turn = step(config, state, events)
            state = turn.state
            for command in turn.commands:
                if isinstance(command, Execute):
                    executor.launch(command.plan)
            found = [one for one in turn.reasons if isinstance(one, Admitted)]
            shares += [one.hit / length for one in found]
            results = executor.collect() if executor.plans else None
            events = (results,) if isinstance(results, Executed) else ()
    return shares[1:]


@pytest.mark.parametrize("budget", [2048, 8192])
@pytest.mark.parametrize("shared", [512, 1536, 3072, 6144])
def test_a_shared_prefix_is_hit_from_the_third_prompt_on(
    shared: int, budget: int
) -> None:
    assert min(hits((shared,) * 6, budget)[1:]) >= 0.9


@pytest.mark.parametrize("budget", [2048, 8192])
def test_so_it_is_if_the_shared_lengths_vary(budget: int) -> None:
    assert min(hits(VARYING, budget)[1:]) >= 0.9


@pytest.mark.parametrize("seed", range(5))
def test_and_in_any_order(seed: int) -> None:
    lengths = list(VARYING)
    Random(seed).shuffle(lengths)
    assert min(hits(tuple(lengths), 8192)[1:]) >= 0.9
