"""The page of all options of vLLM's, and what minfer makes of each, in Markdown.

    python -m minfer.effects.cli.vllm_page

It is made of the table (`minfer.effects.setup.vllm_options`) and of the options that
`minfer serve` has.
"""

import argparse
from collections.abc import Iterator
from typing import Final

from minfer.effects.cli.serve import add_options
from minfer.effects.setup.vllm_options import (
    ALIASES,
    FORMER,
    RELEASE,
    Outcome,
    VllmOption,
    vllm_options,
)

_MEANINGS: Final = {
    Outcome.SAME: "minfer has this option",
    Outcome.ALIAS: "taken, as another name of an option of minfer's",
    Outcome.ALWAYS: "taken with a note: minfer always does so",
    Outcome.HINT: "taken with a note: it has no effect, and changes no answer",
    Outcome.REFUSED: "refused, with the reason and what would do",
}
_TEXTS: Final = {
    "--async-scheduling": "`--no-async-scheduling` is `--steps-in-flight 1`",
}


def page_lines() -> Iterator[str]:
    """Yields the lines of the page."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    own = {
        name: action.help or "" for name, action in parser._option_string_actions.items()
    }
    rows = [_row(option, own) for option in dict.fromkeys(vllm_options().values())]
    yield f"# Options of `vllm serve` {RELEASE}"
    yield ""
    yield "Underscores are dashes, and an option at vLLM's own default is always taken."
    yield ""
    for outcome, meaning in _MEANINGS.items():
        count = sum(found is outcome for found, _ in rows)
        yield f"- {outcome}: {meaning} ({count})"
    yield ""
    yield "| option | outcome | |"
    yield "| --- | --- | --- |"
    yield from (line for _, line in rows)
    yield ""
    yield "Options of earlier releases are refused, too:"
    yield ""
    yield "| option | what would do |"
    yield "| --- | --- |"
    yield from (f"| `{name}` | {text} |" for name, text in sorted(FORMER.items()))


def _row(option: VllmOption, own: dict[str, str]) -> tuple[Outcome, str]:
    """Returns an option's outcome, and its line in the table."""
    outcome, text = option.outcome, option.text
    if option.name in own:
        outcome, text = Outcome.SAME, own[option.name]
        text = text if text != argparse.SUPPRESS else ""
    elif option.name in ALIASES:
        text = f"`{ALIASES[option.name]}`"
    text = "; ".join(part for part in (text, _TEXTS.get(option.name)) if part)
    text = text.replace("%(default)s", "default").replace("|", "\\|")
    names = " ".join(f"`{name}`" for name in option.names)
    return outcome, f"| {names} | {outcome} | {text} |"


if __name__ == "__main__":
    print("\n".join(page_lines()))
