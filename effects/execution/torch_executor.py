"""The torch executor: plans become launches; on a GPU results come a step later.

Theory. The device owns its rows (`device_rows.py`). Launching a plan is: pack its inputs
and what it changes into one pinned buffer, copy that without waiting, scatter the
changes; run the step, from embedding to tokens drawn and rows advanced; copy the tokens
to pinned memory and record an event. Collecting waits for that event alone, so the next
step runs while the host reads this one. The CPU does the same when its results are asked
for, with its own cache and sampler.

A step's launches are a function of its `Kind` (kinds.py) and of what lies on the device,
so it can be a CUDA graph: one for each kind, captured when it is first needed. A step
with inputs from history is captured if launching it takes longer than its work, and once
its kind came a second time; else its launches are made one by one.

Everything is on one stream, in order: a device buffer can be overwritten by the next
step's copy as soon as that is enqueued. Host buffers are read by copies in flight, so
there is a ring of them.
"""

import contextlib
import logging
import threading
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from minfer.config import EngineConfig
from minfer.effects.execution.attention import KVCache, make_cache
from minfer.effects.execution.device_rows import EMPTY, DeviceRows, Words, aligned
from minfer.effects.execution.executor import ExecutorError, not_finite
from minfer.effects.execution.graphs import GraphCache, watched
from minfer.effects.execution.kinds import DECODE, Kind, bucket_of, most_draws
from minfer.effects.execution.sampler import Sampling, choose
from minfer.effects.models.batch import Batch, Chunks
from minfer.effects.models.model import Model, forward
from minfer.effects.models.shapes import cuda_activation_bytes, padded_tokens
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import Weights
from minfer.kernels import plain
from minfer.kernels.flash import FlashWork
from minfer.kernels.packages import FLASH, NAMES, QUACK, load
from minfer.messages import Executed, Failed
from minfer.params import MAX_LOGPROBS
from minfer.plan import Open, Plan, TokenLogprobs, Yields
from minfer.sample import is_greedy

if TYPE_CHECKING:
    from minfer.effects.execution.cuda_attention import CudaCache

GRAPHS = "CUDA graphs"
# Sizes of prompts whose kernels serve any: of few tokens, which are launched early, and
# of more. Still larger ones may take packages, which take seconds to import.
PROMPTS = (64, 320)
# Weights of a product up to which the CPU's other cores wake up too late to help: with
# one thread of two, the bundled model (74,000) wrote 1.6 times as fast at batch 1, one
# with 262,000 as fast.
FOR_ONE_THREAD = 1 << 17
_log = logging.getLogger("minfer.executor")


def _work_alone() -> None:
    """Let torch use one thread for what this thread asks for; other threads keep their
    number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # also of threads to come: let one set that right
    other = threading.Thread(target=torch.set_num_threads, args=(before,))
    other.start()
    other.join()


@frozen(eq=False)
class Draw:
    """Who draws in a forward, in order: entries of the plan, their requests, places in
    `drawn`.
    """

    places: list[int]
    seats: list[Open | None]  # kept here, as rows change hands
    at: list[int] | None = None  # None: in order


@define(eq=False)
class Slot:
    """A host buffer's turn: what goes to the device, and what comes back once `done`."""

    words: Tensor  # pinned int32
    drawn: Tensor  # pinned int32 [draws]: tokens; -1 where the logits were not finite
    # pinned int32 [draws, 2, 1 + MAX_LOGPROBS]: as `kernels.logprobs` writes them
    scores: Tensor
    done: torch.cuda.Event | None
    draw: Draw | None = None
    scored: bool = False

    @classmethod
    def of(cls, words: int, draws: int, scores: tuple[int, ...], cuda: bool) -> "Slot":
        """A slot of these sizes; for a GPU, pinned."""
        host = [
            torch.empty(size, dtype=torch.int32, pin_memory=cuda)
            for size in ((words,), (draws,), scores)
        ]
        # Torch's.
        done = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        return cls(host[0], host[1], host[2], done)


@define(eq=False)
class Flight:
    """A plan on its way: where its results will be, or why it could not be launched."""

    plan: Plan
    slots: list[Slot] = field(factory=list)  # one for each forward
    error: str = ""


class TorchExecutor:
    """Runs plans on the device that the weights are on; steps overlap with the host's
    work.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        weights: Weights | Model,
        device: torch.device | str,
        *,
        graphs: bool = True,
        checked: bool = False,
        kernels: bool = False,
    ) -> None:
        """Runs on `device`, where the weights are.

        `checked`: a decode step that waits for the device, or takes memory, fails.
        `kernels`: on the CPU, do as a GPU does, with the kernels' references. Raises
        MemoryError or RuntimeError (torch.OutOfMemoryError) if the cache does not fit.
        """
        self.device = torch.device(device)
        cuda = self.device.type == "cuda"
        self.config, self.spec, self.graphs, self.checked = (
            config,
            spec,
            graphs and cuda,
            checked,
        )
        self.small = (
            not cuda and spec.hidden_size * spec.intermediate_size <= FOR_ONE_THREAD
        )
        self.model: Model = (
            weights
            if not isinstance(weights, Weights)
            else (lambda batch, cache: forward(spec, weights, batch, cache))
        )
        length = min(config.max_model_len, spec.max_position_embeddings)
        self.gpu: Any = None  # what needs Triton
        self.flash_from, self.captured, self.fused = 0, 0, False  # as in `Routes`
        self.routes: list[tuple[str, str]] = []  # which kernel serves what, in words
        if kernels or cuda:
            from minfer.effects.execution import cuda_attention

            self.gpu = cuda_attention
            routes = cuda_attention.Routes.for_device(
                spec, config.block_size, config.max_num_batched_tokens, self.device
            )
            self.flash_from, self.captured = routes.flash_from, routes.captured
            self.fused = not routes.apart
            self.routes = routes.described()
        self.ops: Any = self.gpu or plain
        self.cache = self.make_cache(config.num_blocks, config.block_size, length)
        blocks = -(-length // config.block_size)
        self.rows = DeviceRows(config.max_num_seqs, blocks, self.device)
        self.rows.table[self.rows.scratch] = (
            config.num_blocks
        )  # the block that nobody has
        self.seats: list[Open | None] = [None] * config.max_num_seqs
        self.wants = np.zeros(
            (config.max_num_seqs, 2), bool
        )  # rows that are filtered, and scored
        draws = most_draws(config.max_num_seqs)
        tokens = padded_tokens(config.max_num_batched_tokens)
        # The largest inputs, and changes: every table whole, what else rows keep, who
        # decodes.
        room = (
            3 * tokens + 6 * draws + 64 + 2 * (config.max_num_seqs * (blocks + 8) + draws)
        )
        self.staging = torch.zeros(room, dtype=torch.int32, device=self.device)
        self.out = torch.zeros(draws, dtype=torch.int32, device=self.device)
        self.scores = torch.zeros(
            draws, 2, 1 + MAX_LOGPROBS, dtype=torch.int32, device=self.device
        )
        slots = range((config.depth + 1) * config.max_repeat + 1)
        self.ring = deque(Slot.of(room, draws, self.scores.shape, cuda) for _ in slots)
        if checked:  # torch calls its check a prototype
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        # Torch's.
        self.stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        most = cuda_activation_bytes(spec, config, self.captured + config.max_num_seqs)
        self.captures = GraphCache(self.device, most)
        self.members: tuple[int, ...] = ()  # whose rows are in `rows.batch`
        self.wanted: list[bool] = []  # whether one of them does
        self.draw = Draw([], [])  # theirs
        self.trying: list[
            str
        ] = []  # what the step under way takes that may not work here
        self.flights: deque[Flight] = deque()
        self.drawing: tuple[list[int], Sampling] | None = (
            None  # who the CPU's sampler drew for
        )
        if cuda:
            self._prepare()
        self._wait()

    def _prepare(self) -> None:
        """Compile what first requests need all at once: for a prompt, and to go on."""
        spec, sizes = (
            self.spec,
            {min(n, self.config.max_num_batched_tokens) for n in PROMPTS},
        )
        splits = self.gpu.num_splits(1, spec.kv_heads, spec.head_dim, 1024)
        kinds = [self._kind(0, 1, False, False, n, 1, n) for n in sorted(sizes)]
        kinds.append(Kind(1, 1, False, False, splits=splits))
        try:
            with (
                torch.inference_mode(),
                torch.cuda.stream(self.stream),
                self.gpu.compiled(),
            ):
                self.ops.scatter(self.rows.arena, self.staging[:2])
                for kind in kinds:
                    self._step(kind, dry=True)
        except (
            Exception
        ) as error:  # the first step will say so again, if it cannot do otherwise
            _log.warning("kernels are compiled one by one, as they are needed: %r", error)

    def make_cache(
        self, blocks: int, block_size: int, length: int
    ) -> "KVCache | CudaCache":
        """A cache that the model can run with, for positions below `length`."""
        sizes = self.spec, blocks, block_size
        if self.gpu is None:
            return make_cache(*sizes, max_model_len=length)
        made: CudaCache = self.gpu.CudaCache.make(*sizes, length, self.device)
        return made

    # --- the executor's contract --------------------------------------------------------

    def launch(self, plan: Plan) -> None:
        """Enqueue a plan. What goes wrong is said when it is collected."""
        flight = Flight(plan)
        self.flights.append(flight)
        if self.stream is not None and not any(one.error for one in self.flights):
            self._attempt(flight)

    def _attempt(self, flight: Flight) -> None:
        if self.small and torch.get_num_threads() > 1:
            _work_alone()
        self.trying = []
        try:
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                self._launch(flight)
        except Exception as error:
            for what in [] if isinstance(error, torch.OutOfMemoryError) else self.trying:
                self._do_without(what, error)
            flight.error = str(error) if isinstance(error, ExecutorError) else repr(error)

    def _do_without(self, what: str, why: object) -> None:
        """Take the slower way from now on, and say so: what failed would fail again."""
        name = NAMES.get(what, what)
        _log.warning("%s cannot be used here, and is not from now on: %s", name, why)
        setattr(
            self, {FLASH: "flash_from", QUACK: "fused", GRAPHS: "graphs"}[what], False
        )

    def _may_take(self, package: str) -> bool:
        """Whether a package can be loaded; if the step under way fails, that is its
        fault.
        """
        if why := load(package):
            self._do_without(package, why)
        elif GRAPHS not in self.trying:  # else it has done this step before
            self.trying.append(package)
        return not why

    def collect(self) -> Executed | Failed:
        """Wait for the earliest plan's tokens."""
        flight = self.flights.popleft()
        if self.stream is None:
            self._attempt(flight)
        if not flight.error:
            try:
                logprobs: dict[int, list[TokenLogprobs]] = {}
                yields = self._yields(flight, logprobs)
                column = [tuple(logprobs.get(i, ())) for i in range(len(yields))]
                beside = tuple(column) if logprobs else ()
                return Executed(flight.plan.step, yields, logprobs=beside)
            except Exception as error:
                flight.error = (
                    str(error) if isinstance(error, ExecutorError) else repr(error)
                )
        self.flights.clear()
        self.members, self.rows.changes = (), []
        self._wait()  # nothing handed over touches the cache any more
        if self.stream is not None:
            # while a graph is captured, torch does not do so itself
            torch.cuda.empty_cache()
        return Failed(flight.plan.step, flight.error)

    def close(self) -> None:
        """Let go of the weights and the cache; no call may follow."""
        self._wait()
        self.flights.clear()
        self.captures.made.clear()
        # All that is on the device, even if somebody keeps this object: torch gives a
        # segment back whole, and small tensors can lie at the end of the cache's.
        del self.cache, self.model, self.rows, self.staging, self.out, self.scores

    def _wait(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def _yields(self, flight: Flight, logprobs: dict[int, list[TokenLogprobs]]) -> Yields:
        """A plan's tokens; `logprobs` get what was asked beside, by place in the plan."""
        plan = flight.plan
        out: list[tuple[int, ...]] = [()] * len(plan.rows)
        for slot in flight.slots:
            if slot.done is not None:
                slot.done.synchronize()
            who: Any = slot.draw
            tokens = (
                slot.drawn[: len(who.places)] if who.at is None else slot.drawn[who.at]
            )
            drawn: list[int] = tokens.tolist()
            if -1 in drawn:
                raise not_finite(
                    s for s, token in zip(who.seats, drawn, strict=True) if token < 0
                )
            if slot.scored:
                self._read_logprobs(slot.scores.numpy(), who, logprobs)
            if plan.repeat == 1 and who.at is None:
                return tuple(zip(drawn, strict=True))
            for i, token in zip(who.places, drawn, strict=True):
                out[i] += (token,)
        return tuple(out)

    def _read_logprobs(
        self, words: Any, who: Draw, logprobs: dict[int, list[TokenLogprobs]]
    ) -> None:
        vocab = self.spec.vocab_size
        at = who.at or range(len(who.seats))
        for line, place, seat in zip(at, who.places, who.seats, strict=True):
            if seat is not None and (most := seat.sampling.logprobs) is not None:
                ids, bits = words[line, :, : 1 + min(most, vocab)]
                rank, *likeliest = ids.tolist()
                own, *theirs = bits.view(np.float32).tolist()
                found = TokenLogprobs(own, rank, tuple(likeliest), tuple(theirs))
                logprobs.setdefault(place, []).append(found)

    # --- one plan -----------------------------------------------------------------------

    def _launch(self, flight: Flight) -> None:
        plan, rows, vocab = flight.plan, self.rows, self.spec.vocab_size
        for opened in plan.opens:
            row, params = plan.rows[opened.index], opened.sampling
            self.seats[row], self.members, self.drawing = opened, (), None
            filtered = params.top_p < 1 or 0 < params.top_k < vocab or params.min_p > 0
            self.wants[row] = (
                filtered and not is_greedy(params),
                params.logprobs is not None,
            )
            rows.open(row, opened, vocab)
            full, part = divmod(plan.starts[opened.index], self.config.block_size)
            (table,) = opened.tables  # layers are of one group here
            self.cache.clear(table[full:], part)
        for grow in plan.grows:
            rows.set_table(grow.row, grow.at, grow.blocks)
            self.cache.clear(grow.blocks)
        for copy in plan.copies:
            self.cache.copy(copy.source, copy.target, copy.count)
        if plan.fills:
            self._mixed(flight)
        elif plan.repeat == 1:
            self._decode(
                flight, plan.rows, list(range(len(plan.rows))), max(plan.starts) + 1
            )
        for turn in range(int(bool(plan.fills)), plan.repeat if plan.repeat > 1 else 0):
            live = [i for i, most in enumerate(plan.most) if most > turn]
            if live:
                alive = plan.rows if len(live) == len(plan.rows) else None
                members = alive or tuple(plan.rows[i] for i in live)
                self._decode(flight, members, live, max(plan.starts) + turn + 1)

    def _decode(
        self, flight: Flight, rows: tuple[int, ...], places: list[int], longest: int
    ) -> None:
        """Every row feeds itself; `longest` is the most tokens that one attends to."""
        if rows is not self.members:
            self.rows.set_batch(rows, bucket_of(len(rows), DECODE))
            self.members, self.wanted = (
                rows,
                np.logical_or.reduce(self.wants[list(rows)]).tolist(),
            )
            self.draw = Draw(places, [self.seats[row] for row in rows])
        self._run(
            flight,
            self._kind(len(rows), len(rows), *self.wanted),
            EMPTY,
            self.draw,
            longest,
        )

    def _mixed(self, flight: Flight) -> None:
        """Rows that feed themselves, and chunks of history."""
        plan = flight.plan
        filled = {fill.index for fill in plan.fills}
        selves = [i for i in range(len(plan.rows)) if i not in filled]
        counts = [len(fill.tokens) for fill in plan.fills]
        drawing = [k for k, fill in enumerate(plan.fills) if plan.most[fill.index]]
        flags, alone = (
            np.logical_or.reduce(self.wants[list(plan.rows)]).tolist(),
            len(selves),
        )
        history = sum(counts), len(counts), max(counts)
        kind = self._kind(alone, alone + len(drawing), *flags, *history)
        places = selves + [plan.fills[k].index for k in drawing]
        at = [*range(len(selves)), *range(kind.alone, kind.alone + len(drawing))]
        draw = Draw(places, [self.seats[plan.rows[i]] for i in places], at)
        longest = max((plan.starts[i] + 1 for i in selves), default=1)
        self._run(flight, kind, self._packed(plan, selves, drawing, kind), draw, longest)

    def _kind(self, *exact: Any) -> Kind:
        """The kind of a step, padded if there can be a graph of it."""
        kind = Kind(*exact)
        return kind.padded() if self.graphs and kind.fits(self.captured) else kind

    def _packed(
        self, plan: Plan, selves: list[int], drawing: list[int], kind: Kind
    ) -> Words:
        """The inputs of a mixed step, as `_inputs` reads them; padding is the scratch
        row's.

        `selves` are the plan's rows that feed themselves, `drawing` its fills that draw.
        """
        words = np.zeros(
            sum(lines * aligned(count) for lines, count in kind.inputs), np.int32
        )
        (tokens, positions, owners), chunks, drawn, wanted = self._inputs(words, kind)
        counts = [len(fill.tokens) for fill in plan.fills]
        total = sum(counts)
        tokens[:total] = np.concatenate(
            [np.array(fill.tokens, np.int32) for fill in plan.fills]
        )
        owners[:], drawn[:], chunks[0] = (self.rows.scratch,) * 3
        where, starts, sizes, offsets = (row[: len(counts)] for row in chunks)
        where[:] = [plan.rows[fill.index] for fill in plan.fills]
        starts[:] = [plan.starts[fill.index] for fill in plan.fills]
        sizes[:] = counts
        offsets[:] = kind.alone + np.cumsum(sizes) - sizes
        owners[:total] = np.repeat(where, counts)
        positions[:total] = np.arange(total) + np.repeat(
            starts - offsets + kind.alone, counts
        )
        drawn[: len(selves)] = [plan.rows[i] for i in selves]
        wanted[: kind.alone] = np.arange(kind.alone)
        last = kind.alone + np.arange(len(drawing))
        wanted[last] = (offsets + sizes - 1)[drawing]
        drawn[last] = where[drawing]
        return words

    @staticmethod
    def _inputs(words: Any, kind: Kind) -> Any:
        """[3, tokens]: ids, positions, rows; [4, chunks]: rows, starts, counts, offsets;
        draws: [draws] rows that draw, and [draws] which token's logits they draw from.
        """
        parts, at = [], 0
        for lines, count in kind.inputs:
            end = at + lines * aligned(count)
            parts.append(words[at:end].reshape(lines, aligned(count))[:, :count])
            at = end
        return parts[0], parts[1], parts[2][0], parts[2][1]

    # --- one forward --------------------------------------------------------------------

    def _run(
        self, flight: Flight, kind: Kind, inputs: Words, draw: Draw, longest: int
    ) -> None:
        """Send what a forward needs, run it, and have its tokens sent back."""
        slot, spec = self.ring[0], self.spec
        self.ring.rotate(-1)
        slot.draw, slot.scored = draw, kind.scored
        flight.slots.append(slot)
        table = self.rows.blocks * self.config.block_size
        context = min(1 << max(10, longest.bit_length()), table)  # few kinds
        if kind.alone and self.gpu is not None:
            splits = self.gpu.num_splits(
                kind.alone, spec.kv_heads, spec.head_dim, context
            )
            kind = evolve(kind, splits=splits)
        checked = self.checked and kind in self.captures.made
        with watched(self.device) if checked else contextlib.nullcontext():
            self._send(slot, inputs)
            (self._replay if self.graphs and kind.fits(self.captured) else self._step)(
                kind
            )
            slot.drawn[: kind.draws].copy_(self.out[: kind.draws], non_blocking=True)
            if kind.scored:
                slot.scores[: kind.draws].copy_(
                    self.scores[: kind.draws], non_blocking=True
                )
            if slot.done is not None:
                slot.done.record()

    def _send(self, slot: Slot, inputs: Words) -> None:
        """Inputs and changes to the device in one copy; the rows change."""
        changes = self.rows.take()
        total = len(inputs) + sum(map(len, changes))
        if not total:
            return
        np.concatenate([inputs, *changes], out=slot.words.numpy()[:total])
        self.staging[:total].copy_(slot.words[:total], non_blocking=True)
        if changes:
            self.ops.scatter(self.rows.arena, self.staging[len(inputs) : total])

    def _replay(self, kind: Kind) -> None:
        """A step, as its graph does it; launch by launch while there is none."""
        if (graph := self.captures.made.get(kind)) is None:
            if not self.captures.due(kind):
                self._step(kind)
                self.captures.seen.add(kind)  # now that what it needs is compiled
                return
            if not kind.tokens:
                self._step(kind, dry=True)
            self.trying = [GRAPHS]
            graph = self.captures.capture(kind, self._step)
        graph.replay()

    def _step(self, kind: Kind, dry: bool = False) -> None:
        """A whole step, from what is on the device into `out` and the rows.

        `dry`: to compile it. The rows that feed themselves are nobody's; those of chunks
        are what lies on the device, which before the first request is nobody's either.
        """
        rows, alone, size = self.rows, kind.alone, self.config.block_size
        given, sampled, chunks = None, None, None
        drawn = (
            torch.full_like(rows.batch[:alone], rows.scratch)
            if dry
            else rows.batch[:alone]
        )
        if kind.tokens:
            given, chunk, drawn, sampled = self._inputs(self.staging, kind)
            chunks = self._chunks(kind, chunk)
        count = alone + kind.tokens
        make = drawn.new_zeros if dry else drawn.new_empty  # where no kernel fills them
        tokens, positions, ahead = make((3, aligned(count)))[:, :count].unbind(0)
        slots = make(count, dtype=torch.int64)
        selves = drawn[:alone]
        of = given, rows.last, rows.next, rows.table, size
        self.ops.gather(selves, *of, tokens, positions, ahead, slots)
        pays = self.fused and self.gpu.pays(count, self.spec.intermediate_size)
        batch = Batch(
            tokens,
            positions,
            slots,
            sampled,
            rows.table,
            selves,
            ahead[:alone],
            chunks,
            splits=kind.splits,
            fused=pays and self._may_take(QUACK),
        )
        logits = self.model(batch, self.cache)
        if not kind.draws:
            return
        if sampled is not None:
            ahead = ahead.index_select(0, sampled)
        if self.gpu is None:
            new, broken = self._drawn_on_cpu(logits, drawn.tolist(), ahead)
        else:
            new, broken = self.gpu.sample(
                logits,
                drawn,
                rows.temperature,
                rows.top_k,
                rows.top_p,
                rows.deepest,
                rows.stream,
                ahead,
                filtered=kind.filtered,
            )
        self.ops.advance(
            drawn, ahead, new, broken, rows.last, rows.next, rows.scratch, self.out
        )
        if kind.scored:
            self.ops.logprobs(logits, new, drawn, rows.asked, self.scores)

    def _drawn_on_cpu(
        self, logits: Tensor, rows: list[int], positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What `sample` does, with the CPU's sampler: tokens, and 1 where logits are not
        finite.
        """
        if self.drawing is None or self.drawing[0] != rows:
            seats = [seat for row in rows if (seat := self.seats[row]) is not None]
            how = [seat.sampling for seat in seats]
            self.drawing = rows, Sampling.of(how, self.spec.vocab_size)
        choice = choose(logits, self.drawing[1], positions.numpy())
        broken = torch.zeros_like(positions)
        if choice.broken:
            broken[list(choice.broken)] = 1
        return torch.from_numpy(
            np.where(broken, 0, choice.tokens).astype(np.int32)
        ), broken

    def _chunks(self, kind: Kind, words: Tensor) -> Chunks:
        """From `words` [4, chunks]; flash-attn's work is not captured."""
        rows, starts, counts, offsets = words
        flash = None
        wanted = 0 < self.flash_from <= kind.longest and kind.tokens > self.captured
        if wanted and self._may_take(FLASH):
            flash = FlashWork.of(rows, starts, counts, self.rows.table, kind.longest)
        return Chunks(rows, starts, counts, offsets, kind.longest, flash)
