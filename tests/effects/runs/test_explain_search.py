"""`minfer explain` tells of the rounds of a beam search together."""

import json
from pathlib import Path
from typing import Any

import pytest

from minfer import LLM, BeamSearchOutput, BeamSearchParams, SamplingParams
from minfer.effects.cli.main import main
from minfer.effects.live.request_names import answer_of, search_of, searches_matching
from tests.effects.tiny_model import write_checkpoint

WIDTH, MAX_TOKENS = 4, 9


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, BeamSearchOutput]:
    """A journal of two searches and a request, and what the second search found."""
    folder = tmp_path_factory.mktemp("searches")
    path = folder / "run.journal"
    model = str(write_checkpoint(folder / "model"))
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4}
    with LLM(model, journal=path, num_gpu_blocks_override=80, **settings) as llm:
        params = BeamSearchParams(
            beam_width=WIDTH, max_tokens=MAX_TOKENS, ignore_eos=True
        )
        outputs = llm.beam_search(["abc", "abcd"], params, use_tqdm=False)
        llm.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True))
    return str(path), outputs[1]


def reported(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["explain", *options]) == 0
    return capsys.readouterr().out


def test_a_search_is_one_of_the_requests_that_are_listed(
    run: tuple[str, BeamSearchOutput], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = run
    listed = json.loads(reported(capsys, path, "--json"))
    assert [(entry["id"], entry["prompt"]) for entry in listed] == [
        ("0", 3),
        ("1", 4),
        ("2", 3),
    ]
    first, _, sampled = listed
    assert first["tokens"] == 1 + WIDTH * (MAX_TOKENS - 1), (
        "one of each beam in each round"
    )
    assert sampled["tokens"] == 3
    assert 0 < first["first"] < first["took"]


def test_its_rounds_and_what_it_found(
    run: tuple[str, BeamSearchOutput], capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = run
    search = json.loads(reported(capsys, path, "1", "--json"))
    assert (search["id"], search["width"], search["most"]) == ("1", WIDTH, MAX_TOKENS)
    rounds = search["rounds"]
    assert [beam_round["number"] for beam_round in rounds] == list(range(MAX_TOKENS))
    assert [beam_round["beams"] for beam_round in rounds] == [1] + [WIDTH] * (
        MAX_TOKENS - 1
    )
    assert all(
        beam_round["arrived"] <= beam_round["admitted"] <= beam_round["ended"]
        for beam_round in rounds
    )
    # A beam computes one token: the others are hit, or copied.
    assert all(
        beam_round["known"] - beam_round["hit"] - beam_round["copied"] == WIDTH
        for beam_round in rounds[1:]
    )
    assert search["over"]
    scores = [sequence["logprob"] for sequence in search["found"]]
    assert scores == [sequence.cum_logprob for sequence in output.sequences]
    text = reported(capsys, path, "1")
    assert text.startswith(f"Beam search '1': 4 prompt tokens, {WIDTH} beams")
    assert f"{MAX_TOKENS} rounds" in text


def test_a_beam_is_a_request_of_its_own(
    run: tuple[str, BeamSearchOutput], capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = run
    text = reported(capsys, path, "1/3/2")
    assert text.startswith("Request '1/3/2': 7 prompt tokens, at most 1 output token")


def test_names_of_rounds() -> None:
    ids = ["c-4-0/0/0", "c-4-0/1/0", "c-4-0/1/1#7", "c-4-1", "c-5-0/0/0"]
    assert {search_of(name) for name in ids} == {"c-4-0", "c-4-1", "c-5-0"}
    assert {answer_of(name) for name in ids} == {"c-4", "c-5"}
    assert searches_matching("c-4", ids) == searches_matching("c-4-0", ids) == ["c-4-0"]
    assert searches_matching("c-4-1", ids) == []


def test_the_rest_of_a_search_is_reported_without_its_beginning(
    run: tuple[str, BeamSearchOutput],
) -> None:
    """As of the run of an engine that went on with it."""
    from minfer.effects.live.journal.journal_files import read_journal
    from minfer.effects.runs.explain_search import render_search, search_figures

    path, _ = run
    turns = [*read_journal(Path(path)).turns()]
    search = search_figures(turns[7:], "0")
    assert not search["over"]
    assert search["rounds"][0]["number"] > 0
    assert [*render_search(search)][-1] == "  it did not end here"


def test_of_searches_with_one_id_the_last_is_reported(
    run: tuple[str, BeamSearchOutput],
) -> None:
    from minfer.effects.live.journal.journal_files import read_journal
    from minfer.effects.runs.explain_search import search_figures

    path, _ = run
    turns = [*read_journal(Path(path)).turns()]
    expected = search_figures(turns, "0")
    assert expected["over"]
    for before in (turns, turns[:7], turns[7:]):
        assert search_figures([*before, *turns], "0") == expected
