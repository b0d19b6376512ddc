"""Architectures outside the family table: the same tokens as transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minfer import LLM, SamplingParams
from minfer.effects.cli.main import main
from minfer.effects.models.layout.shapes import parameter_count
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from minfer.values.checks import ConfigError as SettingError
from tests.effects.tiny_fallback import CONFIGS, VOCAB, save

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 12,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 19,
}


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy continuation."""
    ids = torch.tensor([prompt])
    options = {
        "do_sample": False,
        "max_new_tokens": count,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.long
@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = save(tmp_path, kind)
    rng = random.Random(kind)
    prompts = [
        [rng.randrange(1, VOCAB) for _ in range(n)] for n in (1, 3, 9, 14, 21, 30, 5, 17)
    ]
    expected = [generated(model, prompt, 12) for prompt in prompts]
    with LLM(str(tmp_path), **SMALL) as llm:
        count = sum(p.numel() for p in model.parameters())
        assert parameter_count(llm.setup.spec) == count
        for turn in range(2):
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert turn == 0 or any(output.num_cached_tokens for output in outputs)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 7.0],
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
}


# With the former, the family table has a row for it.
activations = pytest.mark.parametrize("activation", ["silu", "gelu"])


def long_rope(folder: Path, activation: str) -> Any:
    changes = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}
    return save(folder, "phi3", **changes, hidden_act=activation)


@pytest.mark.long
@activations
def test_longrope_has_its_short_factors_within_the_original_context(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, activation: str
) -> None:
    model = long_rope(tmp_path, activation)
    prompt = list(range(3, 20))
    with LLM(str(tmp_path), **SMALL) as llm:
        assert bool(llm.setup.spec.parameters) == (activation == "gelu")
        assert llm.setup.config.max_model_len == 32
        params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
        output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert list(output.token_ids) == generated(model, prompt, 15)
    assert "--max-model-len up to 128 takes the long ones" in caplog.text
    with pytest.raises(SettingError, match="longer than the 128 tokens"):
        prepare(EngineArgs(model=str(tmp_path), max_model_len=129, executor="dry"))


@pytest.mark.long
@activations
def test_longrope_has_its_long_factors_in_a_longer_context(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, activation: str
) -> None:
    """Each token behind the original context is transformers' likeliest one: it then
    takes the long factors for the whole sequence.
    """
    model = long_rope(tmp_path, activation)
    rng = random.Random(0)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(n)] for n in (1, 20, 31, 33, 70)]
    with LLM(str(tmp_path), **SMALL, max_model_len=128) as llm:
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            generated_tokens = [list(output.outputs[0].token_ids) for output in outputs]
            for prompt, tokens in zip(prompts, generated_tokens, strict=True):
                ids = torch.tensor([[*prompt, *tokens]])
                with torch.inference_mode():
                    expected = model(ids, use_cache=False).logits[0].argmax(-1).tolist()
                assert tokens == expected[len(prompt) - 1 : -1]
    for prompt, tokens in zip(prompts[3:], generated_tokens[3:], strict=True):
        assert tokens == generated(model, prompt, 50)
    assert "its long factors hold for sequences of all lengths" in caplog.text


@activations
def test_the_factors_of_longrope_are_in_the_keys_of_blocks(
    tmp_path: Path, activation: str
) -> None:
    long_rope(tmp_path, activation)
    keys = {
        prepare(EngineArgs(model=str(tmp_path), max_model_len=length)).fingerprint
        for length in (16, 32, 33, 128)
    }
    assert len(keys) == 2


@pytest.mark.parametrize(("length", "is_long"), [(32, False), (33, True)])
def test_a_draft_model_has_the_factors_of_its_target(
    length: int, is_long: bool, tmp_path: Path
) -> None:
    long_rope(tmp_path, "silu")
    drafts = {
        "method": "draft_model",
        "model": str(tmp_path),
        "num_speculative_tokens": 2,
    }
    setup = prepare(
        EngineArgs(
            model=str(tmp_path),
            max_model_len=length,
            speculative_config={**drafts, "model": str(tmp_path)},
            skip_tokenizer_init=True,
        )
    )
    assert setup.draft is not None
    for spec in (setup.spec, setup.draft.spec):
        ropes = [attention.rope for attention in spec.attentions]
        assert all(rope is not None and rope.is_long is is_long for rope in ropes)


@pytest.mark.long
def test_dynamic_rope_is_at_rest_below_its_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = save(tmp_path, "olmo2", rope_parameters=rope)
    prompts = [list(range(3, 120)), [5, 6, 7]]
    with LLM(str(tmp_path), **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == generated(model, prompt, 11)


@pytest.mark.long
def test_options_of_a_known_family_that_minfer_lacks_run_too(tmp_path: Path) -> None:
    model = save(tmp_path, "llama", hidden_act="gelu")
    with LLM(str(tmp_path), **SMALL) as llm:
        assert llm.setup.spec.parameters
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        output = llm.generate([7, 8, 9], params, use_tqdm=False)[0].outputs[0]
    assert list(output.token_ids) == generated(model, [7, 8, 9], 8)


def test_plan_counts_parameters(neox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(neox), "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    count = sum(t.numel() for t in load_file(neox / "model.safetensors").values())
    assert f"{4 * count / 2**10:.2f} KiB" in out
