"""The edge: what users say becomes `Request` values, or a typed error that names what was
wrong.

All is decided here, before anything runs: token ids, seeds, stop ids, lengths, content
keys. The engine's own `objection` has the last word, so nothing that passes here is
turned down later.
"""

import hashlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from minfer.arrive import objection
from minfer.blocks import blocks_for
from minfer.effects.setup.options import Setup
from minfer.effects.text.tokenizer import TextError, Tokenizer
from minfer.keys import block_keys, root_key
from minfer.request import Request, SamplingParams
from minfer.state import initial

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams]
MAX_CLIENT: Final = 256  # characters of a client's name


class RequestError(ValueError):
    """A request cannot be served: that at `index` of its list, because of its field
    `param`.
    """

    def __init__(self, message: str, index: int = 0, param: str | None = None) -> None:
        super().__init__(message)
        self.index, self.param = index, param


class TooLongError(RequestError):
    """The context or the cache cannot hold prompt and output, whoever else is served."""


class OverloadedError(RequestError):
    """Too many requests wait already; the same request may be served later."""


@frozen
class Asked:
    """A prompt as it was asked for: its text, if it had one, token ids, and who may share
    it.
    """

    text: str | None
    ids: Sequence[int]
    salt: bytes = b""


def _wrong(what: str, wanted: str, given: object, index: int = 0) -> RequestError:
    return RequestError(f"{what} must be {wanted}, not a {type(given).__name__}", index)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. Token ids, not in a list of their own, are one
    prompt.
    """
    if not isinstance(prompts, str | Mapping | Sequence):
        raise _wrong("prompts", "a string, token ids, or a list of these", prompts)
    ids = prompts and all(isinstance(p, int) and not isinstance(p, bool) for p in prompts)
    if ids or isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]  # by now it is one prompt
    return list(prompts)  # type: ignore[arg-type]  # and here several


def params_for(params: Params, count: int) -> list[SamplingParams]:
    """One set of parameters for each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise _wrong("sampling_params", "SamplingParams", params)
    if len(params) != count:
        given = f"{len(params)} sampling_params for {count} prompts"
        raise RequestError(f"{given}; give one, or one for each prompt")
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise _wrong(f"sampling_params[{i}]", "SamplingParams", one, i)
    return list(params)


def urgencies_for(priority: Sequence[int] | None, count: int) -> list["Urgency"]:
    """A priority for each of `count` prompts; lower runs first under the
    priority policy.
    """
    if priority is None:
        return [Urgency()] * count
    if len(priority) != count:
        raise RequestError(
            f"{len(priority)} priorities for {count} prompts; give one for each"
        )
    found = []
    for i, one in enumerate(priority):
        try:
            found.append(Urgency(priority=one))
        except RequestError as error:
            raise RequestError(
                str(error).replace("priority", f"priority[{i}]", 1), i
            ) from None
    return found


def read_prompt(
    prompt: object, tokenizer: Tokenizer | None, vocab_size: int, salt: bytes = b""
) -> Asked:
    """Token ids of a prompt: a string, token ids, or vLLM's mapping of either.
    RequestError.
    """
    if isinstance(prompt, Asked):  # a conversation that was rendered already
        return prompt
    prompt, salt = (
        _from_mapping(prompt) if isinstance(prompt, Mapping) else (prompt, salt)
    )
    text = prompt if isinstance(prompt, str) else None
    given = prompt if text is None else encoded(text, tokenizer)
    if not isinstance(given, Iterable):
        raise _wrong("a prompt", "a string or token ids", prompt)
    ids = tuple(given)
    odd: list[tuple[int, Any]] = []
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab_size):
        odd = [
            (i, t)
            for i, t in enumerate(ids)
            if type(t) is not int or not 0 <= t < vocab_size
        ]
    for place, token in odd:  # numpy's integers are good
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise RequestError(
                f"token ids must be whole numbers, not {token!r} (at {place})"
            )
        if not 0 <= token < vocab_size:
            where = f"token id {token} at position {place} is outside the vocabulary"
            raise RequestError(f"{where}; ids are from 0 to {vocab_size - 1}")
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    return Asked(text, tuple(map(operator.index, ids)) if odd else ids, salt)


def _from_mapping(prompt: Mapping[Any, Any]) -> tuple[object, bytes]:
    if odd := set(map(str, prompt)) - {"prompt", "prompt_token_ids", "cache_salt"}:
        raise RequestError(
            f"a prompt has no field {min(odd)!r}; use prompt or prompt_token_ids"
        )
    given = [
        name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None
    ]
    if len(given) != 1:
        raise RequestError("a prompt needs one of the fields prompt and prompt_token_ids")
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise _wrong("cache_salt", "a string", salt)
    return prompt[given[0]], salt.encode("utf-8", "surrogatepass")


def encoded(
    text: str, tokenizer: Tokenizer | None, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text. Raises RequestError if it cannot be encoded."""
    if tokenizer is None:
        why = "a text prompt needs a tokenizer, which was left out (skip_tokenizer_init)"
        raise RequestError(f"{why}; give token ids")
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except TextError as error:
        raise RequestError(str(error)) from None


@frozen(kw_only=True)
class Urgency:
    """What scheduling policies may heed besides arrival. Raises RequestError for a wrong
    value.
    """

    priority: int = 0  # lower runs first
    client: str = ""  # who asks
    deadline: float = math.inf  # seconds from arrival

    def __attrs_post_init__(self) -> None:
        if type(self.priority) is not int or abs(self.priority) >= 2**53:
            raise RequestError(f"priority must be a whole number, not {self.priority!r}")
        if not isinstance(self.client, str) or len(self.client) > MAX_CLIENT:
            raise RequestError(
                f"client must be a string of up to {MAX_CLIENT} characters"
            )
        number = isinstance(self.deadline, int | float) and not isinstance(
            self.deadline, bool
        )
        if not number or not self.deadline > 0:
            raise RequestError(
                f"deadline must be a number above 0, not {self.deadline!r}"
            )


def make_request(
    setup: Setup,
    asked: Asked,
    params: SamplingParams,
    count: int,
    urgency: Urgency,
    name: str = "",
) -> Request:
    """The engine's request after `count` others. RequestError if it could never run."""
    config, prompt, length = setup.config, tuple(asked.ids), len(asked.ids)
    stops = frozenset(params.stop_token_ids)
    if max(stops, default=0) >= config.vocab_size:
        why = f"stop_token_ids: {max(stops)} is outside the vocabulary; ids are from 0 to"
        raise RequestError(f"{why} {config.vocab_size - 1}", param="stop_token_ids")
    if params.logprobs is not None and setup.args.executor != "torch":
        why = (
            f"logprobs: the {setup.args.executor} executor has no model that could "
            f"give any"
        )
        raise RequestError(f"{why}; leave it out", param="logprobs")
    whole, able = config.max_model_len, setup.spec.max_position_embeddings
    if length >= whole:
        why = (
            f"the prompt has {length} tokens; the context holds {whole}, of which at "
            f"least one"
        )
        longer = (
            f", or raise max_model_len (this model can do {able})" if whole < able else ""
        )
        raise TooLongError(
            f"{why} must be left for the output: shorten the prompt{longer}"
        )
    slots = config.num_blocks * config.block_size + 1  # the last token needs none
    most = max(1, min(whole - length, params.max_tokens or slots - length))
    needs = blocks_for(length + most, config.block_size)
    if needs > config.num_blocks:
        raise TooLongError(
            f"prompt ({length} tokens) and output (up to {most}) need {needs} KV blocks "
            f"of "
            f"{config.block_size} tokens; the cache has {config.num_blocks}: shorten "
            f"the prompt, "
            "lower max_tokens, or enlarge the cache (kv_cache_memory_bytes)"
        )
    salt = asked.salt if setup.args.enable_prefix_caching else f"request {count}".encode()
    root = root_key(setup.fingerprint, salt)
    # Where it has no seed of its own, one that follows from the engine's: 63 bits.
    derived = hashlib.sha256(f"{setup.args.seed}/{count}".encode()).digest()[:8]
    request = Request(
        id=name or str(count),
        prompt=prompt,
        max_tokens=most,
        n=params.n,
        sampling=params,
        stop_ids=stops if params.ignore_eos else stops | setup.stop_ids,
        seed=int.from_bytes(derived, "little") >> 1
        if params.seed is None
        else params.seed,
        priority=urgency.priority,
        client=urgency.client,
        deadline=float(urgency.deadline),
        root=root,
        keys=block_keys(root, prompt, config.block_size),
    )
    if why := objection(config, initial(config), request):
        raise RequestError(why)
    return request
