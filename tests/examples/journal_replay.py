"""Record a run, decide all of it again, and ask why a request took as long as it did."""

import subprocess
import sys
import tempfile

from minfer import LLM, SamplingParams


def minfer(*arguments: str) -> None:
    """Run a command of minfer's; its output is shown."""
    result = subprocess.run(
        [sys.executable, "-m", "minfer", *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    print(result.stdout)


with tempfile.TemporaryDirectory() as folder:
    with LLM(journal=folder, max_num_seqs=2) as llm:  # two at a time: the others wait
        prompts = [f"def f{i}(" for i in range(5)]
        params = SamplingParams(temperature=0, max_tokens=12)
        last = llm.generate(prompts, params, use_tqdm=False)[-1]
    minfer("replay", folder)  # every decision again; needs no model
    minfer("explain", folder, last.request_id)  # what the last one waited for
