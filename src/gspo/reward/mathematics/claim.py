"""The one answer of a completion: in its last tag, else its last box, else where it says so, else at its end."""

import re

from gspo.reward.answer import tagged_answer
from gspo.reward.mathematics.equality import equal_values
from gspo.reward.mathematics.reading import Quantity, Words, read

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BULLET = re.compile(r"\s*-\s")  # "- 17" is a list's 17 or minus 17; in a formula or a box it is minus 17
_ITEM = re.compile(r"\s*(?:[*•]|[A-Z0-9][.)])?\s*\$?([0-9][0-9.,]*)\$?\s*")  # a line of a list of numbers
_MARKED = re.compile(r"####[ \t]*(.+)")
_ANNOUNCED = re.compile(
    r"(?i)\b(?:answer|correct\s+(?:option|choice))(?:\s+(?:is|equals)\b:?|\s*[:=])\**(?!\s+(?:correct\b|right[.!,]))\s*(?=\S)"
)
# What makes a box a part of something: it stands for no answer alone.
_OPENS_MORE = re.compile(
    r"(?:[0-9\-−+/^]|(?<!_)_|[=$(\[{0-9)}]\s*[-−+*/]\s*|\\(?:cdot|times|div|pm)\s*"
    r"|\\(?:[dtc]?frac|sqrt|binom)\s*(?:\[[^]]*\]\s*|\{[^{}]*\}\s*)?\{?\s*|\\boxed\{[^{}]*\}[ $,;]*(?:and)?[ $]*)$"
)
_GOES_ON = re.compile(
    r"[!0-9]|\^(?!\s*\{?\s*\\circ)|\s*[-−+*/]\s*(?:[0-9(]|\\(?:[dtc]?frac|sqrt|pi)\b)|\s*\\(?:cdot|times|div|pm)(?![A-Za-z])"
    r"|[\s$*]{0,20}(?:\\text\s?\{)?\s{0,20}(?:is|was)\s+(?:not|wrong|incorrect)\b"
)
_TAKEN_BACK = re.compile(r"(?i)[\W_]*(?:h+m+|oops|sorry|wait|actually|correction|no(?=[,.!:]|\s+wait))\b")
_BOLD = re.compile(r"(?<![\w)}*])\*\*(?=[^\s*])([^*\n]+)(?<=\S)\*\*(?![\w*])")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$(?!\s)([^$\n]*[^$\s\\])\$", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.,/:^*+\-−\\])(?<![0-9]\s)[-−+]?[$€£]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?(?:\s*%|"
    r"\s+(?:hundred|thousand|million|billion|trillion|dozen|percent|squared|cubed|factorial)\b)?"
    r"(?![\w!^({\\+\-−]|\s*[-+*/×÷=<>≈±](?=\s*[\w(\\])|[.,:][0-9])"
)
# A sentence with one of these commits itself to nothing.
_DOUBTED = re.compile(
    r"(?i)\b(?:maybe|perhaps|possibly|probably|guess|unsure|uncertain|unknown|impossible|doubt|suspect|neither|"
    r"(?:could|might|may) be)\b|(?:\bnot|n't) (?:sure|certain|know|think|believe|true|the case|clear)\b|\?"
)
# A value with one of these shortly before or anywhere behind it is denied, inexact or one of several.
_HEDGED = re.compile(
    r"(?i)\b(?:not|never|nor|cannot|either|or|could be|might|tried|fail(?:s|ed)?|wrong|incorrect|"
    r"approximately|approx|about|roughly|around|almost|nearly|close to|between|at (?:least|most)|"
    r"(?:more|less|fewer|greater) than|instead of|rather than|"
    r"(?:over|under|above|below|up to|exceeds?)(?=\s+\$?[0-9]))\b|n't\b|≈|≠|\\(?:approx|neq?|sim)\b"
)
_CLAUSE = re.compile(  # where a clause or what its verb says begins
    r"(?i)[,;:](?=\s)|\b(?:so|but|thus|hence|therefore|which|is|are|was|were|equals|makes|costs|has|gets|gives)\b"
)
_EQUALS = re.compile(r"[^\s=]{1,40}\s{0,20}=\s{0,20}$")  # the x = of x = 5
_JOINED = re.compile(  # another value just before: 16, 17 and 18, or 17 = 18
    r"[0-9]\S{0,20}?\s{0,20}(?:[,;|&<>≤≥]|[-=]+>|→|\\to\b|\b(?:and(?:\s+then)?|then|to|vs|versus)\b\.?|\s\(?[A-Z][).:])[\s$]*$"
    r"|^\s*\$?[0-9][0-9.,]*\s*=\s*$"
)
# Numbers behind these are names of things.
_NAMED = re.compile(
    r"(?i)(?:\b(?:steps?|questions?|problems?|pages?|lines?|cases?|chapters?|sections?|equations?|eq|figures?|tables?|parts?|"
    r"examples?|exercises?|theorems?|lemmas?|options?|versions?|numbers?|no|rules?|attempts?|try|rooms?|items?|points?|notes?|"
    r"rows?|columns?|levels?|rounds?|trials?|chapters?|hints?|tasks?|year)\.?\s*|#|[([])$"
)
_DENIED = re.compile(r"(?i)(?:\b(?:not|never|neither|nor|or)|n't|\\neq?|≠)(?:\s+(?:be|equal(?:\s+to)?|in))?[\s$:*(]*$")


def claimed_answer(completion: str) -> str | None:
    """The text of the answer; None where it is missing, cut off, denied, taken back or one of several."""
    if (tagged := tagged_answer(completion)) is not None:
        return None if _BULLET.match(tagged) else _kept(tagged, completion.rpartition("</answer>")[2])
    if "<answer>" in completion:
        return None
    if boxes := list(_BOX.finditer(completion)):
        return _boxed_alone(completion, boxes[-1])
    if marks := list(_MARKED.finditer(completion)):
        answer, behind = _first_sentence(marks[-1][1]), completion[marks[-1].end() :]
        if not isinstance(read(answer), Words) or not behind.strip():
            return _kept(answer, behind)  # else it is a heading
    completion = _BOLD.sub(r"\1", completion)
    if announced := list(_ANNOUNCED.finditer(completion)):
        said = re.split(r"[.!?]\s|\n", completion[: announced[-1].start()])[-1]  # I doubt that the answer is 42
        return None if _DOUBTED.search(said) else _announced(completion[announced[-1].end() :])
    return _last_claim(completion)


def _kept(answer: str, behind: str) -> str | None:
    """The answer, unless what follows takes it back and claims another: No wait, it is 43."""
    if not (taken_back := _TAKEN_BACK.match(behind)) or (other := _last_claim(behind[taken_back.end() :])) is None:
        return answer
    first, second = read(answer), read(other)
    if isinstance(first, Quantity) and isinstance(second, Quantity):
        return answer if equal_values(first.value, second.value) else None
    return answer if isinstance(second, Words) or first.text == second.text else None


def _announced(text: str) -> str | None:
    """What "the answer is" is followed by, or the number in it where it is a sentence: that she has 64 apples."""
    line, _, below = text.partition("\n")
    answer = _first_sentence(line)
    if answer[:1].isalpha() and isinstance(read(answer), Words):
        sentence = _first_sentence(line, reasons=r"because|since|as|which(?!\s+(?:is|equals)\b)|so|where")
        answer = (None if _DOUBTED.search(sentence) else _last_value(sentence)) or answer
    further = re.split(r"(?<=\S)\.(?=\s)", line, maxsplit=1)[1:]
    return _kept(answer, "\n".join([*further, below]))


def _boxed_alone(text: str, box: "re.Match[str]") -> str | None:
    """What the box holds; None where it is denied, or is a part of more: 2\\boxed{18}, \\boxed{18}!."""
    before = text[max(0, box.start() - 40) : box.start()]
    end = _end_of_box(text, box.end())
    if end is None or _DENIED.search(before) or _OPENS_MORE.search(before) or _GOES_ON.match(text, end):
        return None
    inner = text[box.end() : end]
    return _kept(inner[1:-1] if inner.startswith("{") else inner, text[end:])


def _end_of_box(text: str, start: int) -> int | None:
    """Where the braces that open there close; None where they do not."""
    if text[start : start + 1] != "{":
        found = re.compile(r"[-+]?[0-9A-Za-z][0-9.,]*").match(text, start)
        return found.end() if found else None
    depth = 0
    for mark in re.compile(r"(?<!\\)[{}]").finditer(text, start):
        depth += 1 if mark[0] == "{" else -1
        if depth == 0:
            return mark.end()
    return None


def _first_sentence(text: str, reasons: str = "because|since|as|which|so|where") -> str:
    """Without what follows the answer: a further sentence, or a reason."""
    text = re.split(r"(?<=\S)\.(?=\s|\*|$)", text.strip("* \t"), maxsplit=1)[0].strip("* ")
    return re.split(rf",?\s+(?:{reasons})\s", text, maxsplit=1)[0]


def _last_claim(completion: str) -> str | None:
    """The last line, where it is an answer by itself, else the last formula or number of the last sentence with one."""
    lines = [line for line in completion.splitlines() if line.strip()]
    if not lines or _BULLET.match(lines[-1]):
        return None
    items = [_ITEM.fullmatch(line) for line in lines[-2:]]
    if len(items) == 2 and items[0] and items[1] and items[0][1] != items[1][1]:
        return None
    if not isinstance(read(lines[-1]), Words):
        return lines[-1]
    sentences = re.split(r"(?<=[.!?])(?<!\bvs\.)\s+|\n", completion.strip())
    while sentences:
        sentence = sentences.pop()
        if _DOUBTED.search(sentence):
            return None
        if re.search(r"[0-9]|\$|\\[(\[]", sentence):
            return _last_value(sentence)
        if _HEDGED.search(sentence):
            return None
    return lines[-1]


def _last_value(sentence: str) -> str | None:
    """The last formula or number of a sentence that commits itself to it."""
    formulas = [found for found in _FORMULA.finditer(sentence) if not isinstance(read(found[0]), Words)]
    numbers = list(_NUMBER.finditer(sentence))
    digits = [found.start() for found in re.finditer("[0-9]", sentence)]
    if formulas and (not digits or digits[-1] < formulas[-1].end()):
        return formulas[-1][0] if _is_committed(sentence, formulas[-1]) else None
    if not numbers or digits[-1] >= numbers[-1].end() or _NAMED.search(sentence[: numbers[-1].start()]):
        return None
    return numbers[-1][0] if _is_committed(sentence, numbers[-1]) else None


def _is_committed(sentence: str, value: "re.Match[str]") -> bool:
    """Whether no value is joined to this one, and no hedge is behind it or among the three words before it."""
    before, behind = sentence[: value.start()], sentence[value.end() :]
    if _JOINED.search(before) or _HEDGED.search(behind):
        return False
    shortly = _CLAUSE.split(_EQUALS.sub("", before))[-1].split()[-3:]
    return not _HEDGED.search(" ".join([*shortly, value[0]]))
