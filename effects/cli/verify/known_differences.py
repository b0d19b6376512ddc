"""All intended differences between minfer and transformers, on the same files.

Each row describes minfer's behaviour, its reason, and how a checkpoint's files show that
it matters; `minfer verify` prints the rows that matter to the checkpoint as notes. Token
ids of tokenizer classes that minfer does not know are noted by `tokens.tokenizer`.

What minfer refuses by name where transformers goes on (with a warning, or in silence) is
no row: tensors that are missing or that the model does not have, a model.safetensors
beside a whole set of shards, tensors that two files hold with other values, an output
head that differs from the embedding it is tied to, pickled weights, a
folder without tokenizer.json, `architectures` without a causal language model.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from minfer.effects.cli.verify.findings import NOTE, Check
from minfer.effects.models.checkpoint.checkpoint import read_optional
from minfer.effects.models.config_reader import whole_to_int
from minfer.effects.setup.advice import recommended_params, unapplied_fields
from minfer.effects.text.tokenizer import Tokenizer
from minfer.sampling.params import ADVISED

GENERATION: Final = "generation_config.json"


@frozen
class KnownDifference:
    """One row: `seen` names what in a folder makes the difference, or nothing."""

    what: str
    reason: str
    seen: Callable[[Path], list[str]]


def _not_applied(folder: Path) -> list[str]:
    return unapplied_fields(folder / GENERATION)


def _left_out(folder: Path) -> list[str]:
    file, used = (
        read_optional(folder / GENERATION),
        recommended_params(folder / GENERATION),
    )
    return [name for name in ADVISED if file.get(name) is not None and name not in used]


def _drawn(folder: Path) -> list[str]:
    advice = read_optional(folder / GENERATION)
    return [] if advice.get("do_sample") is not None or not advice else ["do_sample"]


def _more_ends(folder: Path) -> list[str]:
    names = (GENERATION, "config.json")
    values = [read_optional(folder / name).get("eos_token_id") for name in names]
    value: Any = next((candidate for candidate in values if candidate is not None), [])
    config_ends = [*map(whole_to_int, value if isinstance(value, list) else [value])]
    return [str(token) for token in Tokenizer(folder).eos_ids if token not in config_ends]


def _clean_up(folder: Path) -> list[str]:
    settings = read_optional(folder / "tokenizer_config.json")
    model = read_optional(folder / "tokenizer.json").get("model") or {}
    name = "clean_up_tokenization_spaces"
    return [name] if settings.get(name) is True and model.get("type") != "BPE" else []


def _whole_floats(folder: Path) -> list[str]:
    config = read_optional(folder / "config.json")
    sizes = ("_size", "_layers", "_heads", "_embeddings", "_dim", "_token_id")
    named = (name for name in config if name.endswith(sizes))
    return [name for name in named if isinstance(config[name], float)]


def _regex(folder: Path) -> list[str]:
    settings = read_optional(folder / "tokenizer_config.json")
    name = "fix_mistral_regex"
    return [name] if settings.get(name) is True else []


DIFFERENCES: Final = (
    KnownDifference(
        "are not applied",
        "minfer has no such parameter; a request that names one is refused",
        _not_applied,
    ),
    KnownDifference(
        "are out of range and left out",
        "a file that cannot be used in part does not stop a model",
        _left_out,
    ),
    KnownDifference(
        "is absent, and tokens are drawn at temperature 1 unless a user sets it",
        "transformers takes the likeliest; minfer follows vLLM and OpenAI's API",
        _drawn,
    ),
    KnownDifference(
        "end a sequence too, as config.json or the tokenizer says",
        "transformers heeds generation_config.json, or without it config.json, alone, "
        "and goes on behind the end of a turn where that file is incomplete",
        _more_ends,
    ),
    KnownDifference(
        "is not applied",
        "blanks taken off before punctuation would make text that tokens do not say",
        _clean_up,
    ),
    KnownDifference(
        "are floats, and taken as whole numbers",
        "some tools write 128.0; transformers 5 refuses some of them",
        _whole_floats,
    ),
    KnownDifference(
        "is not applied",
        "the pre-tokenizer of tokenizer.json is the one that the model was trained with",
        _regex,
    ),
)


def list_differences(folder: Path) -> Iterator[Check]:
    """A note for each row of the list that matters to a checkpoint."""
    for row in DIFFERENCES:
        if seen := row.seen(folder):
            figures = f"{', '.join(seen)}: {row.what}; {row.reason}"
            yield Check("on purpose", NOTE, figures)
