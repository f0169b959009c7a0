"""What the numbers say, in words: named diagnoses with what to do about them."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gspo.metrics.numbers import is_number
from gspo.recipe.published import PUBLISHED
from gspo.recipe.sections import ActorConfig

WINDOW = 10  # steps a diagnosis looks back on
_LEARNING = 20  # steps in which a value model may still know nothing
_FEW = 5  # steps that a mean of noisy numbers has to have

Lines = Sequence[Mapping[str, Any]]
Diagnosis = tuple[str, str]  # its name, and a sentence


def diagnoses(history: Lines, actor: ActorConfig | None = None) -> dict[str, str]:
    """The diagnoses that hold over the last `WINDOW` steps of the history (or the fewer there are), by name."""
    if not history:
        return {}
    actor, recent = actor or ActorConfig(), history[-WINDOW:]
    signal = dict(_signal(recent, actor))
    return {
        **signal,
        **dict(_clipping(recent, actor, has_signal=not signal)),
        **dict(_sampling(recent)),
        **dict(_gradient(recent)),
        **dict(_updates(recent, len(history))),
    }


def _numbers(lines: Lines, name: str) -> list[float]:
    """The numbers of the steps that have one."""
    return [value for line in lines if is_number(value := line.get(name))]


def _mean(lines: Lines, name: str) -> float:
    """NaN, which is above and below nothing, where no step has a number."""
    values = _numbers(lines, name)
    return statistics.fmean(values) if values else math.nan


def _signal(recent: Lines, actor: ActorConfig) -> Iterator[Diagnosis]:
    if (unscored := _mean(recent, "reward/unscored_fraction")) >= 0.2:
        yield "unscored", f"{unscored:.0%} of responses have no reward: no function applies to them, or one failed"
    # A value model learns from groups of equal rewards, too.
    elif actor.advantage != "gae" and (equal := _mean(recent, "group/zero_variance_fraction")) >= 0.75:
        penalties = _numbers(recent, "reward/overlong_penalty/mean") or [0.0]  # in the reward: no sign of being wrong
        solved = _mean(recent, "reward/mean") - statistics.fmean(penalties) > 0.5
        side = "the task is solved, or too easy" if solved else "the task is too hard for this model"
        yield "no_signal", f"{equal:.0%} of groups have equal rewards: no signal ({side}); change the queries"


def _clipping(recent: Lines, actor: ActorConfig, *, has_signal: bool) -> Iterator[Diagnosis]:
    clipped = _mean(recent, "clip/token_fraction")
    # A surrogate that does not bound the ratio may well clip nothing, or have nothing to clip with.
    could_bind = PUBLISHED[actor.surrogate].bounds_ratio and actor.mini_batches > 1 and has_signal
    if actor.clip_fraction is not None:  # the range sets itself
        return
    if clipped >= 0.6:
        yield "clip_too_narrow", f"{clipped:.0%} of tokens clipped: widen actor.clip_low and actor.clip_high"
    if clipped == 0 and could_bind:
        is_token = actor.importance_sampling_level == "token"
        goal = "the paper's GRPO: 0.2/0.27" if is_token else "to where ratio/sequence_min and _max lie"
        yield (
            "clip_inert",
            f"no token was clipped in {len(recent)} steps: actor.clip_* never bind; narrow them ({goal}) "
            "or raise actor.optimizer.lr",
        )


def _sampling(recent: Lines) -> Iterator[Diagnosis]:
    if (cut := _mean(recent, "response/truncated_fraction")) >= 0.25:
        yield "truncated", f"{cut:.0%} of responses cut off at rollout.max_new_tokens: raise it"
    if (gap := _mean(recent, "mismatch/logprob_gap_mean")) >= 0.05:
        yield "engine_mismatch", f"engine and policy differ by {gap:.3f} nats a token: their weights or numerics differ"
    if (effective := _mean(recent, "ratio/effective_fraction")) < 0.5:
        yield (
            "low_effective_sample",
            f"the ratios leave {effective:.0%} of the samples: a few outweigh the others; lower actor.mini_batches or "
            "actor.optimizer.lr",
        )


def _gradient(recent: Lines) -> Iterator[Diagnosis]:
    ratios = _numbers(recent, "gradient/signal_to_noise")
    if len(ratios) >= _FEW and (ratio := statistics.fmean(ratios)) < 0.05:
        yield (
            "noisy_gradient",
            f"a mini-batch's gradient is lost in its noise (signal-to-noise ratio {ratio:.3f}): raise "
            "rollout.queries_per_step, or lower actor.mini_batches",
        )
    if shares := [pair for line in recent if (pair := _longest(line)) is not None]:
        gradient, tokens = (statistics.fmean(values) for values in zip(*shares, strict=True))
        if gradient >= 0.6 and gradient >= 1.5 * tokens:
            yield (
                "length_share",
                f"the longest quarter of responses carries {gradient:.0%} of the gradient with {tokens:.0%} of the "
                "tokens: see actor.length_norm, rollout.overlong",
            )


def _longest(line: Mapping[str, Any]) -> tuple[float, float] | None:
    """The longest quarter's share of the gradient and of the tokens; where it is empty, the next one's."""
    names = ("gradient/share_by_length", "response/token_share_by_length")
    lists = [shares if isinstance(shares := line.get(name), list) else [] for name in names]
    pairs = list(zip(*lists, strict=False))  # none where a log has but one of the two
    return next((pair for pair in reversed(pairs) if all(map(is_number, pair)) and pair[1] > 0), None)


def _updates(recent: Lines, num_steps: int) -> Iterator[Diagnosis]:
    explained = _numbers(recent, "critic/explained_variance")
    # The median: a single step of nearly equal returns has an explained variance of any size below 0.
    if explained and num_steps >= _LEARNING and (median := statistics.median(explained)) <= 0:
        yield (
            "critic_useless",
            f"the value model explains {median:.0%} of the returns' variance: worse than their mean; "
            "raise critic.optimizer.lr, or take an advantage without it",
        )
    if _mean(recent, "policy/skipped_updates") > 0:
        yield "not_finite", "updates were skipped for a loss or gradient that is not finite: lower actor.optimizer.lr"
