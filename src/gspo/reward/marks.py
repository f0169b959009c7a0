"""What marks the answer in a text: the end of the thoughts, tags, a box, `####`."""

import json
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from gspo.errors import UserError

THINKING = ("<think>", "</think>")  # what opens and closes thoughts
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")

_BRACE = re.compile(r"(?<!\\)[{}]")
_BARE_END = re.compile(r"\$|\\[)\]]|\n|[.,;](?![0-9])|\s(?=[A-Za-z]{2})|$")  # of a box without braces: \boxed 5
_LAST_LINE = re.compile(r"####[ \t]*([^\n]*\S)[ \t]*(?:\n[^\n]*(?<!\w)\1(?!\w)[^\n]*)?\s*$")  # or said again behind it


def opens_thoughts(prompt: Any, thinking: Sequence[str]) -> bool:
    """Tell whether a prompt's text ends with the tag that opens thoughts, or its last message begins them."""
    if isinstance(prompt, str):
        return prompt.rstrip().endswith(thinking[0].strip())
    last = prompt[-1] if isinstance(prompt, list) and prompt else {}
    begun = str(last.get("content")) if last.get("role") == "assistant" else ""
    return begun.rfind(thinking[0]) > begun.rfind(thinking[1])


def behind_thoughts(text: str, prompts: Sequence[Any], thinking: Sequence[str] | None) -> str | None:
    """Return what follows a response's last thoughts, in any of its forms; None where they never end."""
    if not thinking:
        return text
    _, closed, behind = text.rpartition(thinking[1])
    is_begun = not closed and any(opens_thoughts(prompt, thinking) for prompt in prompts)
    return None if is_begun or thinking[0] in behind else behind


def judges_behind_thoughts(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of what follows each completion's thoughts; 0.0 where they, or those the prompt opens, never end."""

    @wraps(function)
    def judging(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        thinking: Sequence[str] | None = THINKING,
        prompt_texts: Sequence[str] | None = None,  # as the model reads them
        **columns: Any,
    ) -> list[float | None]:
        if isinstance(thinking, str) or len(thinking or THINKING) != 2:
            fix = f"give the two texts that open and close thoughts, {json.dumps(THINKING)}, or null"
            raise UserError(f"thinking is {thinking!r}", where="reward.options", fix=fix)
        rows = zip(map(text_of, completions), prompts, prompt_texts or prompts, strict=True)
        texts = [behind_thoughts(text, forms, thinking) for text, *forms in rows]
        scores = function(prompts, [text or "" for text in texts], **columns)
        return [0.0 if text is None and score is not None else score for text, score in zip(texts, scores, strict=True)]

    return judging


def text_of(said: Any) -> str:
    """The text of a prompt or completion: itself, or the content of its last message."""
    return said if isinstance(said, str) else str(said[-1]["content"])


def last_box(text: str) -> tuple[int, int, str] | None:
    """Return where the last box, or the one around it, begins and ends, and what it holds; None where it never ends.

    Of \\boxed{41 \\boxed{42}} that is all.
    """
    boxes = {box.end(): box.start() for box in BOX.finditer(text)}
    bare = [(end, _BARE_END.search(text, end)) for end in boxes if text[end : end + 1] != "{"]
    found = [(boxes[end], until.start(), text[end : until.start()].strip()) for end, until in bare if until]
    opened = list[int]()
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (start := opened.pop()) in boxes:
            found.append((boxes[start], brace.end(), text[start + 1 : brace.start()]))
    last = max(boxes.values())
    return min((box for box in found if box[0] <= last < box[1]), default=None)


def gold_answer(text: str) -> str:
    """The answer of a worked solution, behind its thoughts: tagged, in its last box, behind its last ####; or all."""
    text = behind_thoughts(text, (), THINKING) or text
    text = (TAGGED.findall(text) or [text])[-1].strip()
    if BOX.search(text):
        return ((box := last_box(text)) and box[2].strip()) or text
    return last_line[1] if (last_line := _LAST_LINE.search(text)) else text
