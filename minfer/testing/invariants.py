"""The executable specification: what must hold of every state of the engine.

What must hold of turns and of whole runs is in `minfer.testing.ledger`, which calls
`check` after each.
"""

from collections import Counter
from itertools import chain

from minfer.blocks.keys import Key, extend_keys, group_key
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import ROOT, Node, PrefixIndex, every_node, node_of, pages_of
from minfer.blocks.window import outside
from minfer.lifecycle.committed import committed
from minfer.lifecycle.publish import held_keys
from minfer.records.config import EngineConfig
from minfer.records.policy import Policy
from minfer.records.sequence import COLUMNS, Running
from minfer.records.state import EngineState
from minfer.records.tiers import TransferKind
from minfer.testing.accounts import held_blocks
from minfer.testing.kept_states import check_states
from minfer.testing.law import InvariantError as InvariantError
from minfer.testing.law import require as require
from minfer.values.tickets import words_of


def may_defer(config: EngineConfig) -> bool:
    """Whether the policy may defer clients at all."""
    method = getattr(type(config.policy), "defer", None)
    return method is not Policy.defer


def check(config: EngineConfig, state: EngineState) -> None:
    """Raise InvariantError unless the state is one that the engine may be in."""
    _check_partition(config, state)
    _check_forest(state.blocks.prefix, _holders(config, state))
    check_states(config, state)
    check_tiers(config, state)
    _check_adapters(config, state)
    _check_columns(config, state)
    for i in range(len(state.running)):
        _check_sequence(config, state, i)
    _check_plans(config, state)
    _check_requests(state)
    if not state.requests and not state.inflight:
        _check_quiescence(state)


def free_pages(pool: Pool) -> list[int]:
    """All free pages, as the pool lists them."""
    return [
        *range(pool.fresh, pool.total),
        *pool.spare,
        *chain(*pool.freed.values()),
    ]


def private_pages(config: EngineConfig, run: Running, i: int) -> list[int]:
    """Pages that only the sequence at `i` uses."""
    seq_chain, pages = run.chains[i], list[int]()
    tables = run.tables[i]
    for g, (group, table) in enumerate(zip(config.block_groups, tables, strict=False)):
        blocks = range(seq_chain.sealed[g], -(-len(table) // group.pages))
        for block in held_blocks(config, group, blocks, seq_chain.low[g]):
            pages += table[block * group.pages : (block + 1) * group.pages]
    return [*pages, *tables[-1]] if config.state_group else pages


def _check_quiescence(state: EngineState) -> None:
    """Check that nothing is left of requests when all have ended.

    This follows from the other laws (conservation, fence, faults, refcount), which find
    errors sooner; it states their sum in one place.
    """
    idle = not (len(state.running) or state.waiting or state.fences or state.faults)
    held = state.blocks.live and not state.tiers.transfers
    require(idle and not held, "quiescence", "something is left over")


def _check_partition(config: EngineConfig, state: EngineState) -> None:
    """Check that every page is free, private to one owner, or published; and in one
    place only.
    """
    pool = state.blocks.pool
    run = state.running
    free = free_pages(pool)
    private = [private_pages(config, run, i) for i in range(len(run))]
    private += [[*fence.private] for fence in state.fences]
    private += [
        [*transfer.targets]
        for transfer in state.tiers.transfers
        if transfer.kind.to_device
    ]
    private += [[*save.pages] for plan in state.inflight for save in plan.saves]
    published = [node.pages for node in every_node(state.blocks.prefix).values()]
    places = Counter([*free, *chain(*private), *chain(*published)])
    require(max(places.values(), default=1) == 1, "partition", "a page is in two places")
    require(
        set(places) == set(range(pool.total)),
        "partition",
        "a page is lost or invented",
    )
    require(len(free) == pool.free, "partition", f"{len(free)} free, counted {pool.free}")


def _holders(config: EngineConfig, state: EngineState) -> list[Key]:
    """The published blocks of the device that something holds."""
    run, groups = state.running, range(len(config.block_groups))
    held = [held_keys(config, seq_chain, g) for seq_chain in run.chains for g in groups]
    held += [(seq_chain.states.origin,) for seq_chain in run.chains]
    held += [fence.published for fence in state.fences]
    held += [
        transfer.held_parents if transfer.kind.to_device else transfer.held_leaves
        for transfer in state.tiers.transfers
    ]
    return [*chain(*held)]


def _check_forest(prefix: PrefixIndex, holders: list[Key]) -> None:
    """Check that published blocks form a forest with true counts, whose idle leaves can
    be evicted.
    """
    nodes = every_node(prefix)
    parents = Counter(node.parent for node in nodes.values() if node.parent != ROOT)
    require(all(p in nodes for p in parents), "cache truth", "an ancestor was evicted")
    users, held = Counter[Key](), Counter[Key]()
    for key in holders:
        is_cached = key == ROOT or key in nodes
        require(is_cached, "refcount", f"{key.hex()} is held but not cached")
    if prefix.held is None:
        users = _users(nodes, holders)
    else:
        held.update(holders)
        require(dict(prefix.held) == held, "refcount", "holders are miscounted")
    for key, node in nodes.items():
        is_valid = node.children == parents[key]
        require(is_valid, "cache truth", "children are miscounted")
        counted = node.users + prefix.pinned.get(key, 0) == users[key]
        require(counted, "refcount", "users are miscounted")
        has_users = key not in prefix.pinned or node.users > 0
        require(has_users, "refcount", "a pinned block without users")
        listed = prefix.idle.get(node.last_use) == key
        is_leaf = not node.users and not node.children
        is_valid = listed == is_leaf or (key in held and is_leaf)
        require(is_valid, "evictable", "idle leaves are not as listed")
    live = sum(len(nodes[key].pages) for key in users)
    require(prefix.live == live, "refcount", "live pages are miscounted")
    cached = sum(len(node.pages) for node in nodes.values())
    require(prefix.cached == cached, "cache truth", "cached pages are miscounted")
    require(
        prefix.words == words_of(prefix.idle),
        "evictable",
        "tickets are not those of idle blocks",
    )
    num_listed = sum(prefix.idle.get(node.last_use) == key for key, node in nodes.items())
    require(len(prefix.idle) == num_listed, "evictable", "more is listed than is idle")
    for last_use in prefix.idle:
        require(0 <= last_use < prefix.next_use, "evictable", "a ticket is out of range")


def _users(nodes: dict[Key, Node], holders: list[Key]) -> Counter[Key]:
    """How many hold each block, or a block behind it through another child."""
    users = Counter[Key]()
    for key in holders:
        while key != ROOT:
            users[key] += 1
            if users[key] > 1:
                break
            key = nodes[key].parent
    return users


def check_tiers(config: EngineConfig, state: EngineState) -> None:
    """Raise InvariantError unless every page of the host tier is in one place, its index
    is a forest, and what is on its way is known.
    """
    tiers, host = state.tiers, state.tiers.host
    is_configured = (host is not None) == (config.host is not None)
    external = bool(
        tiers.external_keys
        or tiers.push_keys
        or tiers.transfers_of(TransferKind.STORE_TO_EXTERNAL)
    )
    is_configured = is_configured and (not external or config.external_store is not None)
    require(
        is_configured, "tiers", "a tier that the configuration lacks, or none that it has"
    )
    numbers = [transfer.number for transfer in tiers.transfers]
    ordered = numbers == sorted({*numbers}) and all(
        n < tiers.next_number for n in numbers
    )
    require(ordered, "tiers", f"transfers {numbers}, the next is {tiers.next_number}")
    require(
        tiers.loading <= set(state.requests),
        "tiers",
        "blocks for a request that has ended",
    )
    require(config.has_tiers or not tiers.transfers, "tiers", "transfers without a tier")
    for queue in (tiers.host_queue, tiers.external_queue):
        counted = len([*queue]) == len(queue) <= config.num_blocks
        require(counted, "tiers", f"{len(queue)} blocks wait to be stored")
    for tier, stores in (
        (config.host, tiers.transfers_of(TransferKind.STORE_TO_HOST)),
        (config.external_store, tiers.transfers_of(TransferKind.STORE_TO_EXTERNAL)),
    ):
        keys = [key for transfer in stores for key in transfer.keys]
        require(len(keys) == len({*keys}), "tiers", "a block is stored twice")
        moving = len(pages_of(state.blocks.prefix, keys))
        max_pages = tier.storing if tier is not None else 0
        require(moving <= max_pages, "tiers", f"{moving} pages are being stored")
    if host is None or config.host is None:
        return
    stores = tiers.transfers_of(TransferKind.STORE_TO_HOST)
    pool, published = host.pool, every_node(host.prefix).values()
    free = free_pages(pool)
    written = chain(*(transfer.targets for transfer in stores))
    places = Counter([*free, *written, *chain(*(node.pages for node in published))])
    one_place = max(places.values(), default=1) == 1
    require(one_place, "partition", "a page of the host tier is in two places")
    is_complete = set(places) == set(range(config.host.pages))
    require(is_complete, "partition", "a page of the host tier is lost")
    require(len(free) == pool.free, "partition", "free pages of the host tier")
    holders = [
        transfer.held_parents
        for transfer in tiers.transfers_of(TransferKind.STORE_TO_HOST)
    ]
    loads = tiers.transfers_of(TransferKind.LOAD_FROM_HOST)
    holders += [transfer.held_leaves for transfer in loads]
    _check_forest(host.prefix, [*chain(*holders)])


def _check_adapters(config: EngineConfig, state: EngineState) -> None:
    """Check that each adapter is in one slot, that every running sample's is there, and
    that those who use a slot are counted.
    """
    slots, run = state.adapters.slots, state.running
    require(len(slots) == config.adapter_slots, "adapters", f"{len(slots)} slots")
    present = [slot.adapter for slot in slots if slot.adapter]
    require(len(present) == len({*present}), "adapters", f"one is twice in {present}")
    users = Counter(seq.request.adapter for seq in run.seqs if seq.request.adapter)
    absent = users.keys() - {slot.adapter for slot in slots if not slot.loading}
    require(not absent, "adapters", f"{absent} are used, and in no slot")
    for slot in slots:
        counted = slot.users == (users[slot.adapter] if slot.adapter else 0)
        require(counted, "adapters", f"users of {slot} are miscounted")
        named = slot.adapter or not (slot.loading or slot.dropped or slot.passes)
        require(named, "adapters", f"{slot}, without an adapter")
        require(slot.last_use <= state.adapters.uses, "adapters", f"{slot}: last use")
    queue = state.waiting
    waiting = Counter(seq.request.adapter for seq in queue if seq.request.adapter)
    counted = dict(queue.adapters) == waiting
    counted = counted and queue.num_with_adapter == waiting.total()
    require(counted, "adapters", "waiting samples by adapter are miscounted")


def _check_columns(config: EngineConfig, state: EngineState) -> None:
    run = state.running
    lengths = {len(getattr(run, name)) for name in COLUMNS}
    require(len(lengths) == 1, "columns", lengths)
    places = [seq.place for seq in run.seqs]
    require(
        places == sorted(set(places)), "order", "running sequences are not in rank order"
    )
    rows = sorted([*run.rows, *state.free_rows])
    require(
        rows == list(range(config.max_num_seqs)), "rows", "a device row is lost or shared"
    )
    run_ids = {run_id for run_id in run.run_ids if run_id < state.next_run_id}
    require(len(run_ids) == len(run), "generations", "not unique, or from the future")
    in_prefill = any(
        start < base
        for start, base in zip(run.scheduled, run.num_known_at_admission, strict=True)
    )
    require(
        state.filling or not in_prefill,
        "filling",
        "inputs from the host are not looked for",
    )
    needs_mask = any(seq.request.needs_host_mask for seq in state.running.seqs)
    require(
        state.needs_host_mask or not needs_mask,
        "needs_host_mask",
        "a sample that may not run ahead is not looked for",
    )
    stops = frozenset().union(*(seq.request.stop_ids for seq in run.seqs))
    require(stops <= state.stops, "stops", "a stop id is not looked for")


def _check_sequence(config: EngineConfig, state: EngineState, i: int) -> None:
    """Check the sequence at `i`, column by column."""
    run, size = state.running, config.block_size
    tokens, num_computed = run.tokens(i, size), committed(config, state, i)
    require(run.ids[i] == run.seqs[i].id, "columns", "ids and records disagree")
    _check_tokens(run, i, tokens)
    last_index, scheduled = run.last_index[i], run.scheduled[i]
    is_valid = 0 <= num_computed < run.known[i] <= last_index + 1
    require(is_valid, "coverage", f"{num_computed} of {run.known[i]}")
    require(
        num_computed <= scheduled <= last_index, "coverage", "more is planned than may be"
    )
    fits = scheduled <= _capacity(config, run, i)
    require(fits, "coverage", "more is planned than the table holds")
    _check_windows(config, run, i, num_computed)
    _check_published(config, state, i, tokens, num_computed)
    _check_marks(config, run, i)
    _check_ahead(state, i)


def _check_tokens(run: Running, i: int, tokens: tuple[int, ...]) -> None:
    """Check that its tokens are as many as counted, and begin with its history."""
    history = run.seqs[i].history
    counted = len(tokens) == run.known[i] >= run.num_known_at_admission[i]
    require(counted, "coverage", "known tokens are miscounted")
    is_after = len(history) <= run.num_known_at_admission[i]
    require(is_after, "coverage", "a generation began before its history")
    require(tokens[: len(history)] == history, "history", "known tokens were rewritten")


def _check_published(
    config: EngineConfig,
    state: EngineState,
    i: int,
    tokens: tuple[int, ...],
    num_computed: int,
) -> None:
    """Check that its published blocks are computed, and can be found under the keys of
    its `tokens`, of which `num_computed` have KV.
    """
    run, size, prefix = state.running, config.block_size, state.blocks.prefix
    seq_chain, num_history = run.chains[i], len(run.seqs[i].history)
    computed = max(seq_chain.sealed) * size <= num_computed
    require(
        computed, "publish after write", f"{seq_chain.sealed} blocks at {num_computed}"
    )
    anew = run.seqs[i].request.recomputes_prompt
    held = [
        held_blocks(config, group, range(seq_chain.sealed[g]), seq_chain.low[g])
        for g, group in enumerate(config.block_groups)
    ]
    require(not (anew and any(held)), "computed anew", "others read what it may rewrite")
    keys = extend_keys((), run.seqs[i].request.root, tokens, size)
    require(
        keys[: len(seq_chain.keys)] == seq_chain.keys,
        "keys",
        "a key is not of its tokens",
    )
    require(
        len(seq_chain.keys) >= num_history // size,
        "keys",
        "a key of the history is missing",
    )
    leaf = ROOT
    for g, group in enumerate(config.block_groups):
        table, pages = run.tables[i][g], group.pages
        for block in held[g]:
            node = node_of(prefix, group_key(keys[block], g))
            own_pages = table[block * pages : (block + 1) * pages]
            same = node is not None and node.pages == own_pages
            require(same, "aliasing", f"{own_pages} is of another prefix")
        if seq_chain.sealed[g] and not group.window:
            leaf = group_key(keys[seq_chain.sealed[g] - 1], g)
    require(seq_chain.leaf == leaf, "leaf", seq_chain.leaf.hex())


def _check_windows(config: EngineConfig, run: Running, i: int, num_computed: int) -> None:
    """Check that blocks are released behind windows alone, `num_computed` positions
    having KV; and that where blocks are taken chunk by chunk, it has not many more than
    it reads.
    """
    seq_chain, size, held_pages = run.chains[i], config.block_size, list[int]()
    spec_config = config.speculation
    ahead = config.max_num_batched_tokens * 5 // 4
    max_inputs = 1 + (spec_config.drafts if spec_config else 0)
    ahead = max(ahead, max_inputs * (config.depth + 1))
    for g, group in enumerate(config.block_groups):
        table, low, pages = run.tables[i][g], seq_chain.low[g], group.pages
        sinks = group.sink_blocks(size)
        max_low = outside(num_computed, group.window, size)
        # Else a sink block has a twin: none is published.
        if seq_chain.sealed[g] >= sinks:
            max_low = min(max_low, seq_chain.sealed[g])
        require(low <= max_low, "window", f"{low} released at {num_computed}")
        held_pages += (*table[: min(low, sinks) * pages], *table[low * pages :])
        require(len(table) % pages == 0, "window", f"part of a block: {table}")
        if group.window and config.by_chunk:
            min_low = outside(num_computed - 2 * size, group.window, size)
            ends = num_computed + ahead + 2 * size
            is_valid = min_low <= low and len(table) // pages * size <= ends
            require(
                is_valid,
                "window",
                f"{low} to {len(table) // pages} held at {num_computed}",
            )
    require(len(set(held_pages)) == len(held_pages), "self-alias", held_pages)


def _capacity(config: EngineConfig, run: Running, i: int) -> int:
    """The positions that the tables of the sequence at `i` have room for."""
    pairs = zip(run.tables[i], config.block_groups, strict=False)
    return config.block_size * min(len(table) // group.pages for table, group in pairs)


def _check_marks(config: EngineConfig, run: Running, i: int) -> None:
    """Check the marks that find due work by one comparison: they must never be too
    late.
    """
    size = config.block_size
    grow_limit = min(run.last_index[i], _capacity(config, run, i))
    require(
        run.grow_at[i] <= grow_limit, "grow_at", f"{run.grow_at[i]} is past {grow_limit}"
    )
    sealable = max(len(run.chains[i].keys), run.num_known_at_admission[i] // size)
    publish_limit = min(run.last_index[i], (sealable + 1) * size) + 1
    require(
        run.publish_at[i] <= publish_limit,
        "publish_at",
        f"{run.publish_at[i]} is past {publish_limit}",
    )


def _check_ahead(state: EngineState, i: int) -> None:
    """Check that it is scheduled as far ahead of its known tokens as plans in flight take
    it.
    """
    run, run_id = state.running, state.running.run_ids[i]
    plans = [plan for plan in state.inflight if run_id in plan.run_ids]
    ahead = sum(plan.max_sampled_tokens[plan.run_ids.index(run_id)] for plan in plans)
    # it is never ahead: it only has its prompt
    no_output = not run.seqs[i].request.max_tokens
    if run.scheduled[i] >= run.num_known_at_admission[i]:
        is_valid = run.scheduled[i] == run.known[i] - 1 + ahead + no_output
        require(is_valid, "coverage", "tokens ahead miscounted")
    else:
        is_valid = not ahead and run.known[i] == run.num_known_at_admission[i]
        require(is_valid, "coverage", "sampled while filled")


def _check_plans(config: EngineConfig, state: EngineState) -> None:
    require(len(state.inflight) <= config.depth, "depth", len(state.inflight))
    steps = [plan.step for plan in state.inflight]
    require(steps == sorted(set(steps)), "depth", "plans in flight are out of order")
    require(
        all(f.until in steps for f in state.fences), "fence", "a fence outlived its plan"
    )
    for plan in state.inflight:
        columns = {
            len(column)
            for column in (
                plan.run_ids,
                plan.rows,
                plan.starts,
                plan.num_scheduled_tokens,
                plan.max_sampled_tokens,
            )
        }
        require(columns == {len(plan.run_ids)}, "plan", "columns of different lengths")
        require(0 < len(plan.run_ids) <= config.max_num_seqs, "budget", "rows")
        require(
            sum(plan.num_scheduled_tokens) <= config.max_num_batched_tokens,
            "budget",
            sum(plan.num_scheduled_tokens),
        )
        require(min(plan.num_scheduled_tokens) > 0, "budget", "a row without input")
        require(len(set(plan.rows)) == len(plan.rows), "plan", "a row is planned twice")


def _check_requests(state: EngineState) -> None:
    """Check that every sample waits, runs or has ended: exactly one of these."""
    sample_ids = [seq.id for seq in state.waiting] + list(state.running.ids)
    require(
        len(set(sample_ids)) == len(sample_ids),
        "conservation",
        "a sample is in two places",
    )
    require(
        len(state.waiting) == sum(1 for _ in state.waiting),
        "conservation",
        "the queue is miscounted",
    )
    counts = Counter(name for name, _ in sample_ids)
    expected = {name: live.samples - live.ended for name, live in state.requests.items()}
    require(counts == expected, "conservation", "a sample is lost")
    places = [seq.place for seq in state.waiting]
    require(places == sorted(places), "order", "the queue is not in order")
    for seq in (*state.waiting, *state.running.seqs):
        live = state.requests[seq.request.id]
        require(
            seq.place == live.place_of(seq.sample), "order", f"{seq.id} at {seq.place}"
        )
        require(seq.place[1] < state.arrivals, "order", f"{seq.id} is from the future")
        require(seq.arrived <= state.time, "time", f"{seq.id} came at {seq.arrived}")
    for seq in state.waiting:
        begins = seq.request.prompt + seq.request.output
        require(
            seq.history[: len(begins)] == begins, "history", f"{seq.id} was rewritten"
        )
        require(
            state.waiting.find(seq.place) is seq,
            "order",
            f"{seq.id} is not found in the queue",
        )
    sample_set = set(sample_ids)
    needs_mask = {
        seq.id
        for seq in (*state.waiting, *state.running.seqs)
        if seq.request.needs_host_mask
    }
    require(
        state.paused <= needs_mask, "paused", "a sample that has ended, or needs no mask"
    )
    for name, count in state.faults:
        require(name in sample_set and count > 0, "faults", f"{count} of {name}")
