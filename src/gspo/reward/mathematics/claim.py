"""The one answer of a completion: in its last tag, else its last box, else where it says so, else at its end."""

import re

from gspo.reward.answer import tagged_answer
from gspo.reward.mathematics.reading import Words, read

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BULLET = re.compile(r"\s*-\s")  # "- 17" is a list's 17 or minus 17; in a formula or a box it is minus 17
_MARKED = re.compile(r"####[ \t]*(.+)")
_ANNOUNCED = re.compile(r"(?i)\banswer(?:\s+(?:is|equals)\b:?|\s*[:=])\**\s*(.+)")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$(?!\s)([^$\n]*[^$\s\\])\$", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.,/:^*+\-−\\])(?<![0-9]\s)[-−+]?[$€£]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?(?:\s*%|"
    r"\s+(?:hundred|thousand|million|billion|trillion|dozen|percent|squared|cubed|factorial)\b)?"
    r"(?![\w!^({\\]|\s*[-+*/×÷=<>≈±](?=\s*[\w(\\])|[.,:][0-9])"
)
# A sentence with one of these commits itself to nothing, or denies what it says.
_UNCOMMITTED = re.compile(
    r"(?i)\b(?:not|never|neither|nor|cannot|unsure|uncertain|maybe|perhaps|possibly|probably|guess|either|or|"
    r"could|might|doubt|suspect|tried|fail(?:s|ed)?|"
    r"wrong|incorrect|approximately|approx|about|roughly|around|almost|nearly|between|at (?:least|most)|"
    r"(?:more|less|fewer|greater) than|unknown|impossible|instead of|rather than|"
    r"(?:over|under|above|below|up to|exceeds?)(?=\s+\$?[0-9]))\b|n't\b|\?|≈|≠"
    r"|\\(?:approx|neq?|sim)\b"
)
# Numbers behind these are names of things.
_NAMED = re.compile(
    r"(?i)(?:\b(?:steps?|questions?|problems?|pages?|lines?|cases?|chapters?|sections?|equations?|eq|figures?|tables?|parts?|"
    r"examples?|exercises?|theorems?|lemmas?|options?|versions?|numbers?|no|rules?|attempts?|try|rooms?|items?|points?|notes?|"
    r"rows?|columns?|levels?|rounds?|trials?|chapters?|hints?|tasks?|year)\.?\s*|#|[([])$"
)
_DENIED = re.compile(r"(?i)(?:\b(?:not|never|neither|nor|or)|n't|\\neq?|≠)(?:\s+(?:be|equal(?:\s+to)?|in))?[\s$:*(]*$")


def claimed_answer(completion: str) -> str | None:
    """The text of the answer; None where there is none, or one that is cut off, denied or one of several."""
    if (tagged := tagged_answer(completion)) is not None:
        return None if _BULLET.match(tagged) else tagged
    if "<answer>" in completion:
        return None
    if boxes := list(_BOX.finditer(completion)):
        before = completion[max(0, boxes[-1].start() - 40) : boxes[-1].start()]
        return None if _DENIED.search(before) else _boxed(completion, boxes[-1].end())
    if marked := _MARKED.findall(completion):
        answer = _first_sentence(marked[-1])
        if not isinstance(read(answer), Words) or completion.rstrip().endswith(marked[-1].rstrip()):
            return answer  # else it is a heading
    if announced := _ANNOUNCED.findall(completion):
        return _announced(_first_sentence(announced[-1]))
    return _last_claim(completion)


def _announced(answer: str) -> str:
    """The answer, or the number in it where it is a sentence: the answer is that she has 64 apples."""
    is_sentence = answer[:1].isalpha() and isinstance(read(answer), Words) and not _UNCOMMITTED.search(answer)
    return (_last_value(answer) if is_sentence else None) or answer


def _boxed(text: str, start: int) -> str | None:
    """What stands in the braces that open there; None where they do not close."""
    if text[start : start + 1] != "{":
        found = re.compile(r"[-+]?[0-9A-Za-z][0-9.,]*").match(text, start)
        return found[0] if found else None
    depth = 0
    for mark in re.compile(r"(?<!\\)[{}]").finditer(text, start):
        depth += 1 if mark[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : mark.start()]
    return None


def _first_sentence(text: str) -> str:
    """Without what follows the answer: a further sentence, or a reason."""
    text = re.split(r"(?<=\S)\.(?=\s|\*|$)", text.strip("* \t"), maxsplit=1)[0].strip("* ")
    return re.split(r",?\s+(?:because|since|as|which|so|where)\s", text, maxsplit=1)[0]


def _last_claim(completion: str) -> str | None:
    """The last line, where it is an answer by itself, else the last formula or number of the last sentence with one."""
    lines = [line for line in completion.splitlines() if line.strip()]
    if not lines or _BULLET.match(lines[-1]):
        return None
    if not isinstance(read(lines[-1]), Words):
        return lines[-1]
    sentences = re.split(r"(?<=[.!?])\s+|\n", completion.strip())
    while sentences:
        sentence = sentences.pop()
        if _UNCOMMITTED.search(sentence):
            return None
        if re.search(r"[0-9]|\$|\\[(\[]", sentence):
            return _last_value(sentence)
    return lines[-1]


def _last_value(sentence: str) -> str | None:
    formulas = [found for found in _FORMULA.finditer(sentence) if not isinstance(read(found[0]), Words)]
    numbers = list(_NUMBER.finditer(sentence))
    digits = [found.start() for found in re.finditer("[0-9]", sentence)]
    if formulas and (not digits or digits[-1] < formulas[-1].end()):
        return None if _DENIED.search(sentence[: formulas[-1].start()]) else formulas[-1][0]
    if not numbers or digits[-1] >= numbers[-1].end() or _NAMED.search(sentence[: numbers[-1].start()]):
        return None
    return numbers[-1][0]
