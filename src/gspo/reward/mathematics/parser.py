"""A strict reader of one mathematical value: what its grammar does not hold is no value.

sum     = term {("+" | "-") term}
term    = factor {["*" | "/"] factor}           two numbers side by side are no product
factor  = {"-" | "+"} power
power   = atom {"!"} ["^" factor]
atom    = number | mixed number | symbol | function | \\frac | \\sqrt | \\binom | (sum) | {sum} | |sum|
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import sympy

MAX_EXPONENT = 1_000  # of a number such as 1e1000: larger ones are no answer, and take for ever

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?"
GREEK = re.findall(
    r"\w+",
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell",
)
CONSTANTS: dict[str, Any] = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "infty": sympy.oo, "infinity": sympy.oo}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(sympy, name) for name in re.findall(r"\w+", "sin cos tan cot sec csc sinh cosh tanh exp")},
    **{f"arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan")},
    "ln": sympy.log,
    "log": lambda value, base=10: sympy.log(value, base),
    "lg": lambda value, base=10: sympy.log(value, base),
    "abs": sympy.Abs,
}
NAMES = (*FUNCTIONS, "sqrt", "pi", "infinity")  # that need no backslash
TOKEN = re.compile(
    rf"\s*(?:(?P<number>(?=[0-9]|\.[0-9]){NUMBER}(?:[eE][+-]?[0-9]+)?)|\\(?P<command>[A-Za-z]+)|(?P<word>[A-Za-z]+)"
    r"|(?P<mark>[-+*/^_!%'(){}\[\]|]))"
)


class Unreadable(ValueError):  # noqa: N818 - no fault: it is how the parser says no
    """The text is no mathematics of this grammar."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """What a text is worth, and how it is written."""

    number: Any  # of sympy; numbers are exact: 0.5 is 1/2
    places: int | None = None  # after the decimal point, where the text is one decimal number
    digits: int = 0  # that count, of a decimal number
    operators: frozenset[str] = field(default_factory=frozenset)  # between numbers, which a finished answer has not

    @property
    def is_number(self) -> bool:
        """Whether it holds no symbol."""
        return not self.number.free_symbols


def parse_value(text: str) -> Value:
    """The value of a text in LaTeX or as one types it; Unreadable where it is none."""
    parser = _Parser(_tokens(text))
    number = parser.sum()
    parser.expect_end()
    if not isinstance(number, sympy.Expr) or number.has(sympy.nan, sympy.zoo):
        raise Unreadable(text)
    if parser.symbols > {symbol.name for symbol in number.free_symbols}:
        parser.operators.add("-")  # x - x + 1
    if decimal := re.fullmatch(rf"\s*[-+]?\s*({NUMBER})(?:[eE]([-+]?[0-9]+))?\s*", text):
        digits, exponent = decimal[1].replace(",", ""), int(decimal[2] or 0)
        if "." in digits or decimal[2]:
            places = len(digits.partition(".")[2]) - exponent
            return Value(number=number, places=places, digits=len(digits.replace(".", "").lstrip("0")))
    return Value(number=number, operators=frozenset(parser.operators))


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        if not (found := TOKEN.match(text, position)):
            raise Unreadable(text)
        kind = str(found.lastgroup)
        tokens += _names(found[kind]) if kind == "word" else [(kind, found[kind])]
        position = found.end()
    return tokens


def _names(word: str) -> list[tuple[str, str]]:
    """A function or constant as it is typed, else a symbol for each letter; a longer word is no product of letters."""
    if word in NAMES:
        return [("command", word)]
    if len(word) > 3:
        raise Unreadable(word)
    return [("word", letter) for letter in word]


class _Parser:
    def __init__(self, tokens: Sequence[tuple[str, str]]) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._position = 0
        self._was_plain = False  # whether the last operand was a number as it stands
        self._was_power_of_ten = False
        self.operators: set[str] = set()
        self.symbols: set[str] = set()

    def expect_end(self) -> None:
        if self._kind != "end":
            raise Unreadable(self._text)

    def sum(self) -> Any:
        terms = [self._term()]
        while self._text in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            terms.append(sign * self._term())
        if sum(bool(term.is_Rational) for term in terms) > 1:
            self.operators.add("+")
        return sympy.Add(*terms)

    def _term(self) -> Any:
        factors, plain = [self._factor()], self._was_plain
        while True:
            if self._text == "/":
                self._take()
                divisor = self._factor()
                factors[-1] = self._quotient(factors[-1], divisor, plain and self._was_plain)
                plain = False
            elif self._text == "*" or self._begins_factor():
                is_product = self._text == "*" and bool(self._take())
                begins_number = self._kind == "number"
                factor = self._factor() if is_product else self._power()
                if not is_product and begins_number:  # 3 4 is no product, nor is x2
                    raise Unreadable("numbers side by side")
                is_scientific = plain and len(factors) == 1 and self._was_power_of_ten
                if factor.is_Rational and any(other.is_Rational for other in factors) and not is_scientific:
                    self.operators.add("*")
                factors.append(factor)
                plain = self._was_plain
            else:
                return sympy.Mul(*factors)

    def _quotient(self, dividend: Any, divisor: Any, plain: bool) -> Any:
        if divisor.is_zero:
            raise Unreadable("division by zero")
        if dividend.is_Rational and divisor.is_Rational and not plain:
            self.operators.add("/")
        return dividend / divisor

    def _factor(self) -> Any:
        if self._text in ("-", "+") and self._kind == "mark":
            sign = -1 if self._take() == "-" else 1
            is_signed = self._text in ("-", "+")
            value = self._factor()
            if is_signed or (value.is_Rational and value < 0):
                self.operators.add("-")
            return sign * value
        return self._power()

    def _power(self) -> Any:
        value, self._was_power_of_ten = self._atom(), False
        while self._text in ("!", "%"):
            if self._take() == "%":
                value /= 100
            else:
                value = self._worked_out("!", sympy.factorial(value), value)
        if self._text != "^":
            return value
        self._take()
        plain, exponent = self._was_plain, self._factor()
        power = value**exponent
        if plain and value == 10 and exponent.is_Integer:
            self._was_plain, self._was_power_of_ten = False, True
            return power
        return self._worked_out("^", power, value)

    def _atom(self) -> Any:
        kind, text = self._tokens[self._position]
        self._position += 1
        self._was_plain = kind == "number"
        if kind == "number":
            return self._number(text)
        if kind == "word":
            return CONSTANTS[text] if text in CONSTANTS else sympy.Symbol(self._marked(text))
        if kind == "command":
            return self._command(text)
        closing = {"(": ")", "{": "}", "|": "|"}.get(text) if kind == "mark" else None
        if closing is None:
            raise Unreadable(text)
        self._position -= 1
        inner = self._group(text, closing)
        if text == "|":
            return self._worked_out("|", sympy.Abs(inner), inner)
        return inner

    def _marked(self, name: str) -> str:
        """A symbol's name with its subscript and primes."""
        if self._text == "_":
            self._take()
            braced = self._text == "{" and bool(self._take())
            name += "_"
            while self._kind in ("number", "word", "command"):
                name += self._take()
                if not braced:
                    break
            if braced and self._take() != "}":
                raise Unreadable(name)
        while self._text == "'":
            name += self._take()
        self.symbols.add(name)
        return name

    def _number(self, text: str) -> Any:
        number = exact(text)
        if text.isdigit() and (part := self._proper_fraction()) is not None:
            return number + part
        return number

    def _proper_fraction(self) -> Any:
        """The fraction of a mixed number, 1 1/2 or 1\\frac{1}{2}, where one follows."""
        position, operators = self._position, set(self.operators)
        texts = [text for _, text in self._tokens[position : position + 3]]
        kinds = [kind for kind, _ in self._tokens[position : position + 3]]
        part = None
        if kinds == ["number", "mark", "number"] and texts[1] == "/" and texts[0].isdigit() and texts[2].isdigit():
            self._position += 3
            part = sympy.Rational(int(texts[0]), int(texts[2])) if int(texts[2]) else None
        elif texts[0] == "frac" and kinds[0] == "command":
            self._position += 1
            part = self._command("frac")
        if part is not None and part.is_Rational and 0 < part < 1 and self.operators == operators:
            self._was_plain = True
            return part
        self._position, self.operators, self._was_plain = position, operators, True
        return None

    def _command(self, name: str) -> Any:
        if name == "frac":
            dividend, first = self._argument(), self._was_plain
            divisor = self._argument()
            value = self._quotient(dividend, divisor, first and self._was_plain)
            self._was_plain = False
            return value
        if name == "sqrt":
            index = self._group("[", "]") if self._text == "[" else sympy.Integer(2)
            base = self._atom()
            return self._worked_out("sqrt", base ** (1 / index), base)
        if name == "binom":
            above, below = self._argument(), self._argument()
            return self._worked_out("binom", sympy.binomial(above, below), above)
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name in FUNCTIONS:
            return self._function(name)
        if name in GREEK:
            return sympy.Symbol(self._marked(f"\\{name}"))
        raise Unreadable(name)

    def _function(self, name: str) -> Any:
        more: dict[str, Any] = {}
        exponent = None
        if self._text == "_" and name in ("log", "lg"):
            self._take()
            more["base"] = self._argument()
        if self._text == "^":
            self._take()
            exponent = self._power()
        value = FUNCTIONS[name](self._function_argument(), **more)
        self._worked_out(name, value, value)
        self._was_plain = False
        return value if exponent is None else value**exponent

    def _function_argument(self) -> Any:
        if self._text in ("(", "{"):
            return self._atom()
        value = self._power()  # without brackets, as in \sin 2x
        while self._kind == "word" or (self._kind == "command" and self._text in GREEK):
            value *= self._power()
        return value

    def _argument(self) -> Any:
        """What a command takes: a group, or the next digit or symbol."""
        kind, text = self._tokens[self._position]
        if kind == "number" and len(text) > 1 and text.isdigit():  # \frac12
            self._tokens[self._position : self._position + 1] = [("number", text[0]), ("number", text[1:])]
            self._was_plain = True
            return exact(self._take())
        return self._atom()

    def _group(self, opening: str, closing: str) -> Any:
        if self._take() != opening:
            raise Unreadable(opening)
        start = self._position
        value = self.sum()
        if self._take() != closing:
            raise Unreadable(closing)
        inside = self._tokens[start : self._position - 1]
        is_power_of_ten = self._was_power_of_ten and [text for _, text in inside[:2]] == ["10", "^"]
        self._was_plain = is_power_of_ten or [kind for kind, text in inside if text not in ("-", "+")] == ["number"]
        return value

    def _worked_out(self, operator: str, value: Any, operand: Any) -> Any:
        """The value, with the operator noted where it could have been carried out: √16, 5!, 2^3."""
        if value.is_Rational and operand.is_number:
            self.operators.add(operator)
        self._was_plain = False
        return value

    def _begins_factor(self) -> bool:
        return self._kind in ("number", "word", "command") or self._text in ("(", "{")

    @property
    def _kind(self) -> str:
        return self._tokens[self._position][0]

    @property
    def _text(self) -> str:
        return self._tokens[self._position][1]

    def _take(self) -> str:
        text = self._text
        self._position += 1
        return text


def exact(text: str) -> Any:
    """The number that digits, a point, commas between thousands and an exponent stand for."""
    digits, _, exponent = text.replace(",", "").lower().partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unreadable(text)
    fraction = Fraction(digits) * Fraction(10) ** int(exponent or 0)
    return sympy.Rational(fraction.numerator, fraction.denominator)
