"""One spelling for the many that a piece of mathematics has in LaTeX, in Markdown and as one types it."""

import re

# In this order: what comes later reads what comes before has left.
_SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])", " "),
    (r"\{,\}|,\\!", ","),
    (r"(?<=[0-9])(?:\\[,;: ]|[\u2009\u202f\u00a0])(?=[0-9]{3}(?![0-9]))", ","),  # thin spaces between thousands
    (r"(?<!\\)\\(?:[,;:! ]|q?quad(?![A-Za-z]))|(?<=\S)~(?=\S)|[\u2009\u202f\u00a0]", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|boxed|fbox)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\(?:cdot|times)(?![A-Za-z])|[·×∗⋅]", " * "),
    (r"\\div(?![A-Za-z])|÷", " / "),
    (r"[−–﹣－]", "-"),
    (r"\*\*", "^"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|°", " degrees "),
    (r"²", "^2"),
    (r"³", "^3"),
    (r"½", " 1/2"),
    (r"¼", " 1/4"),
    (r"¾", " 3/4"),
    (r"π", r"\\pi "),
    (r"√", r"\\sqrt "),
    (r"∞", r"\\infty "),
    (r"±", r"\\pm "),
    (r"∪", r"\\cup "),
    (r"∈", r"\\in "),
    (r"\\leq?(?![A-Za-z])|≤", " <= "),
    (r"\\geq?(?![A-Za-z])|≥", " >= "),
    (r"\\lt(?![A-Za-z])", " < "),
    (r"\\gt(?![A-Za-z])", " > "),
    (r"\\neq?(?![A-Za-z])|≠", " != "),
    (r"\\l?brace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\%|(?<=[0-9}])\s*\bper ?cent\b", "%"),
    (r"(?<=[0-9])\s+thousand\b", "*10^{3}"),
    (r"(?<=[0-9])\s+million\b", "*10^{6}"),
    (r"(?<=[0-9])\s+billion\b", "*10^{9}"),
    (r"(?<=[0-9])\s+trillion\b", "*10^{12}"),
    (r"\\\$", "$"),
)
_COMPILED = tuple((re.compile(pattern), replacement) for pattern, replacement in _SPELLINGS)
_WRAPPINGS = re.compile(
    r"\*\*(?P<bold>.*)\*\*|__(?P<under>.*)__|`+(?P<code>[^`]*)`+|\$\$(?P<display>[^$]*)\$\$|\$(?P<inline>[^$]*[^$\\])\$"
    r"|\\\((?P<round>.*)\\\)|\\\[(?P<square>.*)\\\]|\\(?:boxed|fbox)\s*\{(?P<box>.*)\}",
    re.DOTALL,
)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{?([0-9]+)\}?")
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore|then)\b,?\s*)?(?:(?:the|my|our)\s+)?(?:(?:final|correct|right)\s+)?"
    r"(?:(?:answer|result|value|solution|total|sum)\s*(?:is|equals|[:=])|(?:it|this|that)\s+(?:is|equals)|=)\s*:?\s*",
    re.IGNORECASE,
)


def unwrapped(text: str) -> str:
    """The text without Markdown's and LaTeX's marks around all of it, words such as "the answer is", a full stop."""
    while True:
        shorter = re.sub(r"(?<=[^.\\\s])[.,;:](?=\s*$)", "", text.strip())
        if (lead := _LEAD.match(shorter)) and shorter[lead.end() :].strip():
            shorter = shorter[lead.end() :]
        elif (wrapping := _WRAPPINGS.fullmatch(shorter)) and _is_one(inner := _inner(wrapping)):
            shorter = inner
        if shorter == text:
            return text
        text = shorter


def plain_spelling(text: str) -> str:
    """The text in the spelling that the parser knows."""
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_repeating_fraction, text)
    return re.sub(r"\s+", " ", text).strip()


def comparable(text: str) -> str:
    """What two texts that are no mathematics must share; the case of words counts for nothing, that of letters does."""
    squeezed = re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)
    squeezed = re.sub(r"\{([A-Za-z0-9])\}", r"\1", squeezed)
    return re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda word: word[0].casefold(), squeezed)


def _inner(wrapping: "re.Match[str]") -> str:
    return next(group for group in wrapping.groups() if group is not None)


def _is_one(inner: str) -> bool:
    """Whether what the marks enclose is one thing: neither **a** or **b** nor \\boxed{a}{b}."""
    depth = 0
    for mark in re.findall(r"(?<!\\)[{}]", inner):
        depth += 1 if mark == "{" else -1
        if depth < 0:
            return False
    return bool(inner.strip()) and depth == 0 and not any(mark in inner for mark in ("**", "__", "\\(", "\\["))


def _repeating_fraction(found: "re.Match[str]") -> str:
    whole, fixed, period = found[1] or "0", found[2], found[3]
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    return f"{{{int(whole + fixed + period) - int(whole + fixed)}/{below}}}"
