"""The built-in reward `judge`: another model, behind an OpenAI-compatible endpoint, says how good a response is."""

import asyncio
import os
import re
from collections.abc import Sequence
from typing import Any

from gspo.errors import UserError
from gspo.queries.placeholders import fill_in

PATTERN = r"score[\"*\s]*[:=][\"*\s]*(-?\d+(?:\.\d+)?(?:e-?\d+)?)"
MAX_KEPT = 2_000  # answers, so that one that has been given is not asked for again
_PASSING = (408, 409, 429, 500, 502, 503, 504)  # HTTP's codes of what may work a little later
_WHERE = "reward function judge"

_scores: dict[tuple[str, ...], float] = {}


async def judge(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    url: str,
    model: str,
    prompt: str,
    system: str | None = None,
    pattern: str = PATTERN,
    low: float = 0.0,
    high: float = 1.0,
    key: str = "OPENAI_API_KEY",
    tries: int = 4,
    requests: int = 8,
    body: dict[str, Any] | None = None,
    **columns: Any,
) -> list[float]:
    """The score, from 0 (`low`) to 1 (`high`), that the judging model's answer names last.

    `prompt` is what it is asked, with `{prompt}`, `{completion}` and `{name}` of columns filled in, and the first group
    of `pattern` the score. `key` names the environment's variable with the server's key, and `body` has further
    parameters of a request, by default `{temperature: 0}`. What may pass is tried again; RuntimeError where it does
    not, where an answer has no score within the bounds, and where a row has null in such a column.
    """
    import httpx

    compiled = _checked(pattern, low, high)
    if tries < 1 or requests < 1:
        raise UserError(f"tries is {tries}, requests {requests}", where=_WHERE, fix="give 1 or more of both")
    headers = {"Authorization": f"Bearer {os.environ[key]}"} if os.environ.get(key) else {}
    places = asyncio.Semaphore(requests)
    async with httpx.AsyncClient(headers=headers, timeout=None) as client:

        async def score(place: int) -> float:
            lists = {name: own for name, own in columns.items() if isinstance(own, list | tuple)}
            row = {name: own[place] for name, own in lists.items() if len(own) == len(completions)}
            values = {**row, "prompt": _text(prompts[place]), "completion": _text(completions[place])}
            if absent := [name for name, value in row.items() if value is None and f"{{{name}}}" in prompt]:
                raise RuntimeError(f"the row has no {absent[0]}, which the judge's prompt names")
            asked = fill_in(prompt, values, key="the option prompt", where=_WHERE)
            messages = [{"role": "system", "content": system}] * (system is not None)
            messages += [{"role": "user", "content": asked}]
            request = {"model": model, "messages": messages, **(body or {"temperature": 0})}
            kept = (url, model, system or "", asked, str(body), pattern, str((low, high)))
            if kept not in _scores:
                async with places:
                    answer = await _answer(client, f"{url.rstrip('/')}/chat/completions", request, tries)
                _scores[kept] = _score_of(answer, compiled, low, high)
                if len(_scores) > MAX_KEPT:
                    del _scores[next(iter(_scores))]
            return (_scores[kept] - low) / (high - low)

        scores = await asyncio.gather(*map(score, range(len(completions))), return_exceptions=True)
    for found in scores:  # once all are in: what was answered is kept
        if isinstance(found, BaseException):
            raise found
    return [own for own in scores if not isinstance(own, BaseException)]


def _checked(pattern: str, low: float, high: float) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        what = f"not a regular expression: {error}: {pattern!r}"
        raise UserError(what, where=_WHERE, fix="correct its option pattern") from None
    if not compiled.groups:
        what = f"the pattern {pattern!r} has no group, which would be the score"
        raise UserError(what, where=_WHERE, fix="put the number into parentheses: score: (\\d+)")
    if not low < high:
        raise UserError(f"low {low:g} is not below high {high:g}", where=_WHERE, fix="give the scale's two ends")
    return compiled


async def _answer(client: Any, address: str, request: dict[str, Any], tries: int) -> str:
    """The text of the server's answer; RuntimeError where there is none after so many tries."""
    import httpx

    for number in range(tries):
        try:
            reply = await client.post(address, json=request)
            if reply.status_code == 200:
                return str(reply.json()["choices"][0]["message"]["content"])
            failure = f"HTTP {reply.status_code}: {reply.text[:200]}"
            if reply.status_code not in _PASSING:
                break
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError):
            failure = f"this is no chat completion: {reply.text[:200]}"
            break
        if number < tries - 1:
            await asyncio.sleep(2.0**number)
    raise RuntimeError(f"the judge at {address} does not answer: {failure}")


def _score_of(answer: str, pattern: re.Pattern[str], low: float, high: float) -> float:
    found = [match[1] for match in pattern.finditer(answer) if match[1] is not None]
    try:
        score = float(found[-1])
    except (LookupError, ValueError):
        raise RuntimeError(f"the judge's answer has no score: {answer[-200:]!r}") from None
    if not low <= score <= high:
        raise RuntimeError(f"the judge's score {score:g} is not between {low:g} and {high:g}: {answer[-200:]!r}")
    return score


def _text(messages: Any) -> str:
    """A text, or the content of chat messages, each behind its role where there are several."""
    if isinstance(messages, str):
        return messages
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
