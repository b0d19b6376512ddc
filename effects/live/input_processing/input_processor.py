"""The input processor: user input becomes `Request` values, or a typed error that names
the wrong field.

All is decided here, before anything runs: token ids
(`minfer.effects.live.input_processing.prompts`), seeds, stop ids, lengths, content keys.
The engine's own `rejection_reason` is checked last, so a request that passes here is not
refused later.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from attrs import evolve, frozen

from minfer.blocks.keys import Key, block_keys, root_key
from minfer.blocks.ownership import blocks_for
from minfer.effects.live.beams.beam_rounds import SearchRequest
from minfer.effects.live.beams.beam_search import BeamSearchParams
from minfer.effects.live.errors import OverloadedError as OverloadedError
from minfer.effects.live.errors import RequestError as RequestError
from minfer.effects.live.errors import TooLongError as TooLongError
from minfer.effects.live.errors import check_prompt
from minfer.effects.live.input_processing.logit_checks import BadWords, check_shape
from minfer.effects.live.input_processing.prompts import (
    TokenizedPrompt as TokenizedPrompt,
)
from minfer.effects.live.input_processing.prompts import read_prompt as read_prompt
from minfer.effects.live.input_processing.prompts import wrong_type_error
from minfer.effects.setup.prepare import Setup
from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.store import Grammars
from minfer.lifecycle.arrive import rejection_reason
from minfer.records.request import POOLINGS, PromptOnly, Request, SamplingParams
from minfer.records.state import initial
from minfer.sampling.beam import MAX_CANDIDATES
from minfer.sampling.structured import StructuredOutputs
from minfer.values.checks import MAX_PRIORITY, is_number

Params = SamplingParams | Sequence[SamplingParams]
MAX_CLIENT_CHARS: Final = 512  # of a client's name


@frozen(kw_only=True)
class SchedulingHints:
    """What scheduling policies may use besides arrival. Raises RequestError for a wrong
    value.
    """

    priority: int = 0  # lower runs first
    client: str = ""  # the client's name
    session: str = ""  # what continues each other; used to choose among replicas
    deadline: float = math.inf  # seconds from arrival

    def __attrs_post_init__(self) -> None:
        if type(self.priority) is not int or abs(self.priority) >= MAX_PRIORITY:
            raise RequestError(f"priority must be a whole number, not {self.priority!r}")
        if not isinstance(self.client, str) or len(self.client) > MAX_CLIENT_CHARS:
            raise RequestError(
                f"client must be a string of up to {MAX_CLIENT_CHARS} characters"
            )
        if not is_number(self.deadline) or not self.deadline > 0:
            raise RequestError(
                f"deadline must be a number above 0, not {self.deadline!r}"
            )


def params_for(params: Params, count: int) -> list[SamplingParams]:
    """Returns one set of parameters for each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise wrong_type_error("sampling_params", "SamplingParams", params)
    if len(params) != count:
        counts = f"{len(params)} sampling_params for {count} prompts"
        raise RequestError(f"{counts}; give one, or one for each prompt")
    for i, value in enumerate(params):
        if not isinstance(value, SamplingParams):
            raise wrong_type_error(f"sampling_params[{i}]", "SamplingParams", value, i)
    return list(params)


def scheduling_hints_for(
    priority: int | Sequence[int] | None, count: int
) -> list[SchedulingHints]:
    """Returns a priority for each of `count` prompts, from one for all or one for each;
    lower runs first under the priority policy.
    """
    if priority is None:
        return [SchedulingHints()] * count
    if isinstance(priority, int):
        return [SchedulingHints(priority=priority)] * count
    if len(priority) != count:
        raise RequestError(
            f"{len(priority)} priorities for {count} prompts; give one for each"
        )
    hints = []
    for i, level in enumerate(priority):
        try:
            hints.append(SchedulingHints(priority=level))
        except RequestError as error:
            message = str(error).replace("priority", f"priority[{i}]", 1)
            raise RequestError(message, i) from None
    return hints


@frozen(kw_only=True)
class RequestInput:
    """What a request is made of, besides what it asks for."""

    setup: Setup
    prompt: TokenizedPrompt
    count: int  # requests made before it
    urgency: SchedulingHints = SchedulingHints()
    name: str = ""  # its id; else the count is
    # How often the prefix cache was reset, or its epoch: earlier cached blocks are not
    # found.
    resets: int = 0
    adapter: str = ""  # the digest of the adapter that it runs with, if any

    @property
    def id(self) -> str:
        """The request's id."""
        return self.name or str(self.count)

    @property
    def root(self) -> Key:
        """The key before the prompt's first block, which decides who shares its cached
        blocks.
        """
        salt = self.prompt.salt
        if not self.setup.args.enable_prefix_caching:
            salt = f"request {self.count}".encode()
        return cache_root(self.setup.fingerprint, self.resets, salt, self.adapter)


def cache_root(fingerprint: bytes, resets: int, salt: bytes, adapter: str) -> Key:
    """The key before the first block of prompts with a salt and an adapter ("": none),
    after `resets` resets.
    """
    key = root_key(fingerprint, salt, adapter)
    return root_key(key, f"reset {resets}".encode()) if resets else key


def make_request(
    request_input: RequestInput, params: SamplingParams, bad_words: BadWords = ()
) -> Request:
    """Returns the engine's request. Raises RequestError if it could never run.

    `bad_words` are those of the parameters as token ids.
    """
    setup = request_input.setup
    config = setup.config
    stops = _stops(setup, params)
    _check_params(setup, params)
    check_shape(config.vocab_size, params, stops, bad_words)
    prompt = tuple(request_input.prompt.ids)
    root = request_input.root
    request = Request(
        id=request_input.id,
        prompt=prompt,
        max_tokens=_max_output_tokens(setup, len(prompt), params),
        prompt_only=PromptOnly() if params.max_tokens == 0 else None,
        n=params.samples,
        sampling=params,
        stop_ids=stops,
        bad_words=bad_words,
        seed=_seed(setup, request_input.count) if params.seed is None else params.seed,
        needs_host_mask=params.structured_outputs is not None and params.max_tokens != 0,
        priority=request_input.urgency.priority,
        client=request_input.urgency.client,
        deadline=float(request_input.urgency.deadline),
        adapter=request_input.adapter,
        root=root,
        keys=block_keys(root, prompt, config.block_size),
    )
    if reason := rejection_reason(config, initial(config), request):
        raise RequestError(reason)
    return request


def make_search(request_input: RequestInput, search: BeamSearchParams) -> SearchRequest:
    """Returns a beam search as one request; otherwise as `make_request`.

    All its rounds have the root key of a request of its prompt, made from the count
    where nothing is shared: so they find each other's KV.
    """
    setup = request_input.setup
    config, params, width = setup.config, search.sampling, search.beam_width
    stops = _stops(setup, params)
    _check_params(setup, params)
    _check_beams(setup, width, len(stops))
    prompt = tuple(request_input.prompt.ids)
    request = SearchRequest(
        id=request_input.id,
        prompt=prompt,
        max_tokens=_max_output_tokens(setup, len(prompt), params, width),
        n=params.n,
        sampling=params,
        stop_ids=stops,
        priority=request_input.urgency.priority,
        client=request_input.urgency.client,
        deadline=float(request_input.urgency.deadline),
        adapter=request_input.adapter,
        root=request_input.root,
        width=width,
        search_params=search.search_params,
        block_size=config.block_size,
    )
    if reason := rejection_reason(config, initial(config), evolve(request, n=1)):
        raise RequestError(reason)
    return request


def _stops(setup: Setup, params: SamplingParams) -> frozenset[int]:
    """Returns the token ids that end a sample."""
    stops = frozenset(params.stop_token_ids)
    return stops if params.ignore_eos else stops | setup.stop_ids


def make_pooled_request(request_input: RequestInput, pooling: str) -> Request:
    """Returns the engine's request for a prompt as a vector; otherwise as
    `make_request`.
    """
    if pooling not in POOLINGS:
        names = " or ".join(map(repr, POOLINGS))
        raise RequestError(f"pooling must be {names}, not {pooling!r}", param="pooling")
    setup = request_input.setup
    config = setup.config
    prompt = tuple(request_input.prompt.ids)
    _check_prompt(setup, len(prompt))
    root = request_input.root
    request = Request(
        id=request_input.id,
        prompt=prompt,
        prompt_only=PromptOnly(pooling),
        priority=request_input.urgency.priority,
        client=request_input.urgency.client,
        deadline=float(request_input.urgency.deadline),
        adapter=request_input.adapter,
        root=root,
        keys=block_keys(root, prompt, config.block_size),
    )
    if reason := rejection_reason(config, initial(config), request):
        raise RequestError(reason)
    return request


def check_constraint(grammars: Grammars, constraint: StructuredOutputs) -> None:
    """Compile a constraint, unless it was. Raises RequestError if that is impossible."""
    try:
        grammars.get(constraint)
    except GrammarError as error:
        message = str(error) if error.param else f"{constraint.param}: {error}"
        raise RequestError(message, param=constraint.param) from None


def _check_prompt(setup: Setup, length: int) -> None:
    """Raise TooLongError for a prompt that does not fit, even without output."""
    config = setup.config
    _check_context(setup, length, output=False)
    needed_pages = config.most_pages(blocks_for(length + 1, config.block_size))
    if needed_pages > config.num_blocks:
        raise TooLongError(
            f"the prompt ({length} tokens) needs {needed_pages} KV blocks of "
            f"{config.block_size} tokens; the cache has {config.num_blocks}: shorten the "
            "prompt, or enlarge the cache (kv_cache_memory_bytes)"
        )


def _check_context(setup: Setup, length: int, *, output: bool) -> None:
    model_max_len = setup.spec.max_position_embeddings
    check_prompt(length, setup.config.max_model_len, model_max_len, output=output)


def _check_params(setup: Setup, params: SamplingParams) -> None:
    """Raise RequestError for what this model or executor cannot do."""
    vocab_size = setup.config.vocab_size
    largest = max(params.stop_token_ids, default=0)
    if largest >= vocab_size:
        reason = f"stop_token_ids: {largest} is outside the vocabulary; ids are from 0 to"
        raise RequestError(f"{reason} {vocab_size - 1}", param="stop_token_ids")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > setup.args.max_logprobs:
            reason = f"{name}: must be at most {setup.args.max_logprobs} here, not"
            raise RequestError(f"{reason} {getattr(params, name)}", param=name)
    if params.stop and not params.detokenize:
        reason = "stop: stop strings are found in text; leave detokenize=False out"
        raise RequestError(reason, param="stop")
    if params.structured_outputs is not None:
        # Together with these no token at all might be allowed.
        conflicting = {
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": params.bad_words,
        }
        for name, value in conflicting.items():
            if value:
                reason = (
                    f"{name}: cannot be combined with structured_outputs; leave it out"
                )
                raise RequestError(reason, param=name)
    if setup.args.executor == "torch":
        return
    scores = {
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "best_of": params.chooses,
    }
    for field, is_set in scores.items():
        if is_set:
            reason = (
                f"{field}: the {setup.args.executor} executor has no model that could"
            )
            raise RequestError(
                f"{reason} say how likely a token is; leave it out", 0, field
            )


def _check_beams(setup: Setup, width: int, num_stop_ids: int) -> None:
    """Raise RequestError for a search that is too wide."""
    max_beams = setup.config.max_num_seqs
    if width > max_beams:
        reason = (
            f"{width} beams need as many sequences at once; max_num_seqs is {max_beams}"
        )
        raise RequestError(reason, param="n")
    if width + num_stop_ids > MAX_CANDIDATES:
        max_beams = MAX_CANDIDATES - num_stop_ids
        reason = (
            f"{width} beams are too many where {num_stop_ids} token ids end a sequence"
        )
        raise RequestError(f"{reason}; at most {max_beams} can be searched", param="n")


def _max_output_tokens(
    setup: Setup, length: int, params: SamplingParams, beams: int = 1
) -> int:
    """Returns the most output tokens after a prompt of `length`, for `beams` beams that
    share the cache. Raises TooLongError if none fits.
    """
    if params.max_tokens == 0:
        _check_prompt(setup, length)
        return 0
    config = setup.config
    pages = _pages_per_beam(setup, beams)
    _check_context(setup, length, output=True)
    # With windows in all layers, a sequence can be longer than the cache.
    max_blocks = blocks_for(config.max_model_len, config.block_size)
    blocks = bisect_right(range(1, max_blocks + 1), pages, key=config.most_pages)
    slots = blocks * config.block_size + 1  # the last token needs no slot
    max_tokens = max(
        1, min(config.max_model_len - length, params.max_tokens or slots - length)
    )
    needed_blocks = blocks_for(length + max_tokens, config.block_size)
    if needed_blocks > blocks:
        cache_size = f"the cache has {config.num_blocks}"
        if beams > 1:
            cache_size += f", of which each of {beams} beams may take {pages}"
        pages = config.most_pages(needed_blocks)
        raise TooLongError(
            f"prompt ({length} tokens) and output (up to {max_tokens}) need {pages} KV "
            f"blocks of {config.block_size} tokens; {cache_size}: shorten the prompt, "
            f"lower max_tokens, or enlarge the cache (kv_cache_memory_bytes)"
        )
    return max_tokens


def _pages_per_beam(setup: Setup, beams: int) -> int:
    """Returns the pages that each of `beams` beams may take, so that all of them can run
    at once even if they share nothing.
    """
    config = setup.config
    spare = max(1, config.watermark) if beams > 1 else 0
    return (config.num_blocks - spare) // max(1, beams)


def _seed(setup: Setup, count: int) -> int:
    """Returns a seed derived from the engine's, for the request after `count` others: 63
    bits.
    """
    derived = hashlib.sha256(f"{setup.args.seed}/{count}".encode()).digest()[:8]
    return int.from_bytes(derived, "little") >> 1
