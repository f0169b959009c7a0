"""The recipe: one YAML file, one complete run. Every section is typed, frozen and closed to unknown keys."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from gspo.recipe.combinations import impossible
from gspo.recipe.objective import ActorConfig, CriticConfig
from gspo.recipe.section import (
    MAX_DRAWN,
    BelowOne,
    Finite,
    Fraction,
    Natural,
    NumResponses,
    OptimizerConfig,
    PathText,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
)

__all__ = [
    "ActorConfig",
    "CheckpointConfig",
    "ColdStartConfig",
    "ColdStartOptimizerConfig",
    "CriticConfig",
    "EvaluationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Per",
    "ProceduralConfig",
    "QueriesConfig",
    "Recipe",
    "ReportConfig",
    "RewardConfig",
    "RolloutConfig",
    "Section",
]

Per = Literal["response", "segment", "token"]


class ModelConfig(Section):
    path: PathText | None = None  # a directory or a hub id
    architecture: dict[str, Any] | None = None  # any transformers config with a model_type: a new, untrained model
    tokenizer: PathText | None = None  # directory, hub id, or "fit": a small one from the queries; default: model.path
    trust_remote_code: bool = False  # run the Python code that model and tokenizer directories bring along
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU; bfloat16 with fp32 masters on GPU
    device: str = "auto"  # auto: the first GPU, else the CPU

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.architecture is None):
            raise ValueError("give exactly one of model.path (weights) and model.architecture (a new model)")
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError("model.architecture needs a model_type, such as qwen3_moe")
        if self.architecture is not None and self.tokenizer is None:
            raise ValueError("model.architecture needs model.tokenizer: a directory, a hub id, or fit")
        return self


class ColdStartOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 1e-3
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    schedule: Literal["constant", "linear", "cosine"] = "linear"


class ColdStartConfig(Section):
    steps: Natural = 0  # supervised optimiser steps before RL; 0: none
    path: PathText | None = None  # a file with a prompt and a completion a row
    demonstrations: PathText | None = None  # module:name or file.py:name of f(row, rng) -> completion, over the queries
    rows: Positive = 20_000  # demonstrations drawn (procedural queries) or read at most (path)
    rows_per_step: Positive = 64
    optimizer: ColdStartOptimizerConfig = ColdStartOptimizerConfig()

    @model_validator(mode="after")
    def _source(self) -> Self:
        if self.steps and (self.path is None) == (self.demonstrations is None):
            raise ValueError("cold_start.steps > 0 needs exactly one of cold_start.path and cold_start.demonstrations")
        return self


class ProceduralConfig(Section):
    """A reasoning-gym task; other keys go to the task's own configuration."""

    model_config = ConfigDict(frozen=True, extra="allow")
    task: str
    size: Annotated[int, Field(gt=0, le=MAX_DRAWN)] = 20_000  # distinct training queries drawn


class QueriesConfig(Section):
    path: PathText | None = None  # .jsonl, .json, .csv, .parquet, or a hub id
    config: str | None = None  # the hub data set's configuration
    split: str = "train"  # the hub data set's split
    prompt: str | None = None  # the column with text or chat messages; default: known layouts are recognised
    procedural: ProceduralConfig | None = None
    limit: Positive | None = None  # the first rows only
    system: str | None = None  # a system message before the prompt (chat models)
    template: str | None = None  # text around a text prompt, with {prompt} in it
    chat: bool | None = None  # apply the chat template; default: when the tokenizer has one
    shuffle: bool = True

    @model_validator(mode="after")
    def _template_names_prompt(self) -> Self:
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError("queries.template must contain {prompt}")
        if self.path is not None and self.procedural is not None:
            raise ValueError("give queries.path or queries.procedural, not both")
        return self


class RolloutConfig(Section):
    engine: Literal["embedded"] = "embedded"
    queries_per_step: Positive = 64
    group_size: NumResponses = 8
    max_new_tokens: Positive = 1024
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Natural = 0  # 0: all tokens
    stop_tokens: tuple[str, ...] = ()  # besides the model's own end tokens
    max_rows: Positive = 512  # responses decoded side by side: bounds the key/value cache
    dynamic_sampling: bool = False  # drop groups of equal rewards and sample other queries in their place (DAPO)
    max_rounds: Positive = 4  # of sampling in a step, the first one too; then groups of equal rewards fill the batch
    overlong: Literal["keep", "mask", "penalty"] = "keep"  # what becomes of a response cut off at max_new_tokens
    overlong_margin: Fraction = 0.2  # of max_new_tokens: the last ones, over which the penalty grows from 0 to 1
    segment_separator: Annotated[str, Field(min_length=1)] | None = None  # ends a segment, for rewards per segment


class RewardConfig(Section):
    function: PathText  # built-in name, module:name, or file.py:name
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0  # a sum that is weighted with more may be no number
    per: Per = "response"  # what the function gives a number for
    time_limit_seconds: PositiveFloat = 60.0  # for one call (one group of completions)
    concurrent_calls: Positive | None = None  # at the same time; default: a process a core, at most 8; async: 32 in one
    options: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of the function


class CheckpointConfig(Section):
    """A run is saved, too, when a signal asks it to end, and at its end."""

    every: Natural = 0  # steps between checkpoints; 0: as the seconds say
    seconds: PositiveFloat | None = 600.0  # at most between two checkpoints; null: as `every` says
    keep: Positive = 2  # the newest ones


class EvaluationConfig(Section):
    every: Natural = 0  # steps between evaluations; 0: before and after training only
    num_queries: Annotated[int, Field(ge=0, le=MAX_DRAWN)] = 512  # held out from training; 0: no evaluation
    path: PathText | None = None  # a file, or a hub id, of its own; default: held out from the queries
    split: str = "test"  # the hub data set's split
    samples: NumResponses = 1  # responses a query
    temperature: Temperature = 1.0
    pass_threshold: Finite = 1.0  # a response passes if its reward reaches this


class ReportConfig(Section):
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()  # each is an extra of the package
    project: Annotated[str, Field(min_length=1)] = "gspo"  # that trackio and wandb file the run under
    rollouts: bool = True  # write rollouts/step_*.jsonl
    tokens: bool = True  # with the log ratio of every token


def listed_rewards(value: Any) -> Any:
    """A list of mappings for every way to write `reward:`; what is none of them stays as it is."""
    rewards = [value] if isinstance(value, dict | str) else value
    is_list = isinstance(rewards, list | tuple)
    return [{"function": one} if isinstance(one, str) else one for one in rewards] if is_list else rewards


class Recipe(Section):
    """A complete run (docs/guide.md explains every key)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]  # a directory's, too
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    steps: Positive
    output_dir: PathText | None = None  # default: runs/<name>
    model: ModelConfig
    cold_start: ColdStartConfig = ColdStartConfig()
    queries: QueriesConfig = QueriesConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: tuple[RewardConfig, ...] = ()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    report: ReportConfig = ReportConfig()

    @field_validator("reward", mode="before")
    @classmethod
    def _one_reward_is_a_list_of_one(cls, value: Any) -> Any:
        return listed_rewards(value)

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if faults := list(impossible(self)):
            raise ValueError("\n  ".join(faults))
        return self

    @property
    def run_dir(self) -> Path:
        """Where everything about this run is written."""
        return Path(self.output_dir or f"runs/{self.name}")
