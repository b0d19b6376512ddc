"""Loads with heavy tails, drawn by hypothesis: most numbers are small, few are very
large, so that what is rare in an hour of service comes in most runs of the kit.
"""

from math import inf
from typing import Any, Final

import hypothesis.strategies as st

from minfer.records.config import EngineConfig
from minfer.records.request import Request
from minfer.testing.stories import Group, HeavyStory
from minfer.testing.trial import VOCAB

_LENGTH_BITS: Final = 16  # of the longest prompts, in tokens
_COUNT_BITS: Final = 9  # of the largest groups
_GROUPS: Final = 5
_CLIENTS: Final = ("", "a", "b", "a client with a name of many words, as ids of keys are")


def heavy(bits: int) -> st.SearchStrategy[int]:
    """Numbers from 0 to 2^`bits` - 1; each length in bits is as frequent as another."""
    return st.integers(0, bits).flatmap(
        lambda size: st.integers(2**size // 2, max(0, 2**size - 1))
    )


_priorities = st.one_of(st.just(0), heavy(7), heavy(7).map(lambda n: -n))
_deadlines = st.sampled_from((inf, inf, 1.0, 0.01, 1e-9, 3600.0, 1e6))
_gaps = st.sampled_from((0.0, 0.0, 0.02, 1.0, 100.0, 100_000.0))


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    return Request(
        id="",
        prompt=(1,) * (1 + draw(heavy(_LENGTH_BITS))),
        max_tokens=1 + draw(heavy(8)),
        n=draw(st.sampled_from((1, 1, 1, 2, 8))),
        priority=draw(_priorities),
        client=draw(st.sampled_from(_CLIENTS)),
        deadline=draw(_deadlines),
    )


@st.composite
def _groups(draw: st.DrawFn) -> Group:
    request = draw(_requests())
    most_bits = _COUNT_BITS if len(request.prompt) < 1_000 else 4
    return Group(
        count=1 + draw(heavy(most_bits)),
        request=request,
        num_clients=draw(st.sampled_from((1, 1, 3, 24))),
        gap=draw(_gaps),
    )


@st.composite
def heavy_stories(draw: st.DrawFn, policy: Any) -> HeavyStory:
    """Some groups of requests on an engine that is large, or has few blocks."""
    config = EngineConfig(
        policy=policy,
        num_blocks=draw(st.sampled_from((512, 160, 4096))),
        max_num_seqs=draw(st.sampled_from((8, 1, 64, 256))),
        block_size=512,
        max_model_len=2**_LENGTH_BITS + 512,
        vocab_size=VOCAB,
        max_num_batched_tokens=draw(st.sampled_from((8192, 512, 131_072))),
    )
    groups = draw(st.lists(_groups(), min_size=1, max_size=_GROUPS))
    return HeavyStory(config, tuple(groups))
