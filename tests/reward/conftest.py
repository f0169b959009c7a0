"""Groups of rollouts made by hand, and functions as a recipe or a notebook gives them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gspo.records import Group, Messages, Query, Rollout
from gspo.reward.functions import RewardFunction

Groups = Callable[..., list[Group]]
Functions = Callable[..., tuple[RewardFunction, ...]]


def _group(number: int, texts: Sequence[str], prompt: str | Messages, columns: dict[str, Any]) -> Group:
    rollouts = tuple(
        Rollout(
            response_ids=torch.tensor([7, 8]),
            text=text,
            sampler_logprobs=torch.zeros(2),
            finish_reason="stop",
            policy_version=0,
        )
        for text in texts
    )
    query = Query(id=f"data:{number}", prompt=prompt, text="", prompt_ids=(1,), columns=columns)
    return Group(query=query, rollouts=rollouts)


@pytest.fixture
def groups() -> Groups:
    """A group for each list of texts, all with the same prompt; a column's value is the group's own."""

    def build(*texts: Sequence[str], prompt: str | Messages = "1+1=", **columns: Sequence[Any]) -> list[Group]:
        return [
            _group(number + 1, group, prompt, {name: values[number] for name, values in columns.items()})
            for number, group in enumerate(texts)
        ]

    return build


@pytest.fixture
def functions() -> Functions:
    """Functions with a name of their own and the same settings."""

    def build(*calls: Callable[..., Any], **settings: Any) -> tuple[RewardFunction, ...]:
        return tuple(RewardFunction(name=f"f{number}", call=call, **settings) for number, call in enumerate(calls))

    return build
