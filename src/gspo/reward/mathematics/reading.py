"""What an answer says: a quantity, several values, a relation, or else words; one reading of a text, never two."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gspo.reward.mathematics.equality import equal_values
from gspo.reward.mathematics.parser import NAMES, Unreadable, Value, parse_value
from gspo.reward.mathematics.spelling import comparable, plain_spelling, unwrapped
from gspo.reward.mathematics.units import CURRENCIES, unit_name

MAX_CHARACTERS = 2_000  # longer texts are compared as words


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What every kind of reading has."""

    text: str  # in one spelling: equal ones are equal, whatever they say
    label: str | None = None  # the x of x = 5


@dataclass(frozen=True, kw_only=True)
class Quantity(Reading):
    """One number or expression, with the unit that it is given in."""

    value: Value
    unit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Collection(Reading):
    """Several readings: a tuple or an interval by its brackets, a set {}, a union, a matrix, or a list without any."""

    kind: str
    items: tuple[Reading, ...]


@dataclass(frozen=True, kw_only=True)
class Equation(Reading):
    """Two expressions that are equal, the first of which is no name."""

    difference: Value
    side: Quantity | None = None  # the 12 of x + y = 12, which is solved for neither


@dataclass(frozen=True, kw_only=True)
class Words(Reading):
    """All other texts."""


_LABEL = re.compile(
    r"(?:m?\s*\\?(?:angle|triangle)\s*)?\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?'*(?:\s*\([A-Za-z0-9, ]*\))?"
    r"|\([A-Za-z](?:\s*,\s*[A-Za-z])*\)"
)
_RELATION = r"(<=|>=|!=|\\in(?![A-Za-z])|<|>|=)"
_SEPARATOR = r"\s*(?:[,;]\s*(?:and|or)(?![A-Za-z])|;|(?<![A-Za-z])(?:and|or)(?![A-Za-z])|{comma})\s*"
_COMMA = _SEPARATOR.format(comma=",")
_COMMA_BETWEEN_NUMBERS = _SEPARATOR.format(comma=r",(?!(?<=[0-9],)[0-9]{3}(?![0-9]))")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix)\}(.*)\\end\{\1\}")
_WITH_UNIT = re.compile(r"(?P<number>.*?(?:[0-9)}%]|\\pi))(?P<gap>\s*)(?P<unit>[A-Za-zµ][A-Za-zµ ./^*{}0-9-]*)")
_CURRENCY = re.compile(r"(?P<sign>-?)\s*(?P<unit>US\$|USD|[$€£¥])\s*(?P<number>[0-9.].*)")
_CURRENCY_BEHIND = re.compile(r"(?P<number>.*[0-9])\s*(?P<unit>USD|[$€£¥])")


def read(text: str) -> Reading:
    """The one reading of a text."""
    if len(text) > MAX_CHARACTERS:
        return Words(text=comparable(text))
    plain = plain_spelling(unwrapped(text))
    try:
        return _read(plain)
    except (Unreadable, RecursionError):
        return Words(text=comparable(plain))


def _read(text: str, *, comma: str = _COMMA_BETWEEN_NUMBERS) -> Reading:
    if matrix := _MATRIX.fullmatch(text):
        rows = [[_read(entry.strip()) for entry in row.split("&")] for row in matrix[2].split("\\\\") if row.strip()]
        return _collection("matrix", [_collection("row", row, "") for row in rows], text)
    items = _split(text, comma)
    if len(items) > 1:
        return _collection(",", [inner for item in items for inner in _opened(_read(item))], text)
    parts = _split(text, _RELATION)
    if len(parts) > 1:
        return _relation(parts, text)
    if len(sets := _split(text, r"\\cup(?![A-Za-z])")) > 1:
        return _collection("union", [_read(each.strip()) for each in sets], text)
    if "\\pm" in text:
        both = [text.replace("\\pm", sign).replace("\\mp", other) for sign, other in (("+", "-"), ("-", "+"))]
        return _collection(",", [_read(one.strip()) for one in both], text)
    return _bracketed(text) or _quantity(text)


def _collection(kind: str, items: Sequence[Reading], text: str) -> Collection:
    return Collection(kind=kind, items=tuple(items), text=comparable(text))


def _opened(reading: Reading) -> Sequence[Reading]:
    """The two values of ± within a list are two of its values."""
    return reading.items if isinstance(reading, Collection) and reading.kind == "," else [reading]


def _bracketed(text: str) -> Reading | None:
    """A set, tuple or interval; None for brackets that only hold together what is in them."""
    if found := re.fullmatch(r"\\\{(.*)\\\}|\{(.*,.*)\}", text):
        inner = (found[1] if found[1] is not None else found[2]).strip()
        items = [_read(item, comma=_COMMA) for item in _split(inner, _COMMA)] if inner else []
        return _collection("{}", [one for item in items for one in _opened(item)], text)
    if found := re.fullmatch(r"([(\[])(.*)([)\]])", text):
        if _split(text[1:-1] + " ", r"[)\]]") != [text[1:-1] + " "]:
            return None  # (1)(2): the first bracket is not closed by the last
        items = [_read(item, comma=_COMMA) for item in _split(found[2].strip(), _COMMA)]
        if len(items) > 1 or found[1] == "[":
            return _collection(found[1] + found[3], items, text)
    return None


def _quantity(text: str) -> Quantity:
    choice = re.fullmatch(r"\(?([A-Z])\s*[).:]+", text)  # A) and (A). are the letter
    if re.fullmatch("[A-Za-z][A-Za-z ]+", text) and text not in NAMES:  # a word is no product of its letters
        raise Unreadable(text)
    number, unit = _without_unit(choice[1] if choice else text)
    return Quantity(value=parse_value(number), unit=unit, text=comparable(text))


def _without_unit(text: str) -> tuple[str, str | None]:
    if found := _CURRENCY.fullmatch(text):
        return found["sign"] + found["number"], CURRENCIES[found["unit"]]
    if found := _CURRENCY_BEHIND.fullmatch(text):
        return found["number"], CURRENCIES[found["unit"]]
    found = _WITH_UNIT.fullmatch(text)
    unit = unit_name(found["unit"], apart=bool(found["gap"])) if found else None
    return (found["number"], unit) if found and unit is not None else (text, None)


def _relation(parts: Sequence[str], text: str) -> Reading:
    sides, signs = [part.strip() for part in parts[::2]], set(parts[1::2])
    if signs <= {"<", "<=", ">", ">="}:
        return _inequality(sides, list(parts[1::2]), text)
    if signs not in ({"="}, {"\\in"}):
        raise Unreadable(text)
    label = comparable(sides[0]) if _LABEL.fullmatch(sides[0]) else None
    values = [_read(side) for side in (sides if label is None else sides[1:])]
    if label is None and len(values) == 2 and not all(_is_number(value) for value in values):
        first, second = values
        if not isinstance(first, Quantity) or not isinstance(second, Quantity):
            raise Unreadable(text)
        difference = Value(number=first.value.number - second.value.number)
        side = second if _is_number(second) and len(first.value.number.free_symbols) > 1 else None
        return Equation(difference=difference, side=side, text=comparable(text))
    last = values[-1]
    # A chain says one thing only where all its numbers are one number.
    if len(values) > 1 and not all(_is_same_number(value, last) for value in values):
        raise Unreadable(text)
    if isinstance(last, Words | Equation):
        raise Unreadable(text)
    return replace(last, label=label, text=comparable(text))


def _inequality(sides: list[str], signs: list[str], text: str) -> Reading:
    """The interval that inequalities of one name stand for: x > 3 is (3, ∞)."""
    if signs[0][0] == ">":
        sides, signs = sides[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    names = [number for number, side in enumerate(sides) if _LABEL.fullmatch(side)]
    if any(sign[0] != "<" for sign in signs) or len(names) != 1 or len(sides) > 3 or (len(sides) == 3) > (names == [1]):
        raise Unreadable(text)
    lower, upper = sides[: names[0]], sides[names[0] + 1 :]
    opening = "[" if lower and signs[0] == "<=" else "("
    closing = "]" if upper and signs[-1] == "<=" else ")"
    ends = (_read(lower[0] if lower else "-\\infty"), _read(upper[0] if upper else "\\infty"))
    return Collection(kind=opening + closing, items=ends, label=comparable(sides[names[0]]), text=comparable(text))


def _is_number(reading: Reading) -> bool:
    return isinstance(reading, Quantity) and reading.value.is_number


def _is_same_number(reading: Reading, last: Reading) -> bool:
    if not isinstance(reading, Quantity) or not isinstance(last, Quantity):
        return False
    return reading.value.is_number and last.value.is_number and equal_values(reading.value, last.value)


def _split(text: str, pattern: str) -> list[str]:
    """The parts of the text between matches of the pattern that stand within no brackets; the pattern's groups too."""
    parts, start, depth, position = [], 0, 0, 0
    compiled = re.compile(pattern)
    while position < len(text):
        if depth == 0 and (found := compiled.match(text, position)) and found.end() > position:
            parts += [text[start:position], *found.groups()]
            start = position = found.end()
            continue
        mark = text[position]
        depth += (mark in "([{") - (mark in ")]}")
        position += 2 if mark == "\\" and text[position + 1 : position + 2] not in ("{", "}") else 1
    return [*parts, text[start:]]
