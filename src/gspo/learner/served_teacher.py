"""A teacher behind a vLLM server, which says how likely it finds the tokens of responses: it reads them as prompts."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gspo import loop
from gspo.engine.server.api import CLAMPED, BadAnswerError, NoAnswerError, RefusedError, Request, bad_answers
from gspo.engine.server.server import ask, new_client
from gspo.errors import RunError, UserError
from gspo.model.packing import TokenSequence
from gspo.recipe.sections import TeacherConfig
from gspo.types import Batch, Sample

_TRIES, _MOST_AT_ONCE, _SECONDS = 4, 32, 600.0
WAIT_SECONDS = 1.0  # before the second try; twice as long before each further one


def check_server(teacher: TeacherConfig, tokenizer: Any, *, longest: int) -> None:
    """Raise UserError where the server cannot prove that its tokens are the policy's, or reads fewer than `longest`."""
    where, ids = f"teacher.url: {teacher.url}", sorted(tokenizer.get_vocab().values())
    tokens = Request(path="/detokenize", body={"model": teacher.model, "tokens": ids})
    try:
        models, answer = loop.run(_answers(teacher, [Request(path="/v1/models"), tokens]))
        with bad_answers():
            lengths, text = {own["id"]: own["max_model_len"] for own in models["data"]}, str(answer["prompt"])
    except (NoAnswerError, RefusedError, BadAnswerError) as error:
        fix = "name a vLLM server that has the teacher and its tokenizer"
        raise UserError(f"it does not prove that its tokens are the policy's: {error}", where=where, fix=fix) from None
    if teacher.model not in lengths:
        fix = f"set teacher.model to one that it has: {', '.join(lengths)}"
        raise UserError(f"the server has no model {teacher.model}", where=where, fix=fix)
    if lengths[teacher.model] <= longest:
        what = f"it reads {lengths[teacher.model]} tokens; a prompt and its response may have {longest}, and one more"
        raise UserError(what, where=where, fix="start it with a longer --max-model-len")
    # Libraries differ in whether they remove spaces before punctuation by themselves.
    own = [tokenizer.decode(ids, clean_up_tokenization_spaces=cleans) for cleans in (False, True)]
    if text not in own:
        place = next((at for at, pair in enumerate(zip(text, own[0], strict=False)) if len({*pair}) > 1), len(text))
        parts = " and ".join(repr(each[place : place + 12]) for each in (text, own[0]))
        what = f"its tokens are not the policy's: written one after the other they differ first in {parts}"
        raise UserError(what, where=where, fix="name a server that has a teacher with the policy's own tokenizer")


def with_served_teacher(batch: Batch, teacher: TeacherConfig, *, temperature: float) -> Batch:
    """The batch with the teacher's log-likelihoods of every scored sample, which are at temperature 1.

    RunError where a request has no usable answer after several tries.
    """
    if temperature != 1:
        what = f"a hook has set the temperature to {temperature:g}, and a server scores at 1"
        raise UserError(what, where=f"teacher.url: {teacher.url}", fix="leave it at 1, or give a teacher.path")
    texts = {sample: _texts(sample) for sample in batch.samples if sample.reward is not None}
    flat = [text for own in texts.values() for text in own]
    shared = {"model": teacher.model, "max_tokens": 1, "prompt_logprobs": 0}
    bodies = [{**shared, "prompt": [*text.prompt_ids, *text.response_ids.tolist()]} for text in flat]
    try:
        answers = loop.run(_answers(teacher, [Request(path="/v1/completions", body=body) for body in bodies]))
        rows = iter([_logprobs(*pair) for pair in zip(flat, answers, strict=True)])
    except (NoAnswerError, RefusedError, BadAnswerError) as error:
        raise RunError(f"the teacher at {teacher.url}: {error}\n  fix: look after it, then resume") from None
    found = {sample: torch.cat([next(rows) for _ in own]) for sample, own in texts.items()}
    return batch.with_changed({sample: replace(sample, teacher_logprobs=row) for sample, row in found.items()})


def _texts(sample: Sample) -> list[TokenSequence]:
    """Return what is scored: the response behind the teacher's prompt, or each of an agent's contexts."""
    query, ids, mask, starts = sample.query, sample.token_ids, sample.loss_mask, sample.starts
    prompt = query.teacher_ids or query.prompt_ids
    return TokenSequence(prompt_ids=prompt, response_ids=ids, loss_mask=mask, starts=starts).parts


def _logprobs(text: TokenSequence, answer: Any) -> Tensor:
    """The log-likelihoods of the tokens that the policy wrote; BadAnswerError for others."""
    with bad_answers():
        scored = answer["choices"][0]["prompt_logprobs"]
        if len(scored) != text.num_tokens:
            raise ValueError(f"{len(scored)} tokens are scored, of {text.num_tokens}")
        assert text.loss_mask is not None  # of `_texts`
        ids = text.response_ids.tolist()
        written = zip(scored[-len(ids) :], ids, text.loss_mask.tolist(), strict=True)
        numbers = [float(entry[str(token)]["logprob"]) for entry, token, is_own in written if is_own]
        if not all(CLAMPED < number <= 1e-3 for number in numbers):  # NaN is not
            raise ValueError("a log-likelihood is not finite")
    return torch.tensor(numbers)


async def _answers(teacher: TeacherConfig, requests: Sequence[Request]) -> list[Any]:
    """The answers to requests that are made side by side; what fails is tried again, a little later each time."""
    places, key = asyncio.Semaphore(_MOST_AT_ONCE), os.environ.get(teacher.key_variable, "")
    async with new_client() as client:
        ask_once = partial(ask, client, str(teacher.url), key=key, seconds=_SECONDS)

        async def answer(request: Request) -> Any:
            async with places:
                for number in range(_TRIES - 1):
                    with suppress(NoAnswerError):
                        return await ask_once(request)
                    await asyncio.sleep(WAIT_SECONDS * 2.0**number)
                return await ask_once(request)

        return await loop.all_of([answer(request) for request in requests])
