"""Redacted journals: decisions replay, and they have no token ids.

Decisions depend on tokens in three ways only: which full blocks are equal, whether a
token ends its sequence, and whether ids are in range. So a token is written as 0; one
that ends its sequence as 1; and the last of each block as 32 bits of a keyed digest of
the block's content key, so that equal prefixes stay equal and different ones differ.
Without the secret, which is never written, a guessed text cannot be tested against the
journal. Two blocks that follow the same block agree by chance once in 2^32: replay then
hits where the run missed, and reports it. The root of a prompt, which a salt may make
different, is part of the first block's content key, and so of its mark: redacted prompts
have one root.

Clients and adapters are named by keyed digests too. Request ids, lengths, times and
priorities are kept; errors are left out. Of drafts and results only the numbers are kept
(proposed, accepted), on which decisions depend.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Final, cast

import attrs

from minfer.blocks.keys import DIGEST, TAIL, Key, Keys, block_keys, extend_keys
from minfer.journal.writing import as_written, beam_rows
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterFailed,
    AdapterLoaded,
    DropAdapter,
    Event,
    Executed,
    Failed,
    Finish,
    Propose,
    Submit,
)
from minfer.records.plan import Plan
from minfer.records.request import Request, SamplingParams
from minfer.records.state import EngineState
from minfer.records.token_logprobs import Logprobs, TokenLogprobs

STOP: Final = 1  # replaces a token that ends its sequence
_HIDDEN_ERROR: Final = "left out"  # instead of an error
_OUT_OF_RANGE: Final = 2**32 - 1  # a token id out of range


def redacted_config(config: EngineConfig) -> EngineConfig:
    """The configuration under which redacted events replay."""
    return attrs.evolve(config, vocab_size=_OUT_OF_RANGE)


def redacted(
    config: EngineConfig, state: EngineState, events: tuple[Event, ...], secret: bytes
) -> tuple[Event, ...]:
    """The events of a turn taken in `state`, without token ids."""
    out: list[Event] = []
    for event in cast(Iterable[Event], map(as_written, events)):
        match event:
            case Submit(request):
                out.append(Submit(redacted_request(config, request, secret)))
            case Executed(number):
                plan = next((p for p in state.inflight if p.step == number), None)
                out.append(_redact_results(config, state, plan, event, secret))
            case Failed(number):
                out.append(Failed(number))
            case Finish(error=str(why)) if why:
                out.append(attrs.evolve(event, error=_HIDDEN_ERROR))
            case AdapterLoaded(adapter, slot):
                out.append(AdapterLoaded(redacted_adapter(secret, adapter), slot))
            case AdapterFailed(adapter, slot):
                other = redacted_adapter(secret, adapter)
                out.append(AdapterFailed(other, slot, _HIDDEN_ERROR))
            case DropAdapter(adapter):
                out.append(DropAdapter(redacted_adapter(secret, adapter)))
            case Propose(tokens=tokens):
                out.append(attrs.evolve(event, tokens=_blank_tokens(config, tokens)))
            case _:
                out.append(event)
    return tuple(out)


def _keyed_digest(secret: bytes, data: bytes, size: int) -> bytes:
    return blake2b(data, key=secret, digest_size=size).digest()


def _mark(secret: bytes, key: Key) -> int:
    number = int.from_bytes(_keyed_digest(secret, key, 4), "little")
    return 2 + number % (_OUT_OF_RANGE - 2)


def redacted_root(secret: bytes) -> Key:
    """The key before all prompts' first blocks."""
    return _keyed_digest(secret, b"root", 32)


def redacted_client(secret: bytes, client: str) -> str:
    """Another name for a client; an empty one stays empty."""
    return client and _keyed_digest(secret, b"client" + client.encode(), 8).hex()


def redacted_adapter(secret: bytes, adapter: str) -> str:
    """Another name for an adapter; none stays none."""
    return adapter and _keyed_digest(secret, b"adapter" + adapter.encode(), 32).hex()


def redact_block(secret: bytes, key: Key, size: int) -> tuple[int, ...]:
    """The redacted tokens of the full block with this content key."""
    return (*[0] * (size - 1), _mark(secret, key))


def redact_tokens(
    secret: bytes, keys: Keys, start: int, end: int, size: int
) -> list[int]:
    """The redacted tokens at positions from `start` to `end`."""
    out = [0] * (end - start)
    for block in range(start // size, end // size):
        out[(block + 1) * size - 1 - start] = _mark(secret, keys[block])
    return out


def redacted_tail(secret: bytes, key: Key) -> Key:
    """Another key for a partial block; none for none."""
    return key and TAIL + _keyed_digest(secret, key, DIGEST)


def redacted_request(config: EngineConfig, request: Request, secret: bytes) -> Request:
    """A request without its token ids."""
    size, tokens = config.block_size, request.prompt + request.output
    keys = extend_keys(request.keys, request.root, tokens, size)
    redacted_tokens = redact_tokens(secret, keys, 0, len(tokens), size)
    cut = len(request.prompt)
    if request.largest >= config.vocab_size:
        redacted_tokens[0] = _OUT_OF_RANGE
    prompt, root = tuple(redacted_tokens[:cut]), redacted_root(secret)
    continuation = request.continuation
    if continuation.tail_keys is not None:
        before, whole = continuation.tail_keys
        tails = redacted_tail(secret, before), redacted_tail(secret, whole)
        continuation = attrs.evolve(continuation, tail_keys=tails)
    return attrs.evolve(
        request,
        prompt=prompt,
        output=tuple(redacted_tokens[cut:]),
        root=root,
        adapter=redacted_adapter(secret, request.adapter),
        seed=0,
        client=redacted_client(secret, request.client),
        keys=block_keys(root, prompt, size)[: len(request.keys)],
        # Scored prompts take more of a step's budget.
        sampling=SamplingParams(prompt_logprobs=request.sampling.prompt_logprobs),
        bad_words=(),
        continuation=continuation,
        stop_ids=frozenset({STOP}) if request.stop_ids else frozenset(),
    )


def _redact_results(
    config: EngineConfig,
    state: EngineState,
    plan: Plan | None,
    event: Executed,
    secret: bytes,
) -> Executed:
    try:
        sizes = [len(tokens) for tokens in event.yields]
        if plan is None or len(sizes) != len(plan.run_ids):
            return Executed(event.step, tuple((0,) * size for size in sizes))
        index_of = {run_id: i for i, run_id in enumerate(state.running.run_ids)}
        redacted_tokens = [
            tuple(_redact_yield(config, state, index_of.get(run_id), tokens, secret))
            for run_id, tokens in zip(plan.run_ids, event.yields, strict=True)
        ]
    except TypeError:  # invalid results: the step failed
        return Executed(event.step, ())
    is_valid = all(type(tokens) is tuple for tokens in event.yields)
    if not is_valid:
        return Executed(event.step, ())
    logprobs = _redact_logprobs(config, state, plan, event, secret)
    return Executed(event.step, tuple(redacted_tokens), logprobs=logprobs)


def _redact_logprobs(
    config: EngineConfig, state: EngineState, plan: Plan, event: Executed, secret: bytes
) -> Logprobs:
    """The log-probabilities of beams of searches, with each token redacted as the next
    one of its beam.
    """
    beams = frozenset(beam_rows(state, plan)) if event.logprobs else frozenset[int]()
    if not beams:
        return ()
    index_of = {run_id: i for i, run_id in enumerate(state.running.run_ids)}

    def redacted_logprobs(row: int, entry: TokenLogprobs) -> TokenLogprobs:
        i = index_of.get(plan.run_ids[row])
        ids = (entry.token, *entry.likeliest)
        groups = (_redact_yield(config, state, i, (token,), secret) for token in ids)
        token, *likeliest = chain.from_iterable(groups)
        return attrs.evolve(entry, token=token, likeliest=tuple(likeliest))

    return tuple(
        tuple(redacted_logprobs(i, entry) for entry in entries) if i in beams else ()
        for i, entries in enumerate(event.logprobs)
    )


def _blank_tokens(config: EngineConfig, tokens: Sequence[int]) -> tuple[int, ...]:
    """The same number of tokens, one of them out of range if any was."""
    out = [0] * len(tokens)
    if min(tokens, default=0) < 0 or max(tokens, default=0) >= config.vocab_size:
        out[0] = _OUT_OF_RANGE
    return tuple(out)


def _redact_yield(
    config: EngineConfig,
    state: EngineState,
    i: int | None,
    tokens: Sequence[int],
    secret: bytes,
) -> list[int]:
    run, size = state.running, config.block_size
    redacted_tokens = [0] * len(tokens)
    if min(tokens, default=0) < 0 or max(tokens, default=0) >= config.vocab_size:
        return [*_blank_tokens(config, tokens)]
    if i is not None and tokens:
        begin, stops = run.known[i], run.seqs[i].request.stop_ids
        if begin // size != (begin + len(tokens)) // size:
            known_tokens = (*run.tokens(i, size), *tokens)
            root, old_keys = run.seqs[i].request.root, run.chains[i].keys[:]
            keys = extend_keys(old_keys, root, known_tokens, size)
            redacted_tokens = redact_tokens(secret, keys, begin, len(known_tokens), size)
        if not stops.isdisjoint(tokens):
            redacted_tokens = [
                STOP if token in stops else redacted_token
                for token, redacted_token in zip(tokens, redacted_tokens, strict=True)
            ]
    return redacted_tokens
