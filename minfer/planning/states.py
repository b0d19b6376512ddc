"""Which states of recurrent layers are kept, and from which one a row starts: a policy.

Theory. Recurrent layers (gated delta nets, Mamba, short convolutions) have one state per
sequence, which each token changes; a prefix can be hit only after a position at which the
state was kept. A state is as large as the KV of hundreds or thousands of tokens, so only
those are kept that a later prompt is likely to start from:

    branch             the end of the blocks that a prompt shares with earlier ones, if no
                       state was kept there: a second prompt differs from the first after
                       them, and a third is likely to. As lengths of shared prefixes vary,
                       a few states shortly before the branch are kept, too
    end of a prompt    the last block boundary at which an equal prompt can start; if the
                       blocks of a resumed request are pushed to another engine, also that
                       of the prompt without the output so far. Where no prompt starts
                       with another's blocks (`every_prompt` is off), only for the
                       further samples of its request
    stride             where a long prompt is cut into chunks anyway, at least
                       `stride_blocks` apart
    checkpoint         in decode, after every `decode_stride_blocks` blocks; it replaces
                       the checkpoint before it. So the last one is near the end of an
                       answer, after which the next turn of a conversation starts

*Under pressure*, when too few pages are free for one more state, something is evicted for
each state. Then only these are kept: branches without the states before them,
checkpoints, and the end of a prompt if no checkpoint follows it, or if other samples of
the request or another engine will start there.

The position of a kept state is a multiple of the block size; `RowStates.save_at` is the
next one of a row. A prefill chunk of `inside_from` inputs or more may go on after one
such position: the executor keeps that state while it computes the chunk, and no
checkpoint is kept at the chunk's end. A shorter chunk ends at the position: for a branch
and for the end of a prompt it is cut, which costs a step; for a stride a chunk that ends
anyway ends at its last block boundary instead.

A step saves at most `max_saves` states, because all its rows wait for the copies. If more
are due, the others are skipped; the next checkpoint of a skipped row is due one stride
later. States in prompts are saved first, because they are due only once, and among them
those that other samples or another engine wait for; then the checkpoints of the rows
whose last saved state is the oldest.

A kept state is a child of its block in the prefix index (`minfer.blocks.prefix`): it is
evicted like a block, and before its own block. Kept states take at most `max_share` of
the pool. If they have that share, or under pressure, a row drops one of its own earlier
states for its next one, if no other sequence uses it.
"""

from typing import Final

from minfer.blocks.keys import Key, group_key
from minfer.blocks.pool import Pool, PoolChange
from minfer.blocks.prefix import ROOT, Index, node_of
from minfer.records.config import EngineConfig
from minfer.records.request import Request
from minfer.records.sequence import NEVER, RowStates, Running, Sequence, edited
from minfer.records.state import EngineState
from minfer.values.record import evolve

BRANCH_STATES: Final = 3  # kept for a branch: one at it, the others before it
BRANCH_SHARE: Final = 16  # the distance between them is this part of the shared blocks


def state_key(config: EngineConfig, content: Key) -> Key:
    """The key of the state after the block with this content."""
    return group_key(content, len(config.block_groups))


def block_before_state(config: EngineConfig, content: Key) -> Key:
    """The key of the block with this content in the group without a window: the parent of
    the state that is kept after it. ROOT if all groups have a window.
    """
    group = config.full_group
    return ROOT if group is None else group_key(content, group)


def most_state_pages(config: EngineConfig) -> int:
    """The pages that kept states take, at most; if these are fewer than those of one
    state, none is kept.
    """
    return int(config.states.max_share * config.num_blocks)


def max_saves(config: EngineConfig) -> int:
    """The states that one step saves, at most."""
    return max(1, config.states.max_saved_pages // config.state_pages)


def most_urgent_first(run: Running, due: list[int]) -> list[int]:
    """The rows of `run` whose states are to be saved, as indices `due`, in order of
    urgency.
    """

    def urgency(i: int) -> tuple[bool, bool, int]:
        states, request = run.chains[i].states, run.seqs[i].request
        is_awaited = request.n > 1 or _is_pushed(request)
        in_prompt = states.save_at < run.num_known_at_admission[i]
        is_next = in_prompt and is_awaited
        return not in_prompt, not is_next, states.last - states.save_at

    return sorted(due, key=urgency)


def is_pressed(config: EngineConfig, pool: Pool | PoolChange) -> bool:
    """Whether no state can be kept without evicting something."""
    return pool.free < config.state_pages


def next_save(
    config: EngineConfig,
    seq: Sequence,
    states: RowStates,
    position: int,
    last_index: int,
    *,
    pressed: bool,
) -> int:
    """The first position after `position` at which the state of a running sequence is to
    be kept, or NEVER; `pressed`: under pressure.
    """
    few = most_state_pages(config) < config.state_pages
    # The blocks of a request that computes all of its prompt are not published.
    if few or seq.request.recomputes_prompt:
        return NEVER
    size, stride = config.block_size, config.states.decode_stride_blocks
    block, end = position // size, (len(seq.history) - 1) // size
    checkpoint = end + max(1, (block - end) // stride + 1) * stride if stride else end
    has_checkpoint = end < checkpoint and checkpoint * size <= last_index
    points = [checkpoint] if has_checkpoint else []
    if block < end:
        points += _branch_points(states, pressed=pressed)
        if _ends_are_kept(config, seq.request, pressed=pressed and has_checkpoint):
            points.append(end)
        if _is_pushed(seq.request):  # a resumed request has further tokens
            points.append((len(seq.request.prompt) - 1) // size)
    following = min([point for point in points if point > block], default=NEVER)
    return following * size if following < NEVER else NEVER


def _branch_points(states: RowStates, *, pressed: bool) -> list[int]:
    """The numbers of blocks after which states are kept for other prompts that share
    these blocks.
    """
    apart = max(1, states.shared // BRANCH_SHARE)
    num_states = 1 if pressed else BRANCH_STATES
    return [states.shared - apart * number for number in range(num_states)]


def _ends_are_kept(config: EngineConfig, request: Request, *, pressed: bool) -> bool:
    """Whether the state at the end of a prompt is kept; `pressed`: under pressure, and a
    checkpoint follows.
    """
    if request.prompt_only is not None:
        return False
    return request.n > 1 or (config.states.every_prompt and not pressed)


def _is_pushed(request: Request) -> bool:
    """Whether blocks of a request are pushed to another engine."""
    return request.kv_transfer is not None and bool(request.kv_transfer.push_to)


def bound_chunk(
    config: EngineConfig, state: EngineState, run: Running, i: int, inputs: int
) -> tuple[int, Running]:
    """How many of `inputs` prefill tokens the row at `i` of `run` takes: up to the
    position where its state is to be kept, or more if the state is kept inside the chunk;
    and `run`, with that position.
    """
    size, start, states = config.block_size, run.scheduled[i], run.chains[i].states
    save_at = states.save_at
    if start + inputs >= save_at:
        goes_on = _may_be_inside(config, inputs) and (
            _following_save(config, state, run, i) > start + inputs
        )
        return inputs if goes_on else save_at - start, run
    stride = config.states.stride_blocks * size
    end = (start + inputs) // size * size
    is_last = start + inputs >= run.num_known_at_admission[i]
    far = stride and end > start and end - states.last >= stride
    if is_last or not far or save_at == NEVER or not _has_free_pages(config, state):
        return inputs, run
    chain = evolve(run.chains[i], states=evolve(states, save_at=end))
    return end - start, edited(run, chains={i: chain})


def _may_be_inside(config: EngineConfig, inputs: int) -> bool:
    """Whether a state may be kept inside a chunk of this many inputs."""
    return 0 < config.states.inside_from <= inputs


def _following_save(
    config: EngineConfig, state: EngineState, run: Running, i: int
) -> int:
    """The position in the prompt, after `save_at`, at which the state of the row at `i`
    is to be kept next, or NEVER. A checkpoint right after the prompt is left out.
    """
    states, pressed = run.chains[i].states, is_pressed(config, state.blocks.pool)
    last_index = run.last_index[i]
    following = next_save(
        config, run.seqs[i], states, states.save_at, last_index, pressed=pressed
    )
    return following if following < run.num_known_at_admission[i] else NEVER


def _has_free_pages(config: EngineConfig, state: EngineState) -> bool:
    """Whether a state can be kept without evicting anything."""
    reserve = len(state.running) * config.block_pages
    kept = state.blocks.prefix.state_pages + config.state_pages
    free = state.blocks.free >= reserve + config.state_pages
    return free and kept <= most_state_pages(config)


def droppable(prefix: Index, states: RowStates) -> Key:
    """The key of the first kept state of a row that it may drop for a later one, or ROOT:
    one that nothing holds, and from which no other sequence seems to have continued.
    """
    for key in states.kept:
        node = node_of(prefix, key)
        if node is None or node.users:
            continue
        block = node_of(prefix, node.parent)
        # The state itself, and the row's own next block.
        if block is None or block.children <= 2:
            return key
    return ROOT
