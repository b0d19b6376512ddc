"""The figures of one GPU and the table in bench/README.md that they fill."""

from bench.gpu import FLOOR, VLLM, targets


def test_targets_are_those_of_the_table() -> None:
    rows = targets()
    assert rows["throughput 7B: batch 128"] == {
        "at least": 7447,
        "aim": 8300,
        VLLM: 7447,
        FLOOR: 10_023,
    }
    assert all(": " in name for name in rows)  # no line of another table
