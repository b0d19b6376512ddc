"""From a setup to what runs: the executor with its weights, and the journal beside it."""

import platform
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from minfer.effects.execution.executor import Executor
from minfer.effects.live.journal_writer import Writer
from minfer.effects.setup.memory import NotEnoughMemoryError, size_text
from minfer.effects.setup.options import Setup
from minfer.effects.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minfer.effects.models.model import Model
    from minfer.effects.models.weights import Weights


def open_executor(setup: Setup, tokenizer: Tokenizer | None) -> Executor:
    """The executor that the settings ask for, with its weights where it has any.

    Raises CheckpointError if they cannot be used.
    """
    config, spec, args = setup.config, setup.spec, setup.args
    if args.executor == "oracle":
        from minfer.runs.oracle import Oracle

        return Oracle(config.block_size, spec.vocab_size)
    if args.executor == "dry":
        from minfer.effects.execution.dry import Dry, encoded_passage

        spelled = encoded_passage(tokenizer.encode) if tokenizer is not None else ()
        return Dry(spelled or (tuple(range(spec.vocab_size)),))
    import torch

    needs = setup.memory
    try:
        weights = _weights(setup)
    except (MemoryError, torch.OutOfMemoryError) as error:
        what = (
            f"weights of {size_text(needs.weights)} do not fit beside what else is "
            f"in memory"
        )
        raise NotEnoughMemoryError(
            f"{what}: {_line(error)}; choose a smaller model"
        ) from error
    try:
        from minfer.effects.execution.torch_executor import TorchExecutor

        eager, checked = args.enforce_eager, args.check_steps
        device = setup.device.kind
        return TorchExecutor(
            config, spec, weights, device, graphs=not eager, checked=checked
        )
    except (MemoryError, RuntimeError) as error:
        what = (
            f"{config.num_blocks} KV blocks ({size_text(needs.kv_cache)}) cannot be had"
        )
        raise NotEnoughMemoryError(
            f"{what}: {_line(error)}; ask for a smaller KV cache"
        ) from error


def open_journal(setup: Setup, executor: Executor) -> Writer | None:
    """The journal that the settings ask for. Raises ConfigError if it cannot
    be written.
    """
    args = setup.args
    if args.journal is None:
        return None
    packages = (
        ()
        if args.executor != "torch"
        else ("torch", "triton", "flash-attn-4", "quack-kernels")
    )
    versions = {d.name: d.version for name in packages for d in distributions(name=name)}
    model = setup.folder.name if args.journal_redact else str(setup.folder)
    about = {
        "model": model,
        "dtype": setup.spec.dtype,
        "executor": args.executor,
        "device": setup.device.name,
        "fingerprint": setup.fingerprint.hex(),
        "seed": args.seed,
        "eager": args.enforce_eager,
        "kernels": dict(getattr(executor, "routes", ())),
        "versions": {"python": platform.python_version(), **versions},
    }
    size, redact = args.journal_size, args.journal_redact
    return Writer(Path(args.journal), setup.config, about, size=size, redact=redact)


def _weights(setup: Setup) -> "Weights | Model":
    """What the settings say, on the device that they say."""
    from minfer.effects.models.checkpoint import load_weights, random_weights, read_config

    spec, seed, device = setup.spec, setup.args.seed, setup.device.kind
    dummy = setup.args.load_format == "dummy"
    if spec.parameters:
        from minfer.effects.execution.attention import make_cache
        from minfer.effects.models.fallback import load_fallback

        raw = read_config(setup.folder)
        drawn = seed if dummy else None
        return load_fallback(setup.folder, raw, spec, make_cache, drawn, device)
    if dummy:
        return random_weights(spec, spec.dtype, seed, device)
    return load_weights(setup.folder, spec, spec.dtype, device)


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
