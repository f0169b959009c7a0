"""The nouns that flow from stage to stage: values, frozen, without behaviour."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxtyping import Float, Int, Integer
from torch import Tensor

from gspo.errors import FailureKind

Messages = list[dict[str, Any]]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Query:
    """One question to the policy; groups are keyed by `id`, never by the prompt's text."""

    id: str  # "<source>:<row number>", unique within a source
    prompt: str | Messages  # as the data has it: what a reward function receives
    text: str  # what the model reads (chat template applied)
    prompt_ids: tuple[int, ...]
    columns: Mapping[str, Any]  # the data's other columns: to the reward by name


@dataclass(frozen=True, kw_only=True, eq=False)
class Experts:
    """The K experts that each of a model's L routers sent a sequence's tokens to; the last token, never read, has none.

    On the CPU, in the smallest integers that hold them.
    """

    prefix: Integer[Tensor, "P L K"]  # the prompt's tokens but the last: one tensor for a group that shares its prompt
    row: Integer[Tensor, "T L K"]  # the token before each of the response's, whose hidden state it is predicted from


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One response of the policy to a query, with all that is known about how it was sampled."""

    response_ids: Int[Tensor, "T"]  # on the CPU; ends with the stop token where finish_reason is "stop"
    text: str  # decoded, special tokens left out, as TRL does
    sampler_logprobs: Float[Tensor, "T"]  # log π of each token, of the whole distribution at the sampling temperature
    finish_reason: FinishReason
    policy_version: int  # updates, made or skipped, before it was sampled
    experts: Experts | None = None  # that the engine activated; None: not recorded
    segments: tuple[int, ...] = ()  # the number of tokens of each; empty without a rollout.segment_separator


@dataclass(frozen=True, kw_only=True)
class Group:
    """The G rollouts of one query."""

    query: Query
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a reward function has no say on a rollout."""

    kind: FailureKind
    message: str  # with the function's name


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the reward functions said of one rollout."""

    reward: float | None  # weighted sum of the parts that apply; None where none applies: no part in the update
    penalty: float = 0.0  # in the reward, for its length (rollout.overlong)
    parts: Mapping[str, float | None]  # by function name, unweighted; None where it failed, too
    failure: Failure | None = None  # of the first function of weight other than 0 that failed: reward is None then
    failures: Mapping[str, Failure] = field(default_factory=dict)  # by function name, those of weight 0 too
    token_rewards: Float[Tensor, "T"] | None = (
        None  # their sum is the reward; where a function scores segments or tokens
    )
    places: Int[Tensor, "T"] | None = None  # of those tokens: the segments that they belong to, or their positions


@dataclass(frozen=True, kw_only=True, eq=False)
class Appraisal:
    """What models other than the policy say of a step's rollouts, by rollout index; empty where they are not used."""

    reference_logprobs: Mapping[int, Float[Tensor, "T"]] = field(default_factory=dict)
    values: Mapping[int, Float[Tensor, "T"]] = field(default_factory=dict)  # of the state before each response token


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step's groups with their scores and advantages, all in the order of the rollouts, group after group."""

    groups: tuple[Group, ...]
    scores: tuple[Score, ...]  # B
    advantages: tuple[float, ...]  # B; where every token has its own, their mean
    token_advantages: Mapping[int, Float[Tensor, "T"]] = field(default_factory=dict)  # of those whose tokens differ
    returns: Mapping[int, Float[Tensor, "T"]] = field(default_factory=dict)  # what a value model learns
    masked: frozenset[int] = frozenset()  # scored, and part of their group's mean, but no part of the loss
    appraisal: Appraisal = field(default_factory=Appraisal)
    dropped: tuple[tuple[Group, tuple[Score, ...]], ...] = ()  # sampled, and left out by dynamic sampling
