"""What commands about runs say of tiers."""

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import read_journal, write_journal
from minfer.effects.runs.page.make import page
from minfer.effects.runs.simulate_options import with_block_size, with_blocks
from minfer.effects.runs.trace_files import read_trace
from minfer.records.messages import Loading, LostBlocks, Submit
from minfer.records.request import KvTransfer, Request
from minfer.records.tiers import BY_COST, RECOMPUTE, TransferKind
from minfer.simulation.fork import Change, fork
from minfer.simulation.simulate import Simulated, Simulation
from tests.effects.runs.page.scenes import entries, unpacked
from tests.effects.runs.replays import printed
from tests.effects.runs.tiered import STEP, tiered

NAMES = {False: "host memory", True: "disk or another engine"}
KINDS = {False: TransferKind.LOAD_FROM_HOST, True: TransferKind.FETCH_FROM_EXTERNAL}
COSTS: dict[str, Any] = {"page_seconds": 0.5, "token_seconds": 1.0, "choice": BY_COST}


@pytest.mark.parametrize("external", [False, True])
def test_a_load_is_explained(
    external: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.journal"
    write_journal(path, *tiered(external=external, **COSTS))
    assert main(["explain", str(path), "again"]) == 0
    text = capsys.readouterr().out
    words = (
        f"waits for 4 blocks from {NAMES[external]}: 2,000.0 ms to load them, 16,000.0 ms"
    )
    assert words in text
    assert "4: 16, " in text  # the hit with blocks of 4 tokens
    write_journal(path, *tiered(external=external, **COSTS | {"choice": RECOMPUTE}))
    assert main(["explain", str(path), "again"]) == 0
    assert f"computes 4 blocks that {NAMES[external]} has: 2" in capsys.readouterr().out


@pytest.mark.parametrize("external", [False, True])
def test_a_page_says_which_tier_it_was(external: bool) -> None:
    data = page("run", *tiered(external=external))
    [cells] = [cells for _, kind, _, cells in entries(data) if kind == "Loading"]
    assert cells == (4, 0, unpacked(data)[0]["texts"].index(KINDS[external]))


@pytest.mark.parametrize("external", [False, True])
def test_a_state_has_transfers(
    external: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, (config, turns) = (
        tmp_path / "a.journal",
        tiered(external=external, page_seconds=1.0),
    )
    write_journal(path, config, turns)
    number = next(
        turn.number
        for turn in turns
        if any(transfer.kind.to_device for transfer in turn.before.tiers.transfers)
    )
    text = printed(capsys, path, "--at", number)
    tier = "by key" if external else "of host memory"
    assert f": loads 4 blocks {tier}, for 'again'" in text
    assert ("believed to be on disk" in text) == external
    assert ("of 64 pages used" in text) != external


def test_a_simulation_believes_what_a_request_says_is_stored(tmp_path: Path) -> None:
    """A fetch takes as long as those of the run did, if nothing else is known."""
    path = tmp_path / "a.journal"
    write_journal(path, *tiered(external=True, load_seconds=8.0))
    trace = read_trace(str(path), None, 1)
    assert trace.config is not None
    assert trace.config.external_store is not None
    assert trace.config.external_store.page_seconds == pytest.approx(2.0, rel=0.1)
    [*_, (_, request)] = trace.events
    assert isinstance(request, Request)
    arrivals = [(0.0, evolve(request, kv_transfer=KvTransfer(num_stored_blocks=4)))]
    turns = [*Simulation(trace.config, Simulated(), STEP, arrivals).turns()]
    reasons = [reason for turn in turns for reason in turn.transition.reasons]
    [load] = [reason for reason in reasons if isinstance(reason, Loading)]
    assert (load.blocks, load.kind) == (4, KINDS[True])
    assert not [reason for reason in reasons if isinstance(reason, LostBlocks)]


def test_tiers_follow_the_size_of_blocks_and_of_the_pool() -> None:
    config, _ = tiered(external=True, page_seconds=2.0)
    host, _ = tiered(external=False, page_seconds=2.0)
    config = evolve(config, host=host.host)
    larger = with_blocks(with_block_size(config, 8), 100)
    assert larger.host is not None
    assert larger.external_store is not None
    assert (larger.host.pages, larger.host.page_seconds) == (32, 4.0)
    store = larger.external_store
    assert (store.max_known_keys, store.page_seconds) == (200, 4.0)


def test_stored_blocks_are_of_the_new_size(tmp_path: Path) -> None:
    path, (config, turns) = tmp_path / "a.journal", tiered(external=True, stored=4)
    write_journal(path, config, turns)
    trace = read_trace(str(path), None, 1)
    for size, stored in ((4, 4), (8, 2), (2, 8)):
        [*_, (_, request)] = trace.arrivals(size)
        assert isinstance(request, Request)
        assert request.kv_transfer == KvTransfer(num_stored_blocks=stored)
    forked = fork(read_journal(path), 0, Change(settings={"block_size": 8}), STEP)
    events = [event for turn in forked.turns for event in turn.events]
    requests = [event.request for event in events if isinstance(event, Submit)]
    assert requests[-1].kv_transfer == KvTransfer(num_stored_blocks=2)
