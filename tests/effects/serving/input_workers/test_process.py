"""A worker is started afresh, outlives no server, and differs from its server."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from minfer.effects.serving.input_workers.process import Process, WorkerGoneError
from minfer.effects.serving.input_workers.task import ModelFacts, PreparedRequest
from minfer.effects.serving.input_workers.worker_limits import (
    DEFAULT_LIMITS,
    TEMPLATE_LIMITS,
    WorkerLimits,
)
from minfer.effects.serving.openai.completions import ENDPOINT
from tests.effects.waiting import alive, until

RECIPE = ModelFacts(
    folder=None,
    vocab_size=9,
    hidden_size=9,
    max_model_len=9,
    default_params={},
    names=("m",),
)
BODY = b'{"prompt": [5]}'


async def prepared(process: Process) -> PreparedRequest:
    result = await process.work(ENDPOINT.path, BODY)
    assert isinstance(result, PreparedRequest)
    return result


def until_gone(pid: int) -> None:
    until(lambda: not alive(pid))


@pytest.mark.long
def test_it_prepares_until_it_is_killed() -> None:
    async def whole() -> None:
        process = Process(RECIPE)
        for _ in range(2):
            result = await prepared(process)
            assert result.request.prompts[0].ids == [5]
        process.kill()
        process.kill()
        assert process.spent
        with pytest.raises(WorkerGoneError):
            await prepared(process)
        until_gone(process.pid)

    asyncio.run(whole())


@pytest.mark.long
@pytest.mark.parametrize("limits", [None, TEMPLATE_LIMITS])
def test_its_priority_is_lower_also_where_sessions_have_priorities(
    limits: WorkerLimits | None,
) -> None:
    wanted_limits = limits or DEFAULT_LIMITS
    expected = os.nice(0) + wanted_limits.nice

    async def whole() -> None:
        process = Process(evolve(RECIPE, request_templates=limits))
        await process.ready()
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(19, expected)
        group = Path(f"/proc/{process.pid}/autogroup")
        if group.exists():
            assert group.read_text().endswith(
                f"nice {(limits or DEFAULT_LIMITS).session_nice}\n"
            )
        process.kill()

    asyncio.run(whole())


@pytest.mark.long
def test_an_interrupt_of_the_whole_group_is_not_its_own() -> None:
    async def whole() -> None:
        process = Process(RECIPE)
        await process.ready()
        os.kill(process.pid, signal.SIGINT)
        assert (await prepared(process)).model == "m"
        process.kill()

    asyncio.run(whole())


@pytest.mark.long
def test_it_does_not_outlive_its_server() -> None:
    code = f"""
import asyncio, os
from minfer.effects.live.input_processing.template_settings import TemplateSettings
from minfer.effects.serving.input_workers.process import Process
from minfer.effects.serving.input_workers.task import ModelFacts
async def whole():
    one = Process({RECIPE!r})
    await one.ready()
    print(one.pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(whole())
"""
    server = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert server.returncode == -signal.SIGKILL
    until_gone(int(server.stdout))
