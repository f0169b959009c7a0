"""The one answer of a completion to a question of mathematics: tagged, boxed, announced, or at its end."""

import re

from gspo.reward.marks import BOX, TAGGED, last_box
from gspo.reward.mathematics import DIGITS, read, same

MAX_WORDS = 20  # a text of more, which is no mathematics, is a worked solution and no answer
_BULLET = re.compile(r"\s*-\s")  # "- 17" is a list's 17 or minus 17; in a formula or a box it is minus 17
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
_NUMBER = re.compile(
    r"(?<![\w.,/:^*+\-−\\%])(?<![0-9%]\s)(?<![0-9]['’])[-−+]?[$€£]?(?:[0-9](?:[0-9,]|['’](?=[0-9]{3}))*(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]+)?(?:\s*%|"
    r"\s+(?:hundred|thousand|million|billion|dozen|percent|squared|cubed|factorial)\b)?(?![\w!^({\\+\-−]|\s*[-+*/×÷=<>≈±](?=\s*[\w(\\])|[.,:][0-9])"
)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\$])\$(?!\s)([^$\n]*[^$\s\\])\$", re.DOTALL)
_DISPLAY = re.compile(r"(\$\$|\\\[)\s{0,9}([^\n$]{1,200}?)\s{0,9}[.,]?\s{0,9}(\$\$|\\\])")  # in one line or three
# A sentence with one of these commits itself to nothing.
_DOUBTED = re.compile(
    r"(?i)\b(?:maybe|perhaps|possib(?:ly|ility)|possible(?=\s+(?:that|the|it|answer|value|solution|result)|\s*$)|probably|guess|"
    r"un(?:sure|certain|known)|impossible|(?<!without )(?<!without a )(?<!no )(?<!beyond )doubt|suspect|neither|"
    r"(?:could|might|may) be|so sure|(?:any|every)thing (?:but|except)|(?:false|wrong|unlikely|can(?:'t|not) be) that|"
    r"(?:whether|if|suppos\w+|assum\w+|claims|thinks|believes)(?=\s+(?:that )?(?:the|my|our)(?: \w+)?\s*$))\b"
    r"|(?:\bnot|n't) (?:sure|certain|know|think|believe|true|the case|clear)\b|\?"
)
# What a sentence concedes before it commits itself: Perhaps there is a shorter way, but the answer is 6.
_CONCEDED = re.compile(
    r"(?is)^(?:.*(?:[,;–—]\s*(?:but|so|thus|hence|therefore|yet|still|nevertheless|and|however(?!,))\b|;"
    r"|(?<!thing)(?<!help)(?<!none)(?<!all)\sbut\b))?"
    r"(?:\W*(?:(?:since|because|although|though|even though|while|whereas|(?:perhaps|maybe)\s+\w+ly)\b[^,]*"
    r"|as (?:you|one) (?:may|might|can|could|will)(?: have)? guess(?:ed)?"  # as a guess, it might be: is no reason
    r"|as it is impossible\b(?![^,]*\b(?:I|my|know\w*|say|tell|see|find|determine|decide|verify|check|sure|certain\w*|"
    r"guess\w*|maybe|perhaps|prob\w+|doubt\w*|suspect\w*)\b)[^,?]*),)?"
)
# A value with one of these shortly before or anywhere behind it is denied, inexact or one of several.
_HEDGED = re.compile(
    r"(?i)\b(?:not|never|nor|cannot|either|or|and|tried|fail(?:s|ed)?|wrong|incorrect|approx\w*|about|roughly|around|almost|"
    r"nearly|close to|between|at (?:least|most)|(?:more|less|fewer|greater) than|(?:instead|rather) (?:of|than)|"
    r"(?<!equal )to|unlike|(?:more |less |un)likely|except|exclud\w+|reject\w*|rule[sd]? out|differs? from|"
    r"vs|versus|then|(?:over|under|above|below|up to|exceeds?|minus|negative|twice|double|near|from|past|within|base|"
    r"(?:half|third|square|cube|root|reciprocal|opposite|multiple|factor|divisor|factorial|short) of)(?=\s+\$?[0-9])|"
    r"steps?|questions?|problems?|pages?|lines?|"
    r"cases?|chapters?|equations?|figures?|tables?|parts?|examples?|options?|numbers?|no|attempts?|rooms?|items?|rows?|"
    r"rounds?|year|b?mod(?:ulo)?)\b|n't\b|≈|≠|#|\\(?:approx|neq?|sim|to)\b|[=-]>|→|[|<>&;≤≥(\[]"
)
_CLAUSE = re.compile(  # where a clause or what its verb says begins
    r"(?i)[,;:](?=\s+[a-z])|\b(?:so|but|thus|hence|therefore|which|is|are|was|were|equals|makes|costs|has|gets|gives)\b"
)
_REFERENCE = re.compile(r"\\(?:tag|label|ref|eqref)\*?\s*\{[^{}]*\}")
_DENIED = re.compile(r"(?i)(?:\b(?:not|never|neither|nor|or)|n't|\\neq?|≠)(?:\s+(?:be|equal(?:\s+to)?|in))?[\s$:*(]*$")
_BOLD = re.compile(r"(?<![\w)}*])\*\*(?=[^\s*])([^*\n]+)(?<=\S)\*\*(?![\w*])")
_ITEM = re.compile(r"\s*(?:[*•]|[A-Z0-9][.)])?\s*\$?([0-9][0-9.,]*)\$?\s*")  # a line of a list of numbers


def score(gold: str, completion: str) -> float:
    """1.0 where the completion's answer says what the gold one says, else 0.0."""
    right = read(gold)
    if right.value is None and len(re.findall(r"(?<!\\)\b[^\W\d_]{2,}", gold)) > MAX_WORDS:
        return 0.0
    try:
        answer = final_answer(completion)
        return float(answer is not None and same(right, read(answer)))
    except Exception:  # sympy raises on some texts; such an answer is wrong
        return 0.0


def final_answer(completion: str) -> str | None:
    """The text of the answer; None where it is missing, cut off, denied, taken back or one of several."""
    completion = completion.translate(DIGITS)
    if "<answer>" in completion:
        tags = list(TAGGED.finditer(completion))
        if not tags or _BULLET.match(tags[-1][1]):
            return None
        return _kept(tags[-1][1].strip(), completion[tags[-1].end() :])
    if BOX.search(completion):
        return _boxed_alone(completion)
    if marks := list(_MARKED.finditer(completion)):
        answer, behind = _statement(marks[-1][1]), completion[marks[-1].end() :]
        if read(answer).value is not None or not behind.strip():  # else it is a heading
            return _kept(answer, behind)
    completion = _BOLD.sub(r"\1", completion)
    if announced := list(_ANNOUNCED.finditer(completion)):
        before = re.split(r"[.!?]\s|\n", completion[: announced[-1].start()])[-1]  # I doubt that the answer is 42
        line, _, below = _DISPLAY.sub(r"\1\2\3", completion[announced[-1].end() :]).partition("\n")
        sentence, *further = re.split(r"(?<=\S)\.(?=\s)", line, maxsplit=1)
        answer = _statement(sentence)
        if answer[:1].isalpha() and read(answer).value is None:  # the answer is that she has 64 apples
            answer = _last_value(sentence) or answer
        return None if _DOUBTED.search(_CONCEDED.sub("", before)) else _kept(answer, "\n".join([*further, below]))
    return _last_claim(completion)


def _kept(answer: str, behind: str) -> str | None:
    """The answer, unless what follows takes it back and claims another: No wait, it is 43."""
    taken_back = _TAKEN_BACK.match(behind)
    other = _last_claim(behind[taken_back.end() :]) if taken_back else None
    return answer if other is None or read(other).value is None or same(read(answer), read(other)) else None


def _boxed_alone(text: str) -> str | None:
    """Return what the last box holds; None where it is cut off, denied or a part of more, such as 2\\boxed{18}."""
    if (box := last_box(text)) is None:
        return None
    start, end, inner = box
    before = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text[max(0, start - 40) : start])
    is_part = _DENIED.search(before) or _OPENS_MORE.search(before) or _GOES_ON.match(text, end)
    return None if is_part else _kept(inner, text[end:])


def _statement(text: str) -> str:
    """Leave out what follows the answer: a further sentence, or a reason."""
    text = re.split(r"(?<=\S)\.(?=\s|\*|$)", text.strip("* \t"), maxsplit=1)[0].strip("* ")
    answer, *reason = re.split(r",?\s+(?:because|since|as|which|so|where)\s", text, maxsplit=1)
    return "" if reason and re.match(r"(?i)(?:is|was)\s+(?:not|wrong|incorrect|false)\b", reason[0]) else answer


def _last_claim(completion: str) -> str | None:
    """The last line, where it is an answer by itself, else the last formula or number of the last sentence with one."""
    completion = _REFERENCE.sub("", completion)
    lines = [line for line in completion.splitlines() if line.strip()]
    if not lines or _BULLET.match(lines[-1]) or (len(lines) > 1 and all(_ITEM.fullmatch(line) for line in lines[-2:])):
        return None
    if read(lines[-1]).value is not None:
        return lines[-1]
    for sentence in reversed(re.split(r"(?<=[.!?])(?<!\bvs\.)\s+|\n", completion.strip())):
        if re.search(r"[0-9]|\$|\\[(\[]", sentence):
            return _last_value(sentence)
        if _DOUBTED.search(sentence) or _HEDGED.search(sentence):
            return None
    return lines[-1]


def _last_value(sentence: str) -> str | None:
    """The last formula or number of a sentence that commits itself to it: no other value beside it, no doubt."""
    values = [match for match in _FORMULA.finditer(sentence) if read(match[0]).value is not None]
    values = sorted([*values, *_NUMBER.finditer(sentence)], key=re.Match.end)
    if not values or re.search("[0-9]", behind := sentence[values[-1].end() :]):
        return None
    before = sentence[: values[-1].start()]
    if _DOUBTED.search(_CONCEDED.sub("", before) + values[-1][0] + behind):
        return None
    clause = _CLAUSE.split(re.sub(r"[^\s=]{1,40}\s{0,20}=\s{0,20}$", "", before))[-1]  # without the x = of x = 5
    is_beside = re.search(
        r"[0-9]\S{0,20}?[,;]\s*$|[0-9]\s+$|[0-9]\s\(?[A-Z][).:]\s*$|^\s*\$?[0-9][0-9.,]*\s*=\s*$", before
    )
    value = "0" if _FORMULA.fullmatch(values[-1][0]) else values[-1][0]  # a formula may have brackets
    if is_beside or _HEDGED.search(behind) or _HEDGED.search(" ".join([*clause.split()[-3:], value])):
        return None
    return values[-1][0]
