"""All comparisons of a checkpoint, in the order of the output."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import transformers
from attrs import asdict, evolve

from minfer.effects.cli.verify import checkpoint_checks, logit_differences, tokens
from minfer.effects.cli.verify.findings import FAILED, RANDOM, Check
from minfer.effects.cli.verify.known_differences import differences
from minfer.effects.cli.verify.passages import CODE, PROSE, prompts
from minfer.effects.cli.verify.randomness import looks_random
from minfer.effects.cli.verify.reference import (
    load_reference,
    reference_logits,
    write_random,
)
from minfer.effects.live.llm import LLM
from minfer.effects.models.gguf.container import is_gguf
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import model_folder
from minfer.effects.setup.prepare import prepare
from minfer.effects.text.tokenizer import Tokenizer
from minfer.values.checks import ConfigError

CONTEXT: Final = 256  # tokens, of the engine that is compared


def examine(args: EngineArgs, count: int, most: int) -> Iterator[Check]:
    """Yield findings over `count` prompts, continued by `most` tokens.

    Under load format dummy, of the same architecture with random weights, which both
    sides read from a temporary folder. Raises CheckpointError for what cannot be loaded,
    and ConfigError for GGUF files.
    """
    folder = model_folder(args.model)
    if is_gguf(folder):
        raise ConfigError(
            f"model {str(folder)!r}: GGUF files are not compared with transformers, "
            f"which reads them by rules of its own; verify the Hugging Face checkpoint "
            f"that it was made from, or try the file with `minfer generate`"
        )
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
    folder, spec = setup.folder, setup.spec
    length = min(CONTEXT, setup.config.max_model_len)
    run = evolve(args, max_model_len=length, max_num_seqs=8, max_num_batched_tokens=48)
    single = evolve(run, dtype="float32", block_size=logit_differences.BLOCK)
    with LLM(**asdict(single, recurse=False)) as llm:
        ours = Tokenizer(folder)
        theirs = load_reference(transformers.AutoTokenizer, folder)
        if not is_random:
            yield checkpoint_checks.tensors(folder, spec)
        yield checkpoint_checks.ids(folder, ours, spec)
        yield tokens.template(ours, theirs)
        yield from tokens.tokenizer(folder, ours, theirs)
        yield from differences(folder)
        passages = [ours.encode(text)[: length // 2] for text in (CODE, PROSE)]
        texts = prompts(passages, count)
        reference = reference_logits(folder, "float32")
        exact = [reference(ids) for ids in texts]
        yield logit_differences.float32(llm, texts, exact)
        yield logit_differences.greedy(llm, reference, texts, min(most, length // 2))
        if not is_random:
            yield _sanity(llm, passages, folder)
    if spec.dtype != "float32":
        reference = reference_logits(folder, spec.dtype)
        with LLM(**asdict(run, recurse=False)) as llm:
            found = logit_differences.packed_logits(llm, texts)
            yield logit_differences.half(exact, found, [reference(ids) for ids in texts])


def _sanity(llm: LLM, passages: list[list[int]], folder: Path) -> Check:
    """The check of text's probability; random weights are not at fault."""
    found = logit_differences.sanity(llm, passages)
    if found.state != FAILED or not looks_random(folder):
        return found
    return Check(found.name, RANDOM, f"the weights are random; {found.figures}")
