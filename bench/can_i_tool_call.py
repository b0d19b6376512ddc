"""minfer's parsers on the outputs of canitoolcall: 469 recorded and rendered answers.

Each answer is parsed whole, and streamed in all ways that the suite has, by the parsers
that `auto` chooses for the chat template of its model; for models whose template is not
in the folder, by the parsers that are named here. The suite's own checks judge. Answers
are cut where tokens would be, at markers and words: its tokenizers are not needed.

    pip install canitoolcall==0.1.1                # and the source of llama-cpp-python
    python -m bench.can_i_tool_call --templates vendor/llama.cpp/models/templates
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy, split, split_text
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import (
    Observation,
    ParseResult,
    Status,
    StreamAccumulator,
)

from bench.results import run, show
from minfer.effects.text.tools.deltas import (
    Arguments,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
)
from minfer.effects.text.tools.formats import Parsers, Parsing

_MINISTRAL: Final = "mistralai-Ministral-3-14B-Reasoning-2512"
# The chat templates of models, or their like where the model's own is not in the folder.
TEMPLATES: Final = {
    "deepseek-ai/DeepSeek-V3-0324": "llama-cpp-deepseek-r1",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-ai-DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-ai-DeepSeek-V4",
    "google/gemma-4-31B-it": "google-gemma-4-31B-it",
    "zai-org/GLM-4.5": "GLM-4.6",
    "zai-org/GLM-4.7": "GLM-4.7-Flash",
    "zai-org/GLM-5.3": "GLM-4.7-Flash",
    "openai/gpt-oss-20b": "openai-gpt-oss-120b",
    "moonshotai/Kimi-K2-Instruct-0905": "moonshotai-Kimi-K2",
    "moonshotai/Kimi-K2.6": "Kimi-K2-Thinking",
    "moonshotai/Kimi-K3": "Kimi-K3",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama-Llama-3.3-70B-Instruct",
    "mistralai/Devstral-Small-2507": "unsloth-mistral-Devstral-Small-2507",
    "mistralai/Magistral-Small-2509": _MINISTRAL,
    "mistralai/Ministral-3-14B-Instruct-2512": _MINISTRAL,
    "mistralai/Ministral-3-14B-Reasoning-2512": _MINISTRAL,
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": (
        "Mistral-Small-3.2-24B-Instruct-2506"
    ),
    "Qwen/Qwen3-0.6B": "Qwen-Qwen3-0.6B",
    "Qwen/Qwen3-4B-Instruct-2507": "Qwen-Qwen3-0.6B",
    "Qwen/Qwen3-4B-Thinking-2507": "Qwen-Qwen3-0.6B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "Qwen3-Coder",
    "Qwen/Qwen3-Coder-Next": "Qwen3-Coder",
    "Qwen/Qwen3.5-9B": "Qwen3.5-4B",
    "Qwen/Qwen3.8-27B": "Qwen3.5-4B",
}
NAMED: Final = {  # there is no public template of these
    "deepseek-ai/DeepSeek-V4.1-Flash": Parsers("deepseek_v41", "think"),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Parsers("llama4_pythonic", "none"),
    "mistralai/Magistral-Small-2506": Parsers("mistral", "think"),
}
WORD: Final = re.compile(r"\s?\w{1,5}|\s+|[^\w\s]{1,2}")  # about a token
STRATEGIES: Final = (*DEFAULT_STRATEGIES, ChunkStrategy.parse("char:0"))


@cache
def parsers_of(model: str, templates: Path) -> tuple[Parsers, str]:
    """The parsers of a model, and what chose them."""
    if model in NAMED:
        return NAMED[model], "name"
    text = (templates / f"{TEMPLATES[model]}.jinja").read_text("utf-8")
    return Parsers().resolve(text, tokens={"bos_token": "", "eos_token": ""}), "auto"


def units(text: str, markers: Sequence[str]) -> list[str]:
    """A text cut into its markers and words."""
    pattern = "|".join(map(re.escape, sorted(markers, key=len, reverse=True)))
    words: list[str] = []
    for segment in re.split(f"({pattern})", text) if markers else [text]:
        words += [segment] if segment in markers else WORD.findall(segment)
    return [unit for unit in words if unit]


def result(deltas: Sequence[Delta]) -> ParseResult:
    """Deltas as a client puts them together."""
    message = StreamAccumulator()
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                message.add_content(text)
            case ReasoningDelta(text):
                message.add_reasoning(text)
            case CallStart(index, _, name):
                message.add_tool_call(index, name=name, arguments="")
            case Arguments(index, text):
                message.add_tool_call(index, arguments=text)
    return message.result()


def parse(parsing: Parsing | None, chunks: Sequence[str], *, stream: bool) -> ParseResult:
    """What minfer makes of an answer that comes in chunks."""
    if parsing is None:
        return result([ContentDelta("".join(chunks))])
    parser = parsing.parser(streaming=stream)
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)]
    return result([*deltas, *parser.push("", final=True)])


def parsing_of(fixture: Fixture, family: Family, parsers: Parsers) -> Parsing | None:
    """How an answer is parsed, by its tools and its prompt."""
    reference = family.reference_for(fixture.reference_model)
    default = reference.default_generation_prompt if reference else None
    prompt = fixture.generation_prompt
    functions = [tool.get("function", tool) for tool in fixture.tools]
    tools = {function["name"]: function.get("parameters") for function in functions}
    return parsers.parsing(tools, default or "" if prompt is None else prompt)


def observe(fixture: Fixture, family: Family, parsers: Parsers) -> Observation:
    """All parses of an answer."""
    parsing = parsing_of(fixture, family, parsers)
    text = fixture.raw_output
    cut = units(text, family.markers)
    streams = {}
    for strategy in STRATEGIES:
        groups = split(cut, strategy, set(family.markers))
        chunks = ["".join(group) for group in groups]
        if strategy.kind == "char":
            chunks = split_text(text, strategy)
        streams[strategy.id] = parse(parsing, chunks, stream=True)
    return Observation(parse(parsing, [text], stream=False), streams)


STREAMED: Final = (
    "a call is streamed while it comes, and cannot be taken back when it breaks off: its "
    "arguments stay incomplete for the client; an answer that is not streamed keeps text"
)
KEPT: Final = "text that is nearly a call, or breaks off, stays content as it was written"
PARAGRAPHS: Final = "texts before and after a call are paragraphs of the content"
# Why minfer differs from the suite on purpose.
REASONS: Final = {
    **dict.fromkeys(
        (
            "deepseek/v32-truncated-second-parallel-call",
            "deepseek/v4-truncated-second-parallel-call",
            "deepseek/v41-truncated-second-parallel-call",
            "gemma4/truncated-second-parallel-call",
            "qwen3-hermes/truncated-second-parallel-call",
            "qwen3-xml/q38-truncated-at-tool-call-open",
            "mistral/v13think-stop-at-open-marker",
            "kimi/k2i-vllm-noise-between-markers",
            "kimi/k2i-vllm-empty-tool-section",
            "gpt-oss/llamacpp-builtin-python-recipient",
            "gpt-oss/harmony-truncated-in-header",
        ),
        KEPT,
    ),
    **dict.fromkeys(
        (
            "gemma4/sglang-text-around-call",
            "kimi/k2i-vllm-content-after-tool-section",
            "qwen3-xml/bug-coder-text-after-call",
        ),
        PARAGRAPHS,
    ),
    "llama/l4-truncated-missing-close-bracket": (
        "the first call is complete, and counts although the second breaks off"
    ),
    "gpt-oss/harmony-marker-in-reasoning": (
        "markers that the model wrote as text look like its tokens in what is parsed"
    ),
    "qwen3-hermes/vllm-invalid-json-missing-brace": (
        "brackets that are missing after whole arguments are forgiven"
    ),
}


def policy(fixture: Fixture, failing: Sequence[Mapping[str, str]]) -> str:
    """Why minfer differs from the suite on purpose; empty if it is a fault."""
    if fixture.id in REASONS:
        return REASONS[fixture.id]
    streams_alone = all(row["strategy"] != "nonstream" for row in failing)
    return STREAMED if fixture.expected_error is not None and streams_alone else ""


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, and each that fails."""
    families = load_families()
    counts: Counter[str] = Counter()
    failures, chosen = [], {}
    for fixture in load_fixtures():
        family = families[fixture.family]
        parsers, by = parsers_of(fixture.reference_model, args.templates)
        chosen[fixture.reference_model] = f"{parsers.tools}, {parsers.reasoning} by {by}"
        rows = run_checks(fixture, family, observe(fixture, family, parsers))
        status = case_status(rows)
        counts[status.value] += 1
        if status in (Status.FAIL, Status.ERROR):
            failing = [
                {"check": row.check, "strategy": row.strategy, "detail": row.detail or ""}
                for row in rows
                if row.status in (Status.FAIL, Status.ERROR)
            ]
            reason = policy(fixture, failing)
            counts["policy" if reason else "fault"] += 1
            failures.append(
                {"id": fixture.id, "reason": reason or "fault", "rows": failing[:3]}
            )
    results = {
        "canitoolcall": version("canitoolcall"),
        "cases": counts.total() - counts["policy"] - counts["fault"],
        "counts": dict(counts),
        "parsers": chosen,
        "failures": failures,
    }
    show(dict(counts))
    return results


if __name__ == "__main__":
    folder = os.environ.get("MINFER_CHAT_TEMPLATES", ".")
    run(
        "can_i_tool_call",
        measure,
        {"--templates": {"type": Path, "default": Path(folder)}},
    )
