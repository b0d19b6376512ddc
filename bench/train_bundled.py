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
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

END, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL = [END, TURN_START, TURN_END, PAD]
VOCABULARY = 2048
MAX_POSITIONS = 2048
PEAK_RATE = 3e-3
DECAY = {"target": 0.1, "draft": 0.01}
DROPOUT = {"target": 0.1, "draft": 0.0}
# Heads are 64 wide for both: attention kernels for accelerators ask for it.
SHAPES: dict[str, dict[str, Any]] = {
    "target": {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 5,
               "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "draft": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
}  # fmt: skip

# Qwen2's own split, so that a reader which assumes it for this architecture agrees with the file.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Folders left out: tests, other people's packages, generated tables, build settings.
SKIPPED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "msilib",
    "lib-dynload", "ensurepip", "__phello__",
}  # fmt: skip
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

STARTED = time.perf_counter()
# Documents by kind: whole files, openings (functions, classes, imports, prose), chats, held out.
Corpus = dict[str, list[str]]


def say(event: str, **values: Any) -> None:
    """Print one line of progress, with the seconds since the start."""
    seconds = round(time.perf_counter() - STARTED, 1)
    print(json.dumps({"event": event, **values, "seconds": seconds}), flush=True)


def read_corpus(stdlib: Path, limit: int | None) -> Corpus:
    """Read the library into documents; limit bounds the files read, for a quick trial."""
    sources: dict[str, str] = {}
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if any(p in SKIPPED_FOLDERS or p.startswith(SKIPPED_PREFIXES) for p in relative.parts):
            continue
        with suppress(UnicodeDecodeError):
            sources[relative.as_posix()] = path.read_text(encoding="utf-8")
    corpus: Corpus = {"files": [], "openings": [], "chats": [], "held_out": []}
    for name, text in [item for item in sources.items() if len(item[1]) > 200][:limit]:
        digest = hashlib.sha256(name.encode()).digest()
        if name == "pydoc_data/topics.py":  # the language reference: one dictionary of text
            found = [node.value for node in ast.parse(text).body if isinstance(node, ast.Assign)]
            corpus["files"].extend(ast.literal_eval(found[0]).values())
        elif int.from_bytes(digest[:8], "big") % 20 == 0:  # the same files on every machine
            corpus["held_out"].append(text)
        else:
            corpus["files"].append(text)
            with suppress(SyntaxError):
                add_parts(corpus, text)
    return corpus


def add_parts(corpus: Corpus, source: str) -> None:
    """Add a file's openings and chats to the corpus.

    Openings are what follows the first import, each definition without its decorators, and the
    docstrings as prose: with them the model learns to start from an empty context. A chat, as the
    template renders it, asks with a docstring's first paragraph and answers with the definition.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    imports = [n.lineno for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    corpus["openings"] += ["\n".join(lines[at - 1 :][:200]) + "\n" for at in imports[:1]]
    prose: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        indent, own = " " * node.col_offset, lines[node.lineno - 1 : node.end_lineno]
        text = "\n".join(line.removeprefix(indent) for line in own) + "\n"
        if len(text) < 80:
            continue
        corpus["openings"].append(text)
        if documentation := ast.get_docstring(node):
            prose.append(documentation)
            question = " ".join(documentation.split("\n\n")[0].split())
            if 20 <= len(question) <= 300 and len(text) < 4000:
                asked = f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"
                corpus["chats"].append(asked + text.rstrip("\n") + TURN_END + "\n")
    if prose:
        corpus["openings"].append("\n\n".join(prose) + "\n")


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """A byte-level BPE tokenizer, without a normaliser: every text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, max_token_length=20, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus["files"], trainer)
    return tokenizer


class Data:
    """The tokens on the device: those trained on, drawn in windows, and those held out, in rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.corpus = read_corpus(args.stdlib, args.files)
        self.tokenizer = train_tokenizer(self.corpus)
        shuffle = random.Random(args.seed)
        ids: list[int] = [0]
        starts: dict[str, list[int]] = {"files": [], "openings": [], "chats": []}
        for kind, begin in starts.items():
            shuffle.shuffle(self.corpus[kind])
            for document in self.tokenizer.encode_batch(self.corpus[kind]):
                begin.append(len(ids))
                ids += [*document.ids, 0]
        self.count = len(ids)
        self.bytes = {k: sum(len(t.encode()) for t in texts) for k, texts in self.corpus.items()}
        # A window that starts near the end runs on into the beginning.
        self.tokens = torch.tensor(ids + ids[: MAX_POSITIONS + 1], device=args.device)
        self.openings = torch.tensor(starts["openings"] or [1], device=args.device)
        self.chats = torch.tensor(starts["chats"] or [1], device=args.device)
        self.file_end = int(self.openings[0])
        self.synthetic: Tensor | None = None
        self.generator = torch.Generator(args.device).manual_seed(args.seed)
        encoded = self.tokenizer.encode_batch(self.corpus["held_out"])
        held = [0, *(token for document in encoded for token in (*document.ids, 0))]
        self.held_count = len(held) - 1
        # Rows overlap by one token, so each but the first counts once.
        spans = [held[i : i + args.length + 1] for i in range(0, self.held_count, args.length)]
        self.held_rows = [torch.tensor([span], device=args.device) for span in spans]

    def integers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), device=self.tokens.device, generator=self.generator)

    def windows(self, rows: int, length: int) -> Tensor:
        """Stretches of length + 1 tokens: inputs and, one further on, what to predict."""
        openings, chats = round(rows * 0.20), round(rows * 0.10)
        begin = [self.integers(self.file_end, rows - openings - chats)]
        for starts, count in ((self.openings, openings), (self.chats, chats)):
            # Half of these begin with the separator, half with the text itself.
            begin.append(starts[self.integers(len(starts), count)] - self.integers(2, count))
        span = torch.arange(length + 1, device=self.tokens.device)
        return self.tokens[torch.cat(begin)[:, None] + span]

    def batch(self) -> Tensor:
        """One step's windows; half of them the target's own text, once it has written some."""
        rows, length = self.args.rows, self.args.length
        if self.synthetic is None:
            return self.windows(rows, length)
        length = min(length, self.synthetic.shape[1] - 1)
        real = self.windows(rows // 2, length)
        written = self.synthetic[self.integers(len(self.synthetic), rows - len(real))]
        return torch.cat([real, written[:, : length + 1]])


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's logits; half precision in the matrix products, where the device has it."""
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
        output: Tensor = model(input_ids=inputs, use_cache=False).logits
    return output.float()


def loss_of(model: nn.Module, teacher: nn.Module | None, rows: Tensor) -> Tensor:
    """Cross-entropy; given a teacher, a little of it and the divergence (KL) from the teacher."""
    found = functional.log_softmax(logits_of(model, rows[:, :-1]).flatten(0, 1), -1)
    text = functional.nll_loss(found, rows[:, 1:].flatten())
    if teacher is None:
        return text
    with torch.no_grad():
        wanted = functional.log_softmax(logits_of(teacher, rows[:, :-1]).flatten(0, 1), -1)
    divergence = functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
    return divergence + 0.1 * text


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Data) -> float:
    """Mean loss per held-out token, in nats. Leaves the model in evaluation mode."""
    model.eval()
    total = torch.zeros((), device=data.tokens.device)
    for row in data.held_rows:
        total += loss_of(model, None, row) * (row.shape[1] - 1)
    return float(total) / data.held_count


@torch.no_grad()
def write_synthetic(model: Any, data: Data) -> Tensor:
    """Rows the target writes, half at temperature 1, half at 0.7: what the draft is asked about."""
    # A copy in bfloat16, the precision that the bundled weights have: the cache is half as large.
    writer = copy.deepcopy(model).to(torch.bfloat16)
    rows, length = data.args.synthetic_rows, MAX_POSITIONS + 1
    made: list[Tensor] = []
    while len(made) * rows * MAX_POSITIONS < data.args.synthetic:
        prompt = data.windows(rows, MAX_POSITIONS)[:, :8]
        made.append(writer.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0,
            temperature=1.0 if len(made) % 2 == 0 else 0.7, min_length=length, max_length=length,
            eos_token_id=None, pad_token_id=SPECIAL.index(PAD),
        ))  # fmt: skip
    return torch.cat(made)


def build(role: str, data: Data) -> Any:
    """A fresh model with dropout on each block's output: Qwen2's own is on attention weights."""
    config = transformers.Qwen2Config(
        **SHAPES[role], vocab_size=data.tokenizer.get_vocab_size(), tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=0,
        eos_token_id=0, pad_token_id=SPECIAL.index(PAD), max_position_embeddings=MAX_POSITIONS,
    )  # fmt: skip
    model: Any = transformers.Qwen2ForCausalLM(config)
    for name, module in model.named_modules():
        if DROPOUT[role] and name.endswith((".o_proj", ".mlp", ".embed_tokens")):
            module.register_forward_hook(
                lambda block, _, output: functional.dropout(output, DROPOUT[role], block.training)
            )
    return model.to(data.args.device)


def rate_at(step: int, steps: int) -> float:
    """Linear warmup, then a cosine down to a hundredth of the rate."""
    warmup = max(1, min(300, steps // 20))
    if step < warmup:
        return PEAK_RATE * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return PEAK_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def train(role: str, steps: int, data: Data, teacher: Any) -> tuple[Any, dict[str, Any]]:
    """Train a model, from a teacher if there is one, on the teacher's writing as well.

    Returns it with the weights that did best on the held-out files, and figures of the training.
    """
    started = time.perf_counter()
    cuda = data.args.device == "cuda"
    if teacher is not None:
        data.synthetic = write_synthetic(teacher, data)
        say("synthetic", tokens=data.synthetic.numel())
    model = build(role, data)
    weights = list(model.parameters())
    groups = [  # weight decay on matrices only
        {"params": [p for p in weights if p.dim() > 1], "weight_decay": DECAY[role]},
        {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=cuda)
    step_loss = torch.compile(loss_of) if cuda else loss_of
    best, best_step, kept = math.inf, 0, copy.deepcopy(model.state_dict())
    for step in range(1, steps + 1):
        model.train()  # an evaluation leaves it otherwise
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step - 1, steps)
        loss = step_loss(model, teacher, data.batch())
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % data.args.every == 0 or step == steps:
            found = held_out_loss(model, data)
            say(role, step=step, loss=round(loss.item(), 4), held_out=round(found, 4))
            if found < best:
                best, best_step, kept = found, step, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, tokenizers)}
    written = {} if data.synthetic is None else {"synthetic_tokens": data.synthetic.numel()}
    return model.eval().requires_grad_(False), {
        "parameters": sum(p.numel() for p in weights), "steps": steps, "best_step": best_step,
        "tokens_per_step": data.args.rows * data.args.length, "window": data.args.length,
        "peak_learning_rate": PEAK_RATE, "weight_decay": DECAY[role], "dropout": DROPOUT[role],
        "held_out_nats_while_training": round(best, 4),
        "seconds": round(time.perf_counter() - started, 1),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {"python": platform.python_version(), **versions}, **written,
    }  # fmt: skip


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write one model in the Hugging Face layout: weights in bfloat16, tokenizer beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model).to("cpu", torch.bfloat16)
    settings_of: Any = transformers.GenerationConfig
    model.generation_config = settings_of(
        bos_token_id=0, eos_token_id=[0, SPECIAL.index(TURN_END)], pad_token_id=SPECIAL.index(PAD),
        do_sample=True, temperature=0.7,
    )  # fmt: skip
    model.save_pretrained(folder)
    # The safetensors writer makes it readable by its owner alone.
    (folder / "model.safetensors").chmod(0o644)
    # Without indentation the file is less than half as large.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": END,
        "pad_token": PAD, "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False, "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


@torch.no_grad()
def measure(figures: dict[str, Any], data: Data) -> None:
    """Add the figures of the saved models, read back in float32.

    The overlap of the two distributions, the sum of the smaller of the two probabilities, is the
    share of the draft's sampled tokens that speculative sampling at temperature 1 accepts.
    """
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    pair: list[nn.Module] = []
    for role in ("target", "draft"):
        folder = data.args.out / role
        pair.append(read(folder, dtype=torch.float32).to(data.args.device))
        nats = held_out_loss(pair[-1], data)
        bits = nats * data.held_count / math.log(2) / data.bytes["held_out"]
        figures[role]["held_out_nats_per_token"] = round(nats, 4)
        figures[role]["held_out_bits_per_byte"] = round(bits, 4)
        figures[role]["config"] = json.loads((folder / "config.json").read_text())
        figures[role]["folder_bytes"] = sum(path.stat().st_size for path in folder.iterdir())
    total = torch.zeros(2, device=data.args.device)
    for row in data.held_rows:
        wanted, found = (logits_of(model, row[:, :-1]) for model in pair)
        same = (wanted.argmax(-1) == found.argmax(-1)).sum()
        total += torch.stack([same, torch.minimum(wanted.softmax(-1), found.softmax(-1)).sum()])
    greedy, overlap = (round(value / data.held_count, 4) for value in total.tolist())
    figures["agreement"] = {"greedy": greedy, "overlap": overlap}


def arguments() -> argparse.Namespace:
    """The command line, and in command what a reader has to run to repeat this."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the models and figures")
    add("--stdlib", type=Path, help="a Python library folder (default: the running one's)")
    add("--stdlib-version", help="the version to state for --stdlib")
    add("--steps", type=int, default=7000, help="training steps of the target")
    add("--draft-steps", type=int, default=12000, help="training steps of the draft")
    add("--rows", type=int, default=16, help="windows in a step")
    add("--length", type=int, default=MAX_POSITIONS, help="tokens in a window")
    add("--synthetic", type=int, default=2_000_000, help="tokens the target writes for the draft")
    add("--synthetic-rows", type=int, default=512, help="rows it writes at a time")
    add("--every", type=int, default=1000, help="steps between evaluations")
    add("--seed", type=int, default=0)
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--files", type=int, help="read so many files only, for a quick trial")
    args = parser.parse_args()
    args.command = "python bench/train_bundled.py --out effects/bundled"
    for name in ("steps", "draft_steps", "rows", "length", "synthetic", "synthetic_rows", "every",
                 "seed", "files"):  # fmt: skip
        if getattr(args, name) != parser.get_default(name):
            args.command += f" --{name.replace('_', '-')} {getattr(args, name)}"
    named = args.stdlib.name.removeprefix("python") if args.stdlib else platform.python_version()
    args.stdlib_version = args.stdlib_version or named
    args.stdlib = args.stdlib or Path(sysconfig.get_path("stdlib"))
    return args


def main() -> None:
    """Train both models, and measure what was saved."""
    args = arguments()
    transformers.set_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    data = Data(args)
    figures: dict[str, Any] = {"seed": args.seed, "data": {
        "standard_library": args.stdlib_version, "licence": "PSF-2.0",
        "train_documents": len(data.corpus["files"]), "train_bytes": data.bytes["files"],
        "train_tokens": data.file_end, "train_tokens_with_openings_and_chats": data.count,
        "held_out_files": len(data.corpus["held_out"]), "held_out_bytes": data.bytes["held_out"],
        "held_out_tokens": data.held_count,
    }}  # fmt: skip
    say("data", **figures["data"])
    target, figures["target"] = train("target", args.steps, data, None)
    save(target, data.tokenizer, args.out / "target")
    draft, figures["draft"] = train("draft", args.draft_steps, data, target)
    save(draft, data.tokenizer, args.out / "draft")
    measure(figures, data)
    figures["command"] = args.command
    (args.out / "training.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    say("done", **figures)


if __name__ == "__main__":
    main()
