"""The card has every figure, and needs no more than was measured."""

from bench.bundled.card import card
from bench.bundled.tasks.tasks import TASKS


def test_the_card() -> None:
    roles = {"target": 1234567, "draft": 7654}
    shares = dict.fromkeys(TASKS, 0.5)
    means = {"agreement": 0.71, "overlap": 0.72}
    text = card(
        {
            "data": {
                "licences": {"python": "PSF-2.0", "click": "BSD-3-Clause"},
                "python": "3.11.7",
                "files": 4000,
                "bytes": 5000000,
                "held_out_files": 22,
                "held_out_bytes": 238652,
                "like_held_out": 9,
            },
            "evaluated": {
                "problems": 100,
                "right": {**shares, "sum": 0.97},
                "refused": 0.012,
                "right, having reasoned": shares,
                "circles": {"answers": 0.01, "completions": 0.02},
            },
            "later": ["sequence", "chain"],
            "measured": {
                "parameters": roles,
                "folder_bytes": roles,
                "held_out_bits_per_byte": {"target": 0.81, "draft": 0.95},
                "held_out": means,
                "answers": {"agreement": 0.9, "overlap": 0.91},
            },
        }
    )
    for part in (
        "1,234,567",
        "| sum | A sum of two numbers up to 999 | 97% | 50% |",
        "`fibonacci`, ",
        "since the models were trained, as people ask such things: sequence, chain.\n",
        "| talk* |",
        "click (BSD-3-Clause)",
        "71.0%",
        "0.81",
        "1.2%",
    ):
        assert part in text
    assert "{" not in text
