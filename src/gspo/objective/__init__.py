"""Pure functions of tensors: advantages, importance ratios and clipped surrogates (arXiv 2507.18071).

Shapes: B sequences, N response tokens of all sequences packed one after another (lengths [B] sum to N).
"""

from gspo.objective.advantage import group_advantages
from gspo.objective.balance import balance_loss
from gspo.objective.surrogate import Surrogate, surrogate

__all__ = ["Surrogate", "balance_loss", "group_advantages", "surrogate"]
