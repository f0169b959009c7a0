"""What an answer says and whether two say the same: math-verify reads and compares, behind gates of our own.

By itself it takes east for seat (a product of letters), 42! for 42, 40+2 for 42, 4e-7 for 1e-7, 5 cm for 5 m.
"""

import logging
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limit of time; the reward has

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)

MAX_CHARACTERS = 2_000  # longer texts are compared as words
MIN_DIGITS = 6  # that a decimal number must have to stand for a fraction that it only rounds
MIN_DIGITS_IRRATIONAL = 8  # the same for a root or a multiple of pi, which is asked for as it is
NOISE = 1e-12  # relative: of a number that has been a binary one, which is written with 15 to 17 digits
ROUNDING = 1e-25  # relative: of the values that are computed here

_NUMBER = r"(?=[0-9]|\.[0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?"
_AMOUNT = re.compile(rf"({_NUMBER})(?:[eE]([-+]?[0-9]{{1,3}})(?![0-9]))?(?:\s*(\\?%|(?:percent|dozen|[tmb]\w+)\b))?")
_SCALES = dict.fromkeys((r"\%", "%", "percent"), Fraction(1, 100))
_SCALES |= {name: Fraction(10**power) for name, power in (("thousand", 3), ("million", 6), ("billion", 9))}
_SCALES["dozen"] = Fraction(12)
_PERCENTAGE = re.compile(r"(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+)\s*/\s*([0-9]+))\s*(?:\\?%|percent\b)")
_LETTER = r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])"
_COMMANDS = (
    r"\\(?:[{}\\]|(?:frac|binom|neq?|sqrt|pi|infty|pm|in|cup|leq?|geq?|[lg]t|sin|cos|tan|cot|sec|csc|ln|log|exp|begin\{[pb]matrix\}|"
    r"end\{[pb]matrix\}|alpha|beta|gamma|delta|theta|lambda|mu|phi|omega)(?![A-Za-z]))"
)
_MATHEMATICS = re.compile(rf"(?:[0-9.,;=<>+\-*/^_!'(){{}}\[\]|&\s]|{_LETTER}|(?<=\s)(?:and|or)(?=\s)|{_COMMANDS})+")
# What the library would read as something else than it says, or would compute for ever.
_MISREAD = re.compile(
    r"[0-9]\s+[0-9]|(?:\)|(?<!matrix)\}|\\pi|\\infty)\s*[0-9]|(?:[0-9]|(?<!matrix)\})\s*\\frac\{[0-9]|[0-9]\s*[_']"
    r"|(?<![\\A-Za-z])[A-Za-z]\s*[0-9]"
    r"|--|\+\+|-\s*\(\s*-|!!|[0-9]{3,}!|[)}]!|/\s*0(?![.0-9])|\^\s*(?:[^\s{}+*/=,;-]*|\{[^{}]*[0-9)]\s*)\^|\^\s*\{?-?\(?[0-9]{4,}|[0-9]{400,}|[-+*/^=<>]\s*$|^\s*[*/^=<>!]|^\s*\[[^,]*\]\s*$"
    r"|\\binom(?!\{[0-9]{1,3}\}\{[0-9]{1,3}\})"
)
_LABEL = re.compile(  # the x of x = 5
    r"(?:(?:m?\s*\\?(?:angle|triangle)\s*)?\\?[A-Za-z]+(?:_\{?[A-Za-z0-9]+\}?)?'*(?:\s*\([A-Za-z0-9, ]*\))?"
    r"|\(\\?[A-Za-z]+(?:\s*,\s*\\?[A-Za-z]+)*\))\s*(?:=|\\(?:in|equiv)(?![A-Za-z]))"
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
_CHARACTERS |= {"∞": r"\infty ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "≤": r"\le ", "≥": r"\ge "}
_CHARACTERS |= {"°": " degrees", "¢": " cents", "≠": r"\ne ", "≡": r"\equiv ", "’": "'"}
DIGITS = {0xFF10 + digit: str(digit) for digit in range(10)}  # the full-width ones of Chinese and Japanese
_CHARACTERS |= {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F) if chr(code) != "-"}
_SPELLINGS = r"""
\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![A-Za-z]) ⟶
(?:\\text)?\{,\}|,\\!\s*|(?<=[0-9])(?:\\[,;: ]|[\u2009\u202f\u00a0']|\{'\})(?=[0-9]{3}(?![0-9])) ⟶ ,
(?<!\\)\\(?:[,;:! ]|q?quad(?![A-Za-z]))|(?<=\S)~(?=\S)|[\u2009\u202f\u00a0] ⟶ \x20
\\[dtc](frac|binom)(?![A-Za-z]) ⟶ \\\1
\\lbrack(?![A-Za-z]) ⟶ [
\\rbrack(?![A-Za-z]) ⟶ ]
\\lbrace(?![A-Za-z])\s* ⟶ \\{
\\rbrace(?![A-Za-z]) ⟶ \\}
\\colon(?![A-Za-z]) ⟶ :
\\varnothing(?![A-Za-z])|^\\\{\s*\\\}$ ⟶ \\emptyset
\\mathbb\s*(?:R(?![A-Za-z])|\{R\}) ⟶ (-\\infty,\\infty)
[(\[]\s*\\begin\{array\}\s*\{[clr| ]*\} ⟶ \\begin{pmatrix}
\\end\{array\}\s*[)\]] ⟶ \\end{pmatrix}
\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boxed|fbox)\s*\{([^{}]*)\} ⟶ \x20\1\x20
\\(?:cdot|times)(?![A-Za-z]) ⟶ *
\\div(?![A-Za-z]) ⟶ /
\*\*|\s*\^\s* ⟶ ^
\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z]) ⟶ \x20degrees
(?<=[0-9])\s+i(?![A-Za-z]) ⟶ i
\b(?:square|sq\.?)\s+([A-Za-z]+) ⟶ \1^2
\bcubic\s+([A-Za-z]+) ⟶ \1^3
√\s*([0-9A-Za-z]+) ⟶ \\sqrt{\1}
√ ⟶ \\sqrt
\\(?:lor|vee)(?![A-Za-z])|∨ ⟶ \x20or\x20
\binfinity\b ⟶ \\infty
<= ⟶ \\le\x20
>= ⟶ \\ge\x20
(?<![A-Za-z\\])(sqrt|sin|cos|tan|ln|log|exp|pi)(?![A-Za-z]) ⟶ \\\1\x20
\\sqrt\s*\(([^()]*)\) ⟶ \\sqrt{\1}
\\sqrt\s*([0-9A-Za-z]) ⟶ \\sqrt{\1}
\\log_\{?([0-9a-z])\}?\s*([0-9a-z]+) ⟶ \\log_{\1}{\2}
\\(frac|binom)\s*([0-9])\s*([0-9]) ⟶ \\\1{\2}{\3}
\\frac(\{[^{}]*\})\s*([0-9]) ⟶ \\frac\1{\2}
(?<=[0-9])\s*\*\s*(?=[A-Za-z(]|\\(?!frac)) ⟶
(?:(?<![\^_{.0-9])([0-9.]+)(?=\s*(?:\(|\[|\\\{))|(\)))\s*(?=(?:\(|\[|\\\{)?\s*(?:\\frac|[0-9]+\s*/)) ⟶ \1\2*
\{?\s*([0-9]+)\s*\\choose\s*([0-9]+)\s*\}? ⟶ \\binom{\1}{\2}
\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)? ⟶ \\overline{\1\2\3}
\\(overline|bar)\s*([0-9]) ⟶ \\\1{\2}
(?<=[0-9)}])\s*[-+]\s*0\s*\*?\s*i(?![A-Za-z]) ⟶
^0\s*\+\s*(?=\S*i$) ⟶
^\\\{\s*[a-z]\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?(?::|\||\\mid(?![A-Za-z])|\\vert(?![A-Za-z]))([^=]*)\\\}$ ⟶ \1
\\\$ ⟶ $
\s+ ⟶ \x20
"""
_SPELLING_RULES = [
    (re.compile(pattern.strip()), replacement.strip().replace(r"\x20", " "))
    for pattern, _, replacement in (line.partition("⟶") for line in _SPELLINGS.strip().splitlines())
]
_MIXED = re.compile(r"(?<![\^_.,0-9])([0-9]+)(?:\s+([0-9]+)\s*/\s*([0-9]+)|\s*\\frac\{([0-9]+)\}\{([0-9]+)\})")  # 1 1/2
_REPEATING = re.compile(r"([0-9]{0,50})\.([0-9]{0,50})\\(?:overline|bar)\s*\{([0-9]{1,50})\}")  # 0.1\overline{6}
_MODULO = re.compile(r"(.+?)\s*(?:\\pmod\s*\{?([0-9a-z]+)\}?|\(\s*\\?b?mod(?:ulo)?\s*\{?([0-9a-z]+)\}?\s*\))")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|ln|log|exp)(?![A-Za-z])")
_ANGLE = rf"{_NUMBER}|{_LETTER}|\([^()]*\)|(?:\\frac\s*\{{[^{{}}]*\}}\s*)?\{{[^{{}}]*\}}"
_DEGREES = re.compile(rf"\{{\s*({_ANGLE})\s*degrees?\s*\}}|({_ANGLE})\s*degrees?(?![A-Za-z])")
_CURRENCY = re.compile(r"(-?)\s*(US\$|USD|[$€£])\s*([0-9.].*)")
_WITH_UNIT = re.compile(
    r"(.*(?:[0-9]\s+(?:dozen|thousand|[mb]illion)(?=\s)|[0-9)}%]|\\pi))(\s*)((?:[A-Za-z]+(?:\^?\{?-?[1-4]\}?)?[ ./]*)+)"
)
_UNIT_NAMES = """$ US$ USD dollar; € euro; £ pound; metre meter m; feet foot ft; centimetre centimeter cm; inch inche in
    kilometre kilometer km; millimetre millimeter mm; mile mi; hour hr h; minute min; second s; gram g; kilogram kg
    litre liter l; degree; people; unit; cent; lb; oz; /"""
_UNITS = {name: names[-1] for line in re.split("[;\n]", _UNIT_NAMES) for names in [line.split()] for name in names}
_UNITS["mph"] = "mi / h"
_COUNTED = re.compile(r"(?:[a-z]+ )?[a-z]{3,}s(?: / [a-z]{3,}| old| left)?")  # red marbles, eggs per day, years old
# Plurals, and what stands before one, that make another number or no answer of it.
_WORDS = """halves thirds fourths quarters fifths sixths tenths hundredths hundreds thousands millions billions dozens
    tens its or is this plus minus times less versus guess cases steps choices options answers percents squares was and
    not"""
_NO_UNITS = frozenset(_WORDS.split())


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The meaning of a text: equal texts are equal whatever they say, others by their values.

    Example: read("x = 0.5 cm") is Reading(text="x=0.5 cm", label="x", unit="cm", value=1/2, decimal="0.5").
    """

    text: str
    label: str | None = None
    unit: str | None = None
    value: Any = None  # of sympy, with exact numbers; None where the text is no mathematics
    decimal: str | None = None  # the number as it is written, where it has a decimal point
    letters: frozenset[str] = frozenset()
    square_brackets: tuple[int, int] = (0, 0)  # opening and closing: of [1, 2) there is one that opens


@lru_cache(maxsize=256)
def read(text: str) -> Reading:
    """The one reading of a text."""
    plain = _plain(text)
    comparable = _comparable(plain)
    if len(plain) > MAX_CHARACTERS:
        return Reading(text=comparable)
    label, plain = None, _as_point(plain)
    if labelled := _LABEL.match(plain):
        label = _comparable(re.sub(r"(=|\\in|\\equiv)$", "", labelled[0]))
        plain = re.sub(rf"(?:\b(?:and|or)|,)\s*{re.escape(label)}\s*=", ",", plain[labelled.end() :].strip())
    plain, unit = _without_unit(re.sub(r"^\(?([A-Z])\s*[).:]+$", r"\1", plain))
    if re.fullmatch(rf"[-+]?(?:{_NUMBER}\s*(?:\\?%|percent)|{_PERCENTAGE.pattern})", plain):
        unit = "percent"
    value = _chain_value(plain, label)
    decimal = plain.replace(",", "") if "." in plain and re.fullmatch(rf"[-+]?{_NUMBER}", plain) else None
    letters = frozenset(re.findall(_LETTER, plain)) - {"e"}
    bracketed = re.sub(r"\\sqrt\[[^]]*\]", "", plain)
    brackets = bracketed.count("["), bracketed.count("]")
    return Reading(
        text=comparable, label=label, unit=unit, value=value, decimal=decimal, letters=letters, square_brackets=brackets
    )


def _chain_value(plain: str, label: str | None) -> Any:
    """The value of what may be an equation, or a chain of equal numbers behind an unknown: m + n = 9 + 16 = 25."""
    joined = re.split(r"(?<=\s)(or|and)(?=\s)", plain)
    regions = [_region(_value(part)) for part in joined[::2]]
    if None not in regions and len(set(joined[1::2])) == 1:
        return (sympy.Union if joined[1] == "or" else sympy.Intersection)(*regions)
    texts = plain.split("=")
    sides = [_value(side) for side in texts]
    if len(sides) == 1:
        return sides[0]
    if len(sides) == 2 and not label and not all(map(_is_number, sides)):
        return _value(plain)
    first, *others = sides
    is_unknown = not label and isinstance(first, sympy.Expr) and not first.is_number
    numbers = others if is_unknown else sides
    is_one_number = all(map(_is_number, numbers)) and all(_equal_numbers(side, numbers[-1]) for side in numbers)
    if not is_one_number or len({side.strip() for side in texts}) < len(texts):
        return None
    return sympy.Eq(first, numbers[-1], evaluate=False) if is_unknown else numbers[-1]


def _as_point(plain: str) -> str:
    """(x,y)=(4,9) for y = 9, x = 4: in the order of usual letters, else as it is written: n = 3, k = 2."""
    parts = re.split(r"\s*(?:[,;]\s*(?:and\b)?|\band\b)\s*", plain)
    pairs = [pair[0] for part in parts if (pair := re.findall(r"^([A-Za-z])\s*=\s*([^=]+)$", part))]
    letters = {letter for letter, _ in pairs}
    pairs, is_point = sorted(pairs) if letters <= set("abcxyz") else pairs, 1 < len(letters) == len(parts)
    return "({})=({})".format(*map(",".join, zip(*pairs, strict=True))) if is_point else plain


def _region(value: Any) -> Any:
    """The real numbers that intervals or solved inequalities have: -1 < x, x != 2; None where it is neither."""
    if isinstance(value, sympy.Interval | sympy.Union):
        return value.doit()
    relations = value.atoms(sympy.core.relational.Relational) if isinstance(value, sympy.Basic) else ()
    are_solved = [
        {side.is_Symbol for side in r.args} == {True, _is_number(r.rhs), _is_number(r.lhs)} for r in relations
    ]
    is_whole = _kind(value) == "Relational"
    return value.as_set() if is_whole and all(are_solved) else None


def same(gold: Reading, answer: Reading) -> bool:
    """Tell whether the answer says what the gold one says, with no arithmetic left to do that the gold one has not."""
    if gold.text and gold.text in (answer.text, _in_lowest_terms(answer.text)):
        return True
    gold, answer = _alike(gold, answer)
    if gold.value is None or answer.value is None or (r"\binom" in answer.text and r"\binom" not in gold.text):
        return False
    if not _open_operations(answer.value) <= _open_operations(gold.value):
        return False
    if (gold.label and answer.label and gold.label != answer.label) or (
        gold.unit and answer.unit and gold.unit != answer.unit
    ):
        return False
    if _is_number(gold.value) and _is_number(answer.value):
        return _is_same_number(gold, answer)
    kinds = [_kind(reading.value) for reading in (gold, answer)]
    if len(gold.letters | answer.letters) == 1:  # x < -1 or x > 2 is an interval, or a union of some
        regions = [_region(reading.value) for reading in (gold, answer)]
        if None not in regions:
            return bool(regions[0] == regions[1])
    sizes = {len(getattr(reading.value, "args", ())) for reading in (gold, answer)}
    if kinds[0] != kinds[1] or gold.letters != answer.letters or (len(sizes) > 1 and kinds[0] not in ("Expr", "Eq")):
        return False
    if kinds[0] in ("Tuple", "Interval", "Union") and gold.square_brackets != answer.square_brackets:
        return False
    return _verify(gold.value, answer.value) and _verify(answer.value, gold.value)


def _alike(gold: Reading, answer: Reading) -> tuple[Reading, Reading]:
    """Both as numbers where m + n = 25 answers a question for m + n, as equations where one is labelled: y = 2x."""
    if _is_number(gold.value) and isinstance(answer.value, sympy.Eq):
        sums = answer.value.lhs
        if sums.is_Add and all(part.is_Symbol for part in sums.args) and len(set(sums.args)) == len(sums.args):
            return gold, replace(answer, value=answer.value.rhs)
    if isinstance(gold.value, sympy.Eq):
        return gold, _as_equation(answer)
    return (_as_equation(gold), answer) if isinstance(answer.value, sympy.Eq) else (gold, answer)


def _as_equation(reading: Reading) -> Reading:
    """y = 2x + 1 as the equation that it is, where a value was read with the label y."""
    label = reading.label or ""
    if not (re.fullmatch("[a-z]", label) and isinstance(reading.value, sympy.Expr) and reading.letters):
        return reading
    equation = sympy.Eq(_value(label), reading.value, evaluate=False)
    return replace(reading, value=equation, label=None, letters=reading.letters | {label})


def is_finished_number(reading: Reading) -> bool:
    """Tell whether a text says one rational number, with no arithmetic left to do."""
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
    text = re.sub(r"(?<!\\)\$([^$\n]*[^$\s\\])\$", r" \1 ", text)  # $x = 1$ or $x = 2$
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    for pattern, replacement in _SPELLING_RULES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_as_fraction, _MIXED.sub(_improper, text))
    if _FUNCTION.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\2\\pi }{180})", text)
    return re.sub(r"(?<=[^.\\\s])[.,;:]\s*$", "", text).strip()


def _improper(mixed: "re.Match[str]") -> str:
    whole, above, below = (int(part) for part in mixed.groups() if part is not None)
    return rf"\frac{{{whole * below + above}}}{{{below}}}" if 0 < above < below else f"{whole} {above} {below}"


def _as_fraction(repeating: "re.Match[str]") -> str:
    whole, fixed, period = repeating.groups()
    number = Fraction(f"{whole or 0}.{fixed or 0}") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _comparable(text: str) -> str:
    """Return what texts that are no mathematics must share: the case of words does not count, that of letters does."""
    squeezed = re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)
    squeezed = re.sub(r"\{([A-Za-z0-9])\}", r"\1", squeezed)
    return re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda word: word[0].casefold(), squeezed)


def _without_unit(text: str) -> tuple[str, str | None]:
    """The text without the unit that it is given in, or the noun that is counted (64 apples), and the unit's name."""
    if modulo := _MODULO.fullmatch(text):
        return modulo[1], f"mod {modulo[2] or modulo[3]}"
    if currency := _CURRENCY.fullmatch(text):
        return currency[1] + re.sub(r"\s*(?:/|per\b)\s*[a-z]+$", "", currency[3]), _unit_name(currency[2])
    if not (amount := _WITH_UNIT.fullmatch(text)):
        return text, None
    words = amount[3].replace("per ", "/").replace("/", " / ").split()
    is_letter = len(words[0]) < 2 and (not amount[2] or amount[1].endswith("pi"))  # 5m, 2\pi h
    is_angle = words[0].startswith("degree") and _FUNCTION.search(amount[1])  # a part of the value
    if len(words) > 4 or _NO_UNITS.intersection(words) or is_letter or is_angle:
        return text, None
    names = [_unit_name(word) for word in words]
    is_known = [re.sub(r"\^[1-4]$", "", name) in _UNITS.values() for name in names]
    is_counted = _COUNTED.fullmatch(" ".join(words))
    are_words = all(len(name) > 2 or is_unit for name, is_unit in zip(names, is_known, strict=True))
    return (amount[1], " ".join(names)) if are_words and (is_counted or is_known[-1]) else (text, None)


def _unit_name(word: str) -> str:
    """One name for a unit's spellings: the singular, and the short form of the commonest."""
    word, power, exponent = re.sub(r"[{}]|\.$", "", word).partition("^")
    singular = word.removesuffix("s") if len(word) > 2 else word
    return _UNITS.get(singular, singular) + power + exponent


def _verify(gold: Any, answer: Any) -> bool:
    return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))


def _value(text: str) -> Any:
    if re.search(r"\.[0-9]*\.|%\s*[0-9]|[0-9]\s+\.", text):  # 1..5, 5%5, 0 .5: what is left once the amounts are exact
        return None
    text = _PERCENTAGE.sub(lambda part: rf"\frac{{{part[1] or part[3]}}}{{{part[2] or part[4]}00}}", text)
    text = _AMOUNT.sub(_exact, text)
    if not text.strip() or _MISREAD.search(text) or not _MATHEMATICS.fullmatch(text):
        return None
    config = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_NORMALIZATION)
    values = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    value = values[0] if values else None
    if isinstance(value, sympy.MatMul) and sum(part.is_Matrix for part in value.args) == 1:  # 2\begin{pmatrix}…
        return value.doit().as_mutable()
    return value


def _exact(amount: "re.Match[str]") -> str:
    """A decimal number, a power of ten or a percentage as a fraction; the library's are binary."""
    digits, exponent, scale = amount.groups()
    if scale and scale not in _SCALES:
        return amount[0]
    number = Fraction(digits.replace(",", "")) * Fraction(10) ** int(exponent or 0) * _SCALES.get(scale, 1)
    return str(number) if number.denominator == 1 else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _in_lowest_terms(text: str) -> str:
    """The ratio 3:5 for 6:10; any other text as it is."""
    numbers = [int(number) for number in text.split(":")] if re.fullmatch("[0-9]{1,9}(:[0-9]{1,9})+", text) else []
    return ":".join(str(number // (gcd(*numbers) or 1)) for number in numbers) or text


def _is_number(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and value.is_number


def _is_same_number(gold: Reading, answer: Reading) -> bool:
    """Tell whether numbers are equal as far as they are written; 20% is 20, too, of a question for a percentage."""
    is_binary = any(15 <= _num_digits(reading.decimal) <= 17 for reading in (gold, answer) if reading.decimal)
    if _equal_numbers(gold.value, answer.value, NOISE if is_binary else ROUNDING) or _is_rounded(gold, answer):
        return True
    return any(
        percent.unit == "percent" and not plain.unit and percent.value * 100 == plain.value and abs(plain.value) > 1
        for percent, plain in ((gold, answer), (answer, gold))
    )


def _equal_numbers(first: Any, second: Any, tolerance: float = NOISE) -> bool:
    first, second = first.doit().evalf(30), second.doit().evalf(30)
    if not (first.is_finite and second.is_finite):
        return bool(first == second)
    return bool(abs(first - second) <= tolerance * max(abs(first), abs(second)))


def _is_rounded(first: Reading, second: Reading) -> bool:
    """Tell whether the coarser decimal number of the two is the other, rounded to its last place."""
    decimals = sorted((len(r.decimal.partition(".")[2]), r.decimal) for r in (first, second) if r.decimal)
    are_fractions = first.value.doit().is_Rational and second.value.doit().is_Rational
    if not decimals or _num_digits(decimals[0][1]) < (MIN_DIGITS if are_fractions else MIN_DIGITS_IRRATIONAL):
        return False
    difference = (first.value - second.value).doit().evalf(30)
    return bool(difference.is_real and 2 * abs(difference) <= sympy.Rational(1, 10 ** decimals[0][0]))


def _num_digits(decimal: str) -> int:
    return len(re.sub(r"^[-+0.]+|\.", "", decimal))


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
