"""How a server speculates: what is set before it starts, and does not change."""

from typing import Any, Final

from attrs import Attribute, field, frozen

from minfer.checks import ConfigError, flag, number
from minfer.speculate.length import Costs, Learning

# Which drafts stand.
SAME_NOISE: Final = "same noise"  # those that the target draws anyway (accept.py)
REJECTION: Final = "rejection"  # by a coin that keeps the distribution (rejection.py)
RULES: Final = (SAME_NOISE, REJECTION)
# Who says them.
HOST: Final = "host"  # a proposer, by the event `Propose`
DEVICE: Final = "device"  # the executor, by a draft model
DRAFTERS: Final = (HOST, DEVICE)
MOST_DRAFTS: Final = 64  # of a row in a step


def _one_of(some: tuple[str, ...]) -> Any:
    def check(_: object, attribute: "Attribute[str]", value: Any) -> None:
        if value not in some:
            names = " or ".join(map(repr, some))
            raise ConfigError(
                f"speculation: {attribute.name} must be {names}, not {value!r:.80}"
            )

    return check


@frozen(kw_only=True)
class Speculation:
    """Raises ConfigError for what is out of range."""

    drafter: str = field(validator=_one_of(DRAFTERS))
    drafts: int = field(validator=number(1, of="speculation: "))  # of a row in a step
    rule: str = field(default=SAME_NOISE, validator=_one_of(RULES))
    # In steps of more rows there are none; 0: there may be in steps of any number.
    rows: int = field(default=0, validator=number(0, of="speculation: "))
    # As many drafts as pay, by `learning` and `costs`; else always as many as there may
    # be.
    adaptive: bool = field(default=True, validator=flag)
    margin: float = field(default=0.03, validator=number(0, of="speculation: "))
    learning: Learning = Learning()
    costs: Costs | None = None  # unknown, if not adaptive

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
            what = f"speculation: drafts must be at most {MOST_DRAFTS}, not {self.drafts}"
            raise ConfigError(what)
        if self.adaptive and self.costs is None:
            raise ConfigError(
                "speculation: costs of steps are needed to find the number of drafts "
                "that pays; without them it has to be fixed (adaptive: false)"
            )
