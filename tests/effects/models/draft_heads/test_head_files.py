from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import asdict, evolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import make_cache
from minfer.effects.models.architecture.batch import BatchRow, make_batch
from minfer.effects.models.architecture.draft_head import EAGLE3, MTP, HeadSpec
from minfer.effects.models.architecture.layer_states import BEHIND_LAST, LayerStates
from minfer.effects.models.architecture.model import forward
from minfer.effects.models.architecture.quantization import LEVELS, Quantization
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.checkpoint.checkpoint import load_weights, skipped_tensors
from minfer.effects.models.checkpoint.quantize_checkpoint import quantize_checkpoint
from minfer.effects.models.checkpoint.stored_matrices import as_stored
from minfer.effects.models.config_reader import CheckpointError
from minfer.effects.models.draft_heads.head_files import load_head, random_head, read_head
from minfer.effects.models.formats.on_load import OnLoad
from minfer.effects.models.layout.shapes import head_bytes
from minfer.effects.models.ranks import Parallel
from tests.circles import long
from tests.effects.models.draft_heads.drafting_heads import HeadRun, close
from tests.effects.models.rank_threads import ThreadRanks, on_ranks
from tests.effects.tiny_eagle3 import TheirEagle3, save_eagle3
from tests.effects.tiny_families import VARIANTS, config_of, save
from tests.effects.tiny_heads import WEIGHTS, save_with_mtp
from tests.effects.tiny_model import read_spec

GLM: Final = ("Glm4Moe", "experts")
QWEN: Final = ("Qwen3_5", "plain")
DEEPSEEK: Final = ("DeepseekV3", "groups")


def tensors_of(node: Any) -> list[Tensor]:
    """All tensors in weights."""
    found: list[Tensor] = []

    def note(_: Any, value: Any) -> bool:
        if isinstance(value, Tensor):
            found.append(value)
        return True

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for inner in value.values():
                visit(inner)
        elif isinstance(value, tuple | list):
            for inner in value:
                visit(inner)

    visit(asdict(node, recurse=True))
    return found


@pytest.mark.long
def test_a_heads_bytes_are_those_of_its_tensors(tmp_path: Path) -> None:
    for family, name in (GLM, QWEN, DEEPSEEK):
        folder = tmp_path / family
        save_with_mtp(folder, family, VARIANTS[family, name])
        spec = read_spec(folder)
        check_bytes(spec, read_head(spec, MTP, folder), "float32")
        check_bytes(spec, read_head(spec, MTP, folder), "bfloat16")
    target = parse_spec(config_of("Qwen3"))
    folder = save_eagle3(tmp_path / "eagle3", TheirEagle3(fc_norm=True))
    check_bytes(target, read_head(target, EAGLE3, folder), "bfloat16")


def check_bytes(spec: ModelSpec, head: HeadSpec, dtype: str) -> None:
    weights = random_head(spec, head, dtype)
    tensors = tensors_of(weights)
    assert all(tensor.isfinite().all() for tensor in tensors)
    sizes = (tensor.numel() * tensor.element_size() for tensor in tensors)
    assert sum(sizes) == head_bytes(head, dtype, cuda=False)


def test_random_heads_are_the_same_each_time_and_know_different_tokens(
    tmp_path: Path,
) -> None:
    target = parse_spec(config_of("Qwen3"))
    folder = save_eagle3(tmp_path, TheirEagle3())
    head = read_head(target, EAGLE3, folder, random=True)
    first, second = random_head(target, head), random_head(target, head)
    assert first.target_ids is not None
    assert first.target_ids.tolist() == list(range(0, 160, 4))
    pairs = zip(tensors_of(first), tensors_of(second), strict=True)
    assert all(one.equal(other) for one, other in pairs)


def test_a_checkpoint_without_its_mtp_tensors_is_refused(tmp_path: Path) -> None:
    family, name = GLM
    save(str(tmp_path), family, VARIANTS[family, name] | {"num_nextn_predict_layers": 1})
    spec = read_spec(tmp_path)
    with pytest.raises(CheckpointError, match=r"no tensors of an MTP head .*hnorm"):
        read_head(spec, MTP, tmp_path)
    head = read_head(spec, MTP, tmp_path, random=True)
    with pytest.raises(CheckpointError, match=r"no tensors of an MTP head .*hnorm"):
        load_head(tmp_path, spec, head)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("model.layers.2.enorm.weight", r"missing tensor model\.layers\.2\.enorm"),
        ("model.layers.2.mlp.experts.3.up_proj.weight", r"missing tensor .*experts\.3"),
    ],
)
def test_an_mtp_head_without_a_tensor_or_with_another_is_refused(
    name: str, fault: str, tmp_path: Path
) -> None:
    save_with_mtp(tmp_path, "Glm4Moe", VARIANTS[GLM])
    path = tmp_path / WEIGHTS
    tensors = load_file(path)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    spec = read_spec(tmp_path)
    with pytest.raises(CheckpointError, match=fault):
        load_head(tmp_path, spec, read_head(spec, MTP, tmp_path))
    further = {"model.layers.2.self_attn.sinks": torch.ones(4)}
    save_file(tensors | further, path)
    with pytest.raises(CheckpointError, match=r"unexpected tensor .*sinks of the draft"):
        load_head(tmp_path, spec, read_head(spec, MTP, tmp_path))


@pytest.mark.long
def test_copies_of_the_targets_tensors_are_not_read(tmp_path: Path) -> None:
    save_with_mtp(tmp_path, "Glm4Moe", VARIANTS[GLM])
    spec = read_spec(tmp_path)
    head = read_head(spec, MTP, tmp_path)
    path = tmp_path / WEIGHTS
    tensors = load_file(path)
    copies = ("embed_tokens", "shared_head.head")
    further = {f"model.layers.2.{name}.weight": torch.ones(160, 64) for name in copies}
    save_file(tensors | further, path)
    load_head(tmp_path, spec, read_head(spec, MTP, tmp_path))
    names = [*tensors, *further]
    own = [name for name in tensors if name.startswith("model.layers.2.")]
    assert skipped_tensors(spec, names).startswith(f"{len(own) + 2} tensors of other")
    drafting = evolve(spec, draft_head=head)
    assert skipped_tensors(drafting, names).startswith("2 tensors of other parts")


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="draft heads in GGUF files"):
        read_head(parse_spec(config_of("Qwen3")), EAGLE3, path)


def run_of(folder: Path, spec: ModelSpec) -> HeadRun:
    head = read_head(spec, MTP, folder)
    return HeadRun(spec, load_weights(folder, spec), head, load_head(folder, spec, head))


@pytest.mark.parametrize(("family", "name"), long([QWEN, DEEPSEEK]))
def test_matrices_of_a_head_are_quantized_as_its_target(
    family: str, name: str, tmp_path: Path
) -> None:
    """As it is loaded; a checkpoint that minfer quantizes keeps the head as it was."""
    sizes = VARIANTS[family, name] | {"moe_intermediate_size": 32, "v_head_dim": 16}
    theirs = save_with_mtp(tmp_path / "a", family, sizes)
    spec = read_spec(tmp_path / "a")
    tokens = torch.randint(160, (12,)).tolist()
    states = theirs.states(tokens)[:-1]
    expected = theirs.draft(states, tokens[1:])
    at_load = evolve(spec, quantization=Quantization(OnLoad(LEVELS["fp8"])))
    run = run_of(tmp_path / "a", at_load)
    assert run.weights.projection is not None
    assert run.weights.projection.scheme is LEVELS["fp8"]
    found = run.draft(states, tokens[1:])
    scale = float(expected.logits.std())
    assert float((found.logits - expected.logits).std()) < 0.2 * scale
    quantize_checkpoint(tmp_path / "a", "fp8", tmp_path / "b")
    stored = as_stored(read_spec(tmp_path / "b"), tmp_path / "b")
    kept = run_of(tmp_path / "b", stored)
    assert kept.weights.projection is not None
    assert kept.weights.projection.scheme.is_plain
    close(kept.draft(states, tokens[1:]), expected)


@pytest.mark.parametrize(("family", "name"), [QWEN, *long([DEEPSEEK])])
def test_a_head_divided_among_ranks_drafts_the_same(
    family: str, name: str, tmp_path: Path
) -> None:
    theirs = save_with_mtp(tmp_path, family, VARIANTS[family, name])
    spec = read_spec(tmp_path)
    head = read_head(spec, MTP, tmp_path)
    tokens = torch.randint(160, (12,)).tolist()
    states = theirs.states(tokens)[:-1]

    def draft(rank: ThreadRanks) -> Any:
        info = rank.rank_info
        run = HeadRun(
            spec.for_rank(info),
            load_weights(tmp_path, spec, rank_info=info),
            head.for_rank(info),
            load_head(tmp_path, spec, head, rank_info=info),
            rank,
        )
        return run.draft(states, tokens[1:])

    results, _ = on_ranks(Parallel(tensor=2), draft)
    for found in results:
        close(found, theirs.draft(states, tokens[1:]))


def test_a_divided_eagle3_head_drafts_the_same(tmp_path: Path) -> None:
    target = parse_spec(config_of("Qwen3"))
    theirs = TheirEagle3()
    head = read_head(target, EAGLE3, save_eagle3(tmp_path, theirs))
    tokens = torch.randint(160, (12,)).tolist()
    states = torch.randn(12, 64)

    def draft(rank: ThreadRanks) -> Any:
        info = rank.rank_info
        weights = load_head(tmp_path, target, head, rank_info=info)
        own = target.for_rank(info)
        return HeadRun(own, NOTHING, head.for_rank(info), weights, rank).draft(
            states, tokens
        )

    results, _ = on_ranks(Parallel(tensor=2), draft)
    for found in results:
        close(found, theirs.draft(states, tokens))


NOTHING: Final[Any] = None  # the weights of a target that a head does not read


def test_states_are_those_before_layers(tmp_path: Path) -> None:
    theirs = save(str(tmp_path), "Qwen3", VARIANTS["Qwen3", "plain"])
    spec = read_spec(tmp_path)
    tokens = torch.randint(160, (9,)).tolist()
    wanted = LayerStates((0, 2, BEHIND_LAST))
    batch = make_batch([BatchRow(tokens, 0, range(2))], 8)
    cache = make_cache(spec, 2, 8)
    forward(spec, load_weights(tmp_path, spec), evolve(batch, layer_states=wanted), cache)
    with torch.inference_mode():
        result = theirs(torch.tensor([tokens]), output_hidden_states=True)
        last: list[Tensor] = []
        theirs.model.norm.register_forward_hook(lambda *a: last.append(a[1][0]))
        theirs(torch.tensor([tokens]))
    before = [result.hidden_states[layer] for layer in (0, 2)]
    expected = torch.cat((*before, *last), -1)[0]
    assert wanted.states is not None
    torch.testing.assert_close(wanted.states, expected, rtol=1e-4, atol=1e-4)
