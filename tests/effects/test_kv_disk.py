"""KV blocks in a folder, in engines: what an earlier one has computed is loaded."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from minfer import LLM
from minfer.effects.cli.main import main
from minfer.effects.execution.tiers.block_folder import (
    DROPPED,
    FETCHED,
    REFUSED,
    STORED,
    BlockFolder,
    file_bytes,
)
from minfer.effects.models.architecture.kv_format import AUTO
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.prepare import prepare
from minfer.records.messages import Loading, LostBlocks
from minfer.records.tiers import TransferKind
from minfer.values.checks import ConfigError
from tests.effects.test_kv_host_memory import (
    FAMILIES,
    GREEDY,
    SMALL,
    made,
    prompts,
    reasons_of,
)
from tests.effects.tiny_families import VARIANTS, save
from tests.effects.waiting import until

PROMPT = 70  # tokens: 8 blocks and a tail
FULL = 64  # tokens of these blocks
Tokens = list[tuple[int, ...]]


def disk(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "kv_disk": folder,
        "kv_disk_size": 1 << 26,
        "kv_disk_choice": "load",
        **options,
    }


def settle(llm: LLM, stored: int) -> None:
    """Wait until `stored` files are written."""
    until(lambda: llm.worker.snapshot().totals.counts[STORED] >= stored)


def serve(llm: LLM, count: int = 1) -> Tokens:
    """Prompts, one by one."""
    answers = [
        llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        for prompt in prompts(count, PROMPT)
    ]
    return [tuple(answer.outputs[0].token_ids) for answer in answers]


def counts(llm: LLM) -> dict[str, float]:
    return dict(llm.worker.snapshot().totals.counts)


def restarted(folder: Path, **settings: Any) -> None:
    """A second engine loads what the first has computed, and answers the same."""
    settings = disk(folder / "kv", **settings)
    with LLM(**SMALL, **settings) as llm:
        expected = serve(llm, 2)
        assert counts(llm)["prefix_cache_hits"] == 0
    with LLM(**SMALL, **settings) as llm:
        reasons = reasons_of(llm)
        assert serve(llm, 2) == expected
        now = counts(llm)
        assert now["prefix_cache_hits"] == 2 * FULL
        assert now[FETCHED] > 0
        assert not any(now[name] for name in now if name.startswith(REFUSED))
        loads = [reason for reason in reasons if isinstance(reason, Loading)]
        assert [(load.blocks, load.kind) for load in loads] == [
            (8, TransferKind.FETCH_FROM_EXTERNAL)
        ] * 2


@pytest.mark.parametrize("name", [AUTO, "fp8", "int8_per_token_head"])
def test_a_known_prompt_is_loaded_after_a_restart(name: str, tmp_path: Path) -> None:
    restarted(tmp_path, kv_cache_dtype=name)


@pytest.mark.long
@pytest.mark.parametrize(
    "key", [*FAMILIES, ("Qwen2", "windows everywhere")], ids=lambda key: key[0]
)
def test_every_kind_of_cache_is_kept(key: tuple[str, str], tmp_path: Path) -> None:
    save(str(tmp_path), key[0], VARIANTS[key])
    restarted(tmp_path, model=str(tmp_path))


@pytest.mark.long
def test_both_tiers_serve_together(tmp_path: Path) -> None:
    host = {"kv_host_memory": 1 << 24, "kv_host_choice": "load"}
    pool = {"num_gpu_blocks_override": 13}
    settings: dict[str, Any] = {**SMALL, **pool, **host, **disk(tmp_path / "kv")}
    expected = made(prompts(3, PROMPT), GREEDY)
    for _ in range(2):
        with LLM(**settings) as llm:
            assert [*serve(llm, 3), *serve(llm, 1)] == [*expected, expected[0]]
            assert counts(llm)["kv_host_loaded_blocks"] > 0
    assert counts(llm)["kv_keyed_loaded_blocks"] > 0


def test_broken_files_are_computed_again(tmp_path: Path) -> None:
    settings = disk(tmp_path / "kv") | {"kv_disk_secret": "ours"}
    with LLM(**SMALL, **settings) as llm:
        expected = serve(llm)
    files = list(tmp_path.glob("kv/*/*.cpu"))
    for file in files:
        os.truncate(file, file.stat().st_size - 1)
    with LLM(**SMALL, **settings) as llm:
        reasons = reasons_of(llm)
        assert serve(llm) == expected
        assert counts(llm)["prefix_cache_hits"] == 0
        assert counts(llm)[REFUSED + "torn"] > 0
        assert any(isinstance(reason, LostBlocks) for reason in reasons)
    with LLM(**SMALL, **settings) as llm:  # they were stored again
        assert serve(llm) == expected
        assert counts(llm)["prefix_cache_hits"] == FULL
    with LLM(**SMALL, **{**settings, "kv_disk_secret": "another's"}) as llm:
        assert serve(llm) == expected
        assert counts(llm)["prefix_cache_hits"] == 0
        assert counts(llm)[REFUSED + "foreign"] > 0


def test_a_full_disk_ends_stores_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with LLM(**SMALL, **disk(tmp_path)) as llm:
        monkeypatch.setattr(os, "writev", refuse)
        expected = serve(llm)
        assert serve(llm) == expected
        until(lambda: counts(llm)[DROPPED])
    assert not list(tmp_path.glob("*/*"))
    with LLM(**SMALL, **disk(tmp_path)) as second:  # as after the death of an engine
        assert serve(second) == expected


@pytest.mark.parametrize("blocks", [2, 13])
def test_a_small_folder_is_used(tmp_path: Path, blocks: int) -> None:
    """Blocks that are loaded to measure the time of loads leave room for one another."""
    size = file_bytes(prepare(EngineArgs(**SMALL)).memory.block_bytes)
    with LLM(**SMALL, **disk(tmp_path, kv_disk_size=blocks * size)) as llm:
        serve(llm)
        settle(llm, 1)


def test_blocks_that_another_engine_removes_at_the_start_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As two servers that start together in a small folder do."""
    monkeypatch.setattr(BlockFolder, "uncache", BlockFolder.remove)
    with LLM(**SMALL, **disk(tmp_path)) as llm:
        serve(llm)
        settle(llm, 8)
    assert "count as fast" in caplog.text


def test_a_reset_outlives_the_engine(tmp_path: Path) -> None:
    settings = disk(tmp_path)
    with LLM(**SMALL, **settings) as llm, LLM(**SMALL, **settings) as second:
        expected = serve(llm)
        settle(llm, 8)
        llm.reset_prefix_cache()
        assert serve(second) == expected
        assert counts(second)["prefix_cache_hits"] == 0
        settle(second, 8)
        assert serve(llm) == expected
        assert counts(llm)["prefix_cache_hits"] == FULL  # what the other has stored since
    with LLM(**SMALL, **settings) as third:
        assert serve(third) == expected
        assert counts(third)["prefix_cache_hits"] == FULL
        third.reset_prefix_cache()
    with LLM(**SMALL, **settings) as last:
        assert serve(last) == expected
        assert counts(last)["prefix_cache_hits"] == 0


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    args = EngineArgs(device="cpu", kv_disk=tmp_path / "kv", kv_disk_size=1 << 30)
    for changes, message in (
        ({"kv_disk_size": 1 << 13}, "give it several blocks"),
        ({"kv_disk_size": 1 << 60}, "file system of .* make it smaller"),
        ({"enable_prefix_caching": False}, "switched off"),
        ({"journal": tmp_path, "journal_redact": True}, "does not cover"),
        ({"executor": "dry"}, "dry executor has no KV"),
        ({"kv_disk": None}, "name a folder"),
        (
            {
                "speculative_config": {
                    "method": "draft_model",
                    "num_speculative_tokens": 3,
                }
            },
            "beside a draft model",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(evolve(args, **changes))
    with pytest.raises(ConfigError, match="kv_disk_choice must be"):
        EngineArgs(kv_disk_choice="maybe")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        LLM(**SMALL, **disk(file))


def test_the_plan_says_what_the_disk_holds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And makes no folder."""
    folder = tmp_path / "new" / "kv"
    options = ["--kv-disk", str(folder), "--kv-disk-size", "64M"]
    assert main(["plan", "--device", "cpu", *options]) == 0
    assert re.search(
        r"KV on disk +64.00 MiB in .*/kv: \d+ blocks", capsys.readouterr().out
    )
    assert not folder.parent.exists()
