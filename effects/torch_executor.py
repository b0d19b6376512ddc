"""The torch executor: plans become packed forwards over a paged cache. On the CPU so far.

Theory. The device owns what a row needs besides a plan: its last token, the position that token
takes, its block table, how it samples. They are rows of preallocated arrays, changed by `opens`,
`grows` and the results of steps. All rows of a plan go through one forward.

Most steps are decodes of the rows that decoded in the step before. Their part of the arrays is
kept gathered (`_Active`) while membership does not change, which is seen by identity: the engine
hands out the same tuple of rows. Then a step is: pack, forward, choose; nothing is done per row.
While rows are active, their tokens and positions in the arrays are stale; `_settle` writes them
back before anything else looks.
"""

from collections import deque
from collections.abc import Callable
from itertools import compress

import numpy as np
import torch
from attrs import define
from numpy.typing import NDArray

from minfer.config import EngineConfig
from minfer.effects.attention import KVCache, make_cache
from minfer.effects.batch import Batch, DecodeRows, Row, make_batch
from minfer.effects.executor import ExecutorError
from minfer.effects.model import forward
from minfer.effects.sampler import Sampling, choose
from minfer.effects.spec import ModelSpec
from minfer.effects.weights import Weights
from minfer.messages import Executed, Failed
from minfer.plan import Open, Plan, Yields

Ints = NDArray[np.int64]
Model = Callable[[Batch, KVCache], torch.Tensor]  # one packed step: logits [sampled, vocab]


class LogitsError(ExecutorError):
    """The model's logits for a request are not finite: there is nothing to sample from."""


@define(eq=False)
class _Active:
    """The rows that decode step after step, gathered."""

    rows: tuple[int, ...]
    index: Ints  # [rows] the same, as an index
    tokens: Ints  # [rows] the next inputs
    positions: Ints  # [rows] of these inputs
    table: NDArray[np.int32]  # [rows, max_blocks]
    sampling: Sampling


class TorchExecutor:
    """Runs plans with torch. Results are computed when they are collected."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights | Model,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: str | None = None,
        device: str = "cpu",
    ) -> None:
        """Weights of a family, or a model that runs by itself in the spec's dtype.

        Sizes are the engine's (same names); `dtype` is the cache's, the model's by default. Raises
        ValueError for a context longer than the model's, MemoryError or RuntimeError if the cache
        does not fit.
        """
        if device != "cpu":
            raise ValueError(f"device {device!r} is not supported yet; use 'cpu'")
        if max_model_len > spec.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {max_model_len}, but the model was made for contexts of up to "
                f"{spec.max_position_embeddings} tokens; lower max_model_len"
            )
        if isinstance(weights, Weights):
            dtype = dtype or str(weights.embed.dtype).removeprefix("torch.")
            self.model: Model = lambda batch, cache: forward(spec, weights, batch, cache)
        else:
            self.model = weights
        self.spec, self.block_size = spec, block_size
        self.windows = tuple(dict.fromkeys(spec.windows))
        self.cache: KVCache = make_cache(spec, num_blocks, block_size, dtype, device, max_model_len)
        self.last = np.zeros(max_num_seqs, np.int64)
        self.next = np.zeros(max_num_seqs, np.int64)
        self.table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.held = np.zeros(max_num_seqs, np.int64)  # blocks in each table
        self.seats: list[Open | None] = [None] * max_num_seqs  # who has each row
        self.active: _Active | None = None
        self.plans: deque[Plan] = deque()

    @classmethod
    def for_config(
        cls, config: EngineConfig, spec: ModelSpec, weights: Weights | Model
    ) -> "TorchExecutor":
        """An executor of the sizes that an engine has."""
        return cls(
            spec,
            weights,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=min(config.max_model_len, spec.max_position_embeddings),
        )

    def launch(self, plan: Plan) -> None:
        """Queue the plan; it runs when its results are asked for."""
        self.plans.append(plan)

    def collect(self) -> Executed | Failed:
        """Run the next plan. When it fails, all plans queued behind it are dropped."""
        plan = self.plans.popleft()
        try:
            with torch.inference_mode():
                return Executed(plan.step, self._run(plan))
        except Exception as error:
            self.plans.clear()
            self._settle()  # rows outside the failed plans go on from what they have
            what = str(error) if isinstance(error, ExecutorError) else repr(error)
            return Failed(plan.step, what)

    def close(self) -> None:
        """Let go of the weights and the cache; no call may follow."""
        self.plans.clear()
        self.active = None
        del self.cache, self.model

    # --- one plan --------------------------------------------------------------------------------

    def _run(self, plan: Plan) -> Yields:
        if plan.opens or plan.grows or plan.copies:
            self._change(plan)
        if plan.fills:
            first = self._mixed(plan)
            if plan.repeat == 1:
                return first
        elif plan.repeat == 1:
            return tuple(zip(self._decode(plan.rows).tolist(), strict=True))
        else:
            first = ((),) * len(plan.rows)
        return self._repeat(plan, first)

    def _repeat(self, plan: Plan, first: Yields) -> Yields:
        """The forwards that are left of a plan; `first` is what filled rows yielded in one."""
        out = [list(tokens) for tokens in first]
        done = int(bool(plan.fills))
        for turn in range(done, plan.repeat):
            live = tuple(map(turn.__lt__, plan.most))
            if all(live):
                rows, lists = plan.rows, out
            else:
                rows, lists = tuple(compress(plan.rows, live)), list(compress(out, live))
            if not rows:
                break
            for tokens, token in zip(lists, self._decode(rows).tolist(), strict=True):
                tokens.append(token)
        return tuple(map(tuple, out))

    def _decode(self, rows: tuple[int, ...]) -> Ints:
        """One forward in which every row feeds itself; returns the tokens drawn, [rows]."""
        now = self.active
        if now is None or (now.rows is not rows and now.rows != rows):
            now = self._activate(rows)
        inputs = DecodeRows(
            torch.from_numpy(now.tokens),
            torch.from_numpy(now.positions),
            torch.from_numpy(now.table),
        )
        batch = make_batch((), self.block_size, inputs, self.windows)
        logits = self.model(batch, self.cache)
        ahead = now.positions + 1
        choice = choose(logits, now.sampling, ahead)
        if choice.broken:
            raise self._not_finite([rows[i] for i in choice.broken])
        now.tokens, now.positions = choice.tokens, ahead
        return choice.tokens

    def _mixed(self, plan: Plan) -> Yields:
        """One forward of filled rows and of rows that feed themselves."""
        self._settle()
        filled = {fill.index for fill in plan.fills}
        selves = [i for i in range(len(plan.rows)) if i not in filled]
        chunks = []
        for fill in plan.fills:
            at = plan.rows[fill.index]
            start, wanted = plan.starts[fill.index], min(1, plan.most[fill.index])
            table = self.table[at, : self.held[at]].astype(np.int64)
            chunks.append(Row(fill.tokens, start, table, wanted))
            self.next[at] = start + len(fill.tokens)
        index = np.array([plan.rows[i] for i in selves], np.int64)
        inputs = None
        if selves:
            inputs = DecodeRows(
                torch.from_numpy(self.last[index]),
                torch.from_numpy(self.next[index]),
                torch.from_numpy(self.table[index]),
            )
            self.next[index] += 1
        batch = make_batch(chunks, self.block_size, inputs, self.windows)
        drawn = selves + [fill.index for fill in plan.fills if plan.most[fill.index]]
        logits = self.model(batch, self.cache)
        yields: list[tuple[int, ...]] = [()] * len(plan.rows)
        if drawn:
            tokens = self._choose_for([plan.rows[i] for i in drawn], logits)
            for i, token in zip(drawn, tokens.tolist(), strict=True):
                yields[i] = (token,)
        return tuple(yields)

    def _choose_for(self, rows: list[int], logits: torch.Tensor) -> Ints:
        """Draw the next token of settled rows, and keep it as their last."""
        index = np.array(rows, np.int64)
        choice = choose(logits, self._sampling(rows), self.next[index])
        if choice.broken:
            raise self._not_finite([rows[i] for i in choice.broken])
        self.last[index] = choice.tokens
        return choice.tokens

    # --- rows ------------------------------------------------------------------------------------

    def _change(self, plan: Plan) -> None:
        """Take over rows, extend tables, copy blocks: in this order."""
        fresh: list[int] = []  # blocks that rows get to write to
        if plan.opens:
            self._settle()
        for opened in plan.opens:
            fresh += self._open(plan.rows[opened.index], opened, plan.starts[opened.index])
        for grow in plan.grows:
            self.table[grow.row, grow.at : grow.at + len(grow.blocks)] = grow.blocks
            self.held[grow.row] = grow.at + len(grow.blocks)
            fresh += grow.blocks
        if plan.grows and self.active is not None:
            self.active.table = self.table[self.active.index]
        data = self.cache.data  # [layers, blocks, block_size, 2, kv_heads, head_dim]
        if fresh:
            # Attention reads padding with weight 0. If a request whose numbers overflowed had the
            # block before, that would be 0 * NaN, and its successor would fail for it.
            data.index_fill_(1, torch.tensor(fresh), 0)
        for copy in plan.copies:
            data[:, copy.target, : copy.count] = data[:, copy.source, : copy.count]

    def _open(self, row: int, opened: Open, start: int) -> tuple[int, ...]:
        """Seat a sample; returns its blocks without KV. Below `start` KV is there, or copied."""
        self.seats[row] = opened
        self.table[row, : len(opened.table)] = opened.table
        self.held[row] = len(opened.table)
        full, part = divmod(start, self.block_size)
        if part:
            self.cache.data[:, opened.table[full], part:] = 0
        return opened.table[full + bool(part) :]

    def _activate(self, rows: tuple[int, ...]) -> _Active:
        self._settle()
        index = np.array(rows, np.int64)
        self.active = _Active(
            rows,
            index,
            self.last[index],
            self.next[index],
            self.table[index],
            self._sampling(rows),
        )
        return self.active

    def _settle(self) -> None:
        """Write active rows back to the arrays; then nothing is active."""
        if self.active is not None:
            self.last[self.active.index] = self.active.tokens
            self.next[self.active.index] = self.active.positions
            self.active = None

    def _sampling(self, rows: tuple[int, ...] | list[int]) -> Sampling:
        seats = [seat for row in rows if (seat := self.seats[row]) is not None]
        how = [(seat.request.sampling, seat.request.seed, seat.sample) for seat in seats]
        return Sampling.of(how, self.spec.vocab_size)

    def _not_finite(self, rows: list[int]) -> LogitsError:
        names = []
        for row in rows:
            seat = self.seats[row]
            names.append("?" if seat is None else f"{seat.request.id!r} (sample {seat.sample})")
        return LogitsError(f"the model's logits are not finite for request {', '.join(names)}")
