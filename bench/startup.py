"""Start-up times: whole processes, from the command to its end, medians of several runs.

Claims: `import minfer` costs under 0.15 s more than a bare interpreter and loads no torch,
`minfer --help` ends under 0.4 s, and the first token of the bundled model is there within 5 s.
"""

import argparse
import subprocess
import sys
import time

from bench.results import spread, write

CASES = {
    "bare interpreter": [sys.executable, "-c", "pass"],
    "import minfer": [sys.executable, "-c", "import minfer"],
    "minfer --help": [sys.executable, "-m", "minfer.effects.cli", "--help"],
    "minfer plan": [sys.executable, "-m", "minfer.effects.cli", "plan"],
    "first token": [sys.executable, "-m", "minfer.effects.cli", "generate", "--max-tokens", "1"],
}


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(args.runs):  # in turns, so that a slow minute hits all
        for name, command in CASES.items():
            times[name].append(seconds(command))
    loaded = subprocess.run(
        [sys.executable, "-c", "import minfer, sys; print('torch' in sys.modules)"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    found = {name: spread(values) for name, values in times.items()}
    extra = [a - b for a, b in zip(times["import minfer"], times["bare interpreter"], strict=True)]
    found["import minfer, less a bare interpreter"] = spread(extra)
    for name, value in found.items():
        print(f"{name:40} {value['median']:.3f} s ({value['low']:.3f} to {value['high']:.3f})")
    write("startup", {"seconds": found, "import_loads_torch": loaded == "True"})


if __name__ == "__main__":
    main()
