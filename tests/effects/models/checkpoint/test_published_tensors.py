"""Published checkpoints: the loader takes every tensor, or names it as not read.

`published_tensors.json` has of each the fields of its config.json that decide, the names
of its tensors, and where these are from: an index file in a public repository, a list of
a checkpoint's tensors in one, the code of a library that reads the published checkpoint
by these names, with its commit or release, or transformers' class of the model. A source
says what of the names was not checked; of the last two kinds, the config is not from a
file. Names are written as patterns: `{0-27}` stands for each number of a range, and a
pattern's rests follow it.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import field, frozen

from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.architecture.spec import EMBED, LM_HEAD, ModelSpec
from minfer.effects.models.architecture.weights import expected_parts
from minfer.effects.models.checkpoint.checkpoint import (
    HARMLESS_SUFFIXES,
    TensorMismatchError,
    planned_parts,
    skipped_tensors,
)
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.checkpoint.tensor_names import model_name
from minfer.effects.models.checkpoint.weight_files import FoundTensors, TensorPlace
from minfer.effects.models.families.multimodal import MULTIMODAL
from tests.effects.tiny_model import read_spec

FILE: Final = Path(__file__).parent / "published_tensors.json"
CHECKPOINTS: Final[Mapping[str, Any]] = json.loads(FILE.read_text())
# Mixtures are checked with these experts of all, as the others have the same names.
CHECKED_EXPERTS: Final = 4
EXPERT_KEYS: Final = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
)
# How names of multimodal checkpoints begin, as they were published until transformers
# 4.52, and since: of vLLM 0.33's models mistral3, llava_next and others.
RENAMED_PREFIXES: Final = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("image_newline", "model.image_newline"),
)


def names_of(patterns: Mapping[str, str]) -> Iterator[str]:
    """The names that patterns stand for."""
    for pattern, rests in patterns.items():
        literals = re.split(r"\{[^}]*\}", pattern)
        ranges = [numbers(text) for text in re.findall(r"\{([^}]*)\}", pattern)]
        for chosen in itertools.product(*ranges):
            pairs = zip(literals, [*map(str, chosen), ""], strict=True)
            start = "".join(literal + number for literal, number in pairs)
            yield from (f"{start}.{rest}" if start else rest for rest in rests.split())


def with_few_experts(row: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint with its first experts alone, whose patterns have to be of all."""
    config = dict(row["config"])
    if isinstance(text := config.get("text_config"), dict):
        part = with_few_experts({"config": text, "tensors": row["tensors"]})
        return {**row, **part, "config": config | {"text_config": part["config"]}}
    count = next((config[key] for key in EXPERT_KEYS if key in config), 0)
    patterns = dict[str, str]()
    for pattern, rests in row["tensors"].items():
        stem, experts, of = pattern.partition(".experts.")
        assert not experts or of == f"{{0-{count - 1}}}", pattern
        few = f"{stem}{experts}{{0-{CHECKED_EXPERTS - 1}}}" if experts else pattern
        patterns[few] = rests
    if count:
        config |= {key: CHECKED_EXPERTS for key in EXPERT_KEYS if key in config}
        config |= {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
        own_names = {"top_k_experts", "num_experts_per_token"}
        config |= dict.fromkeys(own_names & config.keys(), 1)
    return {**row, "config": config, "tensors": patterns}


def numbers(text: str) -> list[int]:
    """The numbers of ranges: 0-2,5 stands for 0, 1, 2 and 5."""
    pairs = (part.partition("-") for part in text.split(","))
    return [n for low, _, high in pairs for n in range(int(low), int(high or low) + 1)]


@frozen(eq=False)
class Header:
    """What a file says of a tensor: as the model expects it, as an index says nothing."""

    shape: tuple[int, ...]
    kind: str

    def get_shape(self) -> list[int]:
        return [*self.shape]

    def get_dtype(self) -> str:
        return self.kind

    def __getitem__(self, _: object) -> torch.Tensor:
        """Rows of an output head, which are those of the embeddings."""
        return torch.zeros(2)


@frozen(eq=False)
class File:
    """A file of a checkpoint whose tensors are not there."""

    headers: dict[str, Header] = field(factory=dict)

    def get_slice(self, name: str) -> Header:
        return self.headers[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Zeros: what AutoGPTQ writes as the bias of matrices that have none, and
        embeddings, with which an output head is compared.
        """
        assert name.endswith((".bias", "embeddings.weight"))
        return torch.zeros(2)


@frozen(eq=False)
class Published:
    spec: ModelSpec
    names: list[str]
    found: FoundTensors


def published(
    folder: Path, label: str, *further: str, renamed: bool = False
) -> Published:
    """A checkpoint, with further tensors."""
    row = with_few_experts(CHECKPOINTS[label])
    names = [*names_of(row["tensors"]), *further]
    if renamed:
        names = [renamed_name(name) for name in names]
    weights = folder / "a.safetensors"
    weights.touch()
    index = {"weight_map": dict.fromkeys(names, weights.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(row["config"]))
    spec = as_stored(read_spec(folder), folder)
    weight_format = None if spec.quantization is None else spec.quantization.format
    is_stacked = any(".experts.gate_up_proj" in name for name in names)
    form = CheckpointForm(weight_format, is_stacked, row.get("transposed", False))
    expected, file = expected_parts(spec, form), File()
    if spec.tie_word_embeddings:
        expected[LM_HEAD] = expected[EMBED]  # which may be stored twice
    for name in names:
        part = expected.get(model_name(spec, name, expected))
        shape, kind = ((), "F32") if part is None else (part.shape, part.types[0])
        file.headers[name] = Header(shape, kind)
    places = {name: TensorPlace(weights, file, name) for name in names}
    return Published(spec, names, FoundTensors(places, dict.fromkeys(names, weights)))


def renamed_name(name: str) -> str:
    """A multimodal checkpoint's tensor, as the other releases of transformers name it."""
    pairs = [*RENAMED_PREFIXES, *((new, old) for old, new in RENAMED_PREFIXES)]
    prefix, other = next(pair for pair in pairs if name.startswith(pair[0]))
    return other + name.removeprefix(prefix)


@pytest.mark.parametrize("label", CHECKPOINTS)
def test_every_tensor_is_read_or_named_as_skipped(tmp_path: Path, label: str) -> None:
    check(published(tmp_path, label), label)


@pytest.mark.parametrize(
    "label",
    [
        "Ministral-3-8B-Instruct-2512",
        "Mistral-Small-3.2-24B-Instruct-2506-FP8",
        "Mistral-Small-4-119B-2603",
        "InternVL3-8B-hf",
        "gemma-3-4b-it",
        "llava-1.5-7b-hf",
        "llava-onevision-qwen2-7b-ov-hf",
        "llava-v1.6-mistral-7b-hf",
    ],
)
def test_names_of_both_releases_are_read(tmp_path: Path, label: str) -> None:
    check(published(tmp_path, label, renamed=True), label)


def check(checkpoint: Published, label: str) -> None:
    """Every tensor is read, or is one that the spec names as skipped."""
    spec, names = checkpoint.spec, checkpoint.names
    read = {place.name for place, _ in planned_parts(spec, checkpoint.found, Path())}
    rest = [name for name in names if name not in read]
    skipped = [name for name in rest if name.startswith(spec.skipped_prefixes)]
    inert = () if spec.quantization is None else spec.quantization.format.inert
    others = [
        name
        for name in rest
        if not name.startswith(spec.skipped_prefixes)
        and not name.endswith((*HARMLESS_SUFFIXES, *inert))
    ]
    if spec.quantization is not None and spec.quantization.format.method == "gptq":
        others = [name for name in others if not name.endswith(".bias")]  # of zeros
    if spec.tie_word_embeddings:
        others = [name for name in others if name != LM_HEAD]  # a copy
    assert not others
    assert skipped_tensors(spec, names).startswith(str(len(skipped) or ""))
    model_type = CHECKPOINTS[label]["config"]["model_type"]
    assert bool(skipped) == (model_type in MULTIMODAL or predicts_further(label))


def predicts_further(label: str) -> bool:
    """Whether a checkpoint has layers that predict further tokens."""
    row = CHECKPOINTS[label]
    by_config = bool(row["config"].get("num_nextn_predict_layers"))
    return by_config or any(
        pattern.startswith(("model.mtp", "mtp.")) for pattern in row["tensors"]
    )


@pytest.mark.parametrize("label", ["olmOCR-7B-0225-preview", "dolphin-mixtral-8x7b"])
def test_one_more_tensor_and_one_less_are_errors(tmp_path: Path, label: str) -> None:
    more = published(tmp_path, label, "model.layers.0.self_attn.sinks")
    with pytest.raises(TensorMismatchError, match=r"unexpected tensor .*\.sinks"):
        [*planned_parts(more.spec, more.found, tmp_path)]
    places = dict(more.found.places)
    del places["model.layers.0.self_attn.sinks"], places["model.norm.weight"]
    with pytest.raises(TensorMismatchError, match=r"missing tensor model\.norm\.weight"):
        [*planned_parts(more.spec, FoundTensors(places), tmp_path)]


def test_there_are_many_with_sources() -> None:
    assert len(CHECKPOINTS) >= 90
    sources = [row["source"] for row in CHECKPOINTS.values()]
    assert sum("index.json of github.com/" in source for source in sources) >= 35
    assert sum(source.startswith("table of tensors") for source in sources) >= 10
    dated = re.compile(r"github\.com/.* at ([0-9a-f]{12}|v0\.33\.0)")
    assert all(dated.search(source) for source in sources)
    kinds = {row["config"]["model_type"] for row in CHECKPOINTS.values()}
    assert len(kinds & MULTIMODAL.keys()) >= 15
    formats = {
        (row["config"].get("quantization_config") or {}).get("quant_method")
        for row in CHECKPOINTS.values()
    }
    assert formats >= {"awq", "gptq", "fp8", "mxfp4", "compressed-tensors"}
