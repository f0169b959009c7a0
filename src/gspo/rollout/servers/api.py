"""What gspo asks of a server, in the server's own words: a protocol; vLLM, SGLang and gspo's own engine have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gspo.recipe.sections import RolloutConfig
from gspo.types import FinishReason


class BadAnswerError(Exception):
    """The server's answer is not what it was asked for; the text says how."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The path and the JSON of a request.

    Example: Request(path="/resume", body={}), a POST; without a body it is a GET.
    """

    path: str
    body: Any = None
    seconds: float | None = None  # its own limit


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A group of responses that a server is asked for.

    Example: Asked(prompt_ids=(34, 5, 17), keys=(123, 456), stop_ids=(2,), settings=recipe.rollout)
    """

    prompt_ids: Sequence[int]
    keys: Sequence[int]  # of SamplingKey, one for each response
    stop_ids: Sequence[int]
    settings: RolloutConfig  # how many of what distribution
    biases: Mapping[int, float]  # rollout.logit_bias by token id
    wants_experts: bool
    goes_first: bool = False  # before those that wait, where the server can do that

    @property
    def seed(self) -> int:
        """One for the group, below 2**62, so that a server may add a sample's number."""
        return self.keys[0] % 2**62


@dataclass(frozen=True, kw_only=True, eq=False)
class Generated:
    """A response as a server gives it, checked.

    Example: Generated(token_ids=[8, 5, 2], logprobs=[-0.1, -1.2, -0.3], finish_reason="stop", labels=[("a1-12", 3)])
    """

    token_ids: list[int]
    logprobs: list[float]  # log q, of the distribution that the tokens were drawn from
    finish_reason: FinishReason
    labels: list[tuple[str, int]]  # of the weights that drew them: spans of so many tokens
    full_logprobs: list[float] | None = None  # log π, where the server knows it and q is not π
    experts: np.ndarray | None = None  # [prompt + response - 1, L, K], where they are wanted


@runtime_checkable
class ServerApi(Protocol):
    """One kind of server."""

    name: str

    def command(self, *, model: Path, address: str, port: int, max_length: int, dtype: str, kind: str) -> list[str]:
        """What starts a server for a model's configuration, whatever its weights, on a device of that kind."""
        ...

    def environment(self, key: str) -> Mapping[str, str]:
        """What the server's process gets besides the trainer's environment."""
        ...

    def about(self) -> Request:
        """Asks for what `check` reads."""
        ...

    def check(self, about: Any, *, max_length: int) -> Mapping[str, str]:
        """The server's version and dtype; ValueError with the reason where it would compute something else."""
        ...

    def label(self) -> Request:
        """Asks for what `read_label` reads."""
        ...

    def read_label(self, answer: Any) -> str:
        """The label of the weights that the server has."""
        ...

    def publish(self, paths: Sequence[str], label: str) -> list[Request]:
        """Replace the weights by those of the files, and forget what was computed with others."""
        ...

    def sample(self, asked: Asked, label: str) -> Request:
        """Asks for a group of responses of the weights with this label."""
        ...

    def read(self, answer: Any, asked: Asked) -> list[Generated]:
        """The responses, in their order; BadAnswerError where the answer is not that."""
        ...
