"""Tiers: KV blocks in host memory and in the external store, under the device's pool.

Theory. A published block is a value with a content key, so a tier is an index of keys
over pages of its own. Blocks move between the device and a tier by *transfers*, beside
the steps: a transfer reads pages whose content is committed, and writes pages that nobody
reads, so it needs no order among the plans, and no step waits for it. Until the executor
reports its end (`Moved`, or `Lost`), what it reads is held, and what it writes belongs to
it alone.

    store   a block of the device is copied to a tier: once it is published, so that its
            eviction from the device costs nothing (store.py)
    load    blocks of host memory are copied to pages of the device, for a waiting
            sequence whose prefix goes on there (planning/load.py). It is passed over
            until the end of the transfer; then it is admitted with a hit
    fetch   the same, from the external store

**Host memory** is the engine's own. Its pages and their order of eviction are in the
state (`Tiers.host`), so what is there is known, and a block is found or it is not.

**The external store** owns its pages, and other engines use it too: a folder of files, or
the memory of engines that blocks are pushed to. The engine asks it by content key, and
the state has keys only:

    external_keys    blocks that the engine believes the store has: those that it stored,
                     and those that the sender of a request says are there
                     (`KvTransfer.num_stored_blocks`). The oldest are forgotten beyond
                     `max_known_keys`. Only these are fetched
    external_queue   blocks that the engine owes to the store: published, but not stored
                     yet. `host_queue` is the same for host memory
    push_keys        blocks that are owed to another engine (`KvTransfer.push_to`), if the
                     store is `push_only`: then these are stored once they are published,
                     and no others. They go to that engine, and cannot be fetched again

A belief may be wrong, as the store evicts what it likes. If a block is not there, the
whole fetch is `Lost`: its keys are believed no more, and the sequence computes the blocks
(finish.py). What a request wants pushed is stored again, even if the store is believed to
have it, or a transfer to another engine moves it just now. If a store fails, the queue
behind it is dropped: it would fail, too.
"""
