"""Mistakes in policies are named: methods that nobody calls, attributes that are set."""

# ruff: noqa: ARG002 - the protocol says what is asked, not all of which a policy need
# heed

from typing import Any

import pytest
from attrs import frozen
from attrs.exceptions import FrozenInstanceError

from minfer.policies.builtin import INCOMPLETE, POLICIES, SUMMARIES, policy_named
from minfer.policies.mistakes import (
    error_text,
    misnamed_methods,
    overridden_methods,
    raising_line,
)
from minfer.records.policy import FIELDS_ADVICE, FirstCome, Policy
from minfer.values.checks import ConfigError


class Misnamed(FirstCome):
    def displace(self, state: Any, waiting: Any, running: Any) -> bool:
        return True

    def bugdet(self, state: Any, load: Any) -> int:
        return 1

    def again(self, state: Any, rank: Any, request: Any, arrived: Any, done: Any) -> Any:
        return rank


class WithHelpers(FirstCome):
    """Names that are near the protocol's, but not meant as them."""

    most = 3  # no method

    def rank(self, state: Any, request: Any, time: Any) -> Any:
        return self.ranks(state, request, time), state

    def ranks(self, state: Any, request: Any, time: Any) -> Any:
        return (time,)

    def budgets(self) -> list[int]:
        return []

    def _bugdet(self, state: Any, load: Any) -> int:
        return 1


def test_methods_with_nearly_a_name_of_the_protocol_are_named() -> None:
    again, bugdet, displace = misnamed_methods(Misnamed).values()
    assert "never calls again; the protocol has requeue_rank(state, rank, " in again
    assert "Misnamed: the engine never calls bugdet; the protocol has budget(" in bugdet
    assert "may_preempt(state, waiting, running). Rename it" in displace


@pytest.mark.parametrize("kind", [WithHelpers, FirstCome, Policy, *POLICIES.values()])
def test_helpers_are_not_taken_for_mistakes(kind: type) -> None:
    assert misnamed_methods(kind) == {}


def test_overridden_methods_are_those_of_the_policy() -> None:
    assert overridden_methods(WithHelpers()) == ("rank",)
    assert overridden_methods(FirstCome()) == ()
    assert overridden_methods(policy_named("window")) == (
        "start",
        "rank",
        "admit_from",
        "admitted",
        "ended",
        "may_preempt",
    )


class SetsAttribute(FirstCome):
    def rank(self, state: Any, request: Any, time: Any) -> Any:
        self.turn = 1
        return (), state


def test_an_attribute_that_is_set_says_where_to_keep_it() -> None:
    with pytest.raises(FrozenInstanceError) as caught:
        SetsAttribute().rank(None, None, 0.0)
    text = error_text(caught.value)
    assert text.startswith("can't set attribute turn: a policy keeps nothing in its ")
    assert len(text) < 200  # as much as a record keeps
    line = SetsAttribute.rank.__code__.co_firstlineno + 1
    assert raising_line(caught.value) == f"{__file__}, line {line}"
    assert "a policy keeps nothing" in error_text(FrozenInstanceError()), "not raised"


def test_errors_of_other_kinds_are_as_they_are() -> None:
    error = ValueError("no")
    assert error_text(error) == "no"
    assert raising_line(error) == ""


def test_an_attribute_that_is_set_at_construction_says_what_to_write() -> None:
    class Sets(FirstCome):
        def __init__(self, seconds: float = 1.0) -> None:
            self.seconds = seconds

    with pytest.raises(FrozenInstanceError) as caught:
        Sets(2.0)
    assert caught.value.__notes__ == [FIELDS_ADVICE]


def test_other_base_classes_of_a_policy_hear_of_it() -> None:
    kinds = []

    class Other:
        def __init_subclass__(cls) -> None:
            kinds.append(cls)

    class Both(FirstCome, Other):
        pass

    assert kinds == [Both]


def test_a_policy_named_on_the_command_line_says_so_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @frozen
    class Sets(FirstCome):
        def __attrs_post_init__(self) -> None:
            self.seconds = 1.0

    monkeypatch.setitem(POLICIES, "Sets", Sets)
    with pytest.raises(ConfigError, match="scheduling_policy Sets: a policy is frozen"):
        policy_named("Sets")


@pytest.mark.parametrize("name", ["mine:ShortAged", "mine:ShortAged:pace=2"])
def test_a_module_before_the_name_of_a_policy_is_refused(name: str) -> None:
    expected = (
        f"its module by --policies: --policies mine --scheduling-policy {name[5:]}$"
    )
    with pytest.raises(ConfigError, match=expected):
        policy_named(name)


class TooFewParameters(FirstCome):
    def rank(self, state: Any, request: Any) -> Any:  # type: ignore[override]  # the fault
        return (), state


def test_a_method_that_cannot_be_entered_is_named_by_its_definition() -> None:
    method = TooFewParameters().rank
    try:
        method(None, None, 0.0)  # type: ignore[call-arg]  # the fault
    except TypeError as error:
        line = raising_line(error, method)
        unknown = raising_line(error)
    assert line == f"{__file__}, line {TooFewParameters.rank.__code__.co_firstlineno}"
    assert unknown == ""


class Undecorated(FirstCome):
    tokens = 2000.0


@frozen
class Decorated(FirstCome):
    tokens: float = 2000.0


def test_what_makes_an_option_is_said_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in (Undecorated, Decorated):
        monkeypatch.setitem(POLICIES, kind.__name__, kind)
    expected = "@attrs.frozen above the class, and tokens: float = 1.0 in it"
    with pytest.raises(ConfigError, match=f"it has none. The options .*{expected}"):
        policy_named("Undecorated:tokens=9")
    assert policy_named("Decorated:tokens=9") == Decorated(9.0)
    with pytest.raises(
        ConfigError, match=f"it has tokens, written as .*: write {expected[:13]}"
    ):
        policy_named("Decorated:pace=9")
    with pytest.raises(ConfigError, match=r"fcfs has no option 'tokens'; it has none$"):
        policy_named("fcfs:tokens=9")


def test_a_class_that_is_no_policy_is_named_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoBase:
        def rank(self, state: Any, request: Any, time: float) -> Any:
            return (time,), state

    monkeypatch.setitem(INCOMPLETE, "NoBase", NoBase)
    expected = (
        r"lacks the base FirstCome, start, requeue_rank, .* class NoBase\(FirstCome"
    )
    with pytest.raises(ConfigError, match=expected):
        policy_named("NoBase")


def test_each_policy_of_minfer_has_a_summary() -> None:
    names = [name for name, kind in POLICIES.items() if kind.__module__[:7] == "minfer."]
    assert [*SUMMARIES] == names
