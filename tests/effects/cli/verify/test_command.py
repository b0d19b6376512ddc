"""`minfer verify`: it passes what works, and fails damaged copies of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from minfer.effects.cli.main import main
from minfer.effects.cli.verify import tokens
from minfer.effects.execution.cpu import cpu_backend
from minfer.effects.execution.cpu.cpu_sampler import choose
from minfer.effects.execution.running import own_model
from minfer.effects.models.architecture.model import forward
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.setup.prepare import prepare
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tokenizer_classes import CLASSES
from tests.circles import claimed, long
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.tiny_model import EOS, write_checkpoint, write_tokenizer

Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"
EMBED = "model.embed_tokens.weight"

# A config of each family with recurrent layers.
HYBRIDS = {
    "KimiLinear": "plain",
    "Jamba": "plain",
    "Qwen3Next": "plain",
    "Qwen3_5": "plain",
    "Qwen3_5Moe": "plain",
    "GraniteMoeHybrid": "experts",
    "NemotronH": "latent experts",
    "FalconH1": "multipliers",
    "Lfm2": "plain",
    "Lfm2Moe": "plain",
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the bundled model, to be damaged."""
    return Path(shutil.copytree(bundled_folder(), tmp_path / "copy"))


def checked(
    capsys: pytest.CaptureFixture[str],
    folder: Path | None,
    code: int,
    dtype: str = "float32",
    *options: str,
) -> dict[str, Any]:
    """Run `minfer verify`, which must end with `code`; its findings by name, and the
    verdict.
    """
    model = [] if folder is None else ["--model", str(folder)]
    small = ["--prompts", "2", "--tokens", "2", "--dtype", dtype]
    assert main(["verify", *model, *small, *options, "--json"]) == code
    out = json.loads(capsys.readouterr().out)
    assert set(out) == {"checks", "verdict"}
    return {check["name"]: check for check in out["checks"]} | {"verdict": out["verdict"]}


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.long
def test_the_bundled_model_is_supported(capsys: pytest.CaptureFixture[str]) -> None:
    findings = checked(capsys, None, 0, "auto")
    assert findings.pop("verdict") == "supported"
    states = {name: check["state"] for name, check in findings.items()}
    assert set(states.values()) == {"pass"}
    assert list(states) == [
        "tensors",
        "ids",
        "chat template",
        "tokenizer",
        "logits float32",
        "greedy text",
        "sanity",
        "logits half",
    ]
    assert (
        "8 tokens, 0 ties, 32 prompt tokens cached" in findings["greedy text"]["figures"]
    )


@pytest.mark.long
def test_a_tokenizer_class_that_reads_texts_otherwise_is_noted(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A class that minfer does not know, with a normalizer that tokenizer.json has not.
    monkeypatch.delitem(cast(Any, CLASSES), "Qwen2Tokenizer")
    rewrite(copy / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    findings = checked(capsys, copy, 0)
    assert findings["verdict"] == "supported"
    assert findings["tokenizer class"]["state"] == "note"
    figures = findings["tokenizer class"]["figures"]
    assert "Qwen2Tokenizer of transformers brings a" in figures
    assert "1 texts differ" in figures


@pytest.mark.long
def test_a_tokenizer_class_that_is_known_is_compared(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(copy / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    findings = checked(capsys, copy, 0)
    assert findings["tokenizer"]["state"] == "pass"
    assert "tokenizer class" not in findings


@pytest.mark.long
def test_the_template_for_tools_is_compared(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    templates = copy / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools | length }}")
    (copy / "chat_template.jinja").write_text("plain")
    assert checked(capsys, copy, 0)["chat template"] == {
        "name": "chat template",
        "state": "pass",
        "figures": "12 conversations",
    }


@pytest.mark.long
def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--prompts", "1", "--tokens", "1", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "verdict: supported"
    assert lines[0].split()[:2] == ["tensors", "pass"]
    assert not any(
        line.startswith("logits half") for line in lines
    )  # what runs is float32


def damaged(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def configured(file: str = "config.json", **changes: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / file, **changes)


def flip_a_bit(tensors: Tensors) -> None:
    """The highest bit of an exponent: about 0.01 becomes about 10^36."""
    tensors[UP].view(torch.int16)[3, 5] ^= 0x4000


def shuffle_rows(tensors: Tensors) -> None:
    rows = len(tensors[EMBED])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    tensors[EMBED] = tensors[EMBED][order].contiguous()


def cut_heads(folder: Path) -> None:
    """Twice as many heads, half as wide: the shapes of all projections are the same."""
    configured(num_attention_heads=8, num_key_value_heads=4, head_dim=32)(folder)
    damaged(
        lambda tensors: tensors.update(
            {
                name: weight[:32].clone()
                for name, weight in tensors.items()
                if name.endswith(("q_norm.weight", "k_norm.weight"))
            }
        )
    )(folder)


def one_token_more(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    token = {**tokenizer["added_tokens"][-1], "id": size, "content": "<|new|>"}
    tokenizer["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def others_tokens(folder: Path) -> None:
    """The tokenizer of another model: the same tokens, each with its neighbour's id."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocab = tokenizer["model"]["vocab"]
    names = [name for name in vocab if name not in special]
    ids = [vocab[name] for name in names]
    vocab.update(zip(names, ids[1:] + ids[:1], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "damage"),
    [
        ("tensors", damaged(lambda t: t[UP][3].fill_(torch.nan))),
        ("tensors", damaged(lambda t: t[UP].fill_(0.02))),
        ("tensors", damaged(lambda t: t[UP][100:120].zero_())),
        ("tensors", damaged(flip_a_bit)),
        ("sanity", damaged(shuffle_rows)),
        (
            "sanity",
            configured(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
        ),
        ("sanity", cut_heads),
        ("sanity", others_tokens),
        ("ids", one_token_more),
        ("ids", configured("generation_config.json", eos_token_id=[5000])),
        ("ids", configured("generation_config.json", eos_token_id=[7])),
    ],
    ids=[
        "nan",
        "constant",
        "hole",
        "bit",
        "rows",
        "rope",
        "heads",
        "tokens",
        "vocab",
        "eos",
        "ends",
    ],
)
def test_a_damaged_copy_fails(
    check: str,
    damage: Callable[[Path], None],
    copy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(copy)
    findings = checked(capsys, copy, 1)
    assert findings[check]["state"] == "fail"
    assert findings["verdict"] == f"NOT supported: {check}"


def test_a_window_that_transformers_has_not_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "--attention-window", "64"]) == 2
    assert "leave --attention-window out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged(lambda t: t.update({UP: t[UP][:-1].clone()})), f"tensor {UP} has shape"),
        (damaged(lambda t: t.pop(UP)), f"missing tensor {UP}"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: not found"),
        (
            configured("tokenizer_config.json", tokenizer_class=3),
            "transformers cannot load it",
        ),
    ],
)
def test_an_unusable_checkpoint_is_named(
    damage: Callable[[Path], None],
    message: str,
    copy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(copy)
    assert main(["verify", "--model", str(copy)]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "verdict: NOT supported: loading"
    assert message in err


def test_truncated_weights_are_named(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    findings = checked(capsys, copy, 2)
    assert "truncated or corrupt" in findings["loading"]["figures"]


@pytest.mark.long
def test_random_weights_are_no_language_model_but_no_fault_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = checked(capsys, write_checkpoint(tmp_path / "random"), 0)
    verdict = findings.pop("verdict")
    assert verdict.startswith("supported; its weights are random, so what was compared")
    assert verdict.endswith("tensors, ids, tokenizer, logits float32, greedy text")
    assert findings["sanity"]["state"] == "random"
    assert "the weights are random; nats a token" in findings["sanity"]["figures"]
    assert findings["chat template"]["state"] == "skipped"


@pytest.mark.parametrize("family", [*long([*HYBRIDS][:2]), *claimed([*HYBRIDS][2:])])
def test_models_with_recurrent_layers_are_supported(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = VARIANTS[family, HYBRIDS[family]] | {"vocab_size": 260, "eos_token_id": EOS}
    save(str(tmp_path), family, config)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    findings = checked(capsys, tmp_path, 0)
    verdict = findings.pop("verdict")
    assert verdict.endswith("tensors, ids, tokenizer, logits float32, greedy text")


@pytest.mark.long
def test_an_architecture_is_verified_with_random_weights(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "model.safetensors").unlink()
    findings = checked(capsys, copy, 0, "auto", "--load-format", "dummy")
    assert findings.pop("verdict") == (
        "supported; its weights are random, so what was compared is: ids, chat template, "
        "tokenizer, logits float32, greedy text, logits half"
    )
    assert findings["tensors"]["state"] == "random"
    assert "as --load-format dummy asks" in findings["tensors"]["figures"]
    assert "sanity" not in findings  # it says nothing of random weights
    assert not (copy / "model.safetensors").exists()


@pytest.mark.long
def test_a_model_that_transformers_runs_is_verified_too(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundled weights with an activation that the family table does not have."""
    rewrite(copy / "config.json", hidden_act="relu")
    assert prepare(EngineArgs(model=str(copy), executor="dry")).spec.parameters
    assert checked(capsys, copy, 0, "auto")["verdict"] == "supported"


# --- minfer itself damaged --------------------------------------------------------------


@pytest.mark.long
def test_wrong_logits_and_tokens_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = forward

    def askew(*arguments: Any) -> torch.Tensor:
        logits = real(*arguments)
        return logits + 0.02 * logits.std() * (torch.arange(logits.shape[-1]) == 7)

    def second(logits: torch.Tensor, *arguments: Any) -> Any:
        logits.scatter_(-1, logits.argmax(-1, True), -torch.inf)
        return choose(logits, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(own_model, "forward", askew)
        assert checked(capsys, None, 1)["verdict"] == "NOT supported: logits float32"
    monkeypatch.setattr(cpu_backend, "choose", second)
    findings = checked(capsys, None, 1)
    assert findings["verdict"] == "NOT supported: greedy text"
    assert "tokens are not the likeliest" in findings["greedy text"]["figures"]


@pytest.mark.long
def test_wrong_text_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Tokenizer.encode
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", lambda self, text: real(self, text.strip()))
        findings = checked(capsys, None, 1)
        assert findings["tokenizer"]["state"] == "fail"
        assert findings["verdict"] == "NOT supported: tokenizer"
    monkeypatch.setattr(tokens, "render_chat", lambda *_, **__: "hello")
    assert checked(capsys, None, 1)["verdict"] == "NOT supported: chat template"


def test_settings_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--prompts", "0"])
    assert "--prompts" in capsys.readouterr().err
