"""The sections of the objective: the actor with its surrogate, the KL term, the critic."""

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gspo.recipe.published import (
    ALIASES,
    CORRECTIONS,
    PUBLISHED,
    Advantage,
    Correction,
    CorrectionLevel,
    LengthNorm,
    Level,
    Name,
)
from gspo.recipe.section import (
    Finite,
    Fraction,
    NonNegativeFloat,
    OptimizerConfig,
    PathText,
    Positive,
    PositiveFloat,
    Section,
)

# What an absent or null key takes from the surrogate, or from the correction.
_PUBLISHED_KEYS = {
    "importance_sampling_level",
    "advantage",
    "length_norm",
    "clip_low",
    "clip_high",
    "correction_level",
}


class KlConfig(Section):
    """What holds the policy near a reference model; off at coefficient 0."""

    coefficient: NonNegativeFloat = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    reference: PathText | None = None  # a directory or a hub id; default: the policy as RL begins


class ActorConfig(Section):
    surrogate: Name = "clip"
    # What follows, down to clip_high, is as the surrogate was published where the recipe does not say, or says null.
    importance_sampling_level: Level = "sequence"
    advantage: Advantage = "group"
    length_norm: LengthNorm = "own"  # what divides the sum over a response's tokens
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    clip_high: PositiveFloat = 4e-4
    clip_fraction: Annotated[float, Field(gt=0, lt=0.5)] | None = None  # of the tokens: scales the range to clip it
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0  # the most a ratio counts where Â < 0
    minirl_cap: PositiveFloat = 5.0  # the most that π_θ/π_engine counts
    sapo_temperature: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.05)  # where Â > 0, where Â < 0
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0  # of a later token's or segment's reward, for each one between
    advantage_ddof: Literal[0, 1] = 1  # the divisor of a variance is n - ddof
    opsm_delta: PositiveFloat | None = None  # drop a sequence of Â < 0 with mean log(π_engine/π_θ) above it
    correction: Correction = "none"  # for the engine's likelihoods not being the policy's
    correction_level: CorrectionLevel = "token"  # whose π_old/π_engine it weighs by: a token's, a sequence's mean
    correction_low: PositiveFloat | None = None  # bounds on π_old/π_engine, of the correction's own meaning
    correction_high: PositiveFloat | None = None
    kl: KlConfig = KlConfig()
    entropy_bonus: Finite = 0.0  # coefficient of the mean entropy of a response's tokens
    mini_batches: Positive = 4  # optimiser steps a rollout batch is split into
    micro_batch_tokens: Positive = 16_384  # packed tokens of one forward pass; never splits a sequence
    old_logprobs: Literal["recompute", "engine"] = "recompute"  # whose log-likelihoods are π_old
    routing_replay: Literal["none", "policy", "engine"] = "none"  # whose experts a mixture of experts uses again
    router_aux_loss: NonNegativeFloat = 0.0  # coefficient of the loss that evens out the experts' load
    gradient_checkpointing: bool = False
    gradient_noise: bool = False  # measure the gradient's signal and noise: one more copy of it, on its device
    optimizer: OptimizerConfig = OptimizerConfig()

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, value: Any) -> Any:
        """What the recipe leaves out, as the surrogate's paper has it."""
        if not isinstance(value, dict):
            return value
        given = {name: one for name, one in value.items() if one is not None or name not in _PUBLISHED_KEYS}
        name, correction = given.get("surrogate", "clip"), given.get("correction", "none")
        if isinstance(name, str) and name not in PUBLISHED:
            near = difflib.get_close_matches(name, PUBLISHED, n=1, cutoff=0.5)
            hint = (
                f"it is {ALIASES[name.lower()]}"
                if name.lower() in ALIASES
                else f"did you mean {near[0]}?"
                if near
                else ""
            )
            raise ValueError(f"actor.surrogate: there is no {name}: {hint or 'there are ' + ', '.join(PUBLISHED)}")
        if name not in tuple(PUBLISHED) or correction not in tuple(CORRECTIONS):  # said of the key itself
            return given
        published, published_correction = PUBLISHED[name], CORRECTIONS[correction]
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
        kl_in_loss = self.kl.coefficient > 0 and self.kl.place == "loss"
        return self.entropy_bonus != 0 or kl_in_loss or self.advantage == "gae"

    @property
    def wants_engine_experts(self) -> bool:
        """Whether the engine is to record its experts: to be replayed, or to be told from those after an update."""
        return self.routing_replay == "engine" or self.old_logprobs == "engine"


class CriticOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 1e-5


class CriticConfig(Section):
    """The value model of advantage: gae."""

    trunk: Literal["own", "shared"] = "own"  # a copy of the policy as RL begins, or the policy's hidden states
    gae_gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    whiten: bool = True  # advantages to mean 0 and standard deviation 1 over the batch's tokens
    clip: PositiveFloat | None = 0.2  # how far a value may move from the old one before its loss stops falling
    coefficient: PositiveFloat = 0.5  # of the value loss in the shared trunk's
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
