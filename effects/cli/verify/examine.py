"""All comparisons of a checkpoint, in the order of the output."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
import transformers
from attrs import asdict, evolve, frozen

from minfer.effects.cli.verify import checkpoint_checks, logit_differences, tokens
from minfer.effects.cli.verify.dequantized import Dequantized, write_dequantized
from minfer.effects.cli.verify.findings import FAILED, RANDOM, SKIPPED, Check
from minfer.effects.cli.verify.known_differences import list_differences
from minfer.effects.cli.verify.passages import CODE, PROSE, cut_prompts
from minfer.effects.cli.verify.randomness import looks_random
from minfer.effects.cli.verify.reference import (
    load_reference,
    reference_logits,
    write_random,
)
from minfer.effects.live.llm import LLM
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.gguf.container import is_gguf
from minfer.effects.models.layout.cache_layout import plain_layout
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.model_source import checkpoint_folder
from minfer.effects.setup.prepare import prepare
from minfer.effects.text.tokenizer import Tokenizer
from minfer.values.checks import ConfigError

MAX_CONTEXT_TOKENS: Final = 256  # tokens, of the engine that is compared


def examine(args: EngineArgs, count: int, max_tokens: int) -> Iterator[Check]:
    """Yield findings over `count` prompts, continued by `max_tokens` tokens.

    Under load format dummy, of the same architecture with random weights, which both
    sides read from a temporary folder. Raises CheckpointError for what cannot be loaded.
    """
    folder = checkpoint_folder(args)
    if args.load_format != "dummy":
        yield from _examine(evolve(args, model=str(folder)), count, max_tokens)
        return
    with tempfile.TemporaryDirectory(prefix="minfer-verify-") as place:
        copy = write_random(folder, Path(place) / folder.resolve().name, args.seed)
        yield Check("tensors", RANDOM, "made here, as --load-format dummy asks")
        compared = evolve(args, model=str(copy), load_format="auto")
        yield from _examine(compared, count, max_tokens, is_random=True)


def _examine(
    args: EngineArgs, count: int, max_tokens: int, *, is_random: bool = False
) -> Iterator[Check]:
    # Executors that compute nothing have no bound of memory.
    setup = prepare(evolve(args, executor="dry"))
    spec = as_stored(setup.spec, setup.folder)
    length = min(MAX_CONTEXT_TOKENS, setup.config.max_model_len)
    run = evolve(args, max_model_len=length, max_num_seqs=8, max_num_batched_tokens=48)
    with tempfile.TemporaryDirectory(prefix="minfer-verify-") as place:
        copy = Dequantized(setup.folder, None, frozenset())
        if spec.quantization is not None or is_gguf(setup.folder):
            copy = write_dequantized(setup.folder, spec, Path(place) / "dequantized")
        compared = Compared(run, setup.folder, spec, copy, is_random)
        yield from _compare(compared, count, min(max_tokens, length // 2))


@frozen
class Compared:
    """A checkpoint, and what it is compared with."""

    args: EngineArgs
    folder: Path
    spec: ModelSpec
    reference: Dequantized
    is_random: bool


def _compare(compared: Compared, count: int, max_tokens: int) -> Iterator[Check]:
    """Yield findings over `count` prompts, continued by `max_tokens` tokens."""
    single = evolve(compared.args, dtype="float32", block_size=_block_size(compared.spec))
    with LLM(**asdict(single, recurse=False)) as llm:
        tokenizer = Tokenizer(compared.folder)
        if not compared.is_random:
            yield checkpoint_checks.check_tensors(compared.reference, compared.spec)
        yield from _texts(compared, tokenizer)
        length = compared.args.max_model_len or MAX_CONTEXT_TOKENS
        # Ids without an embedding are found by the check of ids.
        passages = [
            [
                token
                for token in tokenizer.encode(text)
                if token < compared.spec.vocab_size
            ]
            for text in (CODE, PROSE)
        ]
        passages = [ids[: length // 2] for ids in passages]
        texts = cut_prompts(passages, count)
        plain = reference_logits(evolve(compared.reference, scheme=None), "float32")
        exact = [plain(ids) for ids in texts]
        if compared.reference.scheme is None:
            yield logit_differences.check_float32(llm, texts, exact)
            yield logit_differences.check_greedy(llm, plain, texts, max_tokens)
        else:
            reference = reference_logits(compared.reference, "float32")
            rounded_logits = [reference(ids) for ids in texts]
            yield logit_differences.check_rounded(llm, texts, exact, rounded_logits)
            off = float((torch.cat(rounded_logits) - torch.cat(exact)).abs().max())
            yield logit_differences.check_greedy(llm, reference, texts, max_tokens, off)
        if not compared.is_random:
            yield _sanity(llm, passages, compared.reference.folder)
    if compared.spec.dtype != "float32":
        reference = reference_logits(compared.reference, compared.spec.dtype)
        with LLM(**asdict(compared.args, recurse=False)) as llm:
            packed = logit_differences.packed_logits(llm, texts)
            yield logit_differences.check_half(
                exact, packed, [reference(ids) for ids in texts]
            )


def _block_size(spec: ModelSpec) -> int:
    """Returns the tokens of a block: few, so that prompts hit the prefix cache, but as
    many as have room for a unit of the state of recurrent layers in float32.
    """
    size, exact = logit_differences.BLOCK_TOKENS, evolve(spec, dtype="float32")
    while spec.has_states and size < MAX_CONTEXT_TOKENS:
        try:
            plain_layout(exact, size)
        except ConfigError:
            size *= 2
        else:
            break
    return size


def _texts(compared: Compared, tokenizer: Tokenizer) -> Iterator[Check]:
    """Yield findings about ids, templates and tokenizers."""
    if is_gguf(compared.folder):
        reason = "transformers reads those of GGUF files by rules of its own"
        yield Check("tokenizer", SKIPPED, reason)
        return
    reference_tokenizer = load_reference(transformers.AutoTokenizer, compared.folder)
    yield checkpoint_checks.check_ids(compared.folder, tokenizer, compared.spec)
    yield tokens.check_template(tokenizer, reference_tokenizer)
    yield from tokens.check_tokenizer(compared.folder, tokenizer, reference_tokenizer)
    yield from list_differences(compared.folder)


def _sanity(llm: LLM, passages: list[list[int]], folder: Path) -> Check:
    """The check of text's probability; random weights are not at fault."""
    check = logit_differences.check_sanity(llm, passages)
    if check.state != FAILED or not looks_random(folder):
        return check
    return Check(check.name, RANDOM, f"the weights are random; {check.figures}")
