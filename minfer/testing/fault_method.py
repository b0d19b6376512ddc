"""Which method of a policy is at fault, and whether it keeps state of its own.

A story that breaks a law is run again, each time with another method of the policy
replaced by first come's, or by one with a fixed answer. The method without which the law
holds is at fault. Methods that decide one thing are tried before those that order all.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from attrs import define, evolve, field

from minfer.policies.mistakes import overridden_methods
from minfer.records.policy import FirstCome
from minfer.testing.hidden_state import HiddenState
from minfer.testing.policy_error import PolicyError
from minfer.testing.policy_proxy import PolicyProxy
from minfer.testing.stories import AnyStory, Bounds

# From methods that decide one thing to those that order all requests.
_ORDER: Final = (
    "budget",
    "drafts",
    "adapter_passes",
    "victim",
    "may_preempt",
    "requeue_rank",
    "admit_from",
    "defer",
    "ended",
    "admitted",
    "rank",
)
# Other answers to try, for laws that first come, first served breaks too, such as
# promises of a user.
_FIXED: Final[dict[str, tuple[Callable[..., Any], ...]]] = {
    "budget": (lambda _, __: 1,),
    "drafts": (lambda *_: 0,),
    "adapter_passes": (lambda *_: 0,),
    "may_preempt": (
        lambda _, waiting, running: waiting < running,
        lambda *_: True,
        lambda *_: False,
    ),
    "victim": (lambda *_: 1,),
    "admit_from": (lambda _, load: load.time,),
    "defer": (lambda state, *_: (False, state),),
}
_DIFFERENCES: Final = {"purity", "determinism", "set order"}  # laws that compare answers


@define
class Replaced:
    """A policy with one method replaced by `answer`."""

    policy: Any
    method: str
    answer: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.answer if name == self.method else getattr(self.policy, name)


def with_method(
    error: PolicyError, story: AnyStory, policy: Any, bounds: Bounds
) -> PolicyError:
    """The error with the method at fault, or unchanged if that cannot be found."""
    if error.method:
        return error
    for name, answer in _replacements(policy):
        if keeps_law(error.law, story, Replaced(policy, name, answer), bounds):
            return error.of_method(name)
    own = overridden_methods(policy)
    return error.of_method(own[0]) if len(own) == 1 else error


def _replacements(policy: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    own, first_come = overridden_methods(policy), FirstCome()
    for name in _ORDER:
        if name in own:
            yield name, getattr(first_come, name)
            yield from ((name, answer) for answer in _FIXED.get(name, ()))


def keeps_law(law: str, story: AnyStory, policy: Any, bounds: Bounds) -> bool:
    """Whether a policy keeps a law in a story."""
    try:
        story.run(policy, bounds)
    except PolicyError as error:
        return error.law != law
    return True


@define
class Restoring(PolicyProxy):
    """A policy whose object, class and module are restored after each call.

    `changes` has the first value that each method changed, by method.
    """

    hidden: HiddenState
    changes: dict[str, str] = field(factory=dict)

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        try:
            return getattr(self.policy, name)(*args)
        finally:
            if changed := self.hidden.changed():
                self.changes.setdefault(name, changed)
                self.hidden.restore()


def with_hidden_state(
    error: PolicyError, story: AnyStory, hidden: HiddenState, bounds: Bounds
) -> PolicyError:
    """The error, or a `hidden state` error if state that the policy keeps for itself is
    the cause.

    It is the cause of an answer that differs, if there is such state. It is the cause of
    another broken law if that law holds as soon as the state is restored after each call,
    or as soon as no method is called a second time and no turn is decided again.
    """
    hidden.restore()
    restoring = Restoring(hidden.policy, hidden)
    holds = keeps_law(error.law, story, restoring, bounds)
    if not restoring.changes:
        return error
    if not (holds or error.law in _DIFFERENCES):
        hidden.restore()
        if not keeps_law(error.law, story, hidden.policy, evolve(bounds, repeats=False)):
            return error
    method, value = next(iter(restoring.changes.items()))
    detail = (
        f"{method} changes {value}, which is no part of the policy's state: start() "
        "returns the first state, and rank, defer, admitted and ended return the next. "
        f"Found by {error.law}: {error.detail}"
    )
    return PolicyError("hidden state", detail, error.config, error.turns, method)
