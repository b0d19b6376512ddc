"""The reader of the files beside tokenizer.json, with the rules of transformers 5.

Which file is used if several define something (`tests/effects/text/test_side_files.py`
compares each row with the installed transformers):

| what | used |
| --- | --- |
| vocabulary, merges, post-processor | tokenizer.json |
| `add_bos_token`, `add_eos_token` | nothing: the post-processor of tokenizer.json does |
| normalizer, pre-tokenizer, decoder | tokenizer.json, but those of the class where \
`tokenizer_classes` lists it (then `legacy`, `add_prefix_space` count) |
| added tokens and their flags | `added_tokens_decoder` of tokenizer_config.json; \
without it added_tokens.json, and over it tokenizer.json |
| ids of added tokens | the vocabulary; others follow it in the order of their keys |
| named tokens (`eos_token`, `image_token`, ...) | tokenizer_config.json; without \
`added_tokens_decoder`, special_tokens_map.json before it; the class's own last, or \
the `pad_token` of the padding in tokenizer.json |
| more special tokens | `extra_special_tokens`; `additional_special_tokens` if that is \
empty; those of special_tokens_map.json likewise, without `added_tokens_decoder` |
| chat templates | chat_template.jinja and additional_chat_templates/ together; without \
them `chat_template` of tokenizer_config.json; without that, chat_template.json, if a \
processor (of images or sound) is beside it, which reads that file in transformers |

Where transformers fails (an object without `__type` as a named token, an unknown flag, a
list of objects in `additional_special_tokens`), the token is read by its text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from tokenizers import AddedToken

from minfer.effects.models.checkpoint.checkpoint import CorruptFileError, read_optional
from minfer.effects.text.tokenizer_classes import TokenizerClass

STANDARD_NAMES: Final = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_EXTRA_TOKENS, _ADDITIONAL_TOKENS = "extra_special_tokens", "additional_special_tokens"
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
Token = str | AddedToken


@frozen(eq=False, kw_only=True)
class SpecialTokens:
    """The tokens that files name: `added` in the order of their ids."""

    added: tuple[AddedToken, ...]
    named: Mapping[str, Token]
    extra: tuple[Token, ...]

    @property
    def texts(self) -> dict[str, str]:
        """The named tokens, for chat templates."""
        return {name: token_content(token) for name, token in self.named.items()}


@frozen
class Templates:
    """The chat templates of a checkpoint: that of a plain conversation, that of one with
    tools if there is another, and the names of all, where they have names.
    """

    plain: str | None = None
    with_tools: str | None = None
    names: tuple[str, ...] = ()


def token_content(token: Token) -> str:
    """A token's text."""
    return token if isinstance(token, str) else token.content


def special_tokens(
    folder: Path,
    config: Mapping[str, Any],
    stored: Mapping[int, AddedToken],
    tokenizer_class: TokenizerClass | None,
) -> SpecialTokens:
    """The tokens that the files of a folder name.

    `config` is tokenizer_config.json, `stored` are the added tokens of tokenizer.json,
    and `tokenizer_class` is the tokenizer's class, if that brings tokens of its own.
    """
    defaults = {} if tokenizer_class is None else tokenizer_class.special_tokens
    settings = dict(config)
    if not settings.get(_EXTRA_TOKENS) and _ADDITIONAL_TOKENS in settings:
        settings[_EXTRA_TOKENS] = settings.pop(_ADDITIONAL_TOKENS)
    other_named = _pop_custom_tokens(settings)
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        added = _read_added_decoder(listed)
    else:
        _overlay_special_map(settings, read_optional(folder / "special_tokens_map.json"))
        other_named |= _pop_custom_tokens(settings, only_objects=True)
        added = _read_added_tokens(folder, settings) | dict(stored)
    if _EXTRA_TOKENS not in settings and _ADDITIONAL_TOKENS in settings:
        settings[_EXTRA_TOKENS] = settings.pop(_ADDITIONAL_TOKENS)
    named = {name: settings.get(name, defaults.get(name)) for name in STANDARD_NAMES}
    named |= {name: defaults[name] for name in defaults if _has_custom_name(name)}
    named |= {
        name: settings[name] for name in settings if _has_custom_name(name)
    } | other_named
    extra_tokens = [] if tokenizer_class is None else [*tokenizer_class.more_tokens]
    added_by_text = {token.content: token for token in added.values()}
    tokens = {name: _read_token(value) for name, value in named.items()}
    return SpecialTokens(
        added=tuple(
            token for _, token in sorted(added.items(), key=lambda entry: entry[0])
        ),
        named={
            name: added_by_text.get(token_content(token), token)
            if name in STANDARD_NAMES
            else token
            for name, token in tokens.items()
            if token is not None
        },
        extra=_read_tokens(settings.get(_EXTRA_TOKENS, extra_tokens)),
    )


def _read_token(value: object, **flags: bool) -> Token | None:
    """A token in a file: its text, or an object with its text and flags."""
    if isinstance(value, str | AddedToken):
        return value
    content = value.get("content") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(content, str):
        return None
    stated = {flag: bool(value[flag]) for flag in _FLAGS if value.get(flag) is not None}
    return AddedToken(content, **{**stated, **flags})


def _read_tokens(values: object) -> tuple[Token, ...]:
    listed = values if isinstance(values, list) else []
    return tuple(token for value in listed if (token := _read_token(value)) is not None)


def _has_custom_name(name: str) -> bool:
    """Whether a setting names a token that is not one of the usual ones."""
    return name.endswith("_token") and name not in STANDARD_NAMES


def _pop_custom_tokens(
    settings: dict[str, Any], *, only_objects: bool = False
) -> dict[str, Any]:
    """Remove the tokens with names of their own from the settings, and return them."""
    names = [
        name
        for name in settings
        if _has_custom_name(name) and isinstance(settings[name], str)
    ]
    named = {} if only_objects else {name: settings.pop(name) for name in names}
    if isinstance(settings.get(_EXTRA_TOKENS), Mapping):
        named |= settings.pop(_EXTRA_TOKENS)
    return named


def _read_added_decoder(entries: Mapping[str, object]) -> dict[int, AddedToken]:
    """The tokens of an `added_tokens_decoder`, by their keys."""
    tokens = {}
    for number, entry in entries.items():
        token = _read_token(entry)
        if isinstance(token, AddedToken) and number.isdecimal():
            tokens[int(number)] = token
    return tokens


def _overlay_special_map(settings: dict[str, Any], older: Mapping[str, Any]) -> None:
    """Lay the settings of special_tokens_map.json over tokenizer_config.json."""
    for name, value in older.items():
        if name == _EXTRA_TOKENS and isinstance(value, list):
            extra_tokens = settings.get(_EXTRA_TOKENS) or []
            settings[name] = [
                *extra_tokens,
                *(token for token in value if token not in extra_tokens),
            ]
        elif name != _EXTRA_TOKENS and isinstance(value, Mapping):
            settings[name] = _read_token(value, special=True)
        else:
            settings[name] = value


def _read_added_tokens(
    folder: Path, settings: Mapping[str, Any]
) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json by id: special are those that `settings` names,
    unless by an object.
    """
    extra = settings.get(_EXTRA_TOKENS)
    named = [settings.get(name) for name in STANDARD_NAMES] + (
        extra if isinstance(extra, list) else []
    )
    special = {
        token_content(token) for token in named if isinstance(token, str | AddedToken)
    }
    return {
        number: AddedToken(text, special=text in special, normalized=text not in special)
        for text, number in read_optional(folder / "added_tokens.json").items()
        if type(number) is int
    }


def read_templates(folder: Path, config: Mapping[str, Any]) -> Templates:
    """The chat templates of a folder whose tokenizer_config.json is `config`.

    Raises CorruptFileError for files that are not text, or templates without a name.
    """
    files = {_DEFAULT: folder / "chat_template.jinja"}
    extra_paths = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files |= {path.name.removesuffix(".jinja"): path for path in extra_paths}
    templates: Any = {
        name: _read_text(path) for name, path in files.items() if path.is_file()
    }
    if list(templates) == [_DEFAULT]:
        return Templates(templates[_DEFAULT])
    templates = templates or config.get("chat_template") or _of_processor(folder)
    location = f"{folder / 'tokenizer_config.json'}: chat_template"
    if isinstance(templates, list):
        try:
            templates = {entry["name"]: entry["template"] for entry in templates}
        except (TypeError, KeyError):
            fault = "must be a template, or a list of objects with name and template"
            raise CorruptFileError(f"{location} {fault}; correct it") from None
    if isinstance(templates, dict):
        named = {
            str(name): text for name, text in templates.items() if isinstance(text, str)
        }
        return Templates(named.get(_DEFAULT), named.get(_TOOL_USE), tuple(sorted(named)))
    return Templates(templates if isinstance(templates, str) else None)


def _of_processor(folder: Path) -> object:
    """The chat template of a multimodal model's processor, in the file of older ones."""
    if any((folder / name).is_file() for name in _PROCESSOR_FILES):
        return read_optional(folder / "chat_template.json").get("chat_template")
    return None


def read_response_template(folder: Path) -> str:
    """The `response_template` of a folder's tokenizer_config.json as JSON, of several the
    default; empty if there is none.
    """
    template = read_optional(folder / "tokenizer_config.json").get("response_template")
    if isinstance(template, Mapping) and "fields" not in template:
        template = template.get(_DEFAULT)
    return "" if template is None else json.dumps(template)


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        fault = f"cannot be read ({error}); download it again"
        raise CorruptFileError(f"{path}: {fault}") from error
