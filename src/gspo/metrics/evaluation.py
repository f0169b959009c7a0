"""The scores on held-out queries among a run's metrics: what they are called, and how they read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo.errors import visible
from gspo.evaluation.held_out import HeldOutScore
from gspo.metrics.numbers import Metrics, is_number

_PASS, _REWARD = "/pass_at_1", "/reward_mean"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A score of an evaluated set.

    Example: Measure(label="pass@1 (a)", name="evaluation/a/pass_at_1", error="evaluation/a/standard_error")
    """

    label: str
    name: str  # of its metric
    error: str  # of the metric that is its standard error over questions


def measures(lines: Iterable[Mapping[str, Any]]) -> list[Measure]:
    """pass@1 of each evaluated set and, wherever it is not the same number, its mean reward."""
    results: dict[str, Measure] = {}
    for line in lines:
        for name in line:
            if name.startswith("evaluation/") and name.endswith(_PASS):
                home = name.removesuffix(_PASS)
                label, reward = home.removeprefix("evaluation/"), home + _REWARD
                results.setdefault(name, Measure(label=f"pass@1 ({label})", name=name, error=f"{home}/standard_error"))
                if is_number(line.get(reward)) and line[reward] != line[name]:
                    error = f"{home}/reward_standard_error"
                    results.setdefault(reward, Measure(label=f"reward ({label})", name=reward, error=error))
    return list(results.values())


def measured(line: Mapping[str, Any], measure: Measure) -> str:
    """Such as `0.514 ± 0.022`; without the error, or without any number, where there is none."""
    if not is_number(line.get(measure.name)):
        return "–"
    error = f" ± {line[measure.error]:.3f}" if is_number(line.get(measure.error)) else ""
    return f"{line[measure.name]:.3f}{error}"


def evaluation_metrics(score: HeldOutScore, set_name: str) -> Metrics:
    """The same names for every evaluation of a run."""
    functions = score.function_means if len(score.function_means) > 1 else {}
    home = f"evaluation/{set_name}"
    return {
        f"{home}/pass_at_1": score.pass_at_1.mean,
        f"{home}/standard_error": score.pass_at_1.error_over_questions,
        f"{home}/standard_error_samples": score.pass_at_1.error_over_samples,
        f"{home}/reward_mean": score.reward.mean,
        f"{home}/reward_standard_error": score.reward.error_over_questions,
        f"{home}/unjudged_fraction": score.num_unjudged / score.num_responses,
        f"{home}/failed_fraction": score.num_failed / score.num_responses,
        f"{home}/mean_tokens": score.mean_response_tokens,
        f"{home}/truncated_fraction": score.truncated_fraction,
        **{f"{home}/{function}/mean": mean for function, mean in functions.items()},
    }


def evaluation_summary(score: HeldOutScore, metrics: Metrics) -> str:
    """Such as `0.514 ± 0.022 on 512 held-out queries`, the reward where it is another number, the judges of several."""
    pass_at_1, *rewards = measures([metrics])
    size, judges = score.pass_at_1.num_questions, score.num_judged_by
    words = f"{measured(metrics, pass_at_1)} on {size} held-out {'query' if size == 1 else 'queries'}"
    words += "".join(f", reward {measured(metrics, reward)}" for reward in rewards)
    if len(judges) > 1:  # some of them may not be verifiers at all
        words += f"; judged by {', '.join(f'{name}: {number}' for name, number in judges.items())}"
    if score.num_unjudged:
        words += f"; no reward function applies to {score.num_unjudged} of {score.num_responses} responses: left out"
    return words


def failure_summary(score: HeldOutScore) -> str:
    """What reward functions that failed have done to the scores, and how the first failed; empty where none has."""
    if not score.first_failure:
        return ""
    return (
        f"reward functions failed on some of {score.num_responses} held-out responses: {score.num_failed} count as not "
        f"passed, {score.num_masked} have no reward; the first: {visible(score.first_failure)}"
    )
