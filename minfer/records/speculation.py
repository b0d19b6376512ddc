"""The configuration of speculation, which does not change while a server runs."""

from typing import Any, Final

from attrs import Attribute, field, frozen

from minfer.records.acceptance import Costs, Learning
from minfer.values.checks import ConfigError, flag, number

# Rules of acceptance.
SAME_NOISE: Final = "same noise"  # the tokens that the target samples anyway (accept.py)
REJECTION: Final = "rejection"  # by a coin that keeps the distribution (rejection.py)
RULES: Final = (SAME_NOISE, REJECTION)
# Where drafts are made.
HOST: Final = "host"  # a proposer, which sends the event `Propose`
DEVICE: Final = "device"  # the executor's drafter: a draft model or a draft head
DRAFTERS: Final = (HOST, DEVICE)
MOST_DRAFTS: Final = 64  # of a row in a step


def _one_of(choices: tuple[str, ...]) -> Any:
    def check(_: object, attribute: "Attribute[str]", value: Any) -> None:
        if value not in choices:
            names = " or ".join(map(repr, choices))
            raise ConfigError(
                f"speculation: {attribute.name} must be {names}, not {value!r:.80}"
            )

    return check


@frozen(kw_only=True)
class Speculation:
    """The settings. Raises ConfigError for values out of range."""

    drafter: str = field(validator=_one_of(DRAFTERS))
    drafts: int = field(validator=number(1, prefix="speculation: "))  # of a row in a step
    rule: str = field(default=SAME_NOISE, validator=_one_of(RULES))
    # Steps of more rows have no drafts; 0: no bound.
    rows: int = field(default=0, validator=number(0, prefix="speculation: "))
    # The most profitable number of drafts, by `learning` and `costs`; else always as many
    # as possible.
    adaptive: bool = field(default=True, validator=flag)
    margin: float = field(default=0.03, validator=number(0, prefix="speculation: "))
    learning: Learning = Learning()
    costs: Costs | None = None  # None: unknown, if not adaptive

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.learning, Learning):
            raise ConfigError(
                f"speculation: learning must be Learning, not {self.learning!r:.80}"
            )
        if not isinstance(self.costs, Costs | None):
            raise ConfigError(
                f"speculation: costs must be Costs or none, not {self.costs!r:.80}"
            )
        if self.drafts > MOST_DRAFTS:
            message = (
                f"speculation: drafts must be at most {MOST_DRAFTS}, not {self.drafts}"
            )
            raise ConfigError(message)
        if self.adaptive and self.costs is None:
            raise ConfigError(
                "speculation: costs of steps are needed to find the number of drafts "
                "that pays; without them it has to be fixed (adaptive: false)"
            )
