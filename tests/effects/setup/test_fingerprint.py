"""The fingerprint changes with all that the KV of a token depends on."""

import os
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.models.architecture.kv_format import KvFormat
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.fingerprint import fingerprint
from tests.effects.published_configs import PUBLISHED
from tests.effects.tiny_model import with_attention

ARGS = EngineArgs(executor="torch", load_format="dummy", seed=1)
CONFIG = PUBLISHED["DeepSeek-V2-Lite"]
SPEC = parse_spec(CONFIG)


def of(
    spec: ModelSpec = SPEC, args: EngineArgs = ARGS, config: dict[str, Any] = CONFIG
) -> bytes:
    return fingerprint(args, config, spec, Path("nowhere"))


def test_a_cache_of_another_type_or_layout_shares_no_keys() -> None:
    """The naive cache of keys and values of MLA has the layout of plain attention."""
    plain = parse_spec(PUBLISHED["Qwen3-30B-A3B"], dtype="bfloat16")
    naive = evolve(SPEC, layers=plain.layers[: len(SPEC.layers)])
    changed_keys = [
        of(evolve(SPEC, kv_dtype="float16")),
        of(evolve(SPEC, dtype="float16")),
        of(naive),
        of(with_attention(SPEC, rank=256)),
        of(evolve(SPEC, layers=SPEC.layers[1:])),
        of(args=evolve(ARGS, seed=2)),
        of(config={**CONFIG, "rope_theta": 7.0}),
    ]
    assert len({of(), *changed_keys}) == 1 + len(changed_keys)
    assert of() == of(evolve(SPEC, kv_dtype="bfloat16"))


def test_formats_that_differ_in_the_layout_alone_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [before], expected = SPEC.kv_formats, of()
    assert before == KvFormat(27, (576,), "bfloat16", "latents")
    for kv_format in (
        evolve(before, layout="keys and values"),
        evolve(before, scales="a"),
    ):
        monkeypatch.setattr(ModelSpec, "kv_formats", (kv_format,))
        assert of() != expected


def test_formats_say_what_each_group_keeps() -> None:
    sliding, full = parse_spec(PUBLISHED["gemma-3-4b-it"]).kv_formats
    assert sliding.text == "bfloat16 keys and values (2 x 4 x 256) in 29 layers"
    assert full.text == "bfloat16 keys and values (2 x 4 x 256) in 5 layers"
    [latents] = SPEC.kv_formats
    assert latents.text == "bfloat16 latents (576) in 27 layers"
    assert latents.token_bytes == 27 * 576 * 2
    assert evolve(latents, scales="token").text.endswith(", a scale per token")


def test_weights_that_are_changed_anywhere_share_no_blocks_on_disk(
    tmp_path: Path,
) -> None:
    """Few bytes of a file are looked at."""
    file = tmp_path / "model.safetensors"
    args = evolve(ARGS, load_format="auto", kv_disk=tmp_path / "kv")
    fingerprints = set[bytes]()
    for changed in (0, 1):
        data = bytearray(1 << 20)
        data[70_000] = changed
        file.write_bytes(data)
        os.utime(file, (9, 9 + changed))  # however coarse the file system's clock is
        fingerprints.add(fingerprint(args, CONFIG, SPEC, tmp_path))
    assert len(fingerprints) == 2
