"""The specification of shared content: a key leads to exactly the tokens that were
computed into its block.

Keys are digests, and a key made from the wrong tokens finds the wrong KV. So the tokens
of every published block, all up to its end, are kept, and compared with those of every
reader.
"""

from attrs import define, field, frozen

from minfer.blocks.keys import Key, block_keys, tail_keys
from minfer.blocks.prefix import every_node
from minfer.records.state import EngineState
from minfer.testing.accounts import Seat
from minfer.testing.books import Books
from minfer.testing.invariants import InvariantError, require


@frozen
class CachedContent:
    """The content of a published block."""

    key: Key
    root: Key  # the key before the first block
    tokens: tuple[int, ...]  # all up to the end of the block's content


@define(eq=False)
class Contents:
    """The content of all published blocks."""

    whole: bool  # the run was followed from its beginning
    blocks: dict[int, CachedContent] = field(factory=dict)

    def check(self, books: Books, after: EngineState) -> None:
        """Learn the tokens of newly published blocks; compare those of blocks that are
        held.

        Raises InvariantError.
        """
        blocks, nodes = self.blocks, every_node(after.blocks.prefix)
        holds = {node.block: key for key, node in nodes.items()}
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
            self._learn(books, new)
            computed = not new or not self.whole
            require(computed, "publish after write", f"{new} was not computed")
        self._compare(books, after)

    def _learn(self, books: Books, new: dict[int, Key]) -> None:
        """Find the tokens of new blocks; removes those it found from `new`."""
        running = [one.seat for one in books.accounts.values() if one.seat is not None]
        for seat in (*running, *books.left):
            self._written(books, seat, new)

    def _written(self, books: Books, seat: Seat, new: dict[int, Key]) -> None:
        """Learn what a sequence has computed into new blocks."""
        size, windowed = books.config.block_size, books.config.window
        root, known = seat.account.request.root, seat.account.known
        for k, block in enumerate(seat.table[: seat.kv // size]):
            if block in new:
                tokens = known[: (k + 1) * size]
                # Outside a window the entries of a table may be blocks of others by now.
                if not windowed or new[block] == block_keys(root, tokens, size)[-1]:
                    self.blocks[block] = CachedContent(new.pop(block), root, tokens)
        self._tail(seat, new, size)

    def _tail(self, seat: Seat, new: dict[int, Key], size: int) -> None:
        """Learn what a sequence has computed of the partial last block of its prompt."""
        request, full = seat.account.request, seat.kv // size
        if request.tails is None or seat.kv != len(request.prompt):
            return
        block = seat.table[full] if full < len(seat.table) else -1
        keys = block_keys(request.root, request.prompt, size)
        _, key = tail_keys(request.root, keys, request.prompt, size)
        if key and new.get(block) == key:
            found = CachedContent(new.pop(block), request.root, request.prompt)
            self.blocks[block] = found

    def _compare(self, books: Books, after: EngineState) -> None:
        """Check that every reader of a block has the tokens of its content."""
        run, size = after.running, books.config.block_size
        for i, table in enumerate(run.tables):
            one, chain = books.accounts[run.ids[i]], run.chains[i]
            for k, block in enumerate(table[chain.low : chain.sealed], chain.low):
                found = self.blocks.get(block)
                if found is None:
                    continue
                mine = one.request.root, one.known[: (k + 1) * size]
                if (found.root, found.tokens) != mine:
                    raise InvariantError(
                        "shared content", f"{one.id} reads {found} at block {k}"
                    )
