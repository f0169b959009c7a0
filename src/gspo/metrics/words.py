"""What the numbers of a run say, in words: its scores on held-out queries, and named diagnoses with what to do."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.metrics.numbers import is_number
from gspo.recipe.published import PUBLISHED
from gspo.recipe.sections import ActorConfig

WINDOW = 10  # steps a diagnosis looks back on
_LEARNING = 20  # steps in which a value model may still know nothing
_FEW = 5  # steps that a mean of noisy numbers has to have
# Shown from step `_FEW` on: nothing comes of the steps before they are seen to.
EARLY = ("failing_tools", "no_signal", "not_moving")
_STILL = 0.06  # of (highest − lowest ratio) · √tokens; usual is 0.2, four standard deviations of 0.05
# By what they cost: those first that leave nothing to learn from, last what costs a part of it.
_FIRST = """not_finite engine_mismatch failing_tools unscored no_signal not_moving clipped_noise clipped_staleness
clip_too_narrow"""

Lines = Sequence[Mapping[str, Any]]
Table = Mapping[str, bool]  # "name: sentence", and whether it holds
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
            if name.startswith("evaluation/") and name.endswith(_PASS) and "/logged/" not in name:
                home = name.removesuffix(_PASS)
                label, reward = home.removeprefix("evaluation/"), home + _REWARD
                results.setdefault(name, Measure(label=f"pass@1 ({label})", name=name, error=f"{home}/standard_error"))
                if is_number(line.get(reward)) and line[reward] != line[name]:
                    error = f"{home}/reward_standard_error"
                    results.setdefault(reward, Measure(label=f"reward ({label})", name=reward, error=error))
    return list(results.values())


def measured(line: Mapping[str, Any], measure: Measure) -> str:
    """Return such as `0.514 ± 0.022`; without the error, or without any number, where there is none."""
    if not is_number(line.get(measure.name)):
        return "–"
    error = f" ± {line[measure.error]:.3f}" if is_number(line.get(measure.error)) else ""
    return f"{line[measure.name]:.3f}{error}"


def first_and_last(lines: Lines) -> tuple[int, dict[str, tuple[float, float]]]:
    """Reward and length of responses, as means over the first and the last few steps of training, and how few."""
    steps = [line for line in lines if line["step"] > 0]
    few = max(1, min(_FEW, len(steps) // 2))  # a single step is noise
    names = {"reward": "reward/mean", "response tokens": "response/mean_tokens"}
    return few, {label: (_mean(steps[:few], name), _mean(steps[-few:], name)) for label, name in names.items()}


def diagnoses(history: Lines, actor: ActorConfig | None = None) -> dict[str, str]:
    """The diagnoses that hold over the last `WINDOW` steps of the history (or the fewer there are), by name."""
    recent = history[-WINDOW:]
    table = {
        **_of_rewards_and_clipping(recent, actor or ActorConfig()),
        **_of_moves(history, actor or ActorConfig()),
        **_of_samples_and_updates(recent, len(history)),
        **_of_engines(recent, actor or ActorConfig()),
    }
    found = dict(" ".join(text.split()).split(": ", 1) for text, holds in table.items() if holds)
    names = [name for name in _FIRST.split() if name in found]
    return {name: found[name] for name in dict.fromkeys([*names, *found])}


def early_diagnoses(history: Lines, actor: ActorConfig) -> dict[str, str]:
    """Return those of `EARLY` that hold where there are a few steps yet."""
    found = diagnoses(history, actor) if len(history) >= _FEW else {}
    return {name: found[name] for name in EARLY if name in found}


def _of_rewards_and_clipping(recent: Lines, actor: ActorConfig) -> Table:
    unscored, equal = _mean(recent, "reward/unscored_fraction"), _mean(recent, "group/zero_variance_fraction")
    is_unscored = unscored >= 0.2
    # With a value model or a teacher, groups of equal rewards train, too.
    has_own = actor.advantage == "gae" or not math.isnan(_mean(recent, "teacher/kl"))
    has_no_signal = not is_unscored and not has_own and equal >= 0.75
    penalty = _mean(recent, "reward/overlong_penalty/mean")  # in the reward: no sign of being wrong
    is_solved = _mean(recent, "reward/mean") - (0.0 if math.isnan(penalty) else penalty) > 0.5
    side = "the task is solved, or too easy; end the run, or ask harder questions"
    side = side if is_solved else "the task is too hard for this model; ask easier questions, or reward a part"
    clipped, is_fixed = _mean(recent, "clip/token_fraction"), actor.clip_fraction is None  # or the range sets itself
    # A surrogate that does not bound the ratio may well clip nothing, or have nothing to clip with.
    could_bind = PUBLISHED[actor.surrogate].bounds_ratio and actor.updates_per_step > 1
    is_token = actor.importance_sampling_level == "token"
    goal = "the paper's GRPO has 0.2/0.27" if is_token else "to where ratio/sequence_min and _max lie"
    return {
        f"""unscored: {unscored:.0%} of responses have no reward: no function applies to them, or one failed
        """: is_unscored,
        f"""no_signal: {equal:.0%} of groups have equal rewards: no signal ({side})
        """: has_no_signal,
        f"""clip_too_narrow: {clipped:.0%} of tokens clipped: widen actor.clip_low and actor.clip_high
        """: clipped >= 0.6 and is_fixed,
        f"""clip_inert: no token was clipped in {len(recent)} steps: actor.clip_* never bind; narrow them ({goal})
        or raise actor.optimizer.lr
        """: clipped == 0 and is_fixed and could_bind and not is_unscored and not has_no_signal,
    }


def _of_moves(history: Lines, actor: ActorConfig) -> Table:
    """Diagnoses of the first steps' moves: later a policy may have come to rest."""
    tokens, low, high = (
        _mean(history, name) for name in ("response/mean_tokens", "ratio/sequence_min", "ratio/sequence_max")
    )
    is_early = _FEW <= len(history) < _LEARNING and actor.updates_per_step > 1
    return {
        f"""not_moving: in {len(history)} steps of {tokens:,.0f} tokens a response the ratios of a step lay between
        {low:.5f} and {high:.5f}: the policy hardly moves; raise actor.optimizer.lr, such as tenfold
        """: is_early and (high - low) * math.sqrt(abs(tokens)) < _STILL
    }


def _of_samples_and_updates(recent: Lines, num_steps: int) -> Table:
    cut, effective = _mean(recent, "response/truncated_fraction"), _mean(recent, "ratio/effective_fraction")
    errors = _mean(recent, "tools/error_fraction")
    run_on, advice = _mean(recent, "response/run_on_fraction"), "raise it"
    if run_on >= cut / 2:
        advice = f"""{run_on:.0%} go on behind the end of their turn, or write the user's next one: name what ends it in
        rollout.stop_tokens or rollout.stop_strings"""
    to_noise = _numbers(recent, "gradient/signal_to_noise")
    ratio = statistics.fmean(to_noise)
    shares = [pair for line in recent if (pair := _longest(line)) is not None] or [(math.nan, math.nan)]
    gradient, tokens = (statistics.fmean(values) for values in zip(*shares, strict=True))
    # The median: a single step of nearly equal returns has an explained variance of any size below 0.
    explained = statistics.median(_numbers(recent, "critic/explained_variance"))
    return {
        f"""failing_tools: {errors:.0%} of the calls of tools end in an error: gspo show says in which; correct the
        tools, or show the policy how to call them
        """: errors >= 0.9,
        f"truncated: {cut:.0%} of responses cut off at rollout.max_new_tokens: {advice}": cut >= 0.25,
        f"""low_effective_sample: the ratios leave {effective:.0%} of the samples: a few outweigh the others; lower
        actor.mini_batches or actor.optimizer.lr
        """: effective < 0.5,
        f"""noisy_gradient: a mini-batch's gradient is lost in its noise (signal-to-noise ratio {ratio:.3f}): raise
        rollout.queries_per_step, or lower actor.mini_batches
        """: len(to_noise) >= _FEW and ratio < 0.05,
        f"""length_share: the longest quarter of responses carries {gradient:.0%} of the gradient with {tokens:.0%} of
        the tokens: see actor.length_norm, rollout.overlong
        """: gradient >= 0.6 and gradient >= 1.5 * tokens,
        f"""critic_useless: the value model explains {explained:.0%} of the returns' variance: worse than their mean;
        raise critic.optimizer.lr, or take an advantage without it
        """: explained <= 0 and num_steps >= _LEARNING,
        """not_finite: updates were skipped for a loss or gradient that is not finite: lower actor.optimizer.lr
        """: _mean(recent, "policy/skipped_updates") > 0,
    }


def _of_engines(recent: Lines, actor: ActorConfig) -> Table:
    gap, noise = _mean(recent, "mismatch/logprob_gap_mean"), _mean(recent, "ratio/mismatch_log_std")
    counts = [line.get(name) for line in recent for name in ("engine/retries", "engine/restarts")]
    failures = sum(count for count in counts if is_number(count))
    is_in_ratio = actor.old_logprobs == "engine" and actor.importance_sampling_level != "token"
    is_cut = is_in_ratio and PUBLISHED[actor.surrogate].bounds_ratio and noise >= 0.5 * actor.clip_low
    age = _mean(recent, "staleness/mean")  # NaN where nothing can be stale
    return {
        f"""engine_mismatch: engine and policy differ by {gap:.3f} nats a token: their weights or numerics differ
        """: gap >= 0.05 and not age > 0,
        f"""clipped_noise: the engine's rounding alone moves log s by {noise:.1g}, and actor.clip_low is
        {actor.clip_low:g}: set actor.old_logprobs: recompute
        """: is_cut and not age > 0,
        f"""clipped_staleness: the tokens' age alone, {age:.2g} in steps, moves log s by {noise:.1g}, and
        actor.clip_low is {actor.clip_low:g}: set actor.clip_fraction, or a wider range
        """: is_cut and age > 0,
        f"""engine_failures: in {len(recent)} steps servers were asked or started again {failures:g} times: the end of
        their log in the run's directory says why
        """: failures > 0,
    }


def _numbers(lines: Lines, name: str) -> list[float]:
    """The numbers of the steps that have one; a NaN, which is above and below nothing, where no step has."""
    return [value for line in lines if is_number(value := line.get(name))] or [math.nan]


def _mean(lines: Lines, name: str) -> float:
    return statistics.fmean(_numbers(lines, name))


def _longest(line: Mapping[str, Any]) -> tuple[float, float] | None:
    """The longest quarter's share of the gradient and of the tokens; where it is empty, the next one's."""
    names = ("gradient/share_by_length", "response/token_share_by_length")
    lists = [shares if isinstance(shares := line.get(name), list) else [] for name in names]
    pairs = list(zip(*lists, strict=False))  # none where a log has but one of the two
    return next((pair for pair in reversed(pairs) if all(map(is_number, pair)) and pair[1] > 0), None)
