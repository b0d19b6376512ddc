"""Runs with adapters, recorded: they replay, also without token ids."""

from pathlib import Path
from typing import Any

import pytest

from minfer import LLM, LoRARequest, SamplingParams
from minfer.effects.cli.main import main
from tests.effects.small_adapters import write_adapter
from tests.effects.tiny_model import write_checkpoint

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("redact", [False, True])
def test_a_run_with_adapters_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], redact: bool
) -> None:
    model = write_checkpoint(tmp_path / "tiny")
    adapters: list[Any] = [
        LoRARequest(name, 1, write_adapter(tmp_path / name, model, seed=seed))
        for seed, name in enumerate(("a", "b", "c"))
    ]
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1}
    journal = str(tmp_path / "runs")
    with LLM(
        str(model), journal=journal, journal_redact=redact, **settings, block_size=8
    ) as llm:
        llm.generate([[*range(20)]] * 4, PARAMS, lora_request=[*adapters, None])
        assert llm.adapters is not None
        digest = llm.adapters.of_request(adapters[0])
    assert main(["replay", journal]) == 0
    assert main(["explain", journal, "1"]) == 0
    said = capsys.readouterr().out
    assert "adapter" in said
    written = b"".join(path.read_bytes() for path in Path(journal).iterdir())
    assert (digest.encode() in written) or redact
