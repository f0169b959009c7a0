"""What sections of a recipe are made of: bounded numbers, the closed section, and the optimiser that several have."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A frozen part of the recipe; unknown keys are errors and defaults are validated too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Optimizer(Section):
    lr: PositiveFloat = 1e-6
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: Natural = 0  # optimiser steps over which the learning rate rises linearly to lr
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up, down to min_lr_fraction · lr
    min_lr_fraction: Fraction = 0.0
    max_grad_norm: PositiveFloat = 1.0
