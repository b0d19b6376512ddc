"""Train the target, or the draft from it, in pieces of some minutes on one GPU.

    python -m bench.bundled.train --role target --minutes 8 --whole 14
    python -m bench.bundled.train --role target --minutes 8 --whole 14 --resume
    python -m bench.bundled.train --role draft --minutes 5 --whole 4
    python -m bench.bundled.train --begin MODELS/target --rate 0.3 --whole 11

`--whole` is how many minutes all pieces together may spend in steps: the learning rate
follows the share of it that is spent, and is zero at the end, however fast the machine
is. (`--steps` counts steps instead of minutes, for trials that shall repeat exactly.)
`--minutes` bounds a piece, start and compilation included. Each leaves a checkpoint in
`--state` every two minutes and at its end, and a copy of the last under `--out` in parts
small enough to travel. One line of JSON is printed each half minute: tokens per second,
losses by source, and what is learnt so far.

`--begin` trains a finished model once more, with the tokenizer that it has: on tasks that
came after it was trained, and on those that it still gets wrong. `--rate` is then below
one, lest it forget more than it learns, and `--stage last` weighs its conversations. Of
sources, of which there are no fresh ones, it has then seen enough (`--python`): with as
many rows of them as before, held-out files took 0.96 bits a byte at the end, and 0.80 in
the middle.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from bench.bundled import checkpoint, probe, shards
from bench.bundled.feed import STEPS, Feed, parted, read_python
from bench.bundled.model import SHAPES, Model
from bench.bundled.muon import Muon, orthogonal
from bench.bundled.prepare import FOLDER, TOKENIZER
from bench.bundled.tasks.tasks import Stage
from bench.bundled.vocabulary import CONTEXT

STATE: Final = Path(".carry/bundled-state")
WARM_UP: Final = 0.01  # shares of the whole
DECAY: Final = 0.5  # from here on, the learning rate falls to zero
MATRIX_RATE: Final = 0.02
OTHER_RATE: Final = 3e-3
CHECKED: Final = 16  # steps between two looks at the clock
TOLD: Final = 30.0  # seconds between two lines of output
PROBED: Final = 4  # lines between two probes
TEXT: Final = (
    0.1  # how much of the draft's loss is the text itself, beside the target's word
)
LAST: Final = 20.0  # seconds kept for the checkpoint

STARTED: Final = time.perf_counter()


def say(**values: Any) -> None:
    """Print one line of progress."""
    print(
        json.dumps({"at": round(time.perf_counter() - STARTED, 1), **values}), flush=True
    )


def rate_at(share: float) -> float:
    """The learning rate, as a share of its highest: up, level, and down to zero."""
    if share < WARM_UP:
        return share / WARM_UP
    return min(1.0, max(0.0, (1 - share) / (1 - DECAY)))


def losses(
    model: nn.Module, teacher: nn.Module | None, batch: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What is minimized; and of each row, the text's loss, and of how many tokens."""
    inputs, follows, learnt = parted(batch)
    logits = model(inputs).float()
    text = functional.cross_entropy(
        logits.flatten(0, 1), follows.flatten(), reduction="none"
    )
    text = text.view_as(follows) * learnt
    count = learnt.sum()
    if teacher is None:
        return text.sum() / count, text.detach().sum(-1), learnt.sum(-1)
    with torch.no_grad():
        wanted = functional.log_softmax(teacher(inputs).float(), -1)
    found = functional.log_softmax(logits, -1)
    apart = (wanted.exp() * (wanted - found)).sum(-1) * learnt
    return (
        (apart.sum() + TEXT * text.sum()) / count,
        text.detach().sum(-1),
        learnt.sum(-1),
    )


@define
class Run:
    """One role's training: what a checkpoint holds, and what a step does to it."""

    model: Model
    feed: Feed
    teacher: nn.Module | None
    whole: float  # seconds of steps, or steps, in all
    by_steps: bool
    compiled: bool
    rate: float = 1.0  # the highest, as a share of `MATRIX_RATE` and `OTHER_RATE`
    step: int = 0
    spent: float = 0.0  # seconds of steps so far
    muon: Muon = field(init=False)
    adam: torch.optim.AdamW = field(init=False)
    losses: Callable[..., tuple[Tensor, Tensor, Tensor]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        named = list(self.model.named_parameters())
        matrices = [one for name, one in named if one.dim() > 1 and "embed" not in name]
        others = [one for name, one in named if one.dim() < 2 or "embed" in name]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            others,
            lr=OTHER_RATE,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=self.compiled,
        )
        self.losses = torch.compile(losses, dynamic=False) if self.compiled else losses
        if self.compiled:
            self.muon.orthogonal = torch.compile(orthogonal, dynamic=False)

    @property
    def share(self) -> float:
        """How much of the whole training is done."""
        return (self.step if self.by_steps else self.spent) / self.whole

    def advance(self) -> tuple[Tensor, Tensor]:
        """One step; returns each row's loss and its tokens."""
        rate = self.rate * rate_at(self.share)
        loss, text, count = self.losses(
            self.model, self.teacher, self.feed.batch(self.step)
        )
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it without types
        self.adam.param_groups[0]["lr"] = OTHER_RATE * rate
        self.adam.step()
        self.adam.zero_grad()
        self.muon.step(MATRIX_RATE * rate)
        self.step += 1
        return text, count

    def state(self) -> dict[str, Any]:
        """All that it takes to go on."""
        return {
            "model": self.model.state_dict(),
            "moments": self.muon.moments,
            "adam": self.adam.state_dict(),
            "generator": self.feed.generator.get_state(),
            "step": self.step,
            "spent": self.spent,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.model.load_state_dict(state["model"])
        for own, other in zip(self.muon.moments, state["moments"], strict=True):
            own.copy_(other)
        self.adam.load_state_dict(state["adam"])
        self.feed.generator.set_state(state["generator"])
        self.step, self.spent = state["step"], state["spent"]


def piece(run: Run, args: argparse.Namespace, look: Callable[[], dict[str, Any]]) -> None:
    """Steps until this piece's minutes or the whole training are over."""
    cuda = args.device == "cuda"
    sums, lines, told, began = dict[str, Tensor](), 0, time.perf_counter(), run.step
    mark = time.perf_counter()
    while run.share < 1 and time.perf_counter() - STARTED < 60 * args.minutes - LAST:
        for _ in range(CHECKED):
            if run.share >= 1:
                break
            text, count = run.advance()
            _add(sums, run.feed.rows, text, count)
            if run.step == began + 1:  # it compiled: that is no training
                torch.cuda.synchronize() if cuda else None
                mark = time.perf_counter()
        torch.cuda.synchronize() if cuda else None
        now = time.perf_counter()
        run.spent, mark = run.spent + now - mark, now
        if now - told > args.told or run.share >= 1:
            found = {
                name: round((one[0] / one[1]).item(), 4) for name, one in sums.items()
            }
            if not all(map(math.isfinite, found.values())):
                raise FloatingPointError(
                    f"the loss is no number at step {run.step}: {found}"
                )
            speed = (run.step - began) * args.rows * args.length / (now - told)
            say(
                step=run.step,
                share=round(run.share, 4),
                tokens_per_second=round(speed),
                loss=found,
                **(look() if lines % PROBED == 0 else {}),
            )
            if lines % PROBED == 0:
                checkpoint.save(run.state(), args.state, args.role)
            lines, began, sums = lines + 1, run.step, {}
            told = mark = time.perf_counter()


def _add(
    sums: dict[str, Tensor], rows: dict[str, int], text: Tensor, count: Tensor
) -> None:
    """Add a step's losses to those of their sources."""
    first = 0
    for name, many in rows.items():
        own = torch.stack(
            [text[first : first + many].sum(), count[first : first + many].sum().float()]
        )
        sums[name] = sums[name] + own if name in sums else own
        first += many


def teacher_of(args: argparse.Namespace, precision: torch.dtype) -> nn.Module | None:
    """The target, for the draft."""
    if args.teacher is None:
        return None
    state = checkpoint.load(args.state, args.teacher)
    if state is None:
        raise SystemExit(
            f"{args.state} has no checkpoint of {args.teacher}: train it first"
        )
    model = Model(SHAPES[args.teacher], precision)
    model.load_state_dict(state["model"])
    return model.to(args.device).eval().requires_grad_(False)


def train(args: argparse.Namespace) -> Run:
    """One piece."""
    precision = torch.bfloat16 if args.device == "cuda" else torch.float32
    old = checkpoint.load(args.state, args.role) if args.resume else None
    if args.resume and old is None:
        raise SystemExit(f"{args.state} has no checkpoint of {args.role} to resume")
    first = (old["step"] if old else 0) // STEPS
    path = (args.begin or args.data) / TOKENIZER
    tokenizer = Tokenizer.from_file(str(path))
    with shards.writing(
        path,
        args.seed + (args.teacher is not None),
        first,
        args.workers,
        args.shard,
        None if args.stage is None else Stage[args.stage.upper()],
    ) as written:
        python = read_python(args.data, args.device, args.documents, tokenizer)
        say(tokens=dict(python.counts))
        model = Model(SHAPES[args.role], precision)
        model = model.begin(args.seed) if args.begin is None else model.load(args.begin)
        model = model.to(args.device)
        feed = Feed(
            python,
            written,
            args.rows,
            args.length,
            args.device,
            args.seed,
            args.python,
        )
        whole = float(args.steps or 60 * args.whole)
        run = Run(
            model,
            feed,
            teacher_of(args, precision),
            whole,
            by_steps=bool(args.steps),
            compiled=args.device == "cuda" and not args.eager,
            rate=args.rate,
        )
        if old is not None:
            run.restore(old)
        say(
            parameters=sum(one.numel() for one in model.parameters()),
            step=run.step,
            share=round(run.share, 4),
        )
        problems = probe.sheet(tokenizer, args.device, each=args.each)
        rows = probe.held_rows(python, args.length, args.device)

        def look() -> dict[str, Any]:
            held = probe.held_out(model, rows, python.held_out_bytes)
            return {
                "bits_per_byte": round(held.bits, 4),
                "exact": probe.exact(model, problems),
            }

        piece(run, args, look)
        say(step=run.step, share=round(run.share, 4), spent=round(run.spent), **look())
    paths = checkpoint.save(run.state(), args.state, args.role)
    if args.out is not None:
        for path in paths:
            shutil.copy(path, args.out / path.name)
    say(saved=[f"{path.name} {path.stat().st_size}" for path in paths])
    return run


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--role", choices=list(SHAPES), default="target")
    add(
        "--teacher",
        choices=list(SHAPES),
        help="learn from it (default for the draft: target)",
    )
    add("--data", type=Path, default=FOLDER, help="what `prepare` made")
    add("--state", type=Path, default=STATE, help="where checkpoints are")
    add(
        "--begin",
        type=Path,
        help="a model's folder to begin with, not with random weights",
    )
    add("--rate", type=float, default=1, help="the highest, as a share of the usual one")
    add("--python", type=float, default=1, help="a share of the usual rows of sources")
    add(
        "--stage",
        choices=[stage.name.lower() for stage in Stage],
        help="how tasks are weighed (by default as training goes on)",
    )
    add("--out", type=Path, help="where a copy of the checkpoint goes, too")
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--minutes", type=float, default=8, help="of this piece")
    add("--whole", type=float, default=14, help="minutes of steps in all pieces")
    add("--steps", type=int, help="steps in all, instead of minutes")
    add("--rows", type=int, default=64, help="windows in a step")
    add("--length", type=int, default=CONTEXT, help="tokens of a window")
    add(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 3),
        help="processes that write conversations",
    )
    add("--seed", type=int, default=0)
    add(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
    )
    add("--eager", action="store_true", help="compile nothing")
    add("--told", type=float, default=TOLD, help="seconds between lines of output")
    add("--documents", type=int, help="so many of the sources only, for a trial")
    add("--shard", type=int, default=shards.SHARD, help="tokens of a shard")
    add("--each", type=int, default=probe.EACH, help="problems of a task in a probe")
    args = parser.parse_args(given)
    if args.role == "draft" and args.teacher is None:
        args.teacher = "target"
    return args


def main() -> None:
    torch.set_float32_matmul_precision("high")
    train(arguments())


if __name__ == "__main__":
    main()
