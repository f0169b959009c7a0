"""The protocol of an engine: prompts of token ids in, completions of token ids out."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from gspo.types import Experts, FinishReason


class LostError(Exception):
    """An engine's server has failed; `publish` makes it ready again, and then what it lost can be submitted anew."""


class Session:
    """A response under way, to which prompts belong: a later one usually begins as an earlier one went on.

    An engine may keep what it has computed for the last one as long as the session exists.
    """


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids to be continued.

    Example: Prompt(ids=(34, 5, 17), key=2**100 + 7, max_new_tokens=256)
    """

    ids: tuple[int, ...]
    key: int  # of 128 bits: decides the random numbers
    max_new_tokens: int
    group: int = 0  # consecutive prompts of one group with equal ids are read once
    # Called with each token in turn: whether it completes a text that ends the completion. An engine that cannot ask
    # while it samples leaves the cut to the caller.
    is_complete: Callable[[int], bool] | None = field(default=None, compare=False)
    session: Session | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution that tokens are drawn from, and the tokens that end a completion.

    Example: Sampling(temperature=0.7, stop_ids=(2,))
    """

    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    biases: Mapping[int, float] = field(default_factory=dict)  # what is added to logits, by token id
    stop_ids: tuple[int, ...] = ()
    record_experts: bool = False

    @property
    def is_shaped(self) -> bool:
        """Tell whether tokens are drawn from another distribution than the model's own at the temperature."""
        shape = (self.top_p, self.top_k, self.min_p, self.repetition_penalty)
        return bool(self.biases) or shape != (1.0, 0, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """The continuation of a prompt by an engine; tensors lie on the CPU.

    Example: Completion(token_ids=tensor([8, 5, 2]), logprobs=tensor([-0.1, -1.2, -0.3]), full_logprobs=None,
    versions=((12, 3),), finish_reason="stop", experts=None)
    """

    token_ids: Int[Tensor, "T"]  # with the token that ends it
    logprobs: Float[Tensor, "T"]  # log q, of the distribution that the tokens were drawn from
    full_logprobs: Float[Tensor, "T"] | None  # log π at the temperature; None: q is π; NaN where nobody knows it
    versions: tuple[tuple[int, int], ...]  # spans: the version of the weights, and how many tokens they drew
    finish_reason: FinishReason
    experts: Experts | None


@runtime_checkable
class Engine(Protocol):
    """Samples with the weights that were published last; a run makes one engine and closes it at its end."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens sampled so far, for a display."""
        ...

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Future[Completion]]:
        """Have the prompts continued, in any order; those of a group are read once.

        The tokens depend on the prompt alone, not on what is sampled at the same time. A future that is cancelled is
        given up. LostError in a future is a server's failure; any other error ends the run.
        """
        ...

    def publish(self, version: int) -> None:
        """Sample with the policy's present weights from now on.

        A version that is published already changes nothing, but for a server that has failed: that gets it again.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Return what decides the last bit of the engine's numbers, for a checkpoint's environment."""
        ...

    def take_metrics(self) -> Mapping[str, float]:
        """Return what it has measured since the last call, by the names of metrics.jsonl."""
        ...

    def close(self) -> None:
        """End the engine's threads or processes and free its memory; a second call does nothing."""
        ...


def in_groups(prompts: Sequence[Prompt]) -> list[range]:
    """The consecutive prompts of one group with equal ids and limits, by their numbers."""

    def alike(number: int) -> tuple[int, tuple[int, ...], int]:
        prompt = prompts[number]
        return prompt.group, prompt.ids, prompt.max_new_tokens

    numbers = [[*run] for _, run in groupby(range(len(prompts)), key=alike)]
    return [range(own[0], own[-1] + 1) for own in numbers]
