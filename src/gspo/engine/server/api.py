"""The requests to a server and its answers, whichever server it is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gspo.engine.engine import Completion, Prompt, Sampling
from gspo.types import Experts

CLAMPED = -9999.0  # servers send it, or less, in place of a log-likelihood that is NaN or -inf


class NoAnswerError(Exception):
    """The server has not answered, or not with an answer: asking again may help; the text says what came instead."""


class RefusedError(Exception):
    """The server refuses the request: asking again would not help; the text is what the server says."""


class BadAnswerError(Exception):
    """The server's answer is not what it was asked for; the text says how."""


@contextmanager
def bad_answers() -> Iterator[None]:
    """A context that makes BadAnswerError of what goes wrong while an answer is read."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswerError(f"the answer has another form: {type(error).__name__}: {error}") from None


def require(needed: Mapping[str, object]) -> None:
    """Raise ValueError with the names of what is not true of a server."""
    if missing := [name for name, is_so in needed.items() if not is_so]:
        raise ValueError(f"it runs without what gspo needs: {', '.join(missing)}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The path and the JSON of a request.

    Example: Request(path="/resume", body={}), a POST; without a body it is a GET.
    """

    path: str
    body: Any = None
    seconds: float | None = None  # its own limit
    is_json: bool = True  # what answers it; else a text


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Completions of one prompt that a server is asked for at once.

    Example: SampleRequest(prompts=[prompt, other], sampling=sampling, versions={"a1-12": 12}) with equal ids
    """

    prompts: Sequence[Prompt]
    sampling: Sampling
    versions: Mapping[str, int]  # of the weights that may draw them, by label; the first is the present one's
    base: str = ""  # the label of the weights beneath, where the versions are of an adapter, which has its label's name
    experts: torch.dtype | None = None  # in which the experts are wanted; None: not
    goes_first: bool = False  # before those that wait, where the server can do that

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids of the prompt."""
        return self.prompts[0].ids

    @property
    def max_new_tokens(self) -> int:
        """The limit of each completion."""
        return self.prompts[0].max_new_tokens

    @property
    def label(self) -> str:
        """The label of the weights that the server has now."""
        return next(iter(self.versions))

    @property
    def seed(self) -> int:
        """The seed of all completions, below 2**62, so that a server may add a completion's number."""
        return self.prompts[0].key % 2**62


def completion_of(
    request: SampleRequest,
    ids: list[int],
    scored: Sequence[tuple[int, float]],
    reason: str,
    spans: Sequence[Mapping[str, Any]],
    experts: np.ndarray | None,
) -> Completion:
    """A completion, made of a server's own words; ValueError where it contradicts itself or what was asked for.

    Those are its tokens, what was scored and how, why it ends, spans of the weights that drew them, and the experts
    [prompt + completion - 1, L, K], where they are wanted.
    """
    num_tokens, logprobs, stop_ids = len(ids), [float(number) for _, number in scored], request.sampling.stop_ids
    if not ids or [token for token, _ in scored] != ids:
        raise ValueError(f"{num_tokens} tokens and log-likelihoods of {len(scored)}, not of the same")
    if not all(CLAMPED < number <= 1e-3 for number in logprobs):  # NaN is not
        raise ValueError("a log-likelihood is not finite: the weights may not be")
    if reason not in ("stop", "length") or (reason == "stop") != (ids[-1] in stop_ids):
        ends = list(stop_ids)
        raise ValueError(f"finish_reason {reason} after token {ids[-1]}, where the policy ends at {ends}")
    if reason == "length" and num_tokens != request.max_new_tokens:
        what = f"cut off after {num_tokens} tokens, not {request.max_new_tokens}"
        raise ValueError(f"{what}: max_model_len or context_length is short")
    labels = [(span["version"], span["end"] - span["start"]) for span in spans]
    starts, ends_of_spans = [span["start"] for span in spans], [span["end"] for span in spans]
    if not all(isinstance(label, str) for label, _ in labels) or [*starts, num_tokens] != [0, *ends_of_spans]:
        raise ValueError(f"the weights of {num_tokens} tokens are named as {spans}")
    if others := {label for label, _ in labels} - request.versions.keys():
        raise ValueError(f"sampled with the weights {', '.join(others)}, not {', '.join(request.versions)}")
    first = len(request.ids) - 1  # the prompt's last token predicts the completion's first
    if experts is not None and len(experts) != first + num_tokens:
        raise ValueError(f"experts of {len(experts)} tokens")
    found = None if experts is None else torch.from_numpy(experts.astype("int64")).to(request.experts)
    return Completion(
        token_ids=torch.tensor(ids),
        logprobs=torch.tensor(logprobs),
        full_logprobs=torch.full((num_tokens,), torch.nan) if request.sampling.is_shaped else None,
        versions=tuple((request.versions[label], count) for label, count in labels),
        finish_reason="stop" if reason == "stop" else "length",
        experts=None if found is None else Experts(prefix=found[:first], row=found[first:]),
    )
