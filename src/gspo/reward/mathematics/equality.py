"""Whether two values are one: numbers exactly or to the last place of a decimal one, expressions at several points."""

from typing import Any

import sympy

from gspo.reward.mathematics.parser import Value

MIN_DIGITS = 6  # that a decimal number must have to stand for a number that it only rounds
ROUNDING_NOISE = sympy.Rational(1, 10**12)  # relative: of a number that has been a binary one
EVALUATED_DIGITS = 30
AGREEING_DIGITS = 20
# Where two expressions are compared: by the symbol's place among the sorted ones; some negative, none a round number.
POINTS = tuple(
    tuple(sympy.Rational((-1) ** (turn * place) * (31 + 17 * place + 7 * turn), 13 + 5 * turn) for place in range(1, 9))
    for turn in range(1, 6)
)
MIN_POINTS = 3


def equal_values(first: Value, second: Value) -> bool:
    """Whether two values are the same number or expression."""
    if first.number == second.number:
        return True
    if first.is_number and second.is_number:
        return _agree(first.number, second.number, ROUNDING_NOISE) or _is_rounded(first, second)
    return first.number.free_symbols == second.number.free_symbols and _agree_at_points(first.number, second.number)


def _is_rounded(first: Value, second: Value) -> bool:
    """Whether the coarser decimal number of the two is the other, rounded to its last place."""
    decimals = [(value.places, value) for value in (first, second) if value.places is not None]
    if not decimals:
        return False
    places, coarse = min(decimals, key=lambda decimal: decimal[0])
    fine = second if coarse is first else first
    if coarse.digits < MIN_DIGITS or not fine.number.is_real:
        return False
    unit = sympy.Rational(10) ** -places
    return bool(abs((fine.number - coarse.number).evalf(EVALUATED_DIGITS)) <= unit / 2)


def _agree_at_points(first: Any, second: Any) -> bool:
    symbols = sorted(first.free_symbols, key=str)
    if len(symbols) > len(POINTS[0]):
        return bool(sympy.simplify(first - second) == 0)
    agreeing = 0
    for point in POINTS:
        values = dict(zip(symbols, point, strict=False))
        ours, theirs = first.subs(values), second.subs(values)
        if ours.is_finite is False or theirs.is_finite is False:
            continue
        if not _agree(ours, theirs, sympy.Rational(1, 10**AGREEING_DIGITS)):
            return False
        agreeing += 1
    return agreeing >= MIN_POINTS


def _agree(first: Any, second: Any, tolerance: Any) -> bool:
    """Whether two numbers differ by no more than that part of the larger one."""
    if first.is_Rational and second.is_Rational:
        return bool(abs(first - second) <= tolerance * max(abs(first), abs(second)))
    ours, theirs = first.evalf(EVALUATED_DIGITS), second.evalf(EVALUATED_DIGITS)
    if not (ours.is_finite and theirs.is_finite and ours.is_number and theirs.is_number):
        return bool(ours == theirs)
    return bool(abs(ours - theirs) <= tolerance * max(abs(ours), abs(theirs)))
