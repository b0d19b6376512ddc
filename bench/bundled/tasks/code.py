"""Small Python functions and classes that newcomers ask for, learnt by heart.

`functions.txt` has each with an example of its use, in the form of doctest: that is how
answers are judged, too.
"""

import ast
import doctest
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

from attrs import frozen

from bench.bundled.tasks.problem import Problem
from bench.bundled.tasks.vocabulary import PHRASES, phrases

_ASKED: Final = phrases("code", "asked")
_DOING: Final = phrases("code", "doing")
_DOES: Final = PHRASES["code"]["does"]
_BY_DOING: Final = 0.4  # of all questions: by what the code does, not by its name


@frozen
class Recipe:
    """A function or a class, and an example of its use."""

    name: str
    code: str
    about: str  # its docstring
    example: str

    @property
    def kind(self) -> str:
        """What it is called in questions."""
        return "class" if self.code.startswith("class") else "function"


@cache
def recipes() -> tuple[Recipe, ...]:
    """All of them."""
    text = Path(__file__).with_name("functions.txt").read_text("utf-8")
    found = []
    for part in text.split("\n===\n"):
        code, _, example = part.partition("\n\n>>> ")
        node = ast.parse(code).body[0]
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        about = ast.get_docstring(node) or ""
        found.append(Recipe(node.name, code.rstrip(), about, f">>> {example.rstrip()}\n"))
    return tuple(found)


def works(code: str, example: str) -> bool:
    """Whether code does what an example of its use says. It is run: give it no strangers'
    code.
    """
    names: dict[str, Any] = {}
    try:
        exec(f"import os\n{code}", names)  # noqa: S102 - the code of recipes, or of the model's answer to one
        test = doctest.DocTestParser().get_doctest(example, names, "example", None, 0)
        return (
            doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 0
        )
    except Exception:
        return False


def _words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").lower()


def third_person(do: str) -> str:
    """What it does that is told to do so: "reverse a list" -> "reverses a list"."""
    verb, _, rest = do.partition(" ")
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        verb += "es"
    elif verb.endswith("y") and verb[-2] not in "aeiou":
        verb = f"{verb[:-1]}ies"
    else:
        verb += "s"
    return f"{verb} {rest}"


def _asked(rng: Random, recipe: Recipe) -> str:
    """How somebody asks for a recipe: by what it does, by its name, or in its words."""
    if rng.random() < _BY_DOING:
        do = rng.choice(_DOES[recipe.name])
        return rng.choice(_DOING).format(do=do, does=third_person(do))
    about = (
        recipe.about[0].lower() + recipe.about[1:] if rng.random() < 0.3 else recipe.about
    )
    return rng.choice(_ASKED).format(
        k=recipe.kind, d=about, name=recipe.name, words=_words(recipe.name)
    )


def draw_code(rng: Random) -> Problem:
    """Somebody asks for one of the functions."""
    recipe = rng.choice(recipes())
    question = _asked(rng, recipe)
    if rng.random() < 0.2:
        question = question.rstrip(".?").lower()
    return Problem(
        task="code",
        question=question,
        answer=f"```python\n{recipe.code}\n```",
        truth=recipe.example,
    )


def document(rng: Random) -> str:
    """A text to be continued: one of the functions by itself, or some in one file."""
    if rng.random() < 0.75:
        return rng.choice(recipes()).code + "\n"
    some = rng.sample(recipes(), rng.randint(2, 3))
    return "\n\n\n".join(recipe.code for recipe in some) + "\n"
