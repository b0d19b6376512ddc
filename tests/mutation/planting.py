"""Puts a known bug into a function: what stands there in the syntax tree becomes
something else.

Both are given as source and compared as trees, so neither layout nor comments matter. The
old one is an expression, or statements that follow each other; it must be in the function
exactly once.
"""

import ast
import copy
import textwrap
from collections.abc import Iterator

Body = list[ast.stmt]


def planted(tree: ast.Module, function: str, old: str, new: str) -> ast.Module:
    """A copy of a module in which `old` is `new` in one function. Raises LookupError,
    TypeError.
    """
    name = function.partition(".")[0]
    unchanged = {
        id(statement): statement
        for statement in tree.body
        if getattr(statement, "name", "") != name
    }
    tree = copy.deepcopy(tree, unchanged)  # shares them: nothing is changed there
    body = _parsed(old)
    for_old, for_new = body[0], _parsed(new)
    target = _function(tree, function)
    num_found = 0
    if len(body) == 1 and isinstance(for_old, ast.Expr):
        value = for_new[0]
        if not isinstance(value, ast.Expr):
            raise LookupError(f"an expression does not become a statement: {new}")
        swap = _Swap(for_old.value, value.value)
        swap.visit(target)
        num_found = swap.found
    else:
        spots = [
            (block, start)
            for block in _blocks(target)
            for start in range(len(block) - len(body) + 1)
            if _same(block[start : start + len(body)], body)
        ]
        num_found = len(spots)
        for block, start in spots:
            block[start : start + len(body)] = for_new or [ast.Pass()]
    if num_found != 1:
        raise LookupError(f"{num_found} times in {function}: {old}")
    return tree


def _parsed(source: str) -> Body:
    return ast.parse(textwrap.dedent(source)).body


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """The function of that qualified name."""
    node: ast.AST = tree
    for name_part in name.split("."):
        statements = getattr(node, "body", [])
        kinds = ast.FunctionDef | ast.ClassDef
        match = next(
            (x for x in statements if isinstance(x, kinds) and x.name == name_part), None
        )
        if match is None:
            raise LookupError(f"no function {name}")
        node = match
    if not isinstance(node, ast.FunctionDef):
        raise TypeError(f"{name} is not a function")
    return node


def _blocks(node: ast.AST) -> Iterator[Body]:
    """Every list of statements below a node."""
    for below in ast.walk(node):
        for field in ("body", "orelse", "finalbody"):
            value = getattr(below, field, None)
            if isinstance(value, list) and value:
                yield value


def _same(left: Body, right: Body) -> bool:
    return [ast.dump(statement) for statement in left] == [
        ast.dump(statement) for statement in right
    ]


class _Swap(ast.NodeTransformer):
    """Replaces an expression, and counts how often."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new, self.found = ast.dump(old), new, 0

    def visit(self, node: ast.AST) -> ast.AST:
        """The node, or what it becomes."""
        if isinstance(node, ast.expr) and ast.dump(node) == self.old:
            self.found += 1
            return copy.deepcopy(self.new)
        return self.generic_visit(node)
