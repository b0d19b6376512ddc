"""A policy whose answers cannot be used is warned of, once for each kind of fault."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from minfer import LLM, AsyncLLM, SamplingParams
from minfer.effects.live.engine.policy_warnings import MAX_WARNINGS, PolicyWarnings
from minfer.records.messages import Missed, PolicyOverride
from minfer.records.policy import FirstCome, Load, Rank
from minfer.records.request import Request

PARAMS = SamplingParams(max_tokens=3)


class Faulty(FirstCome):
    """Raises in two lines, with texts that differ, and returns what is no number."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        del state, time
        if len(request.prompt) > 3:
            raise KeyError(f"long {request.id}")
        raise KeyError(f"short {request.id}")

    def budget(self, state: Any, load: Load) -> Any:
        del state
        return str(load.budget)


def with_llm(policy: FirstCome) -> None:
    with LLM(executor="oracle", scheduling_policy=policy) as llm:
        for _ in range(3):
            llm.generate(["a", "b", "c and more of it"], PARAMS, use_tqdm=False)


def with_async_llm(policy: FirstCome) -> None:
    async def ask(llm: AsyncLLM, prompt: str) -> None:
        async for _ in llm.generate(prompt, PARAMS):
            pass

    async def ask_all(llm: AsyncLLM) -> None:
        prompts = ["a", "b", "c and more of it"] * 3
        await asyncio.gather(*(ask(llm, prompt) for prompt in prompts))

    with closing(AsyncLLM(executor="oracle", scheduling_policy=policy)) as llm:
        asyncio.run(ask_all(llm))


@pytest.mark.parametrize("serve", [with_llm, with_async_llm])
def test_each_kind_of_fault_is_warned_of_once(
    serve: Callable[[FirstCome], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="minfer.engine"):
        serve(Faulty())
    texts = sorted(record.getMessage() for record in caplog.records)
    assert len(texts) == 3
    begin = "scheduling policy Faulty: "
    assert texts[0].startswith(f"{begin}budget returned a str; the engine answers as ")
    lines = []
    for text, word in zip(texts[1:], ("long", "short"), strict=True):
        assert text.startswith(f"{begin}rank raised KeyError: '{word} ")
        assert f"({__file__}, line " in text
        lines.append(text.partition(", line ")[2].partition(")")[0])
    assert int(lines[1]) == int(lines[0]) + 1


def test_kinds_that_a_policy_makes_up_are_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warnings = PolicyWarnings(FirstCome())
    with caplog.at_level(logging.WARNING, logger="minfer.engine"):
        for number in range(2 * MAX_WARNINGS):
            reported = PolicyOverride("rank", f"raised Error{number}")
            warnings.observe((Missed("x", 0, 0, 1), reported, reported))
    assert len(caplog.records) == MAX_WARNINGS
