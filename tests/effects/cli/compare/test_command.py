"""`minfer compare`: its figures are a direct computation's; bad input is named before
anything is loaded.
"""

import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from attrs import evolve
from safetensors.torch import load_file, save_file

from minfer.effects.cli.compare import levels, measure_level
from minfer.effects.cli.main import main
from minfer.effects.live.engine import open_engine as opening
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.tokenizer import Tokenizer
from minfer.values.checks import ConfigError
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import EOS, write_checkpoint, write_tokenizer

TOKENS: Final = 512
WINDOW: Final = 256
# Small sizes, so that it is quick.
SMALL: Final = [
    "--max-model-len", str(WINDOW), "--num-gpu-blocks-override", "64",
    "--batches", "2", "1", "--input-len", "20", "--output-len", "4",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text."""
    place = tmp_path_factory.mktemp("compare")
    shutil.copyfile(json.decoder.__file__, place / "text")
    return place


def compare(place: Path, *options: str) -> int:
    return main(["compare", "--text", str(place / "text"), *SMALL, *options])


def refused(capsys: pytest.CaptureFixture[str], place: Path, *options: str) -> str:
    """The line with which a comparison is refused."""
    assert compare(place, *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


# --- figures ----------------------------------------------------------------------------


def windows(place: Path) -> list[list[int]]:
    ids = Tokenizer(bundled_folder()).encode((place / "text").read_text("utf-8"))[:TOKENS]
    return [ids[start : start + WINDOW] for start in range(0, TOKENS, WINDOW)]


def reference(folder: Path, dtype: torch.dtype, texts: list[list[int]]) -> torch.Tensor:
    """transformers' log-probabilities [positions, vocab], with a next token each."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0, :-1] for ids in texts]
    return torch.cat(logits).double().log_softmax(-1)


def perplexity(logp: torch.Tensor, texts: list[list[int]]) -> float:
    targets = torch.tensor([token for ids in texts for token in ids[1:]])
    return float((-logp.gather(1, targets[:, None]).mean()).exp())


@pytest.mark.long
def test_figures_are_those_of_a_direct_computation(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[Any]] = []
    real = opening.open_executor

    def opened(*arguments: Any) -> Any:
        assert [model for model in models if model() is not None] == []  # one at a time
        executor: Any = real(*arguments)
        models.append(weakref.ref(executor.model.weights.embed))
        return executor

    monkeypatch.setattr(opening, "open_executor", opened)
    file = place / "figures.json"
    options = ["--levels", "float32", "bf16", "--tokens", str(TOKENS + 100)]
    assert compare(place, *options, "--json", str(file)) == 0
    assert len(models) == 2
    report = json.loads(file.read_text("utf-8"))
    assert report["text"]["positions"] == 2 * (WINDOW - 1)
    base, level = (result["quality"] for result in report["levels"])
    texts = windows(place)
    dtypes = (torch.float32, torch.bfloat16)
    exact, half = (reference(bundled_folder(), dtype, texts) for dtype in dtypes)
    assert base["perplexity"] == pytest.approx(perplexity(exact, texts), rel=1e-3)
    # Sums in bfloat16 are rounded in another order than transformers'.
    assert level["perplexity"] == pytest.approx(perplexity(half, texts), rel=5e-3)
    divergence = float((exact.exp() * (exact - half)).sum(-1).mean())
    assert divergence / 2 < level["kl_divergence"] < 2 * divergence
    agreed = (exact.argmax(-1) == half.argmax(-1)).double().mean()
    assert level["top1_agreement"] == pytest.approx(float(agreed), abs=0.01)
    assert base["kl_divergence"] is base["top1_agreement"] is None
    for result in report["levels"]:
        assert [speed["batch"] for speed in result["speeds"]] == [1, 2]
        for speed in result["speeds"]:
            assert speed["ttft"] > 0
            # Medians of two things: on a busy machine they may be of different runs.
            assert 0 < speed["throughput"] < 2 * speed["batch"] / speed["tpot"]
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert f"perplexity {base['perplexity']:.4f} {level['perplexity']:.4f}\n" in shown


def drop_bits(file: Path, bits: int) -> None:
    """Round weights in bfloat16 to so many bits fewer."""
    tensors = load_file(file)
    for tensor in tensors.values():
        tensor.view(torch.int16).bitwise_and_(-(2**bits))
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.long
def test_in_float32_divergence_is_exact(place: Path) -> None:
    """Two checkpoints with the same dtype: nothing but the weights differs."""
    names = []
    for bits in (0, 3):
        copy = Path(shutil.copytree(bundled_folder(), place / f"{bits} bits fewer"))
        config = json.loads((copy / "config.json").read_text()) | {"dtype": "float32"}
        (copy / "config.json").write_text(json.dumps(config))
        drop_bits(copy / "model.safetensors", bits)
        names.append(str(copy))
    file = place / "exact.json"
    options = ["--levels", *names, "--tokens", str(TOKENS), "--json", str(file)]
    assert compare(place, *options) == 0
    base, level = json.loads(file.read_text("utf-8"))["levels"]
    texts = windows(place)
    first, second = (reference(Path(name), torch.float32, texts) for name in names)
    divergence = float((first.exp() * (first - second)).sum(-1).mean())
    agreed = (first.argmax(-1) == second.argmax(-1)).double().mean()
    assert divergence > 1e-4
    assert level["quality"]["kl_divergence"] == pytest.approx(divergence, rel=1e-3)
    assert level["quality"]["top1_agreement"] == pytest.approx(float(agreed))
    tensors = load_file(copy / "model.safetensors").values()
    elements = sum(tensor.numel() for tensor in tensors)
    for result in (base, level):
        memory = result["memory"]
        assert memory["weights_held"] == memory["weights_planned"] == 4 * elements
        # One block more than is planned, for padding.
        block = 64 * memory["kv_of_token"]
        assert memory["kv_held"] == memory["kv_planned"] + block == 65 * block


@pytest.mark.long
def test_states_in_bfloat16_cost_something(place: Path, tmp_path: Path) -> None:
    """They are rounded behind each token, as in decode steps."""
    key = ("Qwen3Next", "plain")
    config = VARIANTS[key] | {"vocab_size": 260, "eos_token_id": EOS}
    save(str(tmp_path), key[0], config)
    write_tokenizer(tmp_path)
    file = tmp_path / "states.json"
    levels_given = ["--levels", "float32", "state:float32", "state:bfloat16"]
    sizes = ["--model", str(tmp_path), "--device", "cpu", "--block-size", "16"]
    options = [*sizes, "--tokens", "256", "--num-gpu-blocks-override", "99"]
    assert compare(place, *levels_given, *options, "--json", str(file)) == 0
    base, full, half = json.loads(file.read_text("utf-8"))["levels"]
    assert full["quality"]["kl_divergence"] == 0
    assert 0 < half["quality"]["kl_divergence"] < 0.1
    dtypes = [level["state_dtype"] for level in (base, full, half)]
    assert dtypes == ["float32", "float32", "bfloat16"]
    sizes_held = [level["memory"]["state"] for level in (base, full, half)]
    assert sizes_held[0] == sizes_held[1] > sizes_held[2] > 0


# --- bad input --------------------------------------------------------------------------


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr(opening, "open_executor", loaded)


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--levels", "int3"], "'int3' is no level; --levels takes auto"),
        (["--levels", ""], "'' is no level"),
        (["--levels", "auto", "no/model/here"], "level no/model/here: model 'no/"),
        (["--dtype", "float16"], "--dtype does not go with compare"),
        (["a", "--model", "b"], "the model is given twice"),
        (["--levels", "auto", "--batches", "300"], "level auto: of --batches 300, "),
        (["--levels", "auto", "--input-len", "255"], "259 tokens together"),
        (["--levels", "auto", "--max-model-len", "9999"], "level auto: max_model_len"),
        (["--levels", "auto", "--text", "none"], "--text none cannot be read: No such"),
        (["--levels", "auto", "--device", "cuda"], "level auto: no GPU can be used"),
    ],
)
def test_bad_input_is_named_before_anything_is_loaded(
    options: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert message in refused(capsys, place, *options)


def test_a_level_is_a_setting_of_its_engine() -> None:
    names = ["auto", "int4-g32", "bf16", "half", "org/name"]
    base = EngineArgs(model="m", seed=5)
    parsed = levels.levels_of(names, base)
    assert [level.name for level in parsed] == names
    assert [level.args for level in parsed] == [
        base,
        evolve(base, quantization="int4-g32"),
        evolve(base, dtype="bfloat16"),
        evolve(base, dtype="float16"),
        evolve(base, model="org/name"),
    ]
    with pytest.raises(ConfigError, match="--quantization does not go with compare"):
        levels.levels_of(names, evolve(base, quantization="fp8"))


def test_a_level_whose_requests_fail_is_named(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: object, **__: object) -> None:
        raise measure_level.LevelFailedError("step 3: out of memory")

    monkeypatch.setattr(measure_level, "measure_level", failed)
    assert compare(place, "--levels", "float32") == 1
    assert "minfer: level float32: step 3: out of memory\n" in capsys.readouterr().err


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 tokens, fewer than a window of 256"),
        (b"def f(): pass\n", "tokens, fewer than a window of 256; give a longer text"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_unusable_texts_are_named(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(content)
    assert message in refused(capsys, tmp_path, "--levels", "auto")


@pytest.mark.usefixtures("loads_nothing")
def test_a_vocabulary_of_another_size_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = write_checkpoint(tmp_path / "tiny")
    err = refused(capsys, place, "--levels", "auto", str(tiny))
    assert f"level {tiny}: its vocabulary has" in err


@pytest.mark.long
@pytest.mark.usefixtures("loads_nothing")
def test_a_text_with_other_tokens_is_named(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(bundled_folder(), tmp_path / "other"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-2000]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    err = refused(capsys, place, "--levels", "auto", str(folder))
    assert f"level {folder}: its tokenizer makes other tokens" in err


@pytest.mark.usefixtures("loads_nothing")
def test_a_full_disk_is_named(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(place)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    err = refused(capsys, place, "--levels", "auto", "float32")
    assert "the base's probabilities need" in err


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize(
    "options",
    [
        ["--plot", "figure.pdf"],
        ["--json", "nowhere/there.json"],
        ["--tokens", "1"],
        ["--batches", "0"],
    ],
)
def test_arguments_that_make_no_sense(
    options: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare(place, *options)
    assert options[0] in capsys.readouterr().err


def test_a_text_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare"])
    assert "required: --text" in capsys.readouterr().err
