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
from minfer.effects.live.input_processing.prompts import wrong_kind
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
MAX_CLIENT: Final = 512  # characters of a client's name


@frozen(kw_only=True)
class Urgency:
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
        if not isinstance(self.client, str) or len(self.client) > MAX_CLIENT:
            raise RequestError(
                f"client must be a string of up to {MAX_CLIENT} characters"
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
        raise wrong_kind("sampling_params", "SamplingParams", params)
    if len(params) != count:
        given = f"{len(params)} sampling_params for {count} prompts"
        raise RequestError(f"{given}; give one, or one for each prompt")
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise wrong_kind(f"sampling_params[{i}]", "SamplingParams", one, i)
    return list(params)


def urgencies_for(priority: Sequence[int] | None, count: int) -> list[Urgency]:
    """Returns a priority for each of `count` prompts; lower runs first under the priority
    policy.
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
            named = str(error).replace("priority", f"priority[{i}]", 1)
            raise RequestError(named, i) from None
    return found


@frozen(kw_only=True)
class RequestInput:
    """What a request is made of, besides what it asks for."""

    setup: Setup
    prompt: TokenizedPrompt
    count: int  # requests made before it
    urgency: Urgency = Urgency()
    name: str = ""  # its id; else the count is
    # How often the prefix cache was reset, or its epoch: earlier cached blocks are not
    # found.
    resets: int = 0

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
        made = root_key(self.setup.fingerprint, salt)
        return root_key(made, f"reset {self.resets}".encode()) if self.resets else made


def make_request(
    given: RequestInput, params: SamplingParams, bad_words: BadWords = ()
) -> Request:
    """Returns the engine's request. Raises RequestError if it could never run.

    `bad_words` are those of the parameters as token ids.
    """
    setup = given.setup
    config = setup.config
    stops = _stops(setup, params)
    _check_params(setup, params)
    check_shape(config.vocab_size, params, stops, bad_words)
    prompt = tuple(given.prompt.ids)
    root = given.root
    request = Request(
        id=given.id,
        prompt=prompt,
        max_tokens=_max_output_tokens(setup, len(prompt), params),
        prompt_only=PromptOnly() if params.max_tokens == 0 else None,
        n=params.samples,
        sampling=params,
        stop_ids=stops,
        bad_words=bad_words,
        seed=_seed(setup, given.count) if params.seed is None else params.seed,
        needs_host_mask=params.structured_outputs is not None and params.max_tokens != 0,
        priority=given.urgency.priority,
        client=given.urgency.client,
        deadline=float(given.urgency.deadline),
        root=root,
        keys=block_keys(root, prompt, config.block_size),
    )
    if why := rejection_reason(config, initial(config), request):
        raise RequestError(why)
    return request


def make_search(given: RequestInput, search: BeamSearchParams) -> SearchRequest:
    """Returns a beam search as one request; otherwise as `make_request`.

    All its rounds have the root key of a request of its prompt, made from the count
    where nothing is shared: so they find each other's KV.
    """
    setup = given.setup
    config, params, width = setup.config, search.sampling, search.beam_width
    stops = _stops(setup, params)
    _check_params(setup, params)
    _check_beams(setup, width, len(stops))
    prompt = tuple(given.prompt.ids)
    request = SearchRequest(
        id=given.id,
        prompt=prompt,
        max_tokens=_max_output_tokens(setup, len(prompt), params, width),
        n=params.n,
        sampling=params,
        stop_ids=stops,
        priority=given.urgency.priority,
        client=given.urgency.client,
        deadline=float(given.urgency.deadline),
        root=given.root,
        width=width,
        how=search.how,
        block_size=config.block_size,
    )
    if why := rejection_reason(config, initial(config), evolve(request, n=1)):
        raise RequestError(why)
    return request


def _stops(setup: Setup, params: SamplingParams) -> frozenset[int]:
    """Returns the token ids that end a sample."""
    stops = frozenset(params.stop_token_ids)
    return stops if params.ignore_eos else stops | setup.stop_ids


def make_pooled_request(given: RequestInput, pooling: str) -> Request:
    """Returns the engine's request for a prompt as a vector; otherwise as
    `make_request`.
    """
    if pooling not in POOLINGS:
        known = " or ".join(map(repr, POOLINGS))
        raise RequestError(f"pooling must be {known}, not {pooling!r}", param="pooling")
    setup = given.setup
    config = setup.config
    prompt = tuple(given.prompt.ids)
    _check_prompt(setup, len(prompt))
    root = given.root
    request = Request(
        id=given.id,
        prompt=prompt,
        prompt_only=PromptOnly(pooling),
        priority=given.urgency.priority,
        client=given.urgency.client,
        deadline=float(given.urgency.deadline),
        root=root,
        keys=block_keys(root, prompt, config.block_size),
    )
    if why := rejection_reason(config, initial(config), request):
        raise RequestError(why)
    return request


def check_constraint(grammars: Grammars, constraint: StructuredOutputs) -> None:
    """Compile a constraint, unless it was. Raises RequestError if that is impossible."""
    try:
        grammars.get(constraint)
    except GrammarError as error:
        named = str(error) if error.param else f"{constraint.param}: {error}"
        raise RequestError(named, param=constraint.param) from None


def _check_prompt(setup: Setup, length: int) -> None:
    """Raise TooLongError for a prompt that does not fit, even without output."""
    config = setup.config
    _check_context(setup, length, output=False)
    needs = config.most_pages(blocks_for(length + 1, config.block_size))
    if needs > config.num_blocks:
        raise TooLongError(
            f"the prompt ({length} tokens) needs {needs} KV blocks of "
            f"{config.block_size} tokens; the cache has {config.num_blocks}: shorten the "
            "prompt, or enlarge the cache (kv_cache_memory_bytes)"
        )


def _check_context(setup: Setup, length: int, *, output: bool) -> None:
    able = setup.spec.max_position_embeddings
    check_prompt(length, setup.config.max_model_len, able, output=output)


def _check_params(setup: Setup, params: SamplingParams) -> None:
    """Raise RequestError for what this model or executor cannot do."""
    vocab_size = setup.config.vocab_size
    largest = max(params.stop_token_ids, default=0)
    if largest >= vocab_size:
        why = f"stop_token_ids: {largest} is outside the vocabulary; ids are from 0 to"
        raise RequestError(f"{why} {vocab_size - 1}", param="stop_token_ids")
    if params.structured_outputs is not None:
        # Together with these no token at all might be allowed.
        beside = {
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": params.bad_words,
        }
        for name, value in beside.items():
            if value:
                why = f"{name}: cannot be combined with structured_outputs; leave it out"
                raise RequestError(why, param=name)
    if setup.args.executor == "torch":
        return
    by_field = {
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "best_of": params.chooses,
    }
    for field, is_set in by_field.items():
        if is_set:
            why = f"{field}: the {setup.args.executor} executor has no model that could"
            raise RequestError(f"{why} say how likely a token is; leave it out", 0, field)


def _check_beams(setup: Setup, width: int, stop_ids: int) -> None:
    """Raise RequestError for a search that is too wide."""
    most = setup.config.max_num_seqs
    if width > most:
        why = f"{width} beams need as many sequences at once; max_num_seqs is {most}"
        raise RequestError(why, param="n")
    if width + stop_ids > MAX_CANDIDATES:
        most = MAX_CANDIDATES - stop_ids
        why = f"{width} beams are too many where {stop_ids} token ids end a sequence"
        raise RequestError(f"{why}; at most {most} can be searched", param="n")


def _max_output_tokens(
    setup: Setup, length: int, params: SamplingParams, beams: int = 1
) -> int:
    """Returns the most output tokens after a prompt of `length`, for so many beams that
    share the cache. Raises TooLongError if none fits.
    """
    if params.max_tokens == 0:
        _check_prompt(setup, length)
        return 0
    config = setup.config
    pages = _pages_per_beam(setup, beams)
    _check_context(setup, length, output=True)
    # With windows in all layers, a sequence can be longer than the cache.
    longest = blocks_for(config.max_model_len, config.block_size)
    blocks = bisect_right(range(1, longest + 1), pages, key=config.most_pages)
    slots = blocks * config.block_size + 1  # the last token needs no slot
    most = max(1, min(config.max_model_len - length, params.max_tokens or slots - length))
    needs = blocks_for(length + most, config.block_size)
    if needs > blocks:
        has = f"the cache has {config.num_blocks}"
        if beams > 1:
            has += f", of which each of {beams} beams may take {pages}"
        pages = config.most_pages(needs)
        raise TooLongError(
            f"prompt ({length} tokens) and output (up to {most}) need {pages} KV blocks "
            f"of {config.block_size} tokens; {has}: shorten the prompt, lower "
            f"max_tokens, or enlarge the cache (kv_cache_memory_bytes)"
        )
    return most


def _pages_per_beam(setup: Setup, beams: int) -> int:
    """Returns the pages that each of so many beams may take, so that all of them can run
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
