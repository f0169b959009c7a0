"""Mathematics in Python's spelling, read from its syntax tree: nothing is evaluated as code."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy

MAX_CHARACTERS = 2_000
MAX_DIGITS = 100
MAX_EXPONENT = 1_000
MAX_SHIFT = 10_000

_FUNCTIONS: Mapping[str, Any] = {
    **{
        name: getattr(sympy, name)
        for name in re.findall(r"\w+", "sin cos tan cot sec csc asin acos atan acot exp log sqrt")
    },
    **{name: getattr(sympy, name) for name in re.findall(r"\w+", "sinh cosh tanh asinh acosh atanh Abs")},
    "ln": sympy.log,
    "abs": sympy.Abs,
    "Integral": sympy.Integral,
}
_CONSTANTS: Mapping[str, Any] = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_BIT_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    **{kind: function for kind, function in _OPERATORS.items() if kind is not ast.Div},
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Invert: operator.invert,
}


def parse_expression(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """sympy's expression for numbers, names, + - * / **, brackets and known functions; ValueError for all else.

    It stands in for sympy.parse_expr, which evaluates the text as Python.
    """
    return _read(lambda tree: _expression(tree, {**_CONSTANTS, **(local_dict or {})}), text)


def integer_value(text: str) -> int:
    """The value of an expression of integers and operators on their bits; ValueError for all else."""
    return int(_read(_integer, text))


def _read(read: Callable[[ast.expr], Any], text: str) -> Any:
    if len(text) > MAX_CHARACTERS or re.search(rf"[0-9A-Fa-f_]{{{MAX_DIGITS},}}", text):
        raise ValueError(f"longer than {MAX_CHARACTERS} characters, or with a number of {MAX_DIGITS} digits")
    try:
        return read(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"no expression: {type(error).__name__}") from None


def _expression(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool) and math.isfinite(number):
            return sympy.sympify(number)  # no text
        case ast.Name(id=name) if not name.startswith("_"):
            return names[name] if name in names else sympy.Symbol(name)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_expression(operand, names))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _expression(left, names), _expression(right, names)
            if exponent.is_number and not abs(exponent) <= MAX_EXPONENT:
                raise ValueError("an exponent that large")
            return base**exponent
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_expression(left, names), _expression(right, names))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_expression(argument, names) for argument in arguments))
    raise ValueError(f"{type(node).__name__} is no mathematics")


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _BIT_OPERATORS:
            return int(_BIT_OPERATORS[type(sign)](_integer(operand)))
        case ast.BinOp(left=left, op=ast.LShift() | ast.RShift() as sign, right=right):
            value, places = _integer(left), _integer(right)
            if places > MAX_SHIFT:
                raise ValueError("a shift that far")
            return value << places if isinstance(sign, ast.LShift) else value >> places
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BIT_OPERATORS:
            return int(_BIT_OPERATORS[type(sign)](_integer(left), _integer(right)))
    raise ValueError(f"{type(node).__name__} is no integer")
