"""What is logged says which process it is from."""

import subprocess
import sys

CODE = """
import logging
from minfer.effects.serving.logs import configure_logs
configure_logs("front 1")
logging.getLogger("minfer.link").warning("it is %s", "cut")
logging.getLogger("uvicorn.error").info("of no concern")
"""


def test_a_warning_names_its_process() -> None:
    found = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
    )
    (line,) = found.stderr.splitlines()
    assert line.endswith(" minfer front 1 WARNING minfer.link: it is cut")
    assert not found.stdout
