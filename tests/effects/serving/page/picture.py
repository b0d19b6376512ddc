"""The picture of the server's page in its README, anew:
`python -m tests.effects.serving.page.picture`.

A prompt is answered by the bundled model, while clients ask it for texts: more and more
of them, until some have to wait.
"""

import sys
import threading
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final

from tests.effects.browser import browser
from tests.effects.served import Serving, serving
from tests.effects.serving.page.visits import settled, visit, write

PICTURE: Final = Path("effects/serving/page/page.png")
SEATS: Final = 12
CLIENTS: Final = 17
SECONDS: Final = 24.0  # in which all of them come
WIDE, HIGH = 1440, 860
PROMPT: Final = "Write a function that says whether a number is prime."
BEGINNINGS: Final = ("import os\n", "class Queue:\n", "def read(path):\n", "try:\n")


def client(served: Serving, number: int, over: threading.Event) -> None:
    """Ask for one text after the other."""
    rng = Random(number)
    over.wait(SECONDS * number / CLIENTS)
    while not over.is_set():
        served.post(
            "completions",
            model="bundled",
            prompt=f"# {rng.random()}\n{rng.choice(BEGINNINGS)}",
            max_tokens=rng.randrange(20, 160),
            ignore_eos=True,
            seed=number,
        )


def main(picture: Path = PICTURE) -> int:
    """Write the picture."""
    over = threading.Event()
    with (
        TemporaryDirectory() as profile,
        serving(
            names=("bundled",), num_gpu_blocks_override=260, max_num_seqs=SEATS
        ) as served,
        browser(Path(profile)) as page,
    ):
        visit(page, served, "both", wide=WIDE)
        size = {"width": WIDE, "height": HIGH, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        clients = [
            threading.Thread(target=client, args=(served, number, over))
            for number in range(CLIENTS)
        ]
        for thread in clients:
            thread.start()
        try:
            time.sleep(SECONDS)
            write(page, PROMPT)
            settled(page)
            picture.write_bytes(page.picture())
        finally:
            over.set()
            for thread in clients:
                thread.join()
    print(f"{picture}: {picture.stat().st_size / 1e3:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
