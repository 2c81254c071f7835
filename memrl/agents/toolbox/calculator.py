"""Compute an arithmetic expression within bounds; it is parsed, never executed as code."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable

MOST_CHARACTERS, MOST_DIGITS, MOST_DECIMALS = 200, 100, 10
_BINARY: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_UNARY: dict[type, Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / ** and parentheses; whole numbers are exact.

    >>> calculate("3 + 4 * 2 ** 3"), calculate("(1 + 2) / 4"), calculate("6 / 2")
    ('35', '0.75', '3')

    Raises:
        ValueError: it is no such expression, it is too long, or a value is undefined or has more than 100 digits.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"the expression has more than {MOST_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser's, about spellings such as 1if
            tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError(f"a value has more than {MOST_DIGITS} digits") from None
    if isinstance(value, float):
        value = int(value) if value.is_integer() and abs(value) < 2**53 else round(value, MOST_DECIMALS)
    return str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        # Before it is computed: a power may take hours.
        if isinstance(node.op, ast.Pow) and abs(right) * math.log10(max(abs(left), 1)) > MOST_DIGITS:
            raise OverflowError
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("an expression has numbers, + - * / ** and parentheses only")


def _bounded(value: int | float | complex) -> int | float:
    if isinstance(value, complex) or value != value:
        raise ValueError("the value is not a real number")
    if abs(value) >= 10**MOST_DIGITS:
        raise OverflowError
    return value
