"""What the numbers say, in words: named diagnoses with what to do about them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.metrics.numbers import is_number
from gspo.recipe.published import PUBLISHED
from gspo.recipe.schema import ActorConfig

WINDOW = 10  # steps a diagnosis looks back on
_LEARNING = 20  # steps in which a value model may still know nothing
_FEW = 5  # steps that a mean of noisy numbers has to have

Lines = Sequence[Mapping[str, Any]]


def diagnoses(history: Lines, actor: ActorConfig | None = None) -> dict[str, str]:
    """The diagnoses that hold over the last `WINDOW` steps of the history (or the fewer there are), by name."""
    if not history:
        return {}
    actor, recent = actor or ActorConfig(), history[-WINDOW:]
    found = _signal(recent, actor)
    return {
        **found,
        **_clipping(recent, actor, has_signal=not found),
        **_sampling(recent),
        **_gradient(recent),
        **_critic(recent, len(history)),
        **_updates(recent),
    }


def _known(lines: Lines, name: str) -> list[float]:
    """The numbers of the steps that have one."""
    return [value for line in lines if is_number(value := line.get(name))]


def _mean(lines: Lines, name: str) -> float:
    """NaN, which is above and below nothing, where no step has a number."""
    values = _known(lines, name)
    return statistics.fmean(values) if values else math.nan


def _signal(recent: Lines, actor: ActorConfig) -> dict[str, str]:
    if (unscored := _mean(recent, "reward/unscored_fraction")) >= 0.2:
        return {"unscored": f"{unscored:.0%} of responses have no reward: no function applies to them, or one failed"}
    if actor.advantage == "gae":  # a value model learns from groups of equal rewards, too
        return {}
    if (equal := _mean(recent, "group/zero_variance_fraction")) >= 0.75:
        penalties = _known(recent, "reward/overlong_penalty/mean") or [0.0]  # in the reward, and no sign of being wrong
        solved = _mean(recent, "reward/mean") - statistics.fmean(penalties) > 0.5
        side = "the task is solved, or too easy" if solved else "the task is too hard for this model"
        return {"no_signal": f"{equal:.0%} of groups have equal rewards: no signal ({side}); change the queries"}
    return {}


def _clipping(recent: Lines, actor: ActorConfig, *, has_signal: bool) -> dict[str, str]:
    if actor.clip_fraction is not None:  # the range sets itself
        return {}
    clipped = _mean(recent, "clip/token_fraction")
    if clipped >= 0.6:
        return {"clip_too_narrow": f"{clipped:.0%} of tokens clipped: widen actor.clip_low and actor.clip_high"}
    # A surrogate that does not bound the ratio may well clip nothing, or have nothing to clip with.
    could_bind = PUBLISHED[actor.surrogate].bounds_ratio and actor.mini_batches > 1 and has_signal
    if clipped == 0 and could_bind:
        is_token = actor.importance_sampling_level == "token"
        goal = "the paper's GRPO: 0.2/0.27" if is_token else "to where ratio/sequence_min and _max lie"
        return {
            "clip_inert": f"no token was clipped in {len(recent)} steps: actor.clip_* never bind; narrow them ({goal}) "
            "or raise actor.optimizer.lr"
        }
    return {}


def _sampling(recent: Lines) -> dict[str, str]:
    found = {}
    if (cut := _mean(recent, "response/truncated_fraction")) >= 0.25:
        found["truncated"] = f"{cut:.0%} of responses cut off at rollout.max_new_tokens: raise it"
    if (gap := _mean(recent, "mismatch/logprob_gap_mean")) >= 0.05:
        found["engine_mismatch"] = (
            f"engine and policy differ by {gap:.3f} nats a token: their weights or numerics differ"
        )
    if (effective := _mean(recent, "ratio/effective_fraction")) < 0.5:
        found["low_effective_sample"] = (
            f"the ratios leave {effective:.0%} of the samples: a few outweigh the others; lower actor.mini_batches or "
            "actor.optimizer.lr"
        )
    return found


def _gradient(recent: Lines) -> dict[str, str]:
    found = {}
    ratios = _known(recent, "gradient/signal_to_noise")
    if len(ratios) >= _FEW and (ratio := statistics.fmean(ratios)) < 0.05:
        found["noisy_gradient"] = (
            f"a mini-batch's gradient is lost in its noise (signal-to-noise ratio {ratio:.3f}): raise "
            "rollout.queries_per_step, or lower actor.mini_batches"
        )
    shares = [pair for line in recent if (pair := _longest(line)) is not None]
    if shares:
        gradient, tokens = (statistics.fmean(values) for values in zip(*shares, strict=True))
        if gradient >= 0.6 and gradient >= 1.5 * tokens:
            found["length_share"] = (
                f"the longest quarter of responses carries {gradient:.0%} of the gradient with {tokens:.0%} of the "
                "tokens: see actor.length_norm, rollout.overlong"
            )
    return found


def _longest(line: Mapping[str, Any]) -> tuple[float, float] | None:
    """The longest quarter's share of the gradient and of the tokens; where it is empty, the next one's."""
    names = ("gradient/share_by_length", "response/token_share_by_length")
    lists = [shares if isinstance(shares := line.get(name), list) else [] for name in names]
    pairs = list(zip(*lists, strict=False))  # none where a log has but one of the two
    known = [pair for pair in pairs if all(map(is_number, pair))]
    return next((pair for pair in reversed(known) if pair[1] > 0), None)


def _critic(recent: Lines, num_steps: int) -> dict[str, str]:
    explained = _known(recent, "critic/explained_variance")
    # The median: a single step of nearly equal returns has an explained variance of any size below 0.
    if explained and num_steps >= _LEARNING and (middle := statistics.median(explained)) <= 0:
        return {
            "critic_useless": f"the value model explains {middle:.0%} of the returns' variance: worse than their mean; "
            "raise critic.optimizer.lr, or take an advantage without it"
        }
    return {}


def _updates(recent: Lines) -> dict[str, str]:
    if _mean(recent, "policy/skipped_updates") > 0:
        return {
            "not_finite": "updates were skipped for a loss or gradient that is not finite: lower actor.optimizer.lr"
        }
    return {}
