"""Reasoning tokens are those that the parser takes for reasoning, however they come."""

from typing import Any

import pytest
from attrs import evolve
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.protocol import GenerationRequest, Include
from minfer.effects.serving.request_parsing.answer_parsing import AnswerParser
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools import harmony
from minfer.effects.text.tools.formats import Parsing
from minfer.records.request import SamplingParams
from tests.effects.tiny_model import write_checkpoint

THINK = Parsing(tools="hermes", reasoning="think", names=("f",))
OPENED = evolve(THINK, opened=True)
BRACKETS = Parsing(tools="mistral", reasoning="mistral", names=("f",))
HARMONY = Parsing(tools="openai", names=("f",))
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>"
# A parsing, an answer, and its reasoning; tokens are bytes.
CASES: list[tuple[Parsing, str, str]] = [
    (THINK, "<think>Hm, é.</think>Yes.", "Hm, é."),
    (THINK, "\n<think>\nHm.\n</think>\n\nYes.", "\nHm.\n"),
    (THINK, "Yes.<think>no</think>", ""),
    (THINK, "Yes.", ""),
    (THINK, "", ""),
    (THINK, "<think>Hm, and", "Hm, and"),
    (THINK, "<think>a<think>b</think>c</think>", "ab"),
    (OPENED, "Hm.</think>Yes.", "Hm."),
    (OPENED, "<think>Hm.</think>Yes.", "Hm."),
    (OPENED, "Hm.", "Hm."),
    (THINK, f"<think>Hm.{CALL}", "Hm."),
    (THINK, f"<think>Hm.{CALL}x</think>", 'Hm.\n{"name": "f", "arguments": {}}\nx'),
    (BRACKETS, "[THINK]Hm.[/THINK]Yes.", "Hm."),
    (
        HARMONY,
        f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>final<|message|>Y",
        "Hm.",
    ),
    (
        HARMONY,
        (
            f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}bc<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
        ),
        "abc",
    ),
    (HARMONY, "<|channel|>final<|message|>Yes.<|return|>", ""),
]
MARKERS = (
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<tool_call>",
    "</tool_call>",
    *harmony.MARKERS,
)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with a token for each marker."""
    folder = write_checkpoint(tmp_path_factory.mktemp("marked") / "m", vocab_size=300)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose markers are text."""
    folder = write_checkpoint(tmp_path_factory.mktemp("plain") / "m", vocab_size=300)
    return Tokenizer(folder)


def counted(tokenizer: Tokenizer, parsing: Parsing, text: str, *, stream: bool) -> int:
    request: Any = GenerationRequest(
        prompts=(TokenizedPrompt(None, [1]),),
        params=SamplingParams(),
        urgency=SchedulingHints(),
        stream=stream,
        include=Include(),
        parsing=parsing,
    )
    parser = AnswerParser(request, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    groups = [[token] for token in ids] if stream else [ids]
    for group in groups:
        piece = tokenizer.decode(group, skip_special_tokens=False)
        parser.read(0, CompletionOutput(index=0, text=piece, token_ids=list(group)))
    end = CompletionOutput(index=0, text="", token_ids=[], finish_reason="stop")
    parser.read(0, end)
    return parser.reasoning_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_tokens_between_markers_count(
    marked: Tokenizer, number: int, stream: bool
) -> None:
    parsing, text, reasoning = CASES[number]
    expected = len(reasoning.encode())
    assert counted(marked, parsing, text, stream=stream) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_where_markers_are_text_the_reasoning_is_tokenized(
    plain: Tokenizer, stream: bool
) -> None:
    for parsing, text in (
        (THINK, "<think>Hm.</think>Yes."),
        (HARMONY, f"{ANALYSIS}Hm.<|end|>"),
    ):
        assert counted(plain, parsing, text, stream=stream) == len("Hm.")


def test_without_reasoning_nothing_counts(marked: Tokenizer) -> None:
    parsing = Parsing(tools="hermes", names=("f",))
    assert counted(marked, parsing, "<think>Hm.</think>", stream=True) == 0
