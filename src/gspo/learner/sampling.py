"""How ranks sample: each some of the groups, with an engine of its own, and all of them get all completions."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from signal import Signals
from typing import Any

from gspo import loop
from gspo.engine.engine import Completion, Engine, Prompt, Sampling, in_groups
from gspo.errors import OtherRankError, RunError, Stopped
from gspo.learner.ranks import gathered, meet, num_ranks, of_all, rank
from gspo.rollout.single_turn import StopStrings, WatchedResponse


def completed(
    engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], sampling: Sampling, strings: Sequence[str]
) -> list[Completion]:
    """The completions of all prompts, in their order; each rank calls it, with an engine and a tokenizer of its own.

    Stopped or RunError, on all ranks, where any of them could not sample.
    """
    groups, failure, completions = in_groups(prompts), None, list[Completion]()
    mine = [prompts[number] for group in groups[rank() :: num_ranks()] for number in group]
    if strings:
        stops = StopStrings(tokenizer, strings)
        mine = [replace(prompt, is_complete=WatchedResponse(stops, prompt.ids)) for prompt in mine]
    try:
        completions = loop.run(_completed(engine, mine, sampling))
    except (Exception, KeyboardInterrupt) as error:  # Stopped is one of the latter
        failure = error
    meet()
    signal = int(failure.args[0]) if isinstance(failure, Stopped) else None
    results = gathered((completions, signal, failure and f"{type(failure).__name__}: {failure}"))
    for other, (_, number, text) in enumerate(results):
        if number is not None:
            raise of_all(Stopped(Signals(number)))
        if text is not None:
            what = f"rank {other} could not sample: {text}"
            raise of_all(OtherRankError(what) if rank() else RunError(what)) from failure
    shares = [iter(share) for share, _, _ in results]
    return [next(shares[place % num_ranks()]) for place, group in enumerate(groups) for _ in group]


async def _completed(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completion]:
    return await asyncio.gather(*map(asyncio.wrap_future, engine.submit(prompts, sampling)))
