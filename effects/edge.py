"""The edge: what users say becomes `Request` values, or a typed error that names what was wrong.

Everything is decided here, before anything runs: token ids, seeds, stop ids, how many tokens there
may be, and the content keys of the prompt. The engine's own `objection` has the last word, so
nothing that passes here is turned down later.
"""

import hashlib
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from minfer.blocks import blocks_for
from minfer.effects.options import Setup
from minfer.effects.text import TextError, Tokenizer
from minfer.engine import objection
from minfer.keys import block_keys, root_key
from minfer.request import Request, SamplingParams
from minfer.state import initial

Prompt = str | Sequence[int] | Mapping[str, Any]
MAX_CLIENT: Final = 256  # characters of a client's name


class RequestError(ValueError):
    """A request cannot be served. `index` is its place in the list it came in."""

    def __init__(self, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.index = index


class TooLongError(RequestError):
    """The context or the cache cannot hold prompt and output, whoever else is served."""


class OverloadedError(RequestError):
    """Too many requests wait already; the same request may be served later."""


@frozen
class Asked:
    """A prompt as it was asked for: its text, if it had one, token ids, and who may share it."""

    text: str | None
    ids: tuple[int, ...]
    salt: bytes = b""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. Token ids, not in a list of their own, are one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be a string, token ids, or a list of these, not {_kind(prompts)}"
        )
    if prompts and all(isinstance(p, int) and not isinstance(p, bool) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def params_for(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """One set of parameters for each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling_params must be SamplingParams, not {_kind(params)}")
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling_params for {count} prompts; give one, or one for each prompt"
        )
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params[{i}] must be SamplingParams, not {_kind(one)}", i)
    return list(params)


def urgencies_for(priority: Sequence[int] | None, count: int) -> list["Urgency"]:
    """A priority for each of `count` prompts; lower runs first under the priority policy."""
    if priority is None:
        return [Urgency()] * count
    if len(priority) != count:
        raise RequestError(f"{len(priority)} priorities for {count} prompts; give one for each")
    return [_urgency(i, one) for i, one in enumerate(priority)]


def _urgency(index: int, priority: int) -> "Urgency":
    try:
        return Urgency(priority=priority)
    except RequestError as error:
        raise RequestError(
            f"priority[{index}]{str(error).removeprefix('priority')}", index
        ) from None


def read_prompt(prompt: object, tokenizer: Tokenizer | None, vocab_size: int) -> Asked:
    """Token ids of a prompt: a string, token ids, or vLLM's mapping of either.

    Raises RequestError for an empty prompt, a wrong type, or an id outside the vocabulary.
    """
    salt = b""
    if isinstance(prompt, Asked):  # a conversation that was rendered already
        return prompt
    if isinstance(prompt, Mapping):
        prompt, salt = _from_mapping(prompt)
    if isinstance(prompt, str):
        text, ids = prompt, encoded(prompt, tokenizer)
    elif isinstance(prompt, Sequence) or hasattr(prompt, "__iter__"):
        text, ids = None, _ids(prompt)
    else:
        raise RequestError(f"a prompt must be a string or token ids, not {_kind(prompt)}")
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} at position {place} is outside the vocabulary; "
                f"ids are from 0 to {vocab_size - 1}"
            )
    return Asked(text, ids, salt)


def _from_mapping(prompt: Mapping[Any, Any]) -> tuple[object, bytes]:
    unknown = sorted(map(str, set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}))
    if unknown:
        raise RequestError(f"a prompt has no field {unknown[0]!r}; use prompt or prompt_token_ids")
    given = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(given) != 1:
        raise RequestError("a prompt needs one of the fields prompt and prompt_token_ids")
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string, not {_kind(salt)}")
    return prompt[given[0]], salt.encode("utf-8", "surrogatepass")


def encoded(
    text: str, tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> tuple[int, ...]:
    """Token ids of a text. Raises RequestError if it cannot be encoded."""
    if tokenizer is None:
        raise RequestError(
            "a text prompt needs a tokenizer, which was left out (skip_tokenizer_init); "
            "give token ids"
        )
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except TextError as error:
        raise RequestError(str(error)) from None


def _ids(prompt: Any) -> tuple[int, ...]:
    ids = []
    for place, token in enumerate(prompt):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise RequestError(f"token ids must be whole numbers, not {token!r} (at {place})")
        ids.append(operator.index(token))
    return tuple(ids)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def derived_seed(seed: int, number: int) -> int:
    """The seed of the request with that number, where it has none of its own: 63 bits."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@frozen(kw_only=True)
class Urgency:
    """What scheduling policies may heed besides arrival. Raises RequestError for a wrong value."""

    priority: int = 0  # lower runs first
    client: str = ""  # who asks
    deadline: float = math.inf  # seconds from arrival

    def __attrs_post_init__(self) -> None:
        if type(self.priority) is not int or abs(self.priority) >= 2**53:
            raise RequestError(f"priority must be a whole number, not {self.priority!r}")
        if not isinstance(self.client, str) or len(self.client) > MAX_CLIENT:
            raise RequestError(f"client must be a string of up to {MAX_CLIENT} characters")
        number = isinstance(self.deadline, int | float) and not isinstance(self.deadline, bool)
        if not number or not self.deadline > 0:
            raise RequestError(f"deadline must be a number above 0, not {self.deadline!r}")


def make_request(
    setup: Setup,
    asked: Asked,
    params: SamplingParams,
    number: int,
    urgency: Urgency = Urgency(),
    name: str | None = None,
) -> Request:
    """The engine's request number `number`, called `name`. RequestError if it could never run."""
    config, length = setup.config, len(asked.ids)
    room = config.max_model_len - length
    for token in params.stop_token_ids:
        if token >= config.vocab_size:
            raise RequestError(
                f"stop_token_ids: {token} is outside the vocabulary; ids are from 0 to "
                f"{config.vocab_size - 1}"
            )
    if room < 1:
        raise TooLongError(
            f"the prompt has {length} tokens; the context holds {config.max_model_len}, of which "
            f"at least one must be left for the output: shorten the prompt{_longer(setup)}"
        )
    whole = config.num_blocks * config.block_size + 1  # the last token needs no slot
    most = min(room, params.max_tokens or min(room, whole - length))
    needs = blocks_for(length + max(1, most), config.block_size)
    if needs > config.num_blocks or most < 1:
        raise TooLongError(
            f"prompt ({length} tokens) and output (up to {max(1, most)}) need {needs} KV blocks of "
            f"{config.block_size} tokens; the cache has {config.num_blocks}: shorten the prompt, "
            "lower max_tokens, or enlarge the cache (kv_cache_memory_bytes)"
        )
    salt = asked.salt if setup.args.enable_prefix_caching else f"request {number}".encode()
    root = root_key(setup.fingerprint, salt)
    stops = frozenset(params.stop_token_ids)
    request = Request(
        id=str(number) if name is None else name,
        prompt=asked.ids,
        max_tokens=most,
        stop_ids=stops if params.ignore_eos else stops | setup.stop_ids,
        n=params.n,
        seed=derived_seed(setup.args.seed, number) if params.seed is None else params.seed,
        sampling=params,
        priority=urgency.priority,
        client=urgency.client,
        deadline=float(urgency.deadline),
        root=root,
        keys=block_keys(root, asked.ids, config.block_size),
    )
    why = objection(config, initial(config), request)
    if why:
        raise RequestError(why)
    return request


def _longer(setup: Setup) -> str:
    config, model = setup.config, setup.spec.max_position_embeddings
    if config.max_model_len < model:
        return f", or raise max_model_len (this model can do {model})"
    return ""
