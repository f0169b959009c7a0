"""The nouns that flow from stage to stage: values, frozen, without behaviour.

A `Sample` is one response. It is made by the rollout engine and travels through all stages of a step; each stage
returns it, by `dataclasses.replace`, with more of its fields filled in. Its per-token values are [W]: one entry for
each of the tokens that the policy wrote. Tensors lie on the CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from gspo.errors import FailureKind

Messages = list[dict[str, Any]]
FinishReason = Literal["stop", "length", "turns"]  # turns: it could go on behind the last that may be
ShowProgress = Callable[[int, int, str], object]  # how much is done, of how much, and of what: (3, 8, "responses")


@dataclass(frozen=True, kw_only=True)
class Query:
    """A question to the policy; groups are keyed by `id`, never by the prompt's text.

    Example: Query(id="train.jsonl:7", prompt="What is 2 + 3?", text="What is 2 + 3?", prompt_ids=(34, 5, 17, 18, 8),
    columns={"answer": "5"})
    """

    id: str  # "<source>:<row number>", unique within a source
    prompt: str | Messages  # as the data has it: what a reward function receives
    text: str  # what the model reads (chat template applied)
    prompt_ids: tuple[int, ...]
    columns: Mapping[str, Any]  # the data's other columns: to the reward by name
    source: str = ""  # of `queries.sources`; empty where there are none
    teacher_ids: tuple[int, ...] = ()  # what a teacher reads in place of prompt_ids; empty: the same
    remarks: tuple[str, ...] = ()  # what one would not expect of how the prompt came to be


@dataclass(frozen=True, kw_only=True, eq=False)
class Experts:
    """The K experts that each of a model's L routers sent a sequence's tokens to; the last token, never read, has none.

    They are kept in the smallest integers that hold them. Example, of 3 + 2 tokens, 2 routers and 1 of 4 experts:
    Experts(prefix=tensor([[[0], [3]], [[1], [1]]]), row=tensor([[[2], [0]], [[0], [3]]])), both of torch.uint8
    """

    prefix: Integer[Tensor, "P L K"]  # the prompt's tokens but the last: one tensor for a group that shares its prompt
    row: Integer[Tensor, "T L K"]  # the token before each of the response's, whose hidden state it is predicted from


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why a reward function has no score for a response.

    Example: Failure(kind="crashed", message="reward function math: ended with signal 11")
    """

    kind: FailureKind
    message: str  # with the function's name


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A part of a response of several turns: what the policy wrote, or what tools or its environment said.

    Example: Turn(role="tool", text="56088", num_tokens=17)
    """

    role: Literal["user", "assistant", "tool"]  # the user's is what an environment says first, or by its method step
    text: str  # of a tool's turn, the results one below the other
    num_tokens: int  # with those that the chat template writes around results
    num_calls: int = 0  # of tools that the policy made in it
    num_errors: int = 0  # of them: what the policy wrote is no call, or the tool has raised an error
    reward: float | None = None  # what the environment's method step gave for it, or the agent
    number: int = 0  # of an agent's completions, whose contexts may interleave; 0: turns stand as they were written


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of the reward functions for one response.

    Example: Score(reward=0.9, parts={"exact_match": 1.0, "brevity": -0.1}) where both functions have weight 1.
    """

    reward: float | None  # weighted sum of the parts that apply; None where none applies: no part in the update
    penalty: float = 0.0  # in the reward, for the response's length (rollout.overlong)
    parts: Mapping[str, float | None]  # by function name, unweighted; None where it failed, too
    failure: Failure | None = None  # of the first function of weight other than 0 that failed: reward is None then
    failures: Mapping[str, Failure] = field(default_factory=dict)  # by function name, those of weight 0 too
    weights: Mapping[str, float] = field(default_factory=dict, compare=False)  # by function name, without those of 0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)  # logged, by function/column: text, numbers
    token_rewards: Float[Tensor, "W"] | None = None  # they sum to the reward; only where segments or tokens are scored
    places: Int[Tensor, "W"] | None = None  # the segment that each of those tokens belongs to; None: its position


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceStats:
    """The statistics of one sequence in the update, in a mini-batch that trained it.

    Example: SequenceStats(mini_batch=1, num_tokens=2, num_clipped=2, sequence_ratio=1.05, entropy_sum=1.9,
    old_logprobs=tensor([-0.7, -0.2]), log_ratios=tensor([0.08, 0.02])) for a sequence that was clipped as a whole.
    """

    mini_batch: int  # from 0, through all epochs of a step
    num_tokens: int  # W
    num_clipped: int  # tokens
    sequence_ratio: float
    entropy_sum: float  # the sum over its tokens
    old_logprobs: Float[Tensor, "W"]
    log_ratios: Float[Tensor, "W"]  # log π_θ/π_old of each token
    num_masked: int = 0  # tokens that a correction or OPSM has dropped
    ratio_sum: float = 0.0  # of the token ratios π_θ/π_old
    ratio_square_sum: float = 0.0
    gradient_weight: float = 0.0  # Σ_t |∂ per_sequence / ∂ log π_t|
    correction_weight: float = 1.0  # mean over its tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A response of the policy to a query, with the results of all stages of a step.

    Example, of a response of three tokens as it is sampled:
    Sample(query=query, token_ids=tensor([8, 5, 2]), loss_mask=tensor([True, True, True]), text="= 5",
    finish_reason="stop", sampler_logprobs=tensor([-0.1, -1.2, -0.3]), versions=((12, 3),))
    Scoring adds score=Score(reward=1.0, …), the advantages' stage advantage=0.7, the update stats=SequenceStats(…).
    """

    query: Query
    token_ids: Int[Tensor, "T"]  # where finish_reason is "stop", up to a stop token or the end of a stop string
    loss_mask: Bool[Tensor, "T"]  # the W tokens that the policy wrote; the others are context that it only reads
    text: str  # what it adds to the prompt's; a token that ends it is left out, other special tokens stay
    finish_reason: FinishReason
    sampler_logprobs: Float[Tensor, "W"]  # log q, of the distribution that the tokens were drawn from
    versions: tuple[tuple[int, int], ...]  # spans (updates made or skipped before, tokens that this policy wrote)
    experts: Experts | None = None  # that the engine activated; None: not recorded
    full_logprobs: Float[Tensor, "W"] | None = None  # log π at the temperature, by the engine; None: q is π
    segments: tuple[int, ...] = ()  # the number of tokens of each; empty without a rollout.segment_separator
    turns: tuple[Turn, ...] = ()  # their tokens are the response's; empty without rollout.tools
    # Where in token_ids contexts of their own begin, each up to the first token that the policy wrote behind it; tokens
    # before the first of them follow the prompt. Empty: all do.
    starts: tuple[int, ...] = ()
    num_taken: int | None = None  # of the tokens that rollout.max_new_tokens allows; None: what `num_limited` counts
    failure: Failure | None = None  # of a tool that gave no answer: the response has no reward
    environment_reward: float | None = None  # what its environment gave in the end, or for its turns in all
    # From the reward functions.
    score: Score | None = None
    # From the models beside the policy, where the recipe has them.
    reference_logprobs: Float[Tensor, "W"] | None = None
    teacher_logprobs: Float[Tensor, "W"] | None = None
    values: Float[Tensor, "W"] | None = None  # of the state before each token
    squared_errors: Float[Tensor, "W"] | None = None  # |1[y] - π|², where an optimal_token_baseline asks for it
    # From the comparison with the group, or with the values.
    masked: bool = False  # scored, and part of the group's mean, but no part of the loss
    advantage: float = 0.0  # where every token has its own, their mean
    token_advantages: Float[Tensor, "W"] | None = None  # where the tokens differ
    returns: Float[Tensor, "W"] | None = None  # what a value model learns
    # From π_old; None: the policy is still π_old when the sample is trained on, so that pass itself gives them.
    old_logprobs: Float[Tensor, "W"] | None = None
    old_experts: Experts | None = None
    # From the update; None: the sample was not trained on.
    stats: SequenceStats | None = None  # of the last epoch
    earlier_stats: tuple[SequenceStats, ...] = ()  # of the epochs before it

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the response."""
        return len(self.token_ids)

    @property
    def num_limited(self) -> int:
        """The tokens that rollout.max_new_tokens limits: of an agent's contexts those that the policy wrote."""
        if self.num_taken is not None:
            return self.num_taken
        return self.num_written if self.starts else self.num_tokens

    @property
    def answer(self) -> str:
        """The text that is judged: of several turns, the last."""
        return self.text if not self.turns else self.turns[-1].text

    @property
    def num_written(self) -> int:
        """The number of tokens that the policy wrote."""
        return len(self.sampler_logprobs)

    @property
    def written_turns(self) -> list[tuple[int, float]]:
        """The number of tokens and the reward of each turn that the policy wrote; a response without turns is one."""
        own = [(turn.num_tokens, turn.reward or 0.0) for turn in self.turns if turn.role == "assistant"]
        return own or [(self.num_written, 0.0)]

    @property
    def turns_in_time(self) -> list[int]:
        """The places of the policy's turns in the order in which it wrote them."""
        numbers = [turn.number for turn in self.turns if turn.role == "assistant"] or [0]
        return sorted(range(len(numbers)), key=numbers.__getitem__)

    @property
    def engine_logprobs(self) -> Float[Tensor, "W"]:
        """Log π of the whole distribution at the temperature, as the engine computed it: a trainer's must be equal."""
        return self.sampler_logprobs if self.full_logprobs is None else self.full_logprobs

    @property
    def reward(self) -> float | None:
        """The reward of the score; it is None if the sample is not scored or no function applied."""
        return None if self.score is None else self.score.reward

    @property
    def all_stats(self) -> tuple[SequenceStats, ...]:
        """Return the statistics of each epoch that has trained the sample."""
        return () if self.stats is None else (*self.earlier_stats, self.stats)

    @property
    def takes_part(self) -> bool:
        """Tell whether the sample counts in the loss's denominator."""
        return self.reward is not None and not self.masked

    @property
    def has_advantage(self) -> bool:
        """Tell whether the advantage is not 0, or any token's is not."""
        tokens = self.token_advantages
        return self.advantage != 0 if tokens is None else bool((tokens != 0).any())


@dataclass(frozen=True, kw_only=True)
class Group:
    """The G samples of one query.

    Example: Group(samples=(right, wrong)), whose two samples have the same `query`.
    """

    samples: tuple[Sample, ...]

    @property
    def query(self) -> Query:
        """The query that all samples respond to."""
        return self.samples[0].query


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """A query that has been drawn for a step to come and, once that is sampled, its group.

    Example: Drawn(query=query, key_step=13), whose responses have the random numbers of step 13, is in flight.
    """

    query: Query
    key_step: int
    temperature: float = 1.0  # that it is sampled at
    group: Group | None = None
    # Of the calls that scored the group beside the training; as in Batch:
    reward_seconds: Mapping[str, float] = field(default_factory=dict)
    logged: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        """Tell whether the group has scores, none of which is masked but for time: that would be spent once more."""
        scores = [] if self.group is None else [sample.score for sample in self.group.samples]
        masked = [score.failure.kind for score in scores if score is not None and score.failure is not None]
        return bool(scores) and None not in scores and {*masked} <= {"timed_out"}


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The times that the trainer waited in a step, and that the engine sampled: in seconds from the step's beginning.

    Example: Timeline(seconds=3.0, waited=[(0.0, 0.5)], sampled=[(0.2, 1.0), (1.4, 3.0)])
    """

    seconds: float  # that the step took
    waited: Sequence[tuple[float, float]]
    sampled: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The groups of a step, at any of its stages.

    Example: Batch(groups=(group, other), reward_seconds={"exact_match": 0.02}) after scoring.
    """

    groups: tuple[Group, ...]
    dropped: tuple[Group, ...] = ()  # sampled and scored, but not trained on (dynamic sampling)
    reward_seconds: Mapping[str, float] = field(default_factory=dict)  # by function, summed over calls, which overlap
    logged: Mapping[str, tuple[float, int]] = field(default_factory=dict)  # by function/metric: sum, number of values
    version: int = 0  # of the policy, as the step begins: the updates that were made or skipped before
    num_too_old: int = 0  # groups that were sampled too many steps before, and neither scored nor trained on

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Return all samples that are not dropped, group after group."""
        return tuple(sample for group in self.groups for sample in group.samples)

    def with_changed(self, changed: Mapping[Sample, Sample]) -> Self:
        """The batch with samples replaced, each in its place; those that are not named stay."""
        groups = (tuple(changed.get(sample, sample) for sample in group.samples) for group in self.groups)
        return replace(self, groups=tuple(Group(samples=samples) for samples in groups))
