"""What tests of the page share: a visit to it, and what one does there."""

import json
from typing import Any, Final

import pytest

from minfer.effects.execution.dry_executor import encoded_passage
from tests.effects.browser import Browser, found
from tests.effects.served import Serving

seen = pytest.mark.skipif(
    found() is None, reason="no Chromium on PATH (Debian: chromium)"
)
DRY: Final[dict[str, Any]] = {"executor": "dry", "num_gpu_blocks_override": 400}


def spoken(served: Serving) -> int:
    """How many tokens an answer of the dry executor has: its passage, and its end."""
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    return sum(map(len, encoded_passage(tokenizer.encode))) + 1


def visit(
    chromium: Browser, served: Serving, view: str = "prompt", *, wide: int = 1280
) -> None:
    """Open the page of a server in a browser that knows nothing of it yet."""
    size = {"width": wide, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    chromium.call("Emulation.setDeviceMetricsOverride", **size)
    everything = {"origin": served.url, "storageTypes": "all"}
    chromium.call("Storage.clearDataForOrigin", **everything)
    chromium.complaints.clear()
    chromium.requested.clear()
    go(chromium, f"{served.url}/#{view}")


def go(chromium: Browser, url: str) -> None:
    """Open an address anew, and wait until the page is there."""
    chromium.call("Page.navigate", url="about:blank")
    chromium.call("Page.navigate", url=url)
    chromium.wait(
        "['drawn', 'failed'].some((is) => is in (document.documentElement?.dataset "
        "?? {})) || document.querySelector('#key')?.open"
    )


def write(chromium: Browser, text: str) -> None:
    """Write a prompt, and send it."""
    chromium.value("document.querySelector('#input').focus()")
    chromium.write(text)
    chromium.key("Enter")


def press(chromium: Browser, selector: str) -> None:
    """Press what a selector finds last."""
    chromium.value(
        f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).click()"
    )


def text(chromium: Browser, selector: str) -> list[str]:
    """The text of all that a selector finds."""
    elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
    shown: list[str] = chromium.value(f"{elements}.map((one) => one.textContent)")
    return shown


def settled(chromium: Browser) -> None:
    """Wait until the answer has ended."""
    chromium.wait("document.querySelector('#answer').ariaBusy === 'false'")


def overhear(chromium: Browser) -> None:
    """From here on, the bodies that the page sends are in its `asked`."""
    chromium.value(
        "window.asked = []; const real = fetch; window.fetch = (path, how) => "
        "{ asked.push(how.body); return real(path, how); }; 0"
    )
