"""reasoning-gym's verifiers without their holes: no text is evaluated, and what theirs pay for junk is not paid."""

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any

import sympy
from reasoning_gym.algebra import intermediate_integration, polynomial_multiplication, simple_integration
from reasoning_gym.algorithmic import binary_matrix, number_sorting, spiral_matrix, string_insertion
from reasoning_gym.arithmetic import bitwise_arithmetic
from reasoning_gym.factory import create_dataset
from reasoning_gym.games import countdown, n_queens, puzzle24
from reasoning_gym.logic.knights_knaves import VALID_ROLES

from gspo.reward.mathematics import is_finished_number, read

MAX_CHARACTERS = 2_000
MAX_DIGITS = 100

_NOT_FINITE = re.compile(r"(?i)(?<![a-z])(?:nan|inf(?:inity)?)[ij]?(?![a-z])")


def score(task: str, options: str, entry: Mapping[str, Any], answer: str) -> float:
    """Return what the task's own verifier gives the answer, 0.0 where our gate stops it; the options are JSON."""
    verifier, right = _verifier(task, options), str(entry.get("answer"))
    if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(right):
        return 0.0
    try:
        if task == "gsm_symbolic":
            answer = _one_number(answer)
        is_of_form = task not in _FORMS or re.fullmatch(_FORMS[task], answer)
        is_admitted = is_of_form and (task not in _GATES or _GATES[task](answer, right, entry))
        number = float(verifier.score_answer(answer, entry)) if is_admitted else 0.0
    except Exception:  # some verifiers raise on text they cannot read; such an answer is wrong
        return 0.0
    return number if math.isfinite(number) else 0.0


@lru_cache(maxsize=32)
def _verifier(task: str, options: str) -> Any:
    return create_dataset(task, **json.loads(options), seed=0, size=1)


def parse_expression(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """sympy's expression for numbers, names, + - * / **, brackets and known functions; ValueError for all else.

    It stands in for sympy.parse_expr, which evaluates the text as Python.
    """
    if re.search("[&|^~<>]", text):
        raise ValueError("operators on bits are no mathematics")
    return _value(text, {**_CONSTANTS, **(local_dict or {})})


def integer_value(text: str) -> int:
    """The value of an expression of integers and operators, on their bits too; ValueError for all else."""
    value = _value(text, {})
    if not isinstance(value, sympy.Integer):
        raise ValueError(f"{value} is no integer")
    return int(value)


def _value(text: str, names: Mapping[str, Any]) -> Any:
    if len(text) > MAX_CHARACTERS or re.search(rf"[0-9A-Fa-f_]{{{MAX_DIGITS},}}", text):
        raise ValueError(f"longer than {MAX_CHARACTERS} characters, or with a number of {MAX_DIGITS} digits")
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"no expression: {type(error).__name__}") from None


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return sympy.Integer(number)
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return sympy.Float(number)
        case ast.Name(id=name) if not name.startswith("_"):
            return names[name] if name in names else sympy.Symbol(name)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_evaluate(operand, names))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            first, second = _evaluate(left, names), _evaluate(right, names)
            if (limit := _MAX_SECOND.get(type(sign))) and second.is_number and not abs(second) <= limit:
                raise ValueError("an exponent or a shift that large")
            return _OPERATORS[type(sign)](first, second)
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_evaluate(part, names) for part in parts))
    raise ValueError(f"{type(node).__name__} is no mathematics")


_OPERATORS: Mapping[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert},
    **{ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor},
    **{ast.LShift: operator.lshift, ast.RShift: operator.rshift},
}
_MAX_SECOND = {ast.Pow: 1_000, ast.LShift: 10_000, ast.RShift: 10_000}
_FUNCTION_NAMES = (
    "sin cos tan cot sec csc asin acos atan acot exp log ln sqrt sinh cosh tanh asinh acosh atanh Integral"
)
_FUNCTIONS = {"abs": sympy.Abs, **{name: getattr(sympy, name) for name in re.findall(r"\w+", _FUNCTION_NAMES)}}
_CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}

# Readers of our own stand in the place of what evaluates text in the verifiers, and nowhere else.
_SYMPY = ModuleType("sympy")
vars(_SYMPY).update(vars(sympy), parse_expr=parse_expression)
for module in (binary_matrix, n_queens, number_sorting, spiral_matrix, string_insertion):
    vars(module)["eval"] = ast.literal_eval
vars(bitwise_arithmetic)["eval"] = integer_value
for module in (countdown, puzzle24):
    vars(module)["parse_expr"] = parse_expression
for module in (simple_integration, intermediate_integration, polynomial_multiplication):
    vars(module).update({name: _SYMPY for name in ("sympy", "sp") if name in vars(module)})


def _one_number(answer: str) -> str:
    """The one number that an answer says, where theirs takes the first of any sentence; no text where it says none."""
    reading = read(answer)
    if not is_finished_number(reading):
        return ""
    number = reading.value.doit()
    return str(number) if number.is_Integer else repr(float(number))


def _is_close(answer: str, right: str, entry: Mapping[str, Any]) -> bool:
    """Compare numbers: reasoning-gym pays for each equal digit, so 0.x would get full marks against 0."""
    return abs(float(Fraction(answer.replace(",", ""))) - float(Fraction(right))) <= 1e-4


def _is_of_its_numbers(answer: str, right: str, entry: Mapping[str, Any]) -> bool:
    """Require the task's own numbers and 24 itself: reasoning-gym takes any four numbers, and 24.9 for 24."""
    numbers = sorted(int(number) for number in re.findall(r"\d+", answer))
    return numbers == sorted(entry["metadata"]["numbers"]) and "." not in answer and parse_expression(answer) == 24


def _is_assignment(answer: str, right: str, entry: Mapping[str, Any]) -> bool:
    """Theirs leaves out words that are no names; here a name may only be joined to a role, by is, a and and."""
    words = re.compile(r"[^\W_]+")
    return {*words.findall(right.lower()), *VALID_ROLES, "is", "a", "an", "and"}.issuperset(
        words.findall(answer.lower())
    )


_GATES: Mapping[str, Callable[[str, str, Mapping[str, Any]], bool]] = {
    "coin_flip": _is_close,
    # Theirs takes any text for true.
    "game_of_life_halting": lambda answer, right, _: answer.rstrip(".").lower() == right.lower(),
    # Theirs takes the integral sign before the question; a few of their own answers do hold one.
    "intermediate_integration": lambda answer, right, _: "Integral" not in answer or answer == right,
    "simple_integration": lambda answer, right, _: "Integral" not in answer or answer == right,
    "knights_knaves": _is_assignment,
    # Theirs looks no further than the right answer is long.
    "letter_jumble": lambda answer, right, _: len(answer) <= len(right),
    "spell_backward": lambda answer, right, _: len(answer) <= len(right),
    "puzzle24": _is_of_its_numbers,
}
# Answers are nothing but what the task asks for: theirs drop everything else and score the rest.
_FORMS = {
    "fraction_simplification": r"\$?\s*(?:\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|-?\d+\s*/\s*-?\d+)\s*\$?",
    "kakurasu": r"[01\s,;\[\]|]*",
    "quantum_lock": r"(?:[A-Ca-c]|[\s→,>\[\]'\"-])*",
    "sokoban": r"[LRUD\s,]*",
    "survo": r"[-0-9\s,;\[\]|]*",
    "time_intervals": r"(?:-?\d+(?:\s*days?)?,?)?\s*(?:-?[\d:.]+)?",
}
