"""transformers' own tokenizer and model of a checkpoint: the reference."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from minfer.effects.cli.verify.dequantized import Dequantized
from minfer.effects.cli.verify.rounded import RoundedProducts
from minfer.effects.models.checkpoint.checkpoint import CheckpointError, read_config
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.families.multimodal import MULTIMODAL

Logits = Callable[[list[int]], Tensor]  # of a text: float32, [tokens, vocab]
_WEIGHTS: Final = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}


def load_reference(kind: Any, folder: Path, **options: Any) -> Any:
    """A folder as loaded by a class of transformers. Raises CheckpointError."""
    try:
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # each kind fails in ways of its own
        raise CheckpointError(
            f"{folder}: transformers cannot load it: {error}"
        ) from error


def _auto_class(folder: Path) -> Any:
    """The class of transformers that knows a folder's model."""
    row = MULTIMODAL.get(str(read_config(folder).get("model_type")))
    if row is not None and not row.text_class:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def reference_logits(copy: Dequantized, dtype: str) -> Logits:
    """The function from token ids to logits that transformers' model computes; it rounds
    activations as the checkpoint's scheme does.
    """
    model = load_reference(
        _auto_class(copy.folder),
        copy.folder,
        dtype=torch_dtype(dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        use_safetensors=True,
    ).eval()
    rounding: Any = nullcontext()
    if copy.scheme is not None:
        rounding = RoundedProducts(model, copy.rounded, copy.scheme)

    def logits(ids: list[int]) -> Tensor:
        with torch.inference_mode(), rounding:
            batch_logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            return torch.as_tensor(batch_logits[0]).float()

    return logits


def write_random(folder: Path, copy: Path, seed: int) -> Path:
    """Copy a checkpoint, but with random weights as transformers initializes them.

    Returns the copy. Raises CheckpointError.
    """
    copy.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.suffix not in _WEIGHTS and "index" not in path.name:
            shutil.copyfile(path, copy / path.name)
    config = load_reference(transformers.AutoConfig, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _auto_class(folder).from_config(config)
    model.save_pretrained(copy)
    for name in ("config.json", "generation_config.json"):  # as their makers wrote them
        if (folder / name).is_file():
            shutil.copyfile(folder / name, copy / name)
    return copy
