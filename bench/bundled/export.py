"""Write a checkpoint in the Hugging Face layout: weights in bfloat16, the tokenizer
beside.

python -m bench.bundled.export --out .carry/bundled-models target and draft
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.bundled import checkpoint
from bench.bundled.model import SHAPES, WEIGHTS
from bench.bundled.prepare import FOLDER, TOKENIZER
from bench.bundled.train import STATE
from bench.bundled.vocabulary import generation, settings


def export(state: Path, role: str, data: Path, out: Path) -> int:
    """Write a role's folder; returns its bytes. Raises FileNotFoundError."""
    found = checkpoint.load(state, role)
    if found is None:
        raise FileNotFoundError(f"{state} has no checkpoint of {role}: train it first")
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: one.to(torch.bfloat16).contiguous() for name, one in found["model"].items()
    }
    save_file(weights, out / WEIGHTS, {"format": "pt"})
    (out / WEIGHTS).chmod(0o644)
    _write(out / "config.json", SHAPES[role].config())
    _write(out / "generation_config.json", generation())
    _write(out / "tokenizer_config.json", settings())
    (out / "tokenizer.json").write_text((data / TOKENIZER).read_text("utf-8"), "utf-8")
    return sum(path.stat().st_size for path in out.iterdir())


def _write(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--roles", nargs="+", choices=list(SHAPES), default=["target", "draft"]
    )
    parser.add_argument("--state", type=Path, default=STATE)
    parser.add_argument("--data", type=Path, default=FOLDER)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sizes = {
        role: export(args.state, role, args.data, args.out / role) for role in args.roles
    }
    print(json.dumps({**sizes, "both": sum(sizes.values())}))


if __name__ == "__main__":
    main()
