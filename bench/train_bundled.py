"""Train the bundled models, a small target and a smaller draft, on Python's standard library.

One command makes what the bundled folder holds: the tokenizer, the two checkpoints in the Hugging
Face layout, and the figures (training.json) that the model card quotes:

    python bench/train_bundled.py --out effects/bundled

The target learns from sources, from single functions and classes, and from (summary, function)
chats. The draft is distilled from the target, on the same data and on text that the target wrote,
because a draft is worth what share of its guesses the target accepts. About one source file in
twenty, chosen by a hash of its path, is never trained on and serves for the held-out figures.

Progress goes to standard output, one JSON object per line.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

END = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<|pad|>"
SPECIAL = [END, TURN_START, TURN_END, PAD]
MAX_POSITIONS = 2048

# Qwen2's own split, so that a reader which assumes it for this architecture agrees with the file.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Folders left out: tests, other people's packages, generated tables, build settings.
SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "msilib",
    "lib-dynload", "ensurepip", "__phello__",
}  # fmt: skip
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
TOPICS = "pydoc_data/topics.py"

Report = dict[str, Any]
Loss = Callable[[Tensor], Tensor]


def say(event: str, **values: Any) -> None:
    """Print one line of progress."""
    print(json.dumps({"event": event, **values}), flush=True)


# ---------------------------------------------------------------------------------------------
# Corpus


@dataclass(frozen=True)
class Corpus:
    """The documents: whole files, openings (functions, classes, imports, prose) and chats."""

    files: list[str]
    openings: list[str]
    chats: list[str]
    held_out: list[str]


def is_held_out(relative: str) -> bool:
    """Whether the file of this path is kept from training: the same files on every machine."""
    digest = hashlib.sha256(relative.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 20 == 0


def source_files(stdlib: Path) -> Iterator[tuple[str, str]]:
    """Each usable source file's path relative to the library, and its text."""
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if any(p in SKIPPED_FOLDERS or p.startswith(SKIPPED_PREFIXES) for p in relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 200:
            yield relative.as_posix(), text


def read_topics(source: str) -> list[str]:
    """The language reference's topics, which the library stores as one dictionary of text."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            value = ast.literal_eval(node.value)
            return [str(text) for text in value.values()]
    return []


def dedented(lines: list[str], column: int) -> str:
    """Lines of a nested definition moved to the left margin, where they are indented so far."""
    blank = " " * column
    return "\n".join(line[column:] if line.startswith(blank) else line for line in lines) + "\n"


def split_source(source: str) -> tuple[list[str], list[str]]:
    """A file's openings and chats.

    Openings are what follows the first import, each definition without its decorators, and the
    docstrings as prose: with them the model learns to start from an empty context. A chat asks
    with a docstring's first paragraph and answers with the definition.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    openings: list[str] = []
    chats: list[str] = []
    prose: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            openings.append("\n".join(lines[node.lineno - 1 :][:200]) + "\n")
            break
    for found in ast.walk(tree):
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        text = dedented(lines[found.lineno - 1 : found.end_lineno], found.col_offset)
        if len(text) < 80:
            continue
        openings.append(text)
        documentation = ast.get_docstring(found)
        if documentation:
            prose.append(documentation)
            question = " ".join(documentation.split("\n\n")[0].split())
            if 20 <= len(question) <= 300 and len(text) < 4000:
                chats.append(chat(question, text.rstrip("\n")))
    if prose:
        openings.append("\n\n".join(prose) + "\n")
    return openings, chats


def chat(question: str, answer: str) -> str:
    """A two-turn conversation as the chat template renders it."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n{answer}{TURN_END}\n"


def read_corpus(stdlib: Path, limit: int | None) -> Corpus:
    """Read the library into documents; limit bounds the files read, for a quick trial."""
    corpus = Corpus([], [], [], [])
    for number, (relative, text) in enumerate(source_files(stdlib)):
        if limit is not None and number >= limit:
            break
        if relative == TOPICS:
            corpus.files.extend(read_topics(text))
        elif is_held_out(relative):
            corpus.held_out.append(text)
        else:
            corpus.files.append(text)
            try:
                openings, chats = split_source(text)
            except SyntaxError:
                continue
            corpus.openings.extend(openings)
            corpus.chats.extend(chats)
    return corpus


def train_tokenizer(corpus: Corpus, vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer, without a normaliser: every text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=20,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.files, trainer)
    return tokenizer


class Stream:
    """The training tokens on the device, and how a batch of windows is drawn from them."""

    # Shares of a batch's windows: anywhere in the files, at an opening's start, at a chat's start.
    SHARES = (0.70, 0.20, 0.10)

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, device: str, seed: int) -> None:
        shuffle = random.Random(seed)
        ids: list[int] = [0]
        starts: list[list[int]] = []
        for documents in (corpus.files, corpus.openings, corpus.chats):
            documents = list(documents)
            shuffle.shuffle(documents)
            starts.append([])
            for encoded in tokenizer.encode_batch(documents):
                starts[-1].append(len(ids))
                ids += [*encoded.ids, 0]
            if not starts[-1]:
                starts[-1].append(1)
        self.file_end = starts[1][0]
        self.count = len(ids)
        # A window that starts near the end runs on into the beginning.
        ids += ids[: MAX_POSITIONS + 1]
        self.tokens = torch.tensor(ids, device=device)
        self.openings = torch.tensor(starts[1], device=device)
        self.chats = torch.tensor(starts[2], device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), device=self.tokens.device, generator=self.generator)

    def batch(self, rows: int, length: int) -> Tensor:
        """Windows of length + 1 tokens: inputs and, one further on, what to predict."""
        openings = round(rows * self.SHARES[1])
        chats = round(rows * self.SHARES[2])
        begin = torch.cat(
            [
                self.integers(self.file_end, rows - openings - chats),
                # Half of these begin with the separator, half with the text itself.
                self.openings[self.integers(len(self.openings), openings)]
                - self.integers(2, openings),
                self.chats[self.integers(len(self.chats), chats)] - self.integers(2, chats),
            ]
        )
        return self.tokens[begin[:, None] + torch.arange(length + 1, device=begin.device)]


@dataclass(frozen=True)
class HeldOut:
    """The held-out files' tokens in rows, and how many bytes they stand for."""

    rows: list[Tensor]
    tokens: int
    bytes: int


def hold_out(corpus: Corpus, tokenizer: Tokenizer, device: str, length: int) -> HeldOut:
    """Rows of length + 1 tokens that overlap by one, so each token but the first counts once."""
    ids = [0]
    for encoded in tokenizer.encode_batch(corpus.held_out):
        ids += [*encoded.ids, 0]
    tokens = torch.tensor(ids, device=device)
    rows = [tokens[i : i + length + 1][None] for i in range(0, len(ids) - 1, length)]
    size = sum(len(text.encode()) for text in corpus.held_out)
    return HeldOut(rows, len(ids) - 1, size)


# ---------------------------------------------------------------------------------------------
# Models


def shape(role: str, vocabulary: int) -> Qwen2Config:
    """The configuration of the target or the draft.

    Heads are 64 wide for both: attention kernels for accelerators ask for it.
    """
    shared: Report = {
        "vocab_size": vocabulary,
        "head_dim": 64,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": SPECIAL.index(PAD),
    }
    if role == "target":
        return Qwen2Config(
            hidden_size=192,
            intermediate_size=384,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            **shared,
        )
    return Qwen2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **shared,
    )


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def drop(share: float) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that drops a share of a block's output while training."""

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            first = functional.dropout(output[0], share, module.training)
            return (first, *output[1:])
        return functional.dropout(output, share, module.training)

    return hook


def build(config: Qwen2Config, device: str, dropout: float) -> tuple[nn.Module, list[Any]]:
    """A fresh model and its dropout hooks: Qwen2 itself has dropout on attention weights only."""
    made: nn.Module = Qwen2ForCausalLM(config)
    model = made.to(device)
    handles: list[Any] = []
    if dropout > 0:
        for name, module in model.named_modules():
            if name.endswith((".self_attn", ".mlp", ".embed_tokens")):
                handles.append(module.register_forward_hook(drop(dropout)))
    return model, handles


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's logits; half precision in the matrix products, where the device has it."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
        output: Tensor = model(input_ids=inputs, use_cache=False).logits
    return output.float()


def cross_entropy(model: nn.Module, rows: Tensor) -> Tensor:
    logits = logits_of(model, rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def distillation(model: nn.Module, teacher: nn.Module, rows: Tensor) -> Tensor:
    """KL divergence from the target's distribution, and a little of the text itself."""
    with torch.no_grad():
        wanted = functional.log_softmax(logits_of(teacher, rows[:, :-1]), -1).flatten(0, 1)
    logits = logits_of(model, rows[:, :-1]).flatten(0, 1)
    found = functional.log_softmax(logits, -1)
    divergence = functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
    return divergence + 0.1 * functional.nll_loss(found, rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, held: HeldOut) -> float:
    """Mean loss per held-out token, in nats."""
    model.eval()
    total = torch.zeros((), device=held.rows[0].device)
    for row in held.rows:
        total += cross_entropy(model, row) * (row.shape[1] - 1)
    model.train()
    return float(total) / held.tokens


@torch.no_grad()
def agreement(target: nn.Module, draft: nn.Module, held: HeldOut) -> tuple[float, float]:
    """How often the two models' likeliest tokens agree, and the overlap of their distributions.

    The overlap, the sum of the smaller of the two probabilities, is the share of the draft's
    sampled tokens that speculative sampling at temperature 1 accepts.
    """
    target.eval()
    draft.eval()
    same = torch.zeros((), device=held.rows[0].device)
    overlap = torch.zeros_like(same)
    for row in held.rows:
        wanted, found = logits_of(target, row[:, :-1]), logits_of(draft, row[:, :-1])
        same += (wanted.argmax(-1) == found.argmax(-1)).sum()
        overlap += torch.minimum(wanted.softmax(-1), found.softmax(-1)).sum()
    return float(same) / held.tokens, float(overlap) / held.tokens


# ---------------------------------------------------------------------------------------------
# Training


@dataclass(frozen=True)
class Plan:
    """How one model is trained."""

    name: str
    steps: int
    rate: float
    decay: float
    rows: int
    length: int
    every: int


def optimizer_for(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": plan.decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = matrices[0].is_cuda
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), fused=fused)


def rate_at(step: int, plan: Plan) -> float:
    """Linear warmup, then a cosine down to a hundredth of the rate."""
    warmup = max(1, min(300, plan.steps // 20))
    if step < warmup:
        return plan.rate * (step + 1) / warmup
    done = (step - warmup) / max(1, plan.steps - warmup)
    return plan.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fit(
    model: nn.Module, loss_of: Loss, draw: Callable[[], Tensor], held: HeldOut, plan: Plan
) -> tuple[float, int]:
    """Train, and leave the model with the weights that did best on the held-out files.

    Returns that held-out loss and the step it was reached at.
    """
    optimizer = optimizer_for(model, plan)
    model.train()
    best, best_step, kept = math.inf, 0, snapshot(model)
    started = time.perf_counter()
    for step in range(1, plan.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step - 1, plan)
        loss = loss_of(draw())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % plan.every == 0 or step == plan.steps:
            found = held_out_loss(model, held)
            seconds = round(time.perf_counter() - started, 1)
            say(plan.name, step=step, loss=round(loss.item(), 4), held_out=round(found, 4),
                seconds=seconds)  # fmt: skip
            if found < best:
                best, best_step, kept = found, step, snapshot(model)
    model.load_state_dict(kept)
    return best, best_step


@torch.no_grad()
def write_synthetic(model: Any, stream: Stream, count: int, rows: int) -> Tensor:
    """Rows of text that the target writes itself, half at temperature 1 and half at 0.7.

    A draft is asked about what the target writes, so this is the text it should know best.
    """
    # A copy in bfloat16, the precision that the bundled weights have: the cache is half as large.
    writer = copy.deepcopy(model).to(torch.bfloat16).eval()
    length = MAX_POSITIONS
    made: list[Tensor] = []
    while len(made) * rows * length < count:
        prompt = stream.batch(rows, length)[:, :8]
        made.append(
            writer.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                temperature=1.0 if len(made) % 2 == 0 else 0.7,
                top_k=0,
                max_length=length + 1,
                min_length=length + 1,
                eos_token_id=None,
                pad_token_id=SPECIAL.index(PAD),
            )
        )
    return torch.cat(made)


def train_target(
    args: argparse.Namespace, stream: Stream, held: HeldOut, vocabulary: int
) -> tuple[nn.Module, Report]:
    """Train the target on the stream."""
    started = time.perf_counter()
    model, handles = build(shape("target", vocabulary), args.device, args.dropout)
    plan = Plan("target", args.steps, args.rate, args.decay, args.rows, args.length, args.every)

    def loss_of(rows: Tensor) -> Tensor:
        return cross_entropy(model, rows)

    compiled: Loss = torch.compile(loss_of) if args.compile else loss_of
    best, step = fit(model, compiled, lambda: stream.batch(plan.rows, plan.length), held, plan)
    for handle in handles:
        handle.remove()
    return model, report_of(model, plan, best, step, args.dropout, started)


def train_draft(
    args: argparse.Namespace, stream: Stream, held: HeldOut, target: nn.Module, vocabulary: int
) -> tuple[nn.Module, Report]:
    """Distil the draft from the target, on the stream and on what the target writes."""
    started = time.perf_counter()
    synthetic = write_synthetic(target, stream, args.synthetic, args.synthetic_rows)
    say("synthetic", tokens=synthetic.numel(), seconds=round(time.perf_counter() - started, 1))
    model, _ = build(shape("draft", vocabulary), args.device, 0.0)
    target.eval().requires_grad_(False)
    plan = Plan(
        "draft", args.draft_steps, args.draft_rate, args.draft_decay, args.rows, args.length,
        args.every,
    )  # fmt: skip

    def loss_of(rows: Tensor) -> Tensor:
        return distillation(model, target, rows)

    def draw() -> Tensor:
        """Half the windows from the corpus, half from the target's own text."""
        length = min(plan.length, synthetic.shape[1] - 1)
        real = stream.batch(plan.rows // 2, length)
        rows = synthetic[stream.integers(len(synthetic), plan.rows - len(real))]
        return torch.cat([real, rows[:, : length + 1]])

    compiled: Loss = torch.compile(loss_of) if args.compile else loss_of
    best, step = fit(model, compiled, draw, held, plan)
    report = report_of(model, plan, best, step, 0.0, started)
    return model, {**report, "synthetic_tokens": synthetic.numel()}


def report_of(
    model: nn.Module, plan: Plan, best: float, step: int, dropout: float, started: float
) -> Report:
    """What the figures say of one training."""
    return {
        "parameters": parameters(model),
        "steps": plan.steps,
        "best_step": step,
        "tokens_per_step": plan.rows * plan.length,
        "window": plan.length,
        "peak_learning_rate": plan.rate,
        "weight_decay": plan.decay,
        "dropout": dropout,
        "held_out_nats_while_training": round(best, 4),
        "seconds": round(time.perf_counter() - started, 1),
        "device": device_name(model),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def device_name(model: nn.Module) -> str:
    """The model's device, as torch names it."""
    device = next(model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# ---------------------------------------------------------------------------------------------
# Saving and reporting


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write one model in the Hugging Face layout: weights in bfloat16, tokenizer beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model).to("cpu", torch.bfloat16)
    settings_of: Any = transformers.GenerationConfig
    model.generation_config = settings_of(
        bos_token_id=0,
        eos_token_id=[0, SPECIAL.index(TURN_END)],
        pad_token_id=SPECIAL.index(PAD),
        do_sample=True,
        temperature=0.7,
    )
    model.save_pretrained(folder)
    # The safetensors writer makes it readable by its owner alone.
    (folder / "model.safetensors").chmod(0o644)
    # Without indentation the file is less than half as large.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )


def load(folder: Path, device: str) -> nn.Module:
    """Read a saved model back, in float32: the figures describe what the folder holds."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()


def figures(
    args: argparse.Namespace, corpus: Corpus, stream: Stream, held: HeldOut, reports: Report
) -> Report:
    """Measure the saved checkpoints, and say what they were made of."""
    target, draft = load(args.out / "target", args.device), load(args.out / "draft", args.device)
    for role, model in (("target", target), ("draft", draft)):
        nats = held_out_loss(model, held)
        bits = nats * held.tokens / math.log(2) / held.bytes
        reports[role]["held_out_nats_per_token"] = round(nats, 4)
        reports[role]["held_out_bits_per_byte"] = round(bits, 4)
        reports[role]["config"] = json.loads((args.out / role / "config.json").read_text())
        files = (args.out / role).iterdir()
        reports[role]["folder_bytes"] = sum(path.stat().st_size for path in files)
    same, overlap = agreement(target, draft, held)
    return {
        "seed": args.seed,
        "data": {
            "standard_library": args.stdlib_version,
            "licence": "PSF-2.0",
            "train_documents": len(corpus.files),
            "train_bytes": sum(len(text.encode()) for text in corpus.files),
            "train_tokens": stream.file_end,
            "train_tokens_with_openings_and_chats": stream.count,
            "held_out_files": len(corpus.held_out),
            "held_out_bytes": held.bytes,
            "held_out_tokens": held.tokens,
        },
        **reports,
        "agreement": {"greedy": round(same, 4), "overlap": round(overlap, 4)},
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the models, figures and card")
    add("--stdlib", type=Path, help="a Python library folder (default: the running one's)")
    add("--stdlib-version", help="the version to state for --stdlib")
    add("--steps", type=int, default=7000, help="training steps of the target")
    add("--draft-steps", type=int, default=12000, help="training steps of the draft")
    add("--rows", type=int, default=16, help="windows in a step")
    add("--length", type=int, default=MAX_POSITIONS, help="tokens in a window")
    add("--rate", type=float, default=3e-3, help="the target's peak learning rate")
    add("--draft-rate", type=float, default=3e-3, help="the draft's peak learning rate")
    add("--decay", type=float, default=0.1, help="the target's weight decay")
    add("--draft-decay", type=float, default=0.01, help="the draft's weight decay")
    add("--dropout", type=float, default=0.1, help="the target's dropout")
    add("--vocabulary", type=int, default=2048, help="tokens in the vocabulary")
    add("--synthetic", type=int, default=2_000_000, help="tokens the target writes for the draft")
    add("--synthetic-rows", type=int, default=512, help="rows it writes at a time")
    add("--every", type=int, default=1000, help="steps between evaluations")
    add("--seed", type=int, default=0)
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action=argparse.BooleanOptionalAction, default=None,
        help="use torch.compile (default: on cuda)")  # fmt: skip
    add("--files", type=int, help="read so many files only, for a quick trial")
    args = parser.parse_args()
    # What a reader has to run to repeat this: every option that shapes the result.
    elsewhere = {"out", "stdlib", "stdlib_version", "device", "compile"}
    changed = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in vars(args).items()
        if name not in elsewhere and value != parser.get_default(name)
    ]
    command = ["python bench/train_bundled.py --out effects/bundled", *changed]
    args.command = " ".join(command)
    if args.stdlib is None:
        args.stdlib = Path(sysconfig.get_path("stdlib"))
        args.stdlib_version = args.stdlib_version or platform.python_version()
    args.stdlib_version = args.stdlib_version or args.stdlib.name.removeprefix("python")
    if args.compile is None:
        args.compile = args.device == "cuda"
    return args


def main() -> None:
    """Train both models, and measure what was saved."""
    args = arguments()
    transformers.set_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    corpus = read_corpus(args.stdlib, args.files)
    tokenizer = train_tokenizer(corpus, args.vocabulary)
    vocabulary = tokenizer.get_vocab_size()
    stream = Stream(corpus, tokenizer, args.device, args.seed)
    held = hold_out(corpus, tokenizer, args.device, args.length)
    say("data", files=len(corpus.files), openings=len(corpus.openings), chats=len(corpus.chats),
        tokens=stream.count, file_tokens=stream.file_end, held_out_tokens=held.tokens,
        held_out_bytes=held.bytes, vocabulary=vocabulary)  # fmt: skip
    target, target_report = train_target(args, stream, held, vocabulary)
    save(target, tokenizer, args.out / "target")
    draft, draft_report = train_draft(args, stream, held, target, vocabulary)
    save(draft, tokenizer, args.out / "draft")
    reports = {"target": target_report, "draft": draft_report}
    found = figures(args, corpus, stream, held, reports)
    found["command"] = args.command
    (args.out / "training.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    say("done", **found["agreement"], target=reports["target"], draft=reports["draft"])


if __name__ == "__main__":
    main()
