"""A model that nobody closed: it is closed when it is collected, or the program ends."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from minfer import LLM, SamplingParams

PROGRAM = """
from minfer import LLM, SamplingParams, StructuredOutputsParams
llm = LLM(journal={folder!r}, device="cpu", max_num_seqs=2)
choice = StructuredOutputsParams(choice=["yes", "no"])
params = SamplingParams(max_tokens=4, structured_outputs=choice)
print(llm.generate("a", params)[0].outputs[0].text)
stream = llm.stream("b", SamplingParams(max_tokens=None, ignore_eos=True))
next(stream)
"""


@pytest.mark.long
def test_a_program_without_close_ends_quietly(tmp_path: Path) -> None:
    program = PROGRAM.format(folder=str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout in ("yes\n", "no\n")
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_model_that_is_collected_is_closed() -> None:
    llm = LLM(executor="dry")
    worker, gone = llm.worker, weakref.ref(llm)
    llm.generate("a", SamplingParams(max_tokens=2))
    del llm
    gc.collect()
    assert gone() is None
    assert worker.closed
