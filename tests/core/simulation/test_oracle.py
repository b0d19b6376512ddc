"""The oracle's drafts."""

import pytest

from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling
from minfer.simulation.oracle import Oracle, OracleRow


class Constant(Oracle):
    """Samples the same token everywhere."""

    def __init__(self, vocab: int, token: int) -> None:
        super().__init__(4, vocab)
        self.token = token

    def _draw(self, row: OracleRow) -> int:
        del row
        return self.token


@pytest.mark.parametrize(
    ("vocab", "token", "other"),
    [(5, 1, 2), (5, 4, 0), (0, 0, 1), (0, 1, 2), (0, 9, 10)],
)
def test_a_wrong_draft_is_another_token(vocab: int, token: int, other: int) -> None:
    """With a vocabulary of 0, each number is a token."""
    oracle = Constant(vocab, token)
    sampling = RowSampling.of(SamplingParams(), seed=0, sample=0)
    oracle.rows[0] = OracleRow(("a", 0), prompt=1, sampling=sampling, tables=[[0]])
    drafts = oracle.preview_drafts(0, 64)
    assert {*drafts} == {token, other}
    assert drafts.count(token) > drafts.count(other)
