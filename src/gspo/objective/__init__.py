"""Pure functions of tensors: advantages, importance ratios, the published objectives, corrections, KL estimators.

Shapes: B sequences, N response tokens of all sequences packed one after another (lengths [B] sum to N).
"""

from gspo.objective.advantage import (
    advantages_and_returns,
    distillation_advantages,
    group_advantages,
    normalize_then_sum,
    optimal_token_advantages,
    token_advantages,
    turn_advantages,
)
from gspo.objective.auxiliary_losses import balance_loss, kl_estimate, value_loss
from gspo.objective.ratio import correction_weights
from gspo.objective.surrogate import Surrogate, surrogate
from gspo.objective.terms import SurrogateSettings

__all__ = [
    "Surrogate",
    "SurrogateSettings",
    "advantages_and_returns",
    "balance_loss",
    "correction_weights",
    "distillation_advantages",
    "group_advantages",
    "kl_estimate",
    "normalize_then_sum",
    "optimal_token_advantages",
    "surrogate",
    "token_advantages",
    "turn_advantages",
    "value_loss",
]
