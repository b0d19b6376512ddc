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
from minfer.effects.cli.verify.known_differences import differences
from minfer.effects.cli.verify.passages import CODE, PROSE, prompts
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
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import model_folder
from minfer.effects.setup.prepare import prepare
from minfer.effects.text.tokenizer import Tokenizer

CONTEXT: Final = 256  # tokens, of the engine that is compared


def examine(args: EngineArgs, count: int, most: int) -> Iterator[Check]:
    """Yield findings over `count` prompts, continued by `most` tokens.

    Under load format dummy, of the same architecture with random weights, which both
    sides read from a temporary folder. Raises CheckpointError for what cannot be loaded.
    """
    folder = model_folder(args.model)
    if args.load_format != "dummy":
        yield from _examine(evolve(args, model=str(folder)), count, most)
        return
    with tempfile.TemporaryDirectory(prefix="minfer-verify-") as place:
        copy = write_random(folder, Path(place) / folder.resolve().name, args.seed)
        yield Check("tensors", RANDOM, "made here, as --load-format dummy asks")
        compared = evolve(args, model=str(copy), load_format="auto")
        yield from _examine(compared, count, most, is_random=True)


def _examine(
    args: EngineArgs, count: int, most: int, *, is_random: bool = False
) -> Iterator[Check]:
    # Executors that compute nothing have no bound of memory.
    setup = prepare(evolve(args, executor="dry"))
    spec = as_stored(setup.spec, setup.folder)
    length = min(CONTEXT, setup.config.max_model_len)
    run = evolve(args, max_model_len=length, max_num_seqs=8, max_num_batched_tokens=48)
    with tempfile.TemporaryDirectory(prefix="minfer-verify-") as place:
        copy = Dequantized(setup.folder, None, frozenset())
        if spec.quantization is not None or is_gguf(setup.folder):
            copy = write_dequantized(setup.folder, spec, Path(place) / "dequantized")
        compared = Compared(run, setup.folder, spec, copy, is_random)
        yield from _compare(compared, count, min(most, length // 2))


@frozen
class Compared:
    """A checkpoint, and what it is compared with."""

    args: EngineArgs
    folder: Path
    spec: ModelSpec
    reference: Dequantized
    is_random: bool


def _compare(of: Compared, count: int, most: int) -> Iterator[Check]:
    """Yield findings over `count` prompts, continued by `most` tokens."""
    single = evolve(of.args, dtype="float32", block_size=logit_differences.BLOCK)
    with LLM(**asdict(single, recurse=False)) as llm:
        ours = Tokenizer(of.folder)
        if not of.is_random:
            yield checkpoint_checks.tensors(of.reference, of.spec)
        yield from _texts(of, ours)
        length = of.args.max_model_len or CONTEXT
        # Ids without an embedding are found by the check of ids.
        passages = [
            [token for token in ours.encode(text) if token < of.spec.vocab_size]
            for text in (CODE, PROSE)
        ]
        passages = [ids[: length // 2] for ids in passages]
        texts = prompts(passages, count)
        plain = reference_logits(evolve(of.reference, scheme=None), "float32")
        exact = [plain(ids) for ids in texts]
        if of.reference.scheme is None:
            yield logit_differences.float32(llm, texts, exact)
            yield logit_differences.greedy(llm, plain, texts, most)
        else:
            reference = reference_logits(of.reference, "float32")
            theirs = [reference(ids) for ids in texts]
            yield logit_differences.rounded(llm, texts, exact, theirs)
            off = float((torch.cat(theirs) - torch.cat(exact)).abs().max())
            yield logit_differences.greedy(llm, reference, texts, most, off)
        if not of.is_random:
            yield _sanity(llm, passages, of.reference.folder)
    if of.spec.dtype != "float32":
        reference = reference_logits(of.reference, of.spec.dtype)
        with LLM(**asdict(of.args, recurse=False)) as llm:
            found = logit_differences.packed_logits(llm, texts)
            yield logit_differences.half(exact, found, [reference(ids) for ids in texts])


def _texts(of: Compared, ours: Tokenizer) -> Iterator[Check]:
    """Yield findings about ids, templates and tokenizers."""
    if is_gguf(of.folder):
        what = "transformers reads those of GGUF files by rules of its own"
        yield Check("tokenizer", SKIPPED, what)
        return
    theirs = load_reference(transformers.AutoTokenizer, of.folder)
    yield checkpoint_checks.ids(of.folder, ours, of.spec)
    yield tokens.template(ours, theirs)
    yield from tokens.tokenizer(of.folder, ours, theirs)
    yield from differences(of.folder)


def _sanity(llm: LLM, passages: list[list[int]], folder: Path) -> Check:
    """The check of text's probability; random weights are not at fault."""
    found = logit_differences.sanity(llm, passages)
    if found.state != FAILED or not looks_random(folder):
        return found
    return Check(found.name, RANDOM, f"the weights are random; {found.figures}")
