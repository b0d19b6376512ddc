"""Which constants attention takes."""

import torch

from minfer.kernels.attention_tunes import (
    DECODE,
    PREFILL,
    DecodeTune,
    HeadSize,
    PrefillTune,
    decode_tune,
    head_size_of,
    padded,
    prefill_tune,
)


def test_the_widest_heads_where_shared_memory_is_small() -> None:
    widest, narrower = HeadSize(2, 256), HeadSize(2, 128)
    for capability, expected in (
        ((8, 6), PrefillTune(64, 32, 2)),
        ((9, 0), PREFILL[widest]),
    ):
        assert prefill_tune(widest, capability) == expected
        assert prefill_tune(narrower, capability) == PREFILL[narrower]


def test_kinds_are_rows_of_the_tables() -> None:
    kinds = {
        head_size_of(
            torch.empty(1, 2, dim, dtype=dtype), torch.empty(1, 2, dim, dtype=cache)
        )
        for dim in (16, 64, 80, 128, 160, 256, 512)
        for dtype in (torch.float16, torch.float32)
        for cache in (dtype, torch.int8)
    }
    assert kinds == {*PREFILL} == {*DECODE}


def test_stages_follow_the_last_round() -> None:
    head_size = HeadSize(2, 128)
    assert decode_tune(head_size, 512, 1) == DecodeTune(64, 4, 2)
    assert (
        decode_tune(head_size, 768, 1).stages
        == decode_tune(head_size, 512, 2).stages
        == 3
    )


def test_tensor_cores_want_powers_of_two_from_16() -> None:
    assert [padded(size) for size in (1, 16, 17, 80)] == [16, 16, 32, 128]
