"""Mutants: right answers with a few small changes, as a tired person might make them.

A change is local: an operator, a constant, a comparison, a branch, a dropped statement or method call, swapped
arguments, one field of a format or one variable in place of another. What comes out is Python text, each text once, in
an order that depends only on the seed. Some mutants do not run and some are still right: whoever uses them finds out.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATORS = {
    ast.Add: (ast.Sub, ast.Mult), ast.Sub: (ast.Add,), ast.Mult: (ast.Add, ast.FloorDiv), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod, ast.Mult), ast.Mod: (ast.FloorDiv,), ast.Pow: (ast.Mult, ast.Add),
    ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,), ast.BitAnd: (ast.BitOr, ast.BitXor),
    ast.BitOr: (ast.BitAnd, ast.Add),
}  # fmt: skip
_COMPARISONS = {
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE), ast.NotEq: (ast.Eq, ast.Lt, ast.Gt), ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
}  # fmt: skip
_ORDER_MATTERS = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift, ast.Pow)
# Names that stand for each other: a mutant takes a neighbour from its own row.
_ROWS = (
    ("exponent_bits", "mantissa_bits", "width", "bias"),
    ("signed", "subnormals"),
    ("ZERO", "SUBNORMAL", "NORMAL", "INF", "NAN"),
    ("inf", "nan"),
    ("isfinite", "isnan", "isinf"),
    ("int32", "int64", "int16"),
    ("float64", "float32", "bfloat16"),
    ("double", "float"),
)
_WORDS = ("ieee", "fn", "fnuz", "finite")


@dataclass(frozen=True)
class _Change:
    """One change: the child `field[index]` of the node at `place` (in walking order) becomes `replacement`."""

    place: int
    field: str
    index: int | None
    replacement: object

    def applied(self, tree: ast.Module) -> str:
        """The text of the tree with this change."""
        changed = copy.deepcopy(tree)
        parent = list(ast.walk(changed))[self.place]
        if self.index is None:
            setattr(parent, self.field, self.replacement)
        else:
            new = self.replacement if isinstance(self.replacement, list) else [self.replacement]
            getattr(parent, self.field)[self.index : self.index + 1] = new
        return ast.unparse(ast.fix_missing_locations(changed))


def mutants(source: str, seed: int, count: int) -> list[str]:
    """At most `count` mutants of the function in `source`: half of them with one change, the others with two or three.

    Where there are fewer with one change, the others make up the number. Raises SyntaxError if it is no Python.
    """
    draw = random.Random(seed)
    tree = ast.parse(source)
    seen = {ast.unparse(tree)}
    once = list(dict.fromkeys(change.applied(tree) for change in _shuffled(_changes(tree), draw)))
    found = [text for text in once if text not in seen][: max(count // 2, 1)]
    seen.update(once)
    for _ in range(8 * count):
        if len(found) >= count or not once:
            break
        text = draw.choice(once)
        for _ in range(draw.choice((1, 1, 1, 2))):
            text = _changed_once(text, draw)
        if text not in seen:
            found.append(text)
            seen.add(text)
    return found


def _changed_once(text: str, draw: random.Random) -> str:
    tree = ast.parse(text)
    changes = list(_changes(tree))
    return draw.choice(changes).applied(tree) if changes else text


def _shuffled(changes: Iterator[_Change], draw: random.Random) -> list[_Change]:
    listed = list(changes)
    draw.shuffle(listed)
    return listed


def _changes(tree: ast.Module) -> Iterator[_Change]:
    variables = _variables(tree)
    for place, node in enumerate(ast.walk(tree)):
        for field, value in ast.iter_fields(node):
            if isinstance(node, ast.FunctionDef) and field != "body":
                continue
            listed = isinstance(value, list)
            for index, child in enumerate(value if listed else [value]):
                if isinstance(child, ast.stmt):
                    replacements = _statement_changes(child)
                elif isinstance(child, ast.expr):
                    replacements = _expression_changes(child, variables)
                else:
                    continue
                for replacement in replacements:
                    yield _Change(place, field, index if listed else None, replacement)


def _variables(tree: ast.Module) -> list[str]:
    """The names that the function itself gives: its parameters and what it assigns."""
    assigned = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    parameters = {a.arg for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) for a in n.args.args}
    return sorted((assigned | parameters) - {"fmt"})


def _statement_changes(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue)):
        yield [ast.Pass()]
    if isinstance(statement, ast.If):
        yield [ast.If(ast.UnaryOp(ast.Not(), statement.test), statement.body, statement.orelse)]
        yield statement.body
        yield statement.orelse or [ast.Pass()]


def _expression_changes(node: ast.expr, variables: list[str]) -> Iterator[ast.expr]:
    change = globals().get(f"_change_{type(node).__name__}")
    if isinstance(node, ast.Name):
        yield from _change_name(node, variables)
    elif change is not None:
        yield from change(node)


def _change_name(node: ast.Name, variables: list[str]) -> Iterator[ast.expr]:
    if isinstance(node.ctx, ast.Load) and node.id in variables:
        yield from (ast.Name(other, ast.Load()) for other in variables if other != node.id)


def _change_BinOp(node: ast.BinOp) -> Iterator[ast.expr]:
    for operator in _OPERATORS.get(type(node.op), ()):
        yield ast.BinOp(node.left, operator(), node.right)
    if isinstance(node.op, _ORDER_MATTERS):
        yield ast.BinOp(node.right, node.op, node.left)
    yield node.left


def _change_UnaryOp(node: ast.UnaryOp) -> Iterator[ast.expr]:
    yield node.operand


def _change_BoolOp(node: ast.BoolOp) -> Iterator[ast.expr]:
    yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    yield from node.values


def _change_Compare(node: ast.Compare) -> Iterator[ast.expr]:
    text = any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in node.comparators)
    for operator in (ast.Eq, ast.NotEq) if text else _COMPARISONS.get(type(node.ops[0]), ()):
        yield ast.Compare(node.left, [operator(), *node.ops[1:]], node.comparators)


def _change_IfExp(node: ast.IfExp) -> Iterator[ast.expr]:
    yield ast.IfExp(node.test, node.orelse, node.body)
    yield from (node.body, node.orelse)


def _change_Constant(node: ast.Constant) -> Iterator[ast.expr]:
    value = node.value
    if isinstance(value, bool):
        others: tuple = (not value,)
    elif isinstance(value, int):
        others = (value + 1, value - 1, 0, 1, 2, -1)
    elif isinstance(value, float):
        others = (value * 2, value / 2, value + 1, -value, 0.0)
    else:
        others = _WORDS if value in _WORDS else ()
    yield from (ast.Constant(other) for other in dict.fromkeys(others) if other != value)


def _change_Attribute(node: ast.Attribute) -> Iterator[ast.expr]:
    for row in _ROWS:
        if node.attr in row:
            yield from (ast.Attribute(node.value, other, node.ctx) for other in row if other != node.attr)


def _change_Call(node: ast.Call) -> Iterator[ast.expr]:
    if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value):
        yield node.func.value  # the method call is dropped
    if len(node.args) == 1 and not node.keywords:
        yield node.args[0]
    for first in range(len(node.args) - 1):
        swapped = list(node.args)
        swapped[first : first + 2] = reversed(swapped[first : first + 2])
        yield ast.Call(node.func, swapped, node.keywords)
    for dropped in range(len(node.args)):
        yield ast.Call(node.func, node.args[:dropped] + node.args[dropped + 1 :], node.keywords)


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("torch", "math", "np", "struct", "float", "int")


def _change_Subscript(node: ast.Subscript) -> Iterator[ast.expr]:
    if isinstance(node.ctx, ast.Load):
        yield node.value
