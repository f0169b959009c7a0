"""What gspo asks of a server, in the server's own words: a protocol; vLLM, SGLang and gspo's own engine have it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gspo.recipe.sections import RolloutConfig
from gspo.types import FinishReason

_CLAMPED = -9999.0  # servers send it, or less, in place of a log-likelihood that is NaN or -inf


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


def generated(
    asked: Asked,
    ids: list[int],
    scored: Sequence[tuple[int, float]],
    reason: str,
    spans: Sequence[Mapping[str, Any]],
    experts: np.ndarray | None,
) -> Generated:
    """A response, made of a server's own words; ValueError where it contradicts itself or what was asked for.

    Those are its tokens, what was scored and how, why it ends, and spans of the weights that drew them.
    """
    num_tokens, logprobs = len(ids), [float(number) for _, number in scored]
    if not ids or [token for token, _ in scored] != ids:
        raise ValueError(f"{num_tokens} tokens and log-likelihoods of {len(scored)}, not of the same")
    if not all(_CLAMPED < number <= 1e-3 for number in logprobs):  # NaN is not
        raise ValueError("a log-likelihood is not finite: the weights may not be")
    if reason not in ("stop", "length") or (reason == "stop") != (ids[-1] in asked.stop_ids):
        ends = list(asked.stop_ids)
        raise ValueError(f"finish_reason {reason} after token {ids[-1]}, where the policy ends at {ends}")
    if reason == "length" and num_tokens != asked.settings.max_new_tokens:
        what = f"cut off after {num_tokens} tokens, not {asked.settings.max_new_tokens}"
        raise ValueError(f"{what}: max_model_len or context_length is short")
    labels = [(span["version"], span["end"] - span["start"]) for span in spans]
    are_named = all(isinstance(label, str) for label, _ in labels)
    starts, ends_of_spans = [span["start"] for span in spans], [span["end"] for span in spans]
    if not are_named or [*starts, num_tokens] != [0, *ends_of_spans]:
        raise ValueError(f"the weights of {num_tokens} tokens are named as {spans}")
    if experts is not None and len(experts) != len(asked.prompt_ids) + num_tokens - 1:
        raise ValueError(f"experts of {len(experts)} tokens")
    finish: FinishReason = "stop" if reason == "stop" else "length"
    return Generated(token_ids=ids, logprobs=logprobs, finish_reason=finish, labels=labels, experts=experts)


@runtime_checkable
class ServerApi(Protocol):
    """One kind of server."""

    name: str
    about_path: str  # where a GET says what `check` reads
    label_path: str  # where it says the label of the weights, as `weight_version`

    def command(self, *, model: Path, address: str, port: int, max_length: int, dtype: str, kind: str) -> list[str]:
        """What starts a server for a model's configuration, whatever its weights, on a device of that kind."""
        ...

    def environment(self, key: str) -> Mapping[str, str]:
        """What the server's process gets besides the trainer's environment."""
        ...

    def check(self, about: Any, *, max_length: int) -> Mapping[str, str]:
        """The server's version and dtype; ValueError with the reason where it would compute something else."""
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
