"""What neighbours feel of a client that fills the batch: exact, on the virtual clock."""

import pytest

from minfer.policies.fair_queue import FairQueue
from minfer.policies.fair_seats import FairSeats
from tests.core.crowd import ATTACKS, Felt, felt

ENOUGH = 2.5  # seconds
MOST = 1.25  # times the gaps of a control


@pytest.fixture(scope="module")
def control() -> Felt:
    return felt(FairSeats(), ATTACKS["nothing"], ENOUGH)


@pytest.mark.long
@pytest.mark.parametrize("name", ["4,096 prompts", "disconnects", "500 readers"])
def test_neighbours_of_a_client_that_fills_the_batch_notice_little(
    name: str, control: Felt
) -> None:
    now = felt(FairSeats(), ATTACKS[name], ENOUGH)
    before = felt(FairQueue(), ATTACKS[name], ENOUGH)
    assert now.p99 <= MOST * control.p99 < before.p99
    assert now.longest < 20 < 1.5 * before.longest
    assert now.median <= MOST * control.median
    assert now.tokens > before.tokens
    assert now.joined > 20, "the attacker is served, too"


def test_without_an_attack_nothing_is_otherwise(control: Felt) -> None:
    assert felt(FairQueue(), ATTACKS["nothing"], ENOUGH) == control
