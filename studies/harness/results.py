"""What is kept of a run: the numbers that tables and figures need, in a small JSON file."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from studies.harness.jobs import Job

DIGITS = 4  # significant ones
SERIES = (
    "reward/mean",
    "response/mean_tokens",
    "turns/mean",
    "turns/written_fraction",
    "group/sampled",
    "group/zero_variance_fraction",
    "clip/token_fraction",
    "clip/sequence_fraction",
    "clip/low",
    "clip/high",
    "ratio/sequence_min",
    "ratio/sequence_max",
    "policy/grad_norm",
    "policy/entropy",
    "policy/skipped_updates",
    "mismatch/logprob_gap_mean",
    "ratio/mismatch_log_std",
    "ratio/staleness_log_std",
    "staleness/mean",
    "hook/token_gap_mean",
    "hook/token_gap_max",
    "engine/publish_seconds",
    "engine/probe_gap_mean",
    "moe/expert_change_fraction",
)
LISTS = (
    "clip/token_fraction_by_mini_batch",
    "clip/sequence_fraction_by_mini_batch",
    "moe/expert_change_fraction_by_layer",
    "moe/expert_change_fraction_by_update",
)
STAGES = ("rollout", "reward", "likelihood", "update", "total")
# Forward-token equivalents: a backward pass costs twice its forward pass.
GENERATED, RECOMPUTED, TRAINED = 1, 1, 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run: what it was, and what came of it."""

    digest: str
    overrides: Mapping[str, Any]
    steps: int  # wanted; a run that failed has made fewer
    failed: str | None  # why it ended before its last step
    seconds: Mapping[str, float]  # of the stages over all steps, and of the whole run
    pass_at_1: Sequence[float]  # before and after
    evaluated_tokens: Sequence[float]  # the mean length of the evaluated responses, before and after
    series: Mapping[str, Sequence[float | None]]  # by metric, a number a step
    means: Mapping[str, Sequence[float]]  # of metrics that are lists, over the steps
    suites: Mapping[str, Sequence[float]] = field(default_factory=dict)  # pass@1 of each suite, before and after

    def save(self, path: Path) -> None:
        """Write it, a line a field or metric, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {name: _rounded(value) for name, value in asdict(self).items()}
        lines = [f"{json.dumps(name)}: {_json(value)}" for name, value in fields.items()]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Read what `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def values(self, metric: str) -> list[float]:
        """A number a step; not a number where there is none."""
        return [math.nan if value is None else value for value in self.series.get(metric, ())]

    def compute(self) -> list[float]:
        """Forward-token equivalents spent up to the end of each step."""
        return list(accumulate(self.values("tokens/forward_equivalents")))


Results = Mapping[int, Result]  # of one arm, by seed


def load_result(directory: Path, job: Job) -> Result | None:
    """The result of just this run; None where there is none, or one of another recipe."""
    path = directory / f"{job.name}.json"
    result = Result.load(path) if path.is_file() else None
    return result if result is not None and result.digest == job.digest else None


def collect(
    directory: Path, *, digest: str, overrides: Mapping[str, Any], failed: str | None, seconds: float
) -> Result:
    """The result of the run in a directory."""
    recipe = yaml.safe_load((directory / "recipe.yaml").read_text(encoding="utf-8"))
    metrics = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.exists() else []
    steps = [line for line in lines if line["step"] > 0]
    series = {name: [step.get(name) for step in steps] for name in SERIES if any(name in step for step in steps)}
    series["tokens/forward_equivalents"] = [_forward_equivalents(step, recipe) for step in steps]
    return Result(
        digest=digest,
        overrides=overrides,
        steps=recipe["steps"],
        failed=failed,
        seconds={"run": seconds, **{stage: sum(step[f"time/{stage}_seconds"] for step in steps) for stage in STAGES}},
        pass_at_1=_evaluated(lines, "pass_at_1"),
        evaluated_tokens=_evaluated(lines, "mean_tokens"),
        series=series,
        means={name: _column_means(step[name] for step in steps if name in step) for name in LISTS},
        suites={own["name"]: _evaluated(lines, "pass_at_1", own["name"]) for own in recipe["evaluation"]["suites"]},
    )


def _forward_equivalents(step: Mapping[str, Any], recipe: Mapping[str, Any]) -> float:
    """Response tokens of a step, each as often as it went through the model, a backward pass counted as two."""
    rollout, actor = recipe["rollout"], recipe["actor"]
    groups = step.get("group/sampled", rollout["queries_per_step"])
    generated = step["response/mean_tokens"] * groups * rollout["group_size"]
    trained = step["throughput/trained_tokens_per_second"] * step["time/update_seconds"]  # a count, divided before
    # The first mini-batch's own forward pass is π_old's; counts by mini-batch are not in the metrics.
    later = 1 - 1 / actor["mini_batches"] if actor["old_logprobs"] == "recompute" else 0.0
    return float(GENERATED * generated + RECOMPUTED * later * trained + TRAINED * trained)


def _evaluated(lines: Iterable[Mapping[str, Any]], name: str, suite: str = "held_out") -> list[float]:
    key = f"evaluation/{suite}/{name}"
    return [line[key] for line in lines if key in line]


def _column_means(rows: Iterable[Sequence[float | None]]) -> list[float]:
    """Over the rows that have a number in the column."""
    columns = zip(*rows, strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    return [sum(values) / len(values) if values else math.nan for values in known]


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def _json(value: Any) -> str:
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value, ensure_ascii=False)
    items = (f" {json.dumps(key)}: {json.dumps(item, ensure_ascii=False)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + "\n}"
