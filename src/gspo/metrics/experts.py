"""Numbers of a mixture of experts: how much of the routing an update changes, and how even the experts' load is."""

import math
from collections.abc import Sequence

import torch

from gspo.learner.update import MiniBatchReport
from gspo.learner.volatility import Activation
from gspo.metrics.numbers import Metrics, fraction
from gspo.types import Experts, Sample


def expert_metrics(samples: Sequence[Sample], reports: Sequence[MiniBatchReport]) -> Metrics:
    """Empty for a model without routers, and where nothing was trained on."""
    loads = [report.activation.load for report in reports if report.activation is not None]
    if not loads:
        return {}
    load = torch.stack(loads).sum(0)  # by layer and expert
    busiest = (load / load.float().mean(-1, keepdim=True)).amax(-1)
    recorded = [experts for sample in samples for experts in (sample.experts, sample.old_experts) if experts]
    metrics: Metrics = {
        **_change_metrics(reports),
        "moe/busiest_expert_load": float(busiest.mean()),
        "moe/busiest_expert_load_by_layer": busiest.tolist(),
        "moe/idle_expert_fraction": float((load == 0).float().mean()),
        "moe/recorded_bytes": float(recorded_bytes(recorded)),
    }
    if any(report.balance_loss for report in reports):
        sums = sum(report.balance_loss * report.num_trained for report in reports)
        metrics["moe/balance_loss"] = sums / sum(report.num_trained for report in reports)
    return metrics


def recorded_bytes(recorded: Sequence[Experts]) -> int:
    """What recorded experts take in memory; what samples share counts once."""
    tensors = {tensor.data_ptr(): tensor for experts in recorded for tensor in (experts.prefix, experts.row)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _change_metrics(reports: Sequence[MiniBatchReport]) -> Metrics:
    """After each number of updates; of a batch's only update, on a sample."""
    metrics: Metrics = {}
    if not math.isnan(mismatch := _changed_fraction(reports[0].activation)):
        metrics["mismatch/expert_fraction"] = mismatch
    by_update = [report.activation for report in reports[1:]] or [reports[0].after]
    compared = [counts for counts in by_update if counts is not None and counts.compared.sum() > 0]
    if compared:
        total = sum(compared[1:], compared[0])
        metrics["moe/expert_change_fraction"] = _changed_fraction(total)
        metrics["moe/expert_change_fraction_by_layer"] = (total.changed / total.compared).tolist()
        metrics["moe/expert_change_fraction_by_update"] = list(map(_changed_fraction, by_update))
    return metrics


def _changed_fraction(counts: Activation | None) -> float:
    """NaN of a mini-batch without any advantage, and where nothing could be compared."""
    return math.nan if counts is None else fraction(int(counts.changed.sum()), int(counts.compared.sum()))
