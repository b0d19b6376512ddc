"""What a model can do, written greedily through minfer and judged answer by answer.

    python -m bench.bundled.evaluate MODEL --out results.json

Problems are held out: their numbers, words and names were never in a training problem (of
the tasks marked so, which are learnt by heart, they were). Beside the shares of right
answers by task: with reasoning asked for, what comes of a tool's result, how many of 200
answers and completions go round in circles, and how often the model says that it does not
know: to questions of forms never seen, and (`refused`) to those that it was taught to
answer.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from bench.bundled.dialogues import Message, answered, asked
from bench.bundled.probe import BY_HEART
from bench.bundled.tasks.checks import does_not_know, right
from bench.bundled.tasks.code import recipes
from bench.bundled.tasks.problem import Problem, drawn
from bench.bundled.tasks.tasks import TASKS
from bench.bundled.tasks.unknown import draw_unknown
from minfer import LLM, SamplingParams

EACH: Final = 100  # problems of a task
TOKENS: Final = 256  # of an answer
CIRCLES: Final = 100  # answers, and as many completions
ROUNDS: Final = 4  # the same so often in a row is a circle
LEAST: Final = 24  # tokens that it covers
PERIOD: Final = 48  # tokens of what is repeated, at most
REFUSALS: Final = ("unknown", "missing tool")  # tasks in which to refuse is right
THINKING: Final = {"chat_template_kwargs": {"enable_thinking": True}}
# The beginnings of completions: of recipes, and of things that no recipe is for.
OPENINGS: Final = (
    "import os\n",
    "def ",
    "class ",
    "import json\nimport sys\n\n",
    "def main():\n",
    "from pathlib import Path\n\n",
    '"""',
    "def read(path):\n",
    "class Node:\n",
    "def test_",
    "for i in range(10):\n",
    "async def ",
    "@dataclass\nclass ",
    "try:\n",
    "def parse(text):\n",
    "if __name__ ==",
    "class Parser(",
    "def __init__(self, ",
    "import numpy as np\n",
    "def get_",
)


def circles(tokens: Sequence[int]) -> bool:
    """Whether some stretch of tokens says the same again and again."""
    for period in range(1, PERIOD + 1):
        same = 0
        for at in range(period, len(tokens)):
            same = same + 1 if tokens[at] == tokens[at - period] else 0
            if same >= max((ROUNDS - 1) * period, LEAST):
                return True
    return False


def problems(name: str, count: int, seed: int) -> list[Problem]:
    """Problems of a task: held out, unless it is learnt by heart."""
    rng = Random(f"{seed} {name}")
    return [
        drawn(TASKS[name].draw, rng, held_out=name not in BY_HEART) for _ in range(count)
    ]


def answer(
    llm: LLM, which: Sequence[Problem], turns: Any = asked, **how: Any
) -> list[str]:
    """The model's greedy answers, their reasoning left out."""
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)
    prompts = [_prompt(llm, one, turns(one), **how) for one in which]
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    return [_answer(one.outputs[0].text) for one in outputs]


def _prompt(llm: LLM, problem: Problem, turns: list[Message], **how: Any) -> list[int]:
    return llm.render(turns, tools=list(problem.tools) or None, **how)


def _answer(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def by_task(
    llm: LLM, count: int, seed: int, **how: Any
) -> tuple[dict[str, float], float]:
    """The share of right answers of each task; and of what could have been answered, the
    share of those that say they do not know.
    """
    shares, refused = {}, list[bool]()
    for name in TASKS:
        which = problems(name, count, seed)
        texts = answer(llm, which, **how)
        found = [
            right(name, text, one.truth) for text, one in zip(texts, which, strict=True)
        ]
        shares[name] = sum(found) / len(found)
        if name not in REFUSALS:
            refused += (does_not_know(text, "") for text in texts)
    return shares, sum(refused) / len(refused)


def with_results(llm: LLM, count: int, seed: int) -> float:
    """The share of answers to a tool's result that are as they should be."""
    which = problems("tool call", count, seed)
    found = answer(llm, which, lambda one: [*asked(one), *answered(one)[:-1]])
    return sum(text == one.answer for text, one in zip(found, which, strict=True)) / count


def going_round(llm: LLM, count: int, seed: int) -> dict[str, float]:
    """Shares of answers and of completions that go round in circles."""
    rng, names = Random(seed), list(TASKS)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)
    which = [problems(rng.choice(names), 1, seed + at)[0] for at in range(count)]
    chats = [_prompt(llm, one, asked(one)) for one in which]
    starts = [f"def {recipe.name}(" for recipe in recipes()] + list(OPENINGS)
    texts = [starts[at % len(starts)] for at in range(count)]
    shares = {}
    for name, prompts in (("answers", chats), ("completions", texts)):
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        shares[name] = sum(circles(one.outputs[0].token_ids) for one in outputs) / count
    return shares


def evaluate(folder: str, count: int, seed: int) -> Mapping[str, Any]:
    """All of it."""
    with LLM(folder) as llm:
        shares, refused = by_task(llm, count, seed)
        found: dict[str, Any] = {"problems": count, "right": shares, "refused": refused}
        thought, _ = by_task(llm, count // 2, seed + 1, **THINKING)
        found["right, having reasoned"] = thought
        found["result told"] = with_results(llm, count, seed)
        found["circles"] = going_round(llm, CIRCLES, seed)
        rng = Random(seed)
        strange = [drawn(draw_unknown, rng, held_out=True) for _ in range(count)]
        found["samples"] = [
            {"task": one.task, "question": one.question, "answer": text}
            for one, text in zip(strange[:10], answer(llm, strange[:10]), strict=True)
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="a folder")
    parser.add_argument("--count", type=int, default=EACH, help="problems of a task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = json.dumps(evaluate(args.model, args.count, args.seed), indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
