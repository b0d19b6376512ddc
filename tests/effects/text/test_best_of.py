"""The best of several samples."""

from minfer.effects.text.best_of import best_of
from minfer.effects.text.outputs import CompletionOutput, Logprob


def sample(index: int, *logprobs: float, end: str = "stop") -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=str(index),
        token_ids=[7] * len(logprobs),
        finish_reason=end,
        logprobs=[{7: Logprob(value, 1)} for value in logprobs],
        cumulative_logprob=sum(logprobs),
    )


def chosen(*samples: CompletionOutput, count: int = 2) -> list[str]:
    best = best_of(samples, count, scored=True)
    assert [output.index for output in best] == [*range(len(best))]
    return [output.text for output in best]


def test_the_likeliest_per_token_come_first() -> None:
    # The sum would have the short ones first.
    assert chosen(sample(0, -0.9), sample(1, *[-0.5] * 9), sample(2, *[-0.7] * 4)) == [
        "1",
        "2",
    ]


def test_of_those_that_are_alike_the_first_comes_first() -> None:
    assert chosen(sample(0, -1), sample(1, -1, -1), sample(2, -1)) == ["0", "1"]


def test_who_did_not_come_to_an_end_comes_last() -> None:
    failed = sample(0, -0.1, end="error")
    assert chosen(failed, sample(1, -3), sample(2, -4, end="length")) == ["1", "2"]
    assert chosen(failed, sample(1), count=2) == ["1", "0"]


def test_log_probabilities_are_given_if_requested() -> None:
    likely = sample(0, -1, -2)
    assert best_of([likely], 1, scored=True) == [likely]
    (plain,) = best_of([likely], 1, scored=False)
    assert plain.logprobs is None
    assert plain.cumulative_logprob == -3
