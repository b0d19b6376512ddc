"""A tokenizer.json for a checkpoint that has none, written by transformers.

Some checkpoints have only the files of sentencepiece, tiktoken or mistral-common, or a
vocabulary with its merges. transformers converts them without code from the checkpoint.
It does so in a process of its own, as it takes seconds and hundreds of megabytes to
import, and once: the cache of the hub keeps the result by a digest of the files.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from minfer.extras import how_to_install

TEKKEN: Final = "tekken.json"
# Files of which transformers makes a tokenizer.json.
SOURCES: Final = (
    "tokenizer.model",  # of sentencepiece or tiktoken
    "tiktoken.model",
    "spiece.model",
    TEKKEN,
    "vocab.json",
    "vocab.txt",
)
_CUSTOM_CODE_FILES: Final = "*.tiktoken"  # what only code of a checkpoint reads
# What else decides which tokenizer transformers makes.
_RELATED_FILES: Final = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "additional_chat_templates/*",
)
_IGNORED_FILES: Final = ("*.index.json", "generation_config.json")
# Imported names of the extra `tokenizers`.
_LIBRARIES: Final = ("sentencepiece", "tiktoken", "mistral_common", "google.protobuf")
_MAX_CONVERSION_SECONDS: Final = 300.0
_DIGEST_BYTES: Final = 16
_BOS: Final = "<s>"  # of tekken's tokenizers
_log: Final = logging.getLogger("minfer.text")


class ConversionError(ValueError):
    """transformers cannot make a tokenizer.json of a checkpoint's files."""


def sources(folder: Path) -> list[str]:
    """The names of the files in a folder of which a tokenizer may be made."""
    names = [name for name in SOURCES if (folder / name).is_file()]
    return [*names, *sorted(path.name for path in folder.glob(_CUSTOM_CODE_FILES))]


def converted_folder(folder: Path) -> Path:
    """A folder with the tokenizer.json that transformers makes of a checkpoint's files,
    and with what belongs to it. Raises ConversionError.
    """
    from huggingface_hub import constants

    cached = Path(constants.HF_HOME) / "minfer" / "tokenizers" / _digest(folder)
    if not cached.exists():
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
        except OSError:  # no cache can be kept: the result serves this process alone
            cached = Path(tempfile.mkdtemp(prefix="minfer-tokenizer-")) / cached.name
        _convert_into(folder, cached)
    return cached


def _digest(folder: Path) -> str:
    """A digest of all that decides the conversion's result."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(version("transformers").encode())
    for path in sorted(_files(folder)):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _files(folder: Path) -> set[Path]:
    """The files of a folder that decide which tokenizer transformers makes."""
    files = {path for pattern in _RELATED_FILES for path in folder.glob(pattern)}
    unused = {path for pattern in _IGNORED_FILES for path in folder.glob(pattern)}
    return {path for path in files - unused if path.is_file()}


def _convert_into(folder: Path, target: Path) -> None:
    """Write the converted tokenizer to `target`, whole or not at all."""
    _log.info("transformers converts %s of %s", ", ".join(sources(folder)), folder)
    with tempfile.TemporaryDirectory(dir=target.parent) as parent:
        staging = Path(parent) / "tokenizer"
        for path in _files(folder):
            copy = staging / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        _convert_in_process(folder, staging)
        try:
            staging.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise


def _convert_in_process(folder: Path, staging: Path) -> None:
    """Have another process convert the files in `staging`, which are copies of those in
    `folder`. Raises ConversionError.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__, str(staging)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MAX_CONVERSION_SECONDS,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "USE_TORCH": "0"},
        )
        output = process.stderr.strip() if process.returncode else ""
        failed = process.returncode != 0
    except subprocess.TimeoutExpired:
        failed, output = True, f"it took more than {_MAX_CONVERSION_SECONDS:.0f} s"
    if not failed and (staging / "tokenizer.json").is_file():
        return
    cause = output.rsplit("\n", 1)[-1] or "it wrote no tokenizer.json"
    missing = [name for name in _LIBRARIES if not _is_installed(name)]
    remedy = how_to_install("tokenizers") if missing else _command(folder)
    raise ConversionError(
        f"{folder}: there is no tokenizer.json, and transformers makes none of "
        f"{', '.join(sources(folder))} ({cause}); {remedy}"
    )


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _command(folder: Path) -> str:
    """The command that writes a tokenizer.json with the code of the checkpoint."""
    load = f"AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True)"
    return (
        "if you trust the checkpoint's code, write it: python -c "
        f'"from transformers import AutoTokenizer; '
        f'{load}.save_pretrained({str(folder)!r})"'
    )


def write_converted(folder: Path) -> None:
    """Write tokenizer.json and its configuration into a folder, by transformers."""
    if (folder / TEKKEN).is_file():
        from tokenizers import processors
        from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

        mistral = convert_tekken_tokenizer(str(folder / TEKKEN))
        # mistral-common begins each text so, and so do published files.
        begin = [(_BOS, mistral.convert_tokens_to_ids(_BOS))]
        mistral.backend_tokenizer.post_processor = processors.TemplateProcessing(
            f"{_BOS} $A", f"{_BOS} $A $B", begin
        )
        mistral.save_pretrained(folder)
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    backend = tokenizer.backend_tokenizer
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    if backend.get_vocab().keys() <= special:
        raise ValueError(f"{type(tokenizer).__name__} reads none of these files")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_converted(Path(sys.argv[1]))
