"""Tokenizers of folders without a tokenizer.json, as transformers converts them.

A checkpoint may have a sentencepiece model (tokenizer.model), a tiktoken file
(tokenizer.model, *.tiktoken), Mistral's tekken.json, or vocabulary and merges alone.
transformers turns some of these into a tokenizer of the `tokenizers` library, with the
package that reads the file; code from the checkpoint is never executed.
"""

import shutil
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

TEKKEN: Final = "tekken.json"
FILES: Final = ("tokenizer.model", TEKKEN, "*.tiktoken", "vocab.json", "*.model")
_CONVERTER: Final = "transformers.integrations.mistral.tokenizer"


def other_files(folder: Path) -> list[str]:
    """Returns the names of a folder's files that a tokenizer may be made of."""
    found = (path.name for pattern in FILES for path in sorted(folder.glob(pattern)))
    return [*dict.fromkeys(found)]


def write_converted(folder: Path, to: Path) -> None:
    """Write the tokenizer that transformers makes of a folder's files to another folder,
    with a tokenizer.json. Raises ValueError, with the cause, if it makes none.
    """
    from minfer.effects.models.fallback import quiet

    try:
        with quiet():
            made = _made(folder)
    except Exception as error:  # each class has its own
        raise ValueError(str(error).partition("\n")[0] or repr(error)) from error
    name, backend = type(made).__name__, getattr(made, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        why = f"{name} is no tokenizer of the tokenizers library"
        raise ValueError(why)  # noqa: TRY004 - of the file, not of an argument
    special = {one.content for one in backend.get_added_tokens_decoder().values()}
    if backend.get_vocab().keys() <= special:  # the class did not find a file of its kind
        raise ValueError(f"{name} reads none of these files")
    made.save_pretrained(to)
    for path in folder.glob("*.json*"):  # of the model, and templates
        if not (to / path.name).exists() and path.name.startswith(("config", "chat")):
            shutil.copyfile(path, to / path.name)


def _made(folder: Path) -> Any:
    """Returns a tokenizer of transformers; fails with an error of its own."""
    import transformers

    if (folder / TEKKEN).is_file():
        from transformers.integrations.mistral import tokenizer as mistral

        convert: Any = mistral.convert_tekken_tokenizer
        return convert(str(folder / TEKKEN))
    read: Any = transformers.AutoTokenizer.from_pretrained
    return read(folder, local_files_only=True, trust_remote_code=False)


def how_to_convert(folder: Path) -> str:
    """Returns the command that writes a tokenizer.json, for errors."""
    where, what = str(folder), "from transformers import AutoTokenizer as A; "
    call = f"A.from_pretrained({where!r})"
    if (folder / TEKKEN).is_file():
        what = f"from {_CONVERTER} import convert_tekken_tokenizer as convert; "
        call = f"convert({str(folder / TEKKEN)!r})"
    needed = "pip install sentencepiece tiktoken mistral-common"
    return f'python3 -c "{what}{call}.save_pretrained({where!r})" (after {needed})'
