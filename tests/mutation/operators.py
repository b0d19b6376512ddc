"""Small changes of a syntax tree, by rule.

Each rule looks at one node and gives what could stand in its place. Strings are never
changed: neither reasons nor the texts of errors. Nor are annotations, decorators,
defaults of fields and of parameters, and what stands outside of functions: tables and
limits, which a test could only copy. Nor is `strict` of zip, which asserts and decides
nothing.
"""

import ast
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from attrs import frozen

Node = ast.AST
Step = tuple[str, int | None]  # a field of a node, and where in it if it is a list
Rule = Callable[[Node], Iterable[Node | None]]  # None: the node goes

_EDGE: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ORDERED: Final = (ast.Sub, ast.FloorDiv, ast.Div, ast.Mod, ast.LShift, ast.RShift)
_WORDS: Final = (ast.Raise, ast.JoinedStr)  # what stands in them is for people to read
_TYPES: Final = ("annotation", "returns")  # fields of nodes
_UPDATES: Final = (
    "evolve",
    "edited",
    "replace",
)  # functions that take a record's changes by name


@frozen
class Spot:
    """A place in a module at which a rule makes something else of a node."""

    function: str  # qualified name
    rule: str
    before: str  # the node's text
    after: str
    path: tuple[Step, ...]
    new: Node | None


def _comparison(node: Node) -> Iterator[Node]:
    """Each comparison a hair further, or its contrary."""
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            new = copy.deepcopy(node)
            new.ops[index] = _EDGE[type(op)]()
            yield new


def _offset(node: Node) -> Iterator[Node]:
    """Each whole number one more, one less."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)


def _term(node: Node) -> Iterator[Node]:
    """Each operand of an operation alone."""
    if isinstance(node, ast.BinOp):
        yield node.left
        if not isinstance(node.op, _ORDERED):
            yield node.right


def _swap(node: Node) -> Iterator[Node]:
    """Operands and arguments the other way round; a minimum for a maximum."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ORDERED):
        yield ast.BinOp(node.right, node.op, node.left)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        opposite = {"min": "max", "max": "min", "any": "all", "all": "any"}.get(name)
        if opposite and isinstance(node.func, ast.Name):
            yield ast.Call(ast.Name(opposite, ast.Load()), node.args, node.keywords)
        elif _alike(node.args):
            first, second, *others = node.args
            yield ast.Call(node.func, [second, first, *others], node.keywords)


def _alike(args: list[ast.expr]) -> bool:
    """Whether the first two arguments could be taken for each other."""
    kinds = (ast.Name, ast.Attribute, ast.BinOp, ast.Subscript)
    return len(args) > 1 and all(isinstance(arg, kinds) for arg in args[:2])


def _bound(node: Node) -> Iterator[Node]:
    """Each argument of a minimum, a maximum or an order alone."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("min", "max") and len(node.args) > 1:
            yield from node.args
        elif (
            node.func.id in ("reversed", "sorted", "set", "frozenset")
            and len(node.args) == 1
        ):
            yield node.args[0]


def _condition(node: Node) -> Iterator[Node]:
    """Each condition taken for granted, or left out."""
    if isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            remaining = node.values[:index] + node.values[index + 1 :]
            yield ast.BoolOp(node.op, remaining) if len(remaining) > 1 else remaining[0]
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.If):
        yield ast.If(ast.Constant(True), node.body, node.orelse)
        yield ast.If(ast.Constant(False), node.body, node.orelse)
    elif isinstance(node, ast.While):
        yield ast.While(ast.Constant(False), node.body, node.orelse)
    elif isinstance(node, ast.comprehension):
        for index in range(len(node.ifs)):
            remaining = node.ifs[:index] + node.ifs[index + 1 :]
            yield ast.comprehension(node.target, node.iter, remaining, node.is_async)


def _negation(node: Node) -> Iterator[Node]:
    """No `not`; no rounding up by two minuses; no minus."""
    if isinstance(node, ast.UnaryOp):
        operand = node.operand
        if (
            isinstance(node.op, ast.USub)
            and isinstance(operand, ast.BinOp)
            and isinstance(operand.left, ast.UnaryOp)
        ):
            yield ast.BinOp(operand.left.operand, operand.op, operand.right)
        elif isinstance(node.op, ast.Not) or not isinstance(operand, ast.Constant):
            yield operand


def _slice(node: Node) -> Iterator[Node]:
    """Each end of a slice left out, or one further."""
    if isinstance(node, ast.Slice):
        one_node = ast.Constant(1)
        if node.lower is not None:
            yield ast.Slice(None, node.upper, node.step)
            yield ast.Slice(
                ast.BinOp(node.lower, ast.Add(), one_node), node.upper, node.step
            )
        if node.upper is not None:
            yield ast.Slice(node.lower, None, node.step)
            yield ast.Slice(
                node.lower, ast.BinOp(node.upper, ast.Add(), one_node), node.step
            )


def _update(node: Node) -> Iterator[Node]:
    """Each named change of a record forgotten."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return
    if node.func.id in _UPDATES and len(node.args) == 1:
        for index, keyword in enumerate(node.keywords):
            remaining = node.keywords[:index] + node.keywords[index + 1 :]
            if keyword.arg is not None:
                yield (
                    ast.Call(node.func, node.args, remaining)
                    if remaining
                    else node.args[0]
                )


def _statement(node: Node) -> Iterator[Node | None]:
    """Each statement that is made for its effect forgotten; a sum for a difference."""
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    stores = ast.Attribute | ast.Subscript
    store = isinstance(node, ast.Assign) and all(
        isinstance(t, stores) for t in node.targets
    )
    if call or store or isinstance(node, ast.Delete | ast.Continue):
        yield None
    elif isinstance(node, ast.AugAssign):
        yield None
        opposite = {ast.Add: ast.Sub(), ast.Sub: ast.Add()}.get(type(node.op))
        if opposite is not None:
            yield ast.AugAssign(node.target, opposite, node.value)


def _constant(node: Node) -> Iterator[Node]:
    """The other truth; nothing where something is returned; one member of several
    forgotten.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        members = node.comparators[0]
        if isinstance(members, ast.Tuple):
            for index in range(len(members.elts)):
                remaining = ast.Tuple(
                    members.elts[:index] + members.elts[index + 1 :], ast.Load()
                )
                yield ast.Compare(node.left, node.ops, [remaining])


RULES: Final[dict[str, Rule]] = {
    "comparison": _comparison,
    "offset": _offset,
    "term": _term,
    "swap": _swap,
    "bound": _bound,
    "condition": _condition,
    "negation": _negation,
    "slice": _slice,
    "update": _update,
    "statement": _statement,
    "constant": _constant,
}


def spots(tree: ast.Module) -> Iterator[Spot]:
    """All that the rules can make of the functions of a module, in the order
    of the file.
    """
    for node, names, path in _functions(tree, (), ()):
        if not _is_overload(node):
            for index, statement in enumerate(node.body):
                yield from _inside(statement, (*path, ("body", index)), ".".join(names))


def _functions(
    node: ast.Module | ast.ClassDef, names: tuple[str, ...], path: tuple[Step, ...]
) -> Iterator[tuple[ast.FunctionDef, tuple[str, ...], tuple[Step, ...]]]:
    """The functions of a module or class, with their qualified names and
    where they are.
    """
    for index, statement in enumerate(node.body):
        if isinstance(statement, ast.FunctionDef):
            yield statement, (*names, statement.name), (*path, ("body", index))
        elif isinstance(statement, ast.ClassDef):
            yield from _functions(
                statement, (*names, statement.name), (*path, ("body", index))
            )


def _is_overload(node: ast.FunctionDef) -> bool:
    return any(
        isinstance(decorator, ast.Name) and decorator.id == "overload"
        for decorator in node.decorator_list
    )


def _inside(node: Node, path: tuple[Step, ...], function: str) -> Iterator[Spot]:
    """What can be made of a node and of all below it."""
    for name, rule in RULES.items():
        for new in rule(node):
            before, after = _text(node), _text(new)
            if before != after:
                yield Spot(function, name, before, after, path, new)
    if isinstance(node, _WORDS) or (
        isinstance(node, ast.keyword) and node.arg == "strict"
    ):
        return
    for field, value in ast.iter_fields(node):
        if field not in _TYPES:
            for index, child in _children(value):
                yield from _inside(child, (*path, (field, index)), function)


def _children(value: object) -> Iterator[tuple[int | None, Node]]:
    if isinstance(value, list):
        yield from (
            (index, child)
            for index, child in enumerate(value)
            if isinstance(child, ast.AST)
        )
    elif isinstance(value, ast.AST):
        yield None, value


def _text(node: Node | None) -> str:
    """A node on one line; of a statement with a body, its head."""
    if node is None:
        return "pass"
    if isinstance(node, ast.If | ast.While):
        word = "if" if isinstance(node, ast.If) else "while"
        return f"{word} {ast.unparse(node.test)}"
    return " ".join(ast.unparse(node).split())


def changed(tree: ast.Module, spot: Spot) -> ast.Module:
    """A copy of the tree in which the node at the spot is another one."""
    tree = copy.deepcopy(tree)
    node: Node = tree
    *above, (field, index_in_field) = spot.path
    for name, index in above:
        value = getattr(node, name)
        node = value if index is None else value[index]
    new = copy.deepcopy(spot.new) or ast.Pass()
    if index_in_field is None:
        setattr(node, field, new)
    else:
        getattr(node, field)[index_in_field] = new
    return tree
