"""Pure functions of tensors: advantages, importance ratios, the published objectives, corrections, KL estimators.

Shapes: B sequences, N response tokens of all sequences packed one after another (lengths [B] sum to N).
"""

from gspo.objective.advantage import group_advantages, token_advantages
from gspo.objective.balance import balance_loss
from gspo.objective.correction import correction_weights
from gspo.objective.gae import advantages_and_returns, value_loss
from gspo.objective.kl import kl_estimate
from gspo.objective.settings import SurrogateSettings
from gspo.objective.surrogate import Surrogate, surrogate

__all__ = [
    "Surrogate",
    "SurrogateSettings",
    "advantages_and_returns",
    "balance_loss",
    "correction_weights",
    "group_advantages",
    "kl_estimate",
    "surrogate",
    "token_advantages",
    "value_loss",
]
