"""What an answer says and whether two say the same: math-verify reads and compares, behind gates of our own.

By itself it takes east for seat (a product of letters), 42! for 42, 40+2 for 42, 4e-7 for 1e-7, 5 cm for 5 m.
"""

import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limit of time; the reward has

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)

MAX_CHARACTERS = 2_000  # longer texts are compared as words
MIN_DIGITS = 6  # that a decimal number must have to stand for a number that it only rounds
NOISE = 1e-12  # relative: of a number that has been a binary one

_NUMBER = r"(?=[0-9]|\.[0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?"
_AMOUNT = re.compile(rf"({_NUMBER})(?:[eE]([-+]?[0-9]{{1,3}})(?![0-9]))?(?:\s*(\\?%|(?:percent|[tmb]\w+)\b))?")
_SCALES = {r"\%": -2, "%": -2, "percent": -2, "thousand": 3, "million": 6, "billion": 9}  # powers of ten
_LETTER = r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])"
_COMMANDS = (
    r"\\(?:[{}\\]|(?:frac|sqrt|pi|infty|pm|in|cup|leq?|geq?|[lg]t|sin|cos|tan|cot|sec|csc|ln|log|exp|begin\{[pb]matrix\}|"
    r"end\{[pb]matrix\}|alpha|beta|gamma|delta|theta|lambda|mu|phi|omega)(?![A-Za-z]))"
)
_MATHEMATICS = re.compile(rf"(?:[0-9.,;=<>+\-*/^_!'(){{}}\[\]|&\s]|{_LETTER}|(?<=\s)(?:and|or)(?=\s)|{_COMMANDS})+")
# What the library would read as something else than it says, or would compute for ever.
_MISREAD = re.compile(
    r"[0-9]\s+[0-9]|(?:[)}]|\\pi|\\infty)\s*[0-9]|[0-9}]\s*\\frac\{[0-9]|[0-9]\s*[_']|(?<![\\A-Za-z])[A-Za-z]\s*[0-9]"
    r"|--|\+\+|-\s*\(\s*-|!!|[0-9]{3,}!|[)}]!|/\s*0(?![.0-9])|\^\s*(?:[^\s{}+*/=,;-]*|\{[^{}]*[0-9)]\s*)\^|\^\s*\{?-?\(?[0-9]{4,}|[0-9]{400,}|[-+*/^=<>]\s*$|^\s*[*/^=<>!]|^\s*\[[^,]*\]\s*$"
)
_LABEL = re.compile(  # the x of x = 5
    r"(?:(?:m?\s*\\?(?:angle|triangle)\s*)?\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?'*(?:\s*\([A-Za-z0-9, ]*\))?"
    r"|\([A-Za-z](?:\s*,\s*[A-Za-z])*\))\s*(?:=|\\in(?![A-Za-z]))"
)
_WRAPPING = re.compile(
    r"(\*\*|__|`+|\$\$|\$)(?P<inner>(?:(?!\1).)*)\1|\\\((?P<round>.*)\\\)|\\\[(?P<square>.*)\\\]|\{(?P<brace>[^{},]*)\}"
    r"|\\(?:boxed|fbox)\s*\{(?P<box>[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*)\}",
    re.DOTALL,
)
_LEAD = re.compile(
    r"(?i)(?:(?:so|thus|hence|therefore|then)\b,?\s*)?(?:(?:the|my|our)\s+)?(?:(?:final|correct|right)\s+)?"
    r"(?:(?:answer|result|value|solution|total|sum)\s*(?:is|equals|[:=])|(?:it|this|that)\s+(?:is|equals)|=)\s*:?\s*"
)
# One spelling for the many that a piece of mathematics has: characters, then patterns, each of what is left by then.
_CHARACTERS = dict(zip("·×∗⋅÷−–﹣－", "****/----", strict=True)) | {"²": "^2", "³": "^3", "½": " 1/2", "π": r"\pi "}
_CHARACTERS |= {"∞": r"\infty ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "≤": r"\le ", "≥": r"\ge ", "°": " degrees"}
_SPELLINGS = r"""
\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![A-Za-z]) ⟶
\{,\}|,\\!|(?<=[0-9])(?:\\[,;: ]|[\u2009\u202f\u00a0])(?=[0-9]{3}(?![0-9])) ⟶ ,
(?<!\\)\\(?:[,;:! ]|q?quad(?![A-Za-z]))|(?<=\S)~(?=\S)|[\u2009\u202f\u00a0] ⟶ \x20
\\[dtc]frac(?![A-Za-z]) ⟶ \\frac
\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boxed|fbox)\s*\{([^{}]*)\} ⟶ \x20\1\x20
\\(?:cdot|times)(?![A-Za-z]) ⟶ *
\\div(?![A-Za-z]) ⟶ /
\*\*|\s*\^\s* ⟶ ^
\^\{?\\circ\s*\}? ⟶ \x20degrees
√\s*([0-9A-Za-z]+) ⟶ \\sqrt{\1}
√ ⟶ \\sqrt
\binfinity\b ⟶ \\infty
<= ⟶ \\le\x20
>= ⟶ \\ge\x20
(?<![A-Za-z\\])(sqrt|sin|cos|tan|ln|log|exp|pi)(?![A-Za-z]) ⟶ \\\1\x20
\\sqrt\s*\(([^()]*)\) ⟶ \\sqrt{\1}
\\sqrt\s*([0-9A-Za-z]) ⟶ \\sqrt{\1}
\\log_\{?([0-9a-z])\}?\s*([0-9a-z]+) ⟶ \\log_{\1}{\2}
\\frac\s*([0-9])\s*([0-9]) ⟶ \\frac{\1}{\2}
\\frac(\{[^{}]*\})\s*([0-9]) ⟶ \\frac\1{\2}
(?<=[0-9])\s*\*\s*(?=[A-Za-z\\(]) ⟶
\\\$ ⟶ $
\s+ ⟶ \x20
"""
_SPELLING_RULES = [
    (re.compile(pattern.strip()), replacement.strip().replace(r"\x20", " "))
    for pattern, _, replacement in (line.partition("⟶") for line in _SPELLINGS.strip().splitlines())
]
_MIXED = re.compile(r"([0-9]+)(?:\s+([0-9]+)\s*/\s*([0-9]+)|\s*\\frac\{([0-9]+)\}\{([0-9]+)\})")  # 1 1/2
_CURRENCY = re.compile(r"(-?)\s*(US\$|USD|[$€£])\s*([0-9.].*)")
_WITH_UNIT = re.compile(r"(.*[0-9)}%])(\s*)((?:[A-Za-z]+(?:\^?\{?-?[1-4]\}?)?[ ./]*)+)")
_UNITS = {"$": "dollar", "US$": "dollar", "USD": "dollar", "€": "euro", "£": "pound", "metre": "m", "meter": "m"}
_UNITS |= {"feet": "ft", "foot": "ft", "centimeter": "cm", "centimetre": "cm"}
_KNOWN_UNITS = {*_UNITS.values(), "/", *re.findall(r"\w+", "sq mm km kg g s h hour min l mi mile in degree people")}
# Plurals, and what stands before one, that make another number or no answer of it.
_NO_UNITS = {
    *re.findall(
        r"\w+",
        "halves thirds fourths quarters fifths sixths tenths hundredths thousands millions billions dozens tens its or "
        "is this plus minus times less versus guess cases steps choices options answers percents squares was and not",
    )
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a text says: equal texts are equal whatever they say, others by their values.

    Example: read("x = 0.5 cm") is Reading(text="x=0.5 cm", label="x", unit="cm", value=1/2, decimal="0.5").
    """

    text: str
    label: str | None = None
    unit: str | None = None
    value: Any = None  # of sympy, with exact numbers; None where the text is no mathematics
    decimal: str | None = None  # the number as it is written, where it has a decimal point
    letters: frozenset[str] = frozenset()


@lru_cache(maxsize=256)
def read(text: str) -> Reading:
    """The one reading of a text."""
    plain = _plain(text)
    comparable = _comparable(plain)
    if len(plain) > MAX_CHARACTERS:
        return Reading(text=comparable)
    label = None
    if labelled := _LABEL.match(plain):
        label = _comparable(re.sub(r"(=|\\in)$", "", labelled[0]))
        plain = re.sub(rf"(?:\b(?:and|or)|,)\s*{re.escape(label)}\s*=", ",", plain[labelled.end() :].strip())
    plain, unit = _without_unit(re.sub(r"^\(?([A-Z])\s*[).:]+$", r"\1", plain))
    sides = [_value(side) for side in plain.split("=")]
    value, are_numbers = sides[-1], all(_is_number(side) for side in sides)
    if len(sides) == 2 and not label and not are_numbers:
        value = _value(plain)  # an equation
    elif len(sides) > 1 and not (are_numbers and all(_equal_numbers(side, value) for side in sides)):
        value = None  # a chain says one thing only where all its numbers are one number
    decimal = plain.replace(",", "") if "." in plain and re.fullmatch(rf"[-+]?{_NUMBER}", plain) else None
    letters = frozenset(re.findall(_LETTER, plain)) - {"e"}
    return Reading(text=comparable, label=label, unit=unit, value=value, decimal=decimal, letters=letters)


def same(gold: Reading, answer: Reading) -> bool:
    """Whether the answer says what the gold one says, with no arithmetic left to do that the gold one has not."""
    if gold.text and gold.text == answer.text:
        return True
    if gold.value is None or answer.value is None or not _open_operations(answer.value) <= _open_operations(gold.value):
        return False
    if (gold.label and answer.label and gold.label != answer.label) or (
        gold.unit and answer.unit and gold.unit != answer.unit
    ):
        return False
    if _is_number(gold.value) and _is_number(answer.value):
        return _equal_numbers(gold.value, answer.value) or _is_rounded(gold, answer)
    kinds = [_kind(reading.value) for reading in (gold, answer)]
    if sorted(kinds) == ["Interval", "Relational"]:
        return _verify(gold.value, answer.value)
    sizes = {len(getattr(reading.value, "args", ())) for reading in (gold, answer)}
    is_alike = kinds[0] == kinds[1] and (kinds[0] == "Expr" or len(sizes) == 1) and gold.letters == answer.letters
    return is_alike and _verify(gold.value, answer.value) and _verify(answer.value, gold.value)


def is_finished_number(reading: Reading) -> bool:
    """Whether a text says one rational number, with no arithmetic left to do."""
    return _is_number(reading.value) and reading.value.doit().is_Rational and not _open_operations(reading.value)


def _plain(text: str) -> str:
    """The text in one spelling, without the marks around all of it, words such as "the answer is", a full stop."""
    shorter = None
    while shorter != text:
        text = text if shorter is None else shorter
        shorter = re.sub(r"(?<=[^.\\\s])[.,;:](?=\s*$)", "", text.strip())
        if (lead := _LEAD.match(shorter)) and shorter[lead.end() :].strip():
            shorter = shorter[lead.end() :]
        elif wrapping := _WRAPPING.fullmatch(shorter):
            shorter = next(inner for name, inner in wrapping.groupdict().items() if inner is not None)
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    for pattern, replacement in _SPELLING_RULES:
        text = pattern.sub(replacement, text)
    return _MIXED.sub(_improper, text).strip()


def _improper(mixed: "re.Match[str]") -> str:
    whole, above, below = (int(part) for part in mixed.groups() if part is not None)
    return rf"\frac{{{whole * below + above}}}{{{below}}}" if 0 < above < below else f"{whole} {above} {below}"


def _comparable(text: str) -> str:
    """What two texts that are no mathematics must share; the case of words counts for nothing, that of letters does."""
    squeezed = re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)
    squeezed = re.sub(r"\{([A-Za-z0-9])\}", r"\1", squeezed)
    return re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda word: word[0].casefold(), squeezed)


def _without_unit(text: str) -> tuple[str, str | None]:
    """The text without the unit that it is given in, or the noun that is counted (64 apples), and the unit's name."""
    if currency := _CURRENCY.fullmatch(text):
        return currency[1] + currency[3], _unit_name(currency[2])
    if not (amount := _WITH_UNIT.fullmatch(text)):
        return text, None
    words = amount[3].replace("per ", "/").replace("/", " / ").split()
    if len(words) > 4 or _NO_UNITS.intersection(words) or (not amount[2] and len(words[0]) < 2):
        return text, None
    names = [_unit_name(word) for word in words]
    is_known = [re.sub(r"\^[1-4]$", "", name) in _KNOWN_UNITS for name in names]
    is_counted = len(words) < 3 and re.fullmatch("[a-z]{3,}s", words[-1])
    are_words = all(len(name) > 2 or is_unit for name, is_unit in zip(names, is_known, strict=True))
    return (amount[1], " ".join(names)) if are_words and (is_counted or is_known[-1]) else (text, None)


def _unit_name(word: str) -> str:
    """One name for a unit's spellings: the singular, and the short form of the commonest."""
    word = re.sub(r"[{}]|\.$", "", word)
    singular = word.removesuffix("s") if len(word) > 2 else word
    return _UNITS.get(singular, singular)


def _verify(gold: Any, answer: Any) -> bool:
    return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))


def _value(text: str) -> Any:
    if re.search(r"\.[0-9]*\.|%\s*[0-9]|[0-9]\s+\.", text):  # 1..5, 5%5, 0 .5: what is left once the amounts are exact
        return None
    text = _AMOUNT.sub(_exact, text)
    if not text.strip() or _MISREAD.search(text) or not _MATHEMATICS.fullmatch(text):
        return None
    config = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_NORMALIZATION)
    values = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return values[0] if values else None


def _exact(amount: "re.Match[str]") -> str:
    """A decimal number, a power of ten or a percentage as a fraction; the library's are binary."""
    digits, exponent, scale = amount.groups()
    if scale and scale not in _SCALES:
        return amount[0]
    number = Fraction(digits.replace(",", "")) * Fraction(10) ** (int(exponent or 0) + _SCALES.get(scale, 0))
    return str(number) if number.denominator == 1 else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and value.is_number


def _equal_numbers(first: Any, second: Any) -> bool:
    first, second = first.doit().evalf(30), second.doit().evalf(30)
    if not (first.is_finite and second.is_finite):
        return bool(first == second)
    return bool(abs(first - second) <= NOISE * max(abs(first), abs(second)))


def _is_rounded(first: Reading, second: Reading) -> bool:
    """Whether the coarser decimal number of the two is the other, rounded to its last place."""
    decimals = sorted((len(r.decimal.partition(".")[2]), r.decimal) for r in (first, second) if r.decimal)
    if not decimals or len(re.sub(r"^[-+0.]+|\.", "", decimals[0][1])) < MIN_DIGITS:
        return False
    difference = (first.value - second.value).doit().evalf(30)
    return bool(difference.is_real and 2 * abs(difference) <= sympy.Rational(1, 10 ** decimals[0][0]))


def _open_operations(value: Any) -> set[str]:
    """The kinds of arithmetic that a value leaves to do: 2^3, 40+2, 5!; a fraction and 6·10^23 are numbers."""
    kinds = set()
    for node in sympy.preorder_traversal(value):
        if not isinstance(node, sympy.Expr) or node.is_Atom or _is_power_of_ten(node):
            continue
        if node.is_Add or node.is_Mul:
            numbers = [number for number in node.args if number.doit().is_Rational and (node.is_Add or number != -1)]
            is_scientific = node.is_Mul and len(node.args) == 2 and any(_is_power_of_ten(part) for part in node.args)
            is_open = len(numbers) > 1 and not is_scientific
        else:
            is_open = node.doit().is_Rational and not (node.is_Pow and node.exp == -1)
        kinds |= {type(node).__name__} if is_open else set()
    return kinds


def _is_power_of_ten(node: Any) -> bool:
    return bool(node.is_Pow and (node.base == 10 or _is_power_of_ten(node.base)) and node.exp.is_Integer)


def _kind(value: Any) -> str:
    if isinstance(value, sympy.Eq):
        return "Eq"
    if isinstance(value, sympy.core.relational.Relational) or type(value).__name__ == "And":
        return "Relational"
    return "Expr" if isinstance(value, sympy.Expr) else type(value).__name__
