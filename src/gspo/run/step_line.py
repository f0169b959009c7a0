"""A step in words: what it came to, and where its time went."""

import math
from collections.abc import Mapping
from typing import Any

_STAGES = {
    "new weights": ("publish",),
    "sampling": ("rollout",),
    "rewards": ("reward",),
    "likelihoods": ("appraisal", "likelihood"),
    "update": ("update",),
}


def step_line(line: Mapping[str, Any]) -> str:
    """The numbers of a step of reinforcement learning, from its line of metrics."""
    low, high = line["ratio/sequence_min"], line["ratio/sequence_max"]
    facts = {
        "reward": f"{line['reward/mean']:.3f}",
        "response tokens": f"{line['response/mean_tokens']:.1f}",
        "clipped tokens": f"{line['clip/token_fraction']:.1%}",
        "equal-reward groups": f"{line['group/zero_variance_fraction']:.0%}",
        "cut off": f"{line['response/truncated_fraction']:.0%}",
        "sequence ratio": "– (nothing to train on)" if math.isnan(low) else f"{low:.4f}…{high:.4f}",
        "tokens/s": f"{line['throughput/generated_tokens_per_second']:,.0f}",
        **_ahead(line),
    }
    return "  ".join([*(f"{name} {fact}" for name, fact in facts.items()), _time(line)])


def _ahead(line: Mapping[str, Any]) -> Mapping[str, str]:
    """Of a step whose groups were sampled ahead: its tokens' age, what is ahead, who had nothing to do."""
    if "staleness/mean" not in line:
        return {}
    idle = [f"{who} {line[f'source/{who}_idle_fraction']:.0%}" for who in ("trainer", "engine")]
    tokens = line["staleness/tokens_by_age"]
    ages = [f"{age}: {number / max(1.0, sum(tokens)):.0%}" for age, number in enumerate(tokens) if number]
    dropped = line["staleness/dropped_groups"]
    return {
        "tokens' age": f"{line['staleness/mean']:.1f} steps ({', '.join(ages)})",
        "ahead": f"{line['source/waiting']:.0f} sampled, {line['source/in_flight']:.0f} in flight",
        **({"too old": f"{dropped:.0f} groups"} if dropped else {}),
        "idle": ", ".join(idle).replace("nan%", "–"),  # a step that was begun by another process
    }


def _time(line: Mapping[str, Any]) -> str:
    """Such as `2.05 s a step (sampling 48%, …)`: the time, then each stage of at least a hundredth of it."""
    stages = {name: sum(line.get(f"time/{part}_seconds", 0.0) for part in parts) for name, parts in _STAGES.items()}
    stages["other"] = max(0.0, line.get("time/total_seconds", 0.0) - sum(stages.values()))
    total = sum(stages.values())
    shares = [f"{name} {seconds / total:.0%}" for name, seconds in stages.items() if total and seconds / total >= 0.01]
    return f"{total:.2f} s a step ({', '.join(shares)})"
