"""What a GPU's shaper is told of a row: its list, and what of it the output ends with."""

import math

import torch

from minfer.effects.execution.cuda.cuda_shaper import NEVER_ENDS, CudaShaper, Entries
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.kernels.shape import ENTRIES, IN_PROMPT, PENALIZED, RESTRICTED
from minfer.records.plan import NewRow
from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling

VOCAB = 40
NEVER = -math.inf


def test_a_list_has_biases_then_ends_then_words() -> None:
    params = SamplingParams(logit_bias={3: 1.5, 4: 0}, min_tokens=2)
    words = ((5,), (6, 7, 8))
    sampling = RowSampling.of(params, 0, 0, frozenset({9, 2, VOCAB}), words)
    entries = Entries.of(sampling, 10, (6, 7), VOCAB)
    assert entries.tokens == [3, 2, 9, 5, 6, 7, 8]
    assert entries.values == [1.5, NEVER, NEVER, NEVER, 0, 0, NEVER]
    assert entries.until == [NEVER_ENDS, 12, 12, *[NEVER_ENDS] * 4]
    assert entries.follows == [0, 0, 0, 0, 0, 1, 1]
    assert entries.matched == [0, 0, 0, 0, 0, 1, 0]
    assert Entries.of(sampling, 10, (7,), VOCAB).matched == [0] * 7
    assert Entries.of(sampling, 10, (7, 6), VOCAB).matched[4:] == [1, 0, 0]


def test_ends_without_a_least_length_are_not_listed() -> None:
    sampling = RowSampling.of(SamplingParams(), 0, 0, frozenset({9}))
    assert Entries.of(sampling, 10, (), VOCAB).tokens == []


def test_a_row_that_asks_for_nothing_costs_nothing() -> None:
    device = torch.device("cpu")
    shaper = CudaShaper(DeviceRows(3, 1, VOCAB, device), device)
    state = shaper.state

    def opened(**changes: object) -> None:
        params = SamplingParams(**changes)  # type: ignore[arg-type]  # of any field
        known_tokens = (1, 2, 2, 5, 5, 5)
        sampling = RowSampling.of(params, 0, 0)
        shaper.open(1, NewRow(0, ("a", 0), known_tokens, 3, 99, sampling, ((0,),)))

    before = [tensor.clone() for tensor in state]
    opened(top_p=0.5)
    assert all(map(torch.equal, state, before))
    opened(presence_penalty=1, allowed_token_ids=[0, 33], logit_bias={7: 1})
    assert state.header[1].tolist()[:3] == [1, 1, 1]
    assert (ENTRIES, RESTRICTED, PENALIZED) == (0, 1, 2)
    assert state.allowed[1].tolist() == [1, 2]
    counts = {t: n for t, n in enumerate(state.seen[1].tolist()) if n}
    assert counts == {1: IN_PROMPT, 2: IN_PROMPT, 5: 3}
    opened(top_p=0.5)
    assert not state.header.any()
    opened(presence_penalty=1)  # what the row before it counted is forgotten
    assert {t: n for t, n in enumerate(state.seen[1].tolist()) if n} == counts
    assert not shaper.state.header[[0, 2, 3]].any()
