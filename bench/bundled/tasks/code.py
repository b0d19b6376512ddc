"""Small Python functions and classes that newcomers ask for, learnt by heart.

`functions.txt` has each with an example of its use, in the form of doctest: that is how
answers are judged, too.
"""

import ast
import doctest
import re
from collections.abc import Mapping, Sequence
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
# What else people call parameters and functions.
_ALSO: Final[Mapping[str, Sequence[str]]] = {
    "n": ("n", "number", "num"),
    "x": ("x", "n", "number"),
    "text": ("text", "s", "string", "word", "sentence"),
    "numbers": ("numbers", "nums", "values", "lst", "arr", "xs"),
    "items": ("items", "arr", "lst", "nums", "values", "a"),
    "target": ("target", "x", "key", "value"),
    "lists": ("lists", "nested", "list_of_lists"),
    "path": ("path", "filename", "file_name"),
    "base": ("base", "x"),
    "exponent": ("exponent", "n", "power"),
    "celsius": ("celsius", "c"),
    "fahrenheit": ("fahrenheit", "f"),
    "mapping": ("mapping", "d", "dictionary"),
    "factorial": ("factorial", "fact"),
    "fibonacci": ("fibonacci", "fib"),
    "is_prime": ("is_prime", "prime", "isprime"),
    "is_palindrome": ("is_palindrome", "palindrome"),
    "reverse_string": ("reverse_string", "reverse", "reverse_text"),
    "quicksort": ("quicksort", "quick_sort"),
    "sum_list": ("sum_list", "sum_of_list"),
    "maximum": ("maximum", "find_max"),
    "minimum": ("minimum", "find_min"),
    "average": ("average", "mean"),
    "unique": ("unique", "remove_duplicates"),
    "chunks": ("chunks", "chunk"),
    "hello": ("hello", "greet"),
    "fizzbuzz": ("fizzbuzz", "fizz_buzz"),
}
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
        return variant(rng, rng.choice(recipes())) + "\n"
    some = rng.sample(recipes(), rng.randint(2, 3))
    return "\n\n\n".join(variant(rng, recipe) for recipe in some) + "\n"


def variant(rng: Random, recipe: Recipe) -> str:
    """A recipe as another person begins it, half of the time: under another name, with
    other parameters, with types, without its docstring. The rest follows from that.
    """
    code = recipe.code
    if rng.random() < 0.5:
        return code
    said = (*_parameters(code), recipe.name)
    names = {name: rng.choice(_ALSO[name]) for name in said if name in _ALSO}
    taken = {name for name in re.findall(r"[A-Za-z_]\w*", code) if name not in names}
    if not taken & set(names.values()) and len({*names.values()}) == len(names):
        code = _renamed(code, names)
    if rng.random() < 0.5:
        code = re.sub(r'\n    """.*?"""(?=\n)', "", code, count=1)
    if recipe.kind == "function" and rng.random() < 0.3:
        code = _typed(code, recipe)
    return code


def _parameters(code: str) -> list[str]:
    node = ast.parse(code).body[0]
    return (
        [one.arg for one in node.args.args] if isinstance(node, ast.FunctionDef) else []
    )


def _renamed(code: str, names: Mapping[str, str]) -> str:
    """Code with other names; its docstring has words for most of them, but no letters."""
    first, docstring, rest = re.split(r'(""".*?""")', code, maxsplit=1)
    letters = {name: other for name, other in names.items() if len(name) == 1}
    return _with(first, names) + _with(docstring, letters) + _with(rest, names)


def _with(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found[0], found[0]), text)


def _typed(code: str, recipe: Recipe) -> str:
    """A function with the types of its example: of what is given, and of what comes."""
    call = ast.parse(recipe.example.splitlines()[0].removeprefix(">>> ")).body[0]
    value = call.value if isinstance(call, ast.Expr) else None
    if not isinstance(value, ast.Call) or value.keywords:
        return code
    try:
        given = [type(ast.literal_eval(one)).__name__ for one in value.args]
        came = type(ast.literal_eval(recipe.example.partition("\n")[2] or "None"))
    except (SyntaxError, ValueError):
        return code
    parameters = _parameters(code)
    if len(given) != len(parameters):  # the example does more than call it
        return code
    listed = ", ".join(map("{}: {}".format, parameters, given))
    back = came.__name__ if came is not type(None) else "None"
    return re.sub(r"\(.*?\):", f"({listed}) -> {back}:", code, count=1)
