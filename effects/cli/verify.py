"""`minfer verify`: is this model really supported? Compared with transformers, on this
machine.

Comparisons find what minfer does otherwise than transformers: token ids, templates,
logits, greedy text. A damaged checkpoint is damaged for both, so there are checks of the
checkpoint by itself: its tensors, its ids, and whether text is more probable to it than
the same tokens shuffled. Damage that leaves a model which works a little worse (two
layers exchanged, say) looks like a worse model.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from attrs import asdict, evolve, frozen
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from torch import Tensor

from minfer.config import ConfigError
from minfer.effects.live.llm import LLM
from minfer.effects.models.batch import Row, make_batch
from minfer.effects.models.checkpoint import CheckpointError, read_optional, shards
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.fallback import quiet
from minfer.effects.models.spec import ModelSpec
from minfer.effects.setup.options import EngineArgs, engine_args, model_folder, prepare
from minfer.effects.text.chat import render_chat
from minfer.effects.text.tokenizer import Tokenizer
from minfer.request import SamplingParams

# Largest difference of a float32 logit, as a share of the logits' spread: sums in another
# order make 1e-5, in deep models 1e-4; the smallest real mistakes make 1e-2. Tokens whose
# logits are closer than twice this may come out either way, which is a tie.
FLOAT32: Final = 1e-3
HALF: Final = 3  # times transformers' own divergence from float32, in half precision
HUGE: Final = 1e6  # of a weight; trained ones stay below 1e3
BLOCK: Final = 16
CODE: Final = '''def read_lines(path):
    """Return the lines of a text file without their ends."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.rstrip()
            if line:
                lines.append(line)
    return lines
'''
PROSE: Final = (
    "The sun rose over the hills, and the people of the town began their day. A man\n"
    "opened the door of his shop and put a table outside, while a woman walked to the "
    "market to buy bread\n"
    "and milk. It was the first day of the year, and most of the children were still at "
    "home."
)
TEXTS: Final = (
    CODE,
    PROSE,
    "",
    " ",
    "  two\t tabs\t\n\n\n  and\r\nlines \u00a0 end  ",
    "x" * 300,
    (
        "naïve café, Größe; cafe\u0301 and A\u030angstro\u0308m "
        "\ufb01 \ufdfa \u00bd \u2167 ∑"
    ),
    "日本語のテキスト、한국어 שלום, مرحبا",
    "\x00\x07\x7f\u200b\u2028\ufeff",
    "emoji 😀 👨\u200d👩\u200d👧 🇨🇭 👍🏽, 1234567890 3.14159 0x1F 1e-9",
    "don't I'LL we've; snake_case camelCase <html> </s> [INST] <|im_start|>",
)
ASKS: Final = {"role": "user", "content": "What is  a 'list' in <Python>? 🐍\n"}
SAYS: Final = {"role": "assistant", "content": " A sequence.\n"}
Logits = Callable[[list[int]], Tensor]  # of a text: float32, [tokens, vocab]
TALKS: Final = (
    [ASKS],
    [{"role": "system", "content": "Be brief."}, ASKS],
    [ASKS, SAYS, ASKS],
)


@frozen
class Check:
    """One finding; `state` is pass, fail, skipped, or note (true, and no fault of
    minfer's).
    """

    name: str
    state: str
    figures: str


def verify(options: argparse.Namespace) -> int:
    """Compare, print a table and a verdict; 0 if nothing failed, else 1. Raises as `LLM`
    does.
    """
    args = engine_args(options, executor="torch")
    if args.load_format == "dummy":
        raise ConfigError(
            "verify compares a checkpoint's own weights: leave out --load-format"
        )
    checks: list[Check] = []
    try:
        with quiet():
            for check in examine(args, options.prompts, options.tokens):
                checks.append(check)
                if not options.json:
                    print(
                        f"{check.name:<16} {check.state:<8} {check.figures}", flush=True
                    )
    except CheckpointError as error:
        _report([*checks, Check("loading", "fail", str(error))], options.json)
        raise
    return _report(checks, options.json)


def _report(checks: list[Check], as_json: bool) -> int:
    failed = [check.name for check in checks if check.state == "fail"]
    verdict = f"NOT supported: {failed[0]}" if failed else "supported"
    found = json.dumps(
        {"checks": [asdict(check) for check in checks], "verdict": verdict}
    )
    print(found if as_json else f"verdict: {verdict}", flush=True)
    return 1 if failed else 0


def _check(name: str, bad: list[str], figures: str) -> Check:
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return Check(
        name, "fail" if bad else "pass", f"{figures}; {bad[0]}{more}" if bad else figures
    )


def examine(args: EngineArgs, prompts: int, tokens: int) -> Iterator[Check]:
    """Yield findings. Raises CheckpointError for what cannot be loaded."""
    args = evolve(args, model=str(model_folder(args.model)))
    setup = prepare(
        evolve(args, executor="dry")
    )  # which has all the memory that it wants
    folder, spec = setup.folder, setup.spec
    length = min(256, setup.config.max_model_len)
    run = evolve(args, max_model_len=length, max_num_seqs=8, max_num_batched_tokens=48)
    with LLM(
        **asdict(evolve(run, dtype="float32", block_size=BLOCK), recurse=False)
    ) as llm:
        mine, theirs = Tokenizer(folder), _theirs(transformers.AutoTokenizer, folder)
        yield _tensors(folder, spec)
        yield _ids(folder, mine, spec)
        yield _template(mine, theirs)
        yield from _tokenizer(folder, mine, theirs)
        known = [mine.encode(text)[: length // 2] for text in (CODE, PROSE)]
        halves = [len(ids) // 2 for ids in known]
        texts = [
            known[i % 2][7 * i % halves[i % 2] :][: 20 + 11 * i % 48]
            for i in range(prompts)
        ]
        reference = _reference(folder, "float32")
        exact = list(map(reference, texts))
        right, found = torch.cat(exact), torch.cat(_packed_logits(llm, texts))
        gap, most = float((found - right).abs().max()), FLOAT32 * float(right.std())
        figures = f"{len(right)} positions of {len(texts)} prompts off by {gap:.2g}"
        yield _check(
            "logits float32", [] if gap <= most else [f"allowed is {most:.2g}"], figures
        )
        yield _greedy(llm, reference, texts, min(tokens, length // 2))
        yield _sanity(llm, known)
    if spec.dtype != "float32":
        reference = _reference(folder, spec.dtype)
        with LLM(**asdict(run, recurse=False)) as llm:
            yield _half(exact, _packed_logits(llm, texts), list(map(reference, texts)))


def _tensors(folder: Path, spec: ModelSpec) -> Check:
    """Numbers that no training leaves behind: NaN, infinities, constant matrices, rows of
    zeros.
    """
    bad, count = [], 0
    for path, _ in shards(folder):
        for name, stored in load_file(path).items():
            tensor, count = stored.float(), count + 1
            inner = tensor.dim() > 1 and len(tensor) < spec.vocab_size
            if not tensor.isfinite().all() or tensor.abs().max() > HUGE:
                bad.append(f"{name} is not finite, or huge")
            elif tensor.dim() > 1 and tensor.min() == tensor.max():
                bad.append(f"{name} is constant")
            elif inner and not tensor.flatten(1).any(1).all():  # embeddings may be padded
                bad.append(f"{name} has rows of zeros")
    return _check("tensors", bad, f"{count} tensors")


def _ids(folder: Path, mine: Tokenizer, spec: ModelSpec) -> Check:
    """Token ids must have an embedding, and the configs must agree where
    sequences end.
    """
    vocab = Backend.from_file(str(folder / "tokenizer.json")).get_vocab()
    named, every = (
        {"tokenizer.json": {max(vocab.values(), default=0)}},
        set(range(spec.vocab_size)),
    )
    for name in ("config.json", "generation_config.json"):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = read_optional(folder / name).get(key)
            ids = value if isinstance(value, list) else [value]
            named[f"{key} of {name}"] = {one for one in ids if one is not None}
    bad = [f"{where} has {ids}" for where, ids in named.items() if not ids <= every]
    ends = [ids for where, ids in named.items() if where.startswith("eos") and ids]
    if ends and not set.intersection(*ends):
        bad.append(f"the configs end sequences with {ends}")
    return _check("ids", bad, f"{spec.vocab_size} embeddings, ends {list(mine.eos_ids)}")


def _sanity(llm: LLM, passages: list[list[int]]) -> Check:
    """Text must be likelier than its tokens shuffled or a uniform guess; repeated text
    more so.

    The last takes attention that finds its way back over positions.
    """

    def cost(ids: list[int], begin: int = 0) -> float:  # nats a token
        logp = _packed_logits(llm, [ids])[0][:-1].log_softmax(-1)
        return float(-logp.gather(1, torch.tensor(ids[1:])[:, None])[begin:].mean())

    text, ids = min(
        (cost(ids), ids) for ids in passages
    )  # the one that the model knows better
    shuffled = cost(random.Random(0).sample(ids, len(ids)))  # noqa: S311 - no secrets
    again = cost([*ids, *ids], len(ids))
    uniform = math.log(llm.setup.spec.vocab_size)
    bad = (
        [] if text < min(uniform, shuffled) - 1 else ["text is not clearly more probable"]
    )
    bad += [] if again < 0.9 * text else ["repeated text is not clearly more probable"]
    figures = (
        f"nats a token: text {text:.2f}, repeated {again:.2f}, shuffled {shuffled:.2f}"
    )
    return _check("sanity", bad, f"{figures}, uniform {uniform:.2f}")


def _tokenizer(folder: Path, mine: Tokenizer, theirs: Any) -> Iterator[Check]:
    """Token ids, text of token ids, and special tokens.

    The reference is AutoTokenizer, as it heeds tokenizer_config.json, but with the
    normalizer and pre-tokenizer of tokenizer.json: that file comes with the model, and
    some classes bring others.
    """
    named = sorted(set(mine.special_tokens.values()))
    texts = [*TEXTS, *(f"a {token} b{token}" for token in named)]
    file, kept = (
        Backend.from_file(str(folder / "tokenizer.json")),
        list(map(theirs.encode, texts)),
    )
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(theirs.backend_tokenizer, part, getattr(file, part))
    differ = [
        text for text, ids in zip(texts, kept, strict=True) if theirs.encode(text) != ids
    ]
    if differ:
        what = (
            f"{type(theirs).__name__} of transformers brings a normalizer or "
            f"pre-tokenizer that "
        )
        what += "tokenizer.json, which holds here, has not; no fault of the model's"
        such = f"{len(differ)} texts differ, such as {differ[0][-40:]!r}"
        yield Check("tokenizer class", "note", f"{what}: {such}")
    bad = []
    for text in texts:
        ids, found = theirs.encode(text), mine.encode(text)
        bad += [] if found == ids else [f"{text[:40]!r} is {found[:8]} and not {ids[:8]}"]
        back = theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        bad += (
            []
            if mine.decode(ids) == back
            else [f"{ids[:8]} is {mine.decode(ids)[:40]!r}"]
        )
    for (
        name,
        token,
    ) in mine.special_tokens.items():  # classes make up those that are not named
        other = getattr(theirs, name)
        bad += [] if other == token else [f"{name} is {token!r} and not {other!r}"]
    yield _check("tokenizer", bad, f"{len(texts)} texts there and back, special tokens")


def _template(mine: Tokenizer, theirs: Any) -> Check:
    """Conversations rendered by both; refusing one is an answer too."""
    if mine.chat_template is None:
        return Check("chat template", "skipped", "the model has none")
    bad = []
    for talk, prompt in [(talk, prompt) for talk in TALKS for prompt in (True, False)]:
        found = right = None
        with suppress(Exception):  # a template raises what it likes
            found = render_chat(mine, talk, {"add_generation_prompt": prompt})
        with suppress(Exception):
            right = theirs.apply_chat_template(
                talk, tokenize=False, add_generation_prompt=prompt
            )
        bad += [] if found == right else [f"{found!r} and not {right!r}"]
    return _check("chat template", bad, f"{2 * len(TALKS)} conversations")


def _theirs(kind: Any, folder: Path, **how: Any) -> Any:
    try:
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **how
        )
    except Exception as error:  # each kind fails in ways of its own
        raise CheckpointError(
            f"{folder}: transformers cannot load it: {error}"
        ) from error


def _reference(folder: Path, dtype: str) -> Logits:
    how = {
        "dtype": torch_dtype(dtype),
        "attn_implementation": "eager",
        "use_safetensors": True,
    }
    model = _theirs(transformers.AutoModelForCausalLM, folder, **how).eval()

    def logits(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[
                0
            ]
            return found.float()

    return logits


def _packed_logits(llm: LLM, texts: list[list[int]]) -> list[Tensor]:
    """minfer's logits of every position: texts packed, each as two chunks and a single
    token.
    """
    executor: Any = llm.worker.driver.executor
    blocks = -(-max(map(len, texts)) // BLOCK) * len(texts)
    cache = executor.make_cache(blocks, BLOCK, blocks * BLOCK)
    parts: list[list[Tensor]] = [[] for _ in texts]
    for turn in range(3):
        rows = {}
        for i, ids in enumerate(texts):
            a, b = (0, len(ids) // 2, len(ids) - 1, len(ids))[turn : turn + 2]
            if a < b:
                rows[i] = Row(ids[a:b], a, range(i, blocks, len(texts)), b - a)
        batch = make_batch([*rows.values()], BLOCK, executor.device)
        logits = executor.model(batch, cache).float().cpu()
        logits = logits.split([row.sample for row in rows.values()])
        for i, part in zip(rows, logits, strict=True):
            parts[i].append(part)
    return [torch.cat(part) for part in parts]


def _greedy(llm: LLM, reference: Logits, texts: list[list[int]], tokens: int) -> Check:
    """What the engine writes, twice, the second time from its prefix cache.

    Each token must have transformers' largest logit after the same tokens, which makes it
    the one that greedy generation writes there.
    """
    bad, count, ties, hits = [], 0, 0, 0
    params = SamplingParams(temperature=0, max_tokens=tokens)
    for _ in range(2):
        outputs = llm.generate([list(ids) for ids in texts], params, use_tqdm=False)
        hits = sum(output.num_cached_tokens for output in outputs)
        for i, (ids, output) in enumerate(zip(texts, outputs, strict=True)):
            made = list(output.outputs[0].token_ids)
            logits = reference([*ids, *made[:-1]])[len(ids) - 1 :]
            gaps = logits.max(-1).values - logits[range(len(made)), made]
            wrong = int((~(gaps <= 2 * FLOAT32 * logits.std())).sum())
            count, ties = count + len(made), ties + int(gaps.count_nonzero()) - wrong
            bad += [f"prompt {i}: {wrong} tokens are not the likeliest"] if wrong else []
            ends = [at for at, token in enumerate(made) if token in llm.setup.stop_ids]
            if (ends or [tokens - 1]) != [len(made) - 1]:
                bad.append(
                    f"prompt {i} ends after {len(made)} tokens: {output.outputs[0].error}"
                )
    return _check(
        "greedy text", bad, f"{count} tokens, {ties} ties, {hits} prompt tokens cached"
    )


def _half(exact: list[Tensor], found: list[Tensor], theirs: list[Tensor]) -> Check:
    """Divergence from float32 (Kullback-Leibler, nats a token), minfer's and
    transformers'.
    """
    right = torch.cat(exact).log_softmax(-1)
    logps = [torch.cat(part).log_softmax(-1) for part in (found, theirs)]
    kl = [float((right.exp() * (right - logp)).sum(-1).mean()) for logp in logps]
    same = [float((right.argmax(-1) == logp.argmax(-1)).float().mean()) for logp in logps]
    bad = [] if kl[0] <= HALF * kl[1] + 1e-4 else ["too far from float32"]
    figures = f"divergence {kl[0]:.2g} nats, likeliest token the same at {same[0]:.1%}"
    return _check(
        "logits half", bad, f"{figures}; transformers {kl[1]:.2g}, {same[1]:.1%}"
    )
