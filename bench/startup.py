"""Start-up times: whole processes, from the command to its end, medians of several runs.

Claims: `import minfer` costs under 0.15 s more than a bare interpreter and loads no
torch, `minfer --help` ends under 0.4 s, and the first token of the bundled model is there
within 5 s.
"""

import argparse
import subprocess
import sys
import time
from typing import Any

from bench.results import run, show, spread

CLI = ["-m", "minfer"]
CASES = {
    "bare interpreter": ["-c", "pass"],
    "import minfer": ["-c", "import minfer"],
    "minfer --help": [*CLI, "--help"],
    "minfer plan": [*CLI, "plan"],
    "first token": [*CLI, "generate", "--max-tokens", "1"],
}


def seconds(case: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *CASES[case]], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def measure(args: argparse.Namespace) -> dict[str, Any]:
    # In turns, so that a slow minute hits all.
    runs = [{case: seconds(case) for case in CASES} for _ in range(args.runs)]
    results = {case: spread([times[case] for times in runs]) for case in CASES}
    extra = [times["import minfer"] - times["bare interpreter"] for times in runs]
    results["import minfer, less a bare interpreter"] = spread(extra)
    for case, figures in results.items():
        show({f"{case:40}": figures})
    loads = [sys.executable, "-c", "import minfer, sys; sys.exit('torch' in sys.modules)"]
    return {"seconds": results, "import_loads_torch": bool(subprocess.call(loads))}


if __name__ == "__main__":
    run("startup", measure, {"--runs": 9})
