"""The sections of the objective: the actor with its surrogate, the KL term, the critic."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gspo.recipe.published import (
    CORRECTIONS,
    PUBLISHED,
    Advantage,
    Correction,
    CorrectionLevel,
    LengthNorm,
    Level,
    Name,
)
from gspo.recipe.sections import (
    Finite,
    Fraction,
    NonNegativeFloat,
    Number,
    OptimizerConfig,
    PathText,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
    key,
)

# Keys that are as the surrogate, or the correction, was published where the recipe leaves them out or says null.
AS_PUBLISHED = ("importance_sampling_level", "advantage", "length_norm", "clip_low", "clip_high", "correction_level")


class KlConfig(Section):
    """What holds the policy near a reference model; off at coefficient 0."""

    coefficient: NonNegativeFloat = key(0.0, "The weight of the KL divergence from the reference model; 0: none.")
    estimator: Literal["k1", "k2", "k3"] = key("k3", "How the divergence is estimated from the sampled tokens.")
    place: Literal["loss", "reward"] = key("loss", "Whether the divergence is a part of the `loss` or of the `reward`.")
    reference: PathText | None = key(None, "A directory or hub id; by default the policy as RL begins.")


class ActorConfig(Section):
    surrogate: Name = key("clip", "The published objective; see [algorithms](algorithms.md).")
    importance_sampling_level: Level = key("sequence", "Whose ratio it is; `sequence` is GSPO, `token` is GRPO.")
    advantage: Advantage = key(
        "group", "What a reward is compared with ([algorithms](algorithms.md)); `gae` needs `critic`."
    )
    length_norm: LengthNorm = key("own", "What divides a response's sum; see [algorithms](algorithms.md).")
    clip_low: PositiveFraction = key(3e-4, "Ratios below 1 - `clip_low` are clipped. Of `clip`: 3e-4; by token 0.2.")
    clip_high: PositiveFloat = key(4e-4, "Ratios above 1 + `clip_high` are clipped. Of `clip`: 4e-4; by token 0.27.")
    clip_fraction: Annotated[Number, Field(gt=0, lt=0.5)] | None = key(
        None, "Scale the clip range, step by step, so that about this fraction of tokens is clipped, such as 0.15."
    )
    dual_clip: Annotated[Number, Field(gt=1, allow_inf_nan=False)] = key(3.0, "The most a ratio counts where Â < 0.")
    minirl_cap: PositiveFloat = key(5.0, "Of `minirl`: the most that π_θ/π_engine counts.")
    sapo_temperature: tuple[PositiveFloat, PositiveFloat] = key((1.0, 1.05), "Of `sapo`: τ where Â > 0, where Â < 0.")
    discount: PositiveFraction = key(1.0, "The factor on a later token's or segment's reward, for each one between.")
    advantage_ddof: Literal[0, 1] = key(1, "A variance is divided by n - ddof.")
    opsm_delta: PositiveFloat | None = key(None, "Drop a sequence of Â < 0 if its mean log(π_engine/π_θ) is larger.")
    correction: Correction = key("none", "For an engine whose likelihoods differ; see [algorithms](algorithms.md).")
    correction_level: CorrectionLevel = key("token", "The ratio of each token, or a sequence's geometric mean.")
    correction_low: PositiveFloat | None = key(None, "The correction's lower bound on π_old/π_engine.")
    correction_high: PositiveFloat | None = key(None, "The correction's upper bound on π_old/π_engine.")
    kl: KlConfig = key(KlConfig(), "The KL term from a reference model.")
    entropy_bonus: Finite = key(0.0, "The coefficient of the mean entropy of a response's tokens.")
    mini_batches: Positive = key(4, "Optimiser steps for one rollout batch; a divisor of `queries_per_step`.")
    micro_batch_tokens: Positive = key(16_384, "Tokens of one forward pass; fewer need less memory in the update.")
    old_logprobs: Literal["recompute", "engine"] = key("recompute", "Who computes π_old (§5.4).")
    routing_replay: Literal["none", "policy", "engine"] = key(
        "none", "The update reuses the experts of π_old (`policy`) or of the `engine` ([experts](experts.md))."
    )
    router_aux_loss: NonNegativeFloat = key(0.0, "The weight of the loss that balances experts; 0: none.")
    gradient_checkpointing: bool = key(False, "Compute activations again in the backward pass, which saves memory.")
    gradient_noise: bool = key(False, "Measure the gradient's signal and noise; costs a copy of it, 9 % of a step.")
    optimizer: OptimizerConfig = key(OptimizerConfig(), "AdamW and its schedule, counted in optimiser steps.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_as_published(cls, value: Any) -> Any:
        """Give the keys that the recipe leaves out the values from the surrogate's and the correction's papers."""
        if not isinstance(value, dict):
            return value
        given = {name: set_to for name, set_to in value.items() if set_to is not None or name not in AS_PUBLISHED}
        surrogate, correction = given.get("surrogate", "clip"), given.get("correction", "none")
        if surrogate not in tuple(PUBLISHED) or correction not in tuple(CORRECTIONS):  # refused by the key itself
            return given
        published, published_correction = PUBLISHED[surrogate], CORRECTIONS[correction]
        level = given.get("importance_sampling_level", published.level)
        low, high = published.range(level if level in published.levels else published.level)
        return {
            "importance_sampling_level": published.level,
            "advantage": published.advantage,
            "length_norm": published.length_norm,
            "clip_low": low,
            "clip_high": high,
            "correction_level": published_correction.levels[0],
            "correction_low": published_correction.low,
            "correction_high": published_correction.high,
            **given,
        }

    @property
    def title(self) -> str:
        """What a person calls the objective."""
        if self.surrogate == "clip":
            return {"sequence": "GSPO", "sequence_token": "GSPO-token", "token": "GRPO"}[self.importance_sampling_level]
        return PUBLISHED[self.surrogate].title

    @property
    def every_sequence_trains(self) -> bool:
        """Whether a response without an advantage has a gradient, too."""
        return self.entropy_bonus != 0 or self.kl_in_loss or self.advantage == "gae"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl.coefficient > 0 and self.kl.place == "loss"

    @property
    def wants_engine_experts(self) -> bool:
        """Whether the engine records its experts, to be replayed or to be compared with those after an update."""
        return self.routing_replay == "engine" or self.old_logprobs == "engine"


class CriticOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 1e-5


class CriticConfig(Section):
    """The value model of advantage: gae."""

    trunk: Literal["own", "shared"] = key("own", "A model of its `own`, or a head on the policy's hidden states.")
    gae_gamma: Fraction = key(1.0, "The discount γ of GAE.")
    gae_lambda: Fraction = key(0.95, "The λ of GAE.")
    whiten: bool = key(True, "Bring advantages to mean 0 and standard deviation 1 over the batch's tokens.")
    clip: PositiveFloat | None = key(0.2, "A value's loss stops falling so far from the old value; `null`: nowhere.")
    coefficient: PositiveFloat = key(0.5, "The weight of the value loss in a shared trunk.")
    optimizer: CriticOptimizerConfig = key(CriticOptimizerConfig(), "The keys of `actor.optimizer`.")
