"""Each task: its answers are right by its check, others are not, and none leaks."""

import json
import re
from itertools import pairwise
from random import Random

import pytest

from bench.bundled.dialogues import answered
from bench.bundled.tasks.arithmetic import column_difference, column_sum, working
from bench.bundled.tasks.checks import CHECKS, right
from bench.bundled.tasks.code import Recipe, recipes, variant, works
from bench.bundled.tasks.problem import Problem, drawn
from bench.bundled.tasks.tasks import TASKS, any_problem

BY_HEART = {"temperature", "weekday", "calendar", "talk", "code"}


def written(problem: Problem) -> str:
    """What a model would write that is right."""
    if not problem.calls:
        return problem.answer
    made = answered(problem)[0]["tool_calls"]
    return "\n".join(
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": '
        f"{json.dumps(dict(call['function']['arguments']))}}}\n</tool_call>"
        for call in made
    )


def test_every_task_has_a_check() -> None:
    assert set(TASKS) == set(CHECKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_own_answers_are_right_and_others_wrong(name: str) -> None:
    rng = Random(7)
    problems = [TASKS[name].draw(rng) for _ in range(80)]
    assert {one.task for one in problems} == {name}
    assert all(right(name, written(one), one.truth) for one in problems)
    assert not any(right(name, "Maybe.", one.truth) for one in problems)
    # Another problem's answer is wrong, but for those few that have the same.
    mixed = pairwise(problems)
    wrong = sum(not right(name, written(other), one.truth) for one, other in mixed)
    assert wrong > 30 or name in {"unknown", "missing tool"}


@pytest.mark.parametrize("name", TASKS)
def test_what_is_held_out_is_never_trained_on(name: str) -> None:
    rng = Random(8)
    trained = {
        one.key
        for one in (drawn(TASKS[name].draw, rng, held_out=False) for _ in range(300))
    }
    if name in BY_HEART:
        assert trained == {""}
        return
    held = {
        one.key
        for one in (drawn(TASKS[name].draw, rng, held_out=True) for _ in range(30))
    }
    assert not trained & held


def test_a_sum_is_held_out_in_both_orders() -> None:
    rng, seen = Random(0), dict[frozenset[str], bool]()
    for _ in range(3000):
        problem = TASKS["sum"].draw(rng)
        terms = frozenset(problem.answer.split(" = ")[0].split(" + "))
        assert seen.setdefault(terms, problem.held_out) == problem.held_out


def test_training_draws_nothing_held_out() -> None:
    rng = Random(1)
    assert not any(any_problem(rng).held_out for _ in range(500))


def test_workings_are_true() -> None:
    assert (
        column_sum(347, 286)
        == "7 + 6 = 13, carry 1; 4 + 8 + 1 = 13, carry 1; 3 + 2 + 1 = 6."
    )
    assert column_difference(52, 17) == "12 - 7 = 5, borrow 1; 5 - 1 - 1 = 3."
    assert (
        column_difference(500, 1)
        == "10 - 1 = 9, borrow 1; 0 - 1 + 10 - 0 = 9, borrow 1; 5 - 1 - 0 = 4."
    )
    assert working(23, 47) == "23 × 47 = 23 × 40 + 23 × 7 = 920 + 161 = 1081"
    for a, b in ((7, 8), (31, 20), (99, 99), (12, 13)):
        assert working(a, b).endswith(f"= {a * b}")


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)
def test_recipes_do_what_their_examples_say(recipe: object) -> None:
    assert works(recipe.code, recipe.example)  # type: ignore[attr-defined]
    assert not works("def nothing():\n    pass\n", recipe.example)  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.name)
def test_variants_of_recipes_do_what_they_do(recipe: Recipe) -> None:
    rng, found = Random(recipe.name), set[str]()
    for _ in range(40):
        code = variant(rng, recipe)
        name = code.split("(")[0].split(":")[0].split()[1]
        assert works(code, re.sub(rf"\b{recipe.name}\b", name, recipe.example)), code
        found.add(code)
    assert recipe.code in found
    assert len(found) > 1


def test_variants_have_other_names_types_and_no_docstring() -> None:
    recipe = next(one for one in recipes() if one.name == "factorial")
    rng = Random(0)
    found = {variant(rng, recipe) for _ in range(300)}
    begins = {code.split("\n", 1)[0] for code in found}
    assert {"def fact(n):", "def factorial(number: int) -> int:"} <= begins
    assert any('"""Return the factorial of num."""' in code for code in found)
    assert any('"""' not in code for code in found)


@pytest.mark.parametrize(
    ("task", "answer", "truth", "as_it_should"),
    [
        ("sum", "It is 12.", "12", True),
        ("sum", "12 + 1 = 13", "12", False),
        ("difference", "3 - 5 = -2", "-2", True),
        ("quotient", "7 / 2 = 3 remainder 1", "3 remainder 1", True),
        ("quotient", "7 / 2 = 3", "3 remainder 1", False),
        ("sort", "Sorted: 1, 2, 3", "1, 2, 3", True),
        ("sort", "0, 1, 2, 3", "1, 2, 3", False),
        ("extraction", '{"b": 1, "a": "x"}', '{"a": "x", "b": 1}', True),
        ("extraction", '{"a": "x", "b": "1"}', '{"a": "x", "b": 1}', False),
        (
            "tool call",
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
            '[{"name": "f", "arguments": {"a": 1}}]',
            True,
        ),
        (
            "tool call",
            '<tool_call>{"name": "f", "arguments": {"a": "1"}}</tool_call>',
            '[{"name": "f", "arguments": {"a": 1}}]',
            False,
        ),
        ("tool call", "<tool_call>{</tool_call>", "[]", False),
        ("unknown", "I cannot know that.", "", True),
        ("unknown", "I don't know" + " that" * 60, "", False),
    ],
)
def test_checks(task: str, answer: str, truth: str, as_it_should: bool) -> None:
    assert right(task, answer, truth) is as_it_should
