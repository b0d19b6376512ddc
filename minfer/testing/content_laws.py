"""The specification of shared content: a key leads to exactly the tokens that were
computed into its block.

Keys are digests, and a key made from the wrong tokens finds the wrong KV. So the tokens
of every published block, all up to its end, are kept, and compared with those of every
reader.
"""

from attrs import define, field, frozen

from minfer.blocks.keys import Key, Keys, block_keys, group_key, tail_keys
from minfer.blocks.prefix import Pages, every_node
from minfer.records.config import CacheGroup
from minfer.records.request import Request
from minfer.records.state import EngineState
from minfer.testing.accounts import Seat, held_blocks
from minfer.testing.books import Books
from minfer.testing.invariants import InvariantError, require


@frozen
class CachedContent:
    """The content of a published block."""

    key: Key
    root: Key  # the key before the first block
    adapter: str  # with which it was computed, if any
    tokens: tuple[int, ...]  # all up to the end of the block's content


@define(eq=False)
class BlockContents:
    """The content of all published blocks."""

    from_start: bool  # the run was followed from its beginning
    blocks: dict[Pages, CachedContent] = field(factory=dict)
    # What was computed, of blocks that are in any tier, or on their way to one; with a
    # external store, of all.
    computed: dict[Key, CachedContent] = field(factory=dict)

    def check(self, books: Books, after: EngineState) -> None:
        """Learn the tokens of newly published blocks; compare those of blocks that are
        held.

        Raises InvariantError.
        """
        blocks, nodes = self.blocks, every_node(after.blocks.prefix)
        holds = {node.pages: key for key, node in nodes.items()}
        if len(blocks) > 4 * books.config.num_blocks:
            raise InvariantError("cache truth", "more is published than there are blocks")
        new = {
            block: key
            for block, key in holds.items()
            if block not in blocks or blocks[block].key != key
        }
        for block in [block for block in blocks if block not in holds]:
            del blocks[block]
        if new:
            self._add(books, new)
            computed = not new or not self.from_start
            require(computed, "publish after write", f"{new} was not computed")
        self._compare(books, after)
        self._forget(books, after)

    def _forget(self, books: Books, after: EngineState) -> None:
        """Forget what no tier has any more; with an external store nothing, as it keeps
        blocks that the engine has forgotten, and may report them again.
        """
        if books.config.external_store is not None:
            return
        host = after.tiers.host
        present = {key for transfer in after.tiers.transfers for key in transfer.keys}
        present.update(after.blocks.prefix.nodes, host.prefix.nodes if host else ())
        self.computed = {
            key: content for key, content in self.computed.items() if key in present
        }

    def _add(self, books: Books, new: dict[Pages, Key]) -> None:
        """Find the tokens of new blocks; removes those it found from `new`."""
        running = [
            account.seat
            for account in books.accounts.values()
            if account.seat is not None
        ]
        for seat in (*running, *books.released_seats):
            self._add_computed(books, seat, new)
        for saved in books.saved:
            if new.get(saved.pages) == saved.key:
                self.blocks[saved.pages] = _content(
                    new.pop(saved.pages), saved.seat.account.request, saved.tokens
                )
        self.computed.update({content.key: content for content in self.blocks.values()})
        # The rest was loaded: it was computed before, and is the same under its key.
        loaded = books.config.has_tiers
        for pages, key in [*new.items()]:
            if loaded and key in self.computed:
                self.blocks[pages] = self.computed[key]
                del new[pages]

    def _add_computed(self, books: Books, seat: Seat, new: dict[Pages, Key]) -> None:
        """Learn what a sequence has computed into new blocks."""
        size, request = books.config.block_size, seat.account.request
        tokens = seat.account.tokens
        keys: Keys = ()
        for g, group in enumerate(books.config.block_groups):
            for k, pages in enumerate(bundled(seat, g, group)[: seat.kv // size]):
                if pages not in new:
                    continue
                # Outside a window the entries of a table may be blocks of others by now.
                keys = keys or block_keys(request.root, tokens, size)
                if new[pages] == group_key(keys[k], g):
                    self.blocks[pages] = _content(
                        new.pop(pages), request, tokens[: (k + 1) * size]
                    )
            self._add_tail(seat, new, size, g, group)

    def _add_tail(
        self, seat: Seat, new: dict[Pages, Key], size: int, g: int, group: CacheGroup
    ) -> None:
        """Learn what a sequence has computed of the partial last block of its prompt."""
        request, full = seat.account.request, seat.kv // size
        if request.continuation.tail_keys is None or seat.kv != len(request.prompt):
            return
        pages = tuple(seat.tables[g][full * group.pages : (full + 1) * group.pages])
        keys = block_keys(request.root, request.prompt, size)
        _, key = tail_keys(request.root, keys, request.prompt, size)
        if key and new.get(pages) == group_key(key, g):
            self.blocks[pages] = _content(new.pop(pages), request, request.prompt)

    def _compare(self, books: Books, after: EngineState) -> None:
        """Check that every reader of a block has the tokens of its content."""
        run, size = after.running, books.config.block_size
        for i, chain in enumerate(run.chains):
            account = books.accounts[run.ids[i]]
            for g, group in enumerate(books.config.block_groups):
                sealed = range(chain.sealed[g])
                for k in held_blocks(books.config, group, sealed, chain.low[g]):
                    table, start = run.tables[i][g], k * group.pages
                    content = self.blocks.get(table[start : start + group.pages])
                    if content is None:
                        continue
                    read = account.tokens[: (k + 1) * size]
                    if content != _content(content.key, account.request, read):
                        raise InvariantError(
                            "shared content", f"{account.id} reads {content} at block {k}"
                        )


def _content(key: Key, request: Request, tokens: tuple[int, ...]) -> CachedContent:
    """What is in a block under `key` after these tokens of a request."""
    return CachedContent(key, request.root, request.adapter, tokens)


def bundled(seat: Seat, g: int, group: CacheGroup) -> list[Pages]:
    """The blocks of a row's table in group `g`."""
    table, pages = seat.tables[g], group.pages
    return [table[start : start + pages] for start in range(0, len(table), pages)]
