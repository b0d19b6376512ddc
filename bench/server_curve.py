"""The curve of a server's and its library's throughput over the number of clients, from a
result of `bench.server_gpu`, as SVG beside it.

    python -m bench.server_curve --name server_gpu_7B_few
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench.results import RESULTS, canvas


def plot(results: dict[str, Any], path: Path) -> None:
    """Tokens a second of the library and of each number of API servers' second run;
    dashed, what as many clients would have if none slowed another down.
    """
    library = {int(n): rate for n, rate in results["library"].items()}
    clients = sorted(library)
    figure = canvas(5, 3.2)
    axes = figure.subplots()
    single = library[clients[0]] / clients[0]
    axes.plot(clients, [single * n for n in clients], "k--", label="proportional")
    axes.plot(clients, [library[n] for n in clients], "o-", label="library")
    for fronts, result in results.items():
        if fronts.startswith("fronts "):
            runs = result["clients"]
            rates = [
                runs[str(n)]["second"]["figures"]["output_throughput"] for n in clients
            ]
            axes.plot(clients, rates, "s-", label=f"server, {fronts}")
    axes.set(xlabel="clients", ylabel="output tokens/s", xticks=clients, ylim=(0, None))
    axes.set_title(f"{results['shape']}: {results['prompt']} in, {results['output']} out")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Draw one result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="server_gpu_7B_few")
    args = parser.parse_args()
    file = args.folder / f"{args.name}.json"
    plot(json.loads(file.read_text("utf-8"))["results"], file.with_suffix(".svg"))


if __name__ == "__main__":
    main()
