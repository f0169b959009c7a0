"""The reward of trl_quickstart.yaml. It is called as TRL calls it, so the function of a TRL script stays as it is."""

from typing import Any


def reward_function(completions: list[str], **kwargs: Any) -> list[float]:
    """The number of different characters, without regard to case."""
    return [float(len(set(completion.lower()))) for completion in completions]
