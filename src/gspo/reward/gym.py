"""reasoning-gym's verifiers without their holes: no text is evaluated, and what theirs pay for junk is not paid."""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from gspo.reward.expression import integer_value, parse_expression
from gspo.reward.mathematics.reading import Quantity, read

Gate = Callable[[str, Mapping[str, Any]], str | None]  # the answer as the verifier may see it; None: it is wrong

_NOT_FINITE = re.compile(r"(?i)(?<![a-z])(?:nan|inf(?:inity)?)[ij]?(?![a-z])")


def warm_up() -> None:
    """Import the verifiers, and put readers of our own in the place of what evaluates text in them."""
    import sympy
    from reasoning_gym.algorithmic import binary_matrix, number_sorting, spiral_matrix, string_insertion
    from reasoning_gym.arithmetic import bitwise_arithmetic
    from reasoning_gym.games import countdown, n_queens, puzzle24

    for module in (binary_matrix, n_queens, number_sorting, spiral_matrix, string_insertion):
        vars(module)["eval"] = ast.literal_eval
    vars(bitwise_arithmetic)["eval"] = integer_value
    for module in (sympy, countdown, puzzle24):
        vars(module)["parse_expr"] = parse_expression
    sympy.simplify(sympy.sin(sympy.Symbol("x")) ** 2)  # what it imports and caches is no answer's time


def judge(task: str, options: str, entry: dict[str, Any]) -> Callable[[str], float]:
    """From answers to the score that the task's own verifier gives them, 0.0 where our gate stops them."""
    verifier = _verifier(task, options)
    gate = _GATES.get(task, _as_it_is)

    def score(answer: str) -> float:
        if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(str(entry.get("answer"))):
            return 0.0
        try:
            admitted = gate(answer, entry)
            number = 0.0 if admitted is None else float(verifier.score_answer(admitted, entry))
        except Exception:  # some verifiers raise on text they cannot read; such an answer is wrong
            return 0.0
        return number if math.isfinite(number) else 0.0

    return score


@lru_cache(maxsize=32)
def _verifier(task: str, options: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, **json.loads(options), seed=0, size=1)


def _as_it_is(answer: str, entry: Mapping[str, Any]) -> str:
    return answer


def _of(pattern: str) -> Gate:
    """A gate for texts that are nothing but what the task asks for: theirs drop everything else and score the rest."""
    compiled = re.compile(pattern)
    return lambda answer, entry: answer if compiled.fullmatch(answer) else None


def _one_number(answer: str, entry: Mapping[str, Any]) -> str | None:
    """Theirs takes the first number of any sentence: not 405."""
    reading = read(answer)
    if not isinstance(reading, Quantity) or not reading.value.number.is_Rational or reading.value.operators:
        return None
    number = reading.value.number
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
    from reasoning_gym.logic.knights_knaves import VALID_ROLES

    words = re.findall(r"[^\W_]+", answer.lower())
    known = {*re.findall(r"[^\W_]+", str(entry["answer"]).lower()), *VALID_ROLES, "is", "a", "an", "and"}
    return answer if known.issuperset(words) else None


_GATES: Mapping[str, Gate] = {
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
