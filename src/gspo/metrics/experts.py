"""Numbers of a mixture of experts: how much of the routing an update changes, and how even the experts' load is."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.learner.old_policy import Old
from gspo.learner.update import MiniBatchReport
from gspo.learner.volatility import Activation
from gspo.metrics.numbers import Metrics
from gspo.types import Experts, Rollout


def expert_metrics(
    reports: Sequence[MiniBatchReport], rollouts: Sequence[Rollout], old: Mapping[int, Old] | None
) -> Metrics:
    """Empty for a model without routers, and where nothing was trained on."""
    seen = [report.activation for report in reports]
    known = [one for one in seen if one is not None]
    if not known:
        return {}
    load = torch.stack([one.load for one in known]).sum(0)
    recorded = [rollout.experts for rollout in rollouts] + [one.experts for one in (old or {}).values()]
    metrics: Metrics = {
        **_change_metrics(reports),
        **_load_metrics(load),
        "moe/recorded_bytes": float(recorded_bytes([experts for experts in recorded if experts is not None])),
    }
    if any(report.balance_loss for report in reports):
        sums = sum(report.balance_loss * len(report.trained) for report in reports)
        metrics["moe/balance_loss"] = sums / sum(len(report.trained) for report in reports)
    return metrics


def recorded_bytes(experts: Sequence[Experts]) -> int:
    """What recorded experts take in memory; what rollouts share counts once."""
    tensors = {tensor.data_ptr(): tensor for one in experts for tensor in (one.prefix, one.row)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _change_metrics(reports: Sequence[MiniBatchReport]) -> Metrics:
    """After each number of updates; of a batch's only update, on a sample."""
    metrics: Metrics = {}
    first = reports[0].activation
    if first is not None and first.compared.sum() > 0:
        metrics["mismatch/expert_fraction"] = _fraction([first])
    by_mini_batch = [report.activation for report in reports[1:]] or [reports[0].after]
    compared = [one for one in by_mini_batch if one is not None and one.compared.sum() > 0]
    if compared:
        changed, total = (torch.stack([getattr(one, name) for one in compared]).sum(0) for name in _COUNTS)
        metrics["moe/expert_change_fraction"] = _fraction(compared)
        metrics["moe/expert_change_fraction_by_layer"] = (changed / total).tolist()
        metrics["moe/expert_change_fraction_by_update"] = [
            _fraction([] if one is None else [one]) for one in by_mini_batch
        ]
    return metrics


_COUNTS = ("changed", "compared")


def _fraction(counts: Sequence[Activation]) -> float:
    changed, compared = (sum(int(getattr(one, name).sum()) for one in counts) for name in _COUNTS)
    return changed / compared if compared else math.nan  # a mini-batch without any advantage


def _load_metrics(load: Int[Tensor, "L E"]) -> Metrics:
    relative: Float[Tensor, "L E"] = load / load.float().mean(-1, keepdim=True)
    busiest = relative.amax(-1)
    return {
        "moe/busiest_expert_load": float(busiest.mean()),
        "moe/busiest_expert_load_by_layer": busiest.tolist(),
        "moe/idle_expert_fraction": float((load == 0).float().mean()),
    }
