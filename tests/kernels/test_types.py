"""What mypy lets pass in files that hold kernels is the kernels alone."""

import ast
from pathlib import Path

import pytest

from minfer import kernels

FILES = sorted(Path(kernels.__file__).parent.resolve().glob("*.py"))


def is_kernel(function: ast.FunctionDef) -> bool:
    return any(
        "triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_function_but_kernels_is_typed(path: Path) -> None:
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef) or is_kernel(function):
            continue
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        variadic = [
            argument
            for argument in (arguments.vararg, arguments.kwarg)
            if argument is not None
        ]
        untyped = [
            argument.arg
            for argument in (*named, *variadic)
            if argument.annotation is None
        ]
        assert set(untyped) <= {"self", "cls"}, f"{path.name}: {function.name}"
        assert function.returns is not None, f"{path.name}: {function.name}"
