"""A journal without token ids replays decision for decision, and holds nothing of the
text.
"""

import attrs
import pytest

from minfer.engine import step
from minfer.journal.redact import redacted, redacted_config, redacted_request
from minfer.journal.writing import encode_journal
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterFailed,
    AdapterLoaded,
    AdapterLoading,
    AdapterLost,
    DropAdapter,
    Executed,
    Failed,
    Finish,
    Reason,
    SlotBlocked,
    Submit,
)
from minfer.records.request import Request
from minfer.records.speculation import Speculation
from minfer.records.state import Turn, initial
from tests.circles import seeds
from tests.core.journal.made import opened
from tests.core.recorded import recorded
from tests.core.world import VOCAB

SECRET = b"s" * 32


def blind(config: EngineConfig, turns: list[Turn], secret: bytes = SECRET) -> bytes:
    """The turns' journal as a writer makes it: live decisions beside redacted events."""
    reported = [
        attrs.evolve(turn, events=redacted(config, turn.before, turn.events, secret))
        for turn in turns
    ]
    return encode_journal(redacted_config(config), reported, states=False)


def unnamed(reasons: tuple[Reason, ...]) -> list[Reason]:
    """Reasons without adapters, which have other names."""
    found = list[Reason]()
    for reason in reasons:
        match reason:
            case AdapterLoading():
                evicted = "other" if reason.evicted else ""
                found.append(attrs.evolve(reason, adapter="", evicted=evicted))
            case SlotBlocked() | AdapterLost():
                found.append(attrs.evolve(reason, adapter=""))
            case _:
                found.append(reason)
    return found


@pytest.mark.long
@seeds(5, 120)
def test_decisions_replay_without_tokens(seeds: range) -> None:
    """Whatever happens: hits on outputs, resumed and cancelled requests,
    garbled results.
    """
    hits = 0
    for seed in seeds:
        config, turns = recorded(seed)
        journal = opened(blind(config, turns))
        for mine, theirs in zip(turns, journal.turns(), strict=True):
            own = unnamed(mine.transition.reasons)
            assert unnamed(theirs.transition.reasons) == own or any(
                isinstance(event, Executed | Failed) for event in mine.events
            )
            hits += sum(
                getattr(reason, "hit", 0) > 0 for reason in mine.transition.reasons
            )
    assert hits > 3 * len(seeds)


def test_no_token_is_in_it() -> None:
    config, turns = recorded(12)
    requests = [e.request for t in turns for e in t.events if isinstance(e, Submit)]
    seen = set[int]()
    for turn in turns:
        for event in redacted(config, turn.before, turn.events, SECRET):
            if isinstance(event, Submit):
                seen.update(event.request.prompt)
                assert event.request.root not in {one.root for one in requests}
                assert event.request.client not in {"a", "b"}
                assert event.request.sampling.seed is None
            elif isinstance(event, Executed):
                seen.update(token for some in event.yields for token in some)
            elif isinstance(event, Failed):
                assert not event.error
    assert {token for token in seen if token < VOCAB} <= {0, 1}
    assert blind(config, turns) != blind(config, turns, b"t" * 32)


@pytest.mark.parametrize("each", [1, 3])
def test_an_outputs_block_and_the_next_prompts_are_equal(each: int) -> None:
    """A second turn of a conversation hits the blocks that the first one's
    answer filled, also in the midst of what one step yielded.
    """
    how = Speculation(drafter="device", drafts=3, adaptive=False) if each > 1 else None
    config = EngineConfig(
        num_blocks=40, block_size=4, vocab_size=50, depth=1, speculation=how
    )
    state, log, answer = initial(config), list[Turn](), (7, 8, 9, 11, 12, 13, 14, 15, 16)

    def take(*events: object) -> None:
        nonlocal state
        # Events.
        log.append(Turn(len(log), state, events, step(config, state, events)))  # type: ignore[arg-type]
        state = log[-1].transition.state

    take(Submit(Request(id="1", prompt=(1, 2, 3), max_tokens=len(answer))))
    take(Executed(0, (answer[:1],)))
    for at in range(1, len(answer), each):
        take(Executed(state.next_step - 1, (answer[at : at + each],)))
    take(Submit(Request(id="2", prompt=(1, 2, 3, *answer, 5), max_tokens=2)))
    journal = opened(blind(config, log))
    reasons = [reason for turn in journal.turns() for reason in turn.transition.reasons]
    assert [getattr(r, "hit", None) for r in reasons if hasattr(r, "hit")] == [0, 8]


def test_errors_of_the_text_layer_are_left_out() -> None:
    config = EngineConfig(num_blocks=40)
    emitted = Finish("a", 0, 1, "error", "what the text was"), Finish("a", 0, 1)
    first, second = redacted(config, initial(config), emitted, SECRET)
    assert first == Finish("a", 0, 1, "error", "left out")
    assert second == emitted[1]


def test_adapters_have_the_same_other_name_everywhere() -> None:
    config = EngineConfig(num_blocks=9, adapter_slots=1)
    request = Request(id="a", prompt=(1,), max_tokens=1, adapter="a1")
    events = (
        Submit(request),
        AdapterLoaded("a1", 0),
        AdapterFailed("a1", 0, "/home/someone/adapter"),
        DropAdapter("a1"),
    )
    state = initial(config)
    submit, *others = redacted(config, state, events, SECRET)
    assert isinstance(submit, Submit)
    name = submit.request.adapter
    assert name != "a1"
    assert others == [
        AdapterLoaded(name, 0),
        AdapterFailed(name, 0, "left out"),
        DropAdapter(name),
    ]
    assert redacted_request(config, request, b"other").adapter != name
