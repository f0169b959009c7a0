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
MAX_EXPONENT = 1_000
MAX_SHIFT = 10_000

_NOT_FINITE = re.compile(r"(?i)(?<![a-z])(?:nan|inf(?:inity)?)[ij]?(?![a-z])")


def score(task: str, options: str, entry: Mapping[str, Any], answer: str) -> float:
    """What the task's own verifier gives the answer, 0.0 where our gate stops it; the options are JSON."""
    verifier, gate = _verifier(task, options), _GATES.get(task, lambda answer, entry: answer)
    if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(str(entry.get("answer"))):
        return 0.0
    try:
        admitted = gate(answer, entry)
        number = 0.0 if admitted is None else float(verifier.score_answer(admitted, entry))
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
    names = {**_CONSTANTS, **(local_dict or {})}
    return _evaluate(_tree(text), {**_OPERATORS, ast.Div: operator.truediv, ast.Pow: _power}, names)


def integer_value(text: str) -> int:
    """The value of an expression of integers and operators on their bits; ValueError for all else."""
    return int(_evaluate(_tree(text), {**_OPERATORS, **_BIT_OPERATORS}, None))


def _tree(text: str) -> ast.expr:
    if len(text) > MAX_CHARACTERS or re.search(rf"[0-9A-Fa-f_]{{{MAX_DIGITS},}}", text):
        raise ValueError(f"longer than {MAX_CHARACTERS} characters, or with a number of {MAX_DIGITS} digits")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"no expression: {type(error).__name__}") from None


def _evaluate(node: ast.expr, operators: Mapping[type, Callable[..., Any]], names: Mapping[str, Any] | None) -> Any:
    """The value of the tree; without names, of integers alone."""
    try:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                return number if names is None else sympy.Integer(number)
            case ast.Constant(value=float() as number) if names is not None and math.isfinite(number):
                return sympy.Float(number)
            case ast.Name(id=name) if names is not None and not name.startswith("_"):
                return names[name] if name in names else sympy.Symbol(name)
            case ast.UnaryOp(op=sign, operand=operand) if type(sign) in operators:
                return operators[type(sign)](_evaluate(operand, operators, names))
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in operators:
                return operators[type(sign)](_evaluate(left, operators, names), _evaluate(right, operators, names))
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if names is not None and name in _FUNCTIONS:
                return _FUNCTIONS[name](*(_evaluate(part, operators, names) for part in parts))
    except RecursionError:
        raise ValueError("nested that deep") from None
    raise ValueError(f"{type(node).__name__} is no mathematics")


def _power(base: Any, exponent: Any) -> Any:
    if exponent.is_number and not abs(exponent) <= MAX_EXPONENT:
        raise ValueError("an exponent that large")
    return base**exponent


def _shift(value: int, places: int) -> int:
    if abs(places) > MAX_SHIFT:
        raise ValueError("a shift that far")
    return value << places if places >= 0 else value >> -places


_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_BIT_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Invert: operator.invert,
    ast.LShift: _shift,
    ast.RShift: lambda value, places: _shift(value, -places),
}
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


def _of(pattern: str) -> Callable[[str, Mapping[str, Any]], str | None]:
    """A gate for texts that are nothing but what the task asks for: theirs drop everything else and score the rest."""
    compiled = re.compile(pattern)
    return lambda answer, entry: answer if compiled.fullmatch(answer) else None


def _one_number(answer: str, entry: Mapping[str, Any]) -> str | None:
    """Theirs takes the first number of any sentence: not 405."""
    reading = read(answer)
    if not is_finished_number(reading):
        return None
    number = reading.value.doit()
    return str(number) if number.is_Integer else repr(float(number))


def _probability(answer: str, entry: Mapping[str, Any]) -> str | None:
    """Theirs pays for every digit that agrees, which is all of them for 0 and any 0.…."""
    try:
        gap = abs(float(Fraction(answer.replace(",", ""))) - float(Fraction(entry["answer"])))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return answer if gap <= 1e-4 else None


def _no_longer(answer: str, entry: Mapping[str, Any]) -> str | None:
    """Theirs looks no further than the right answer is long."""
    return answer if len(answer) <= len(entry["answer"]) else None


def _integrated(answer: str, entry: Mapping[str, Any]) -> str | None:
    """Theirs takes the integral sign before the question; a few of their own answers do hold one."""
    return None if "Integral" in answer and answer != entry["answer"] else answer


def _of_its_numbers(answer: str, entry: Mapping[str, Any]) -> str | None:
    """Theirs takes any four numbers, and 24.9 for 24."""
    numbers = sorted(int(number) for number in re.findall(r"\d+", answer))
    is_right = numbers == sorted(entry["metadata"]["numbers"]) and "." not in answer
    return answer if is_right and parse_expression(answer) == 24 else None


def _truth(answer: str, entry: Mapping[str, Any]) -> str | None:
    """Theirs takes any text for true."""
    return answer if answer.rstrip(".").lower() == str(entry["answer"]).lower() else None


def _assignments(answer: str, entry: Mapping[str, Any]) -> str | None:
    """Theirs leaves out words that are no names; here a name may only be joined to a role, by is, a and and."""
    words = re.findall(r"[^\W_]+", answer.lower())
    words_allowed = {*re.findall(r"[^\W_]+", str(entry["answer"]).lower()), *VALID_ROLES, "is", "a", "an", "and"}
    return answer if words_allowed.issuperset(words) else None


# The answer as the verifier may see it; None: it is wrong.
_GATES: Mapping[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "coin_flip": _probability,
    "fraction_simplification": _of(r"\$?\s*(?:\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\}|-?\d+\s*/\s*-?\d+)\s*\$?"),
    "game_of_life_halting": _truth,
    "gsm_symbolic": _one_number,
    "intermediate_integration": _integrated,
    "kakurasu": _of(r"[01\s,;\[\]|]*"),
    "knights_knaves": _assignments,
    "letter_jumble": _no_longer,
    "puzzle24": _of_its_numbers,
    "quantum_lock": _of(r"(?:[A-Ca-c]|[\s→,>\[\]'\"-])*"),
    "simple_integration": _integrated,
    "sokoban": _of(r"[LRUD\s,]*"),
    "spell_backward": _no_longer,
    "survo": _of(r"[-0-9\s,;\[\]|]*"),
    "time_intervals": _of(r"(?:-?\d+(?:\s*days?)?,?)?\s*(?:-?[\d:.]+)?"),
}
