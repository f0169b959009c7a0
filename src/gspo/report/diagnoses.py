"""What the numbers say, in words: named diagnoses with what to do about them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 10  # steps a diagnosis looks back on


def diagnoses(
    history: Sequence[Mapping[str, Any]], *, level: str = "sequence", mini_batches: int = 4
) -> dict[str, str]:
    """The diagnoses that hold over the last `WINDOW` steps of the history (or the fewer there are), by name."""
    if not history:
        return {}
    recent = history[-WINDOW:]

    def mean(name: str) -> float:
        return statistics.fmean(line[name] for line in recent)

    found: dict[str, str] = {}
    if (unscored := mean("reward/unscored_fraction")) >= 0.2:
        found["unscored"] = f"{unscored:.0%} of responses have no reward: no function applies to them, or one failed"
    elif (equal := mean("group/zero_variance_fraction")) >= 0.75:
        side = "the task is solved, or too easy" if mean("reward/mean") > 0.5 else "the task is too hard for this model"
        found["no_signal"] = f"{equal:.0%} of groups have equal rewards: no signal ({side}); change the queries"
    if (clipped := mean("clip/token_fraction")) >= 0.6:
        found["clip_too_narrow"] = f"{clipped:.0%} of tokens clipped: widen actor.clip_low and actor.clip_high"
    elif clipped == 0 and mini_batches > 1 and not found:
        goal = "the paper's GRPO: 0.2/0.27" if level == "token" else "to where ratio/sequence_min and _max lie"
        found["clip_inert"] = (
            f"no token was clipped in {len(recent)} steps: actor.clip_* never bind; narrow them ({goal}) "
            "or raise actor.optimizer.lr"
        )
    if (cut := mean("response/truncated_fraction")) >= 0.25:
        found["truncated"] = f"{cut:.0%} of responses cut off at rollout.max_new_tokens: raise it"
    if (gap := mean("mismatch/logprob_gap_mean")) >= 0.05:
        found["engine_mismatch"] = (
            f"engine and policy differ by {gap:.3f} nats a token: their weights or numerics differ"
        )
    if mean("policy/skipped_updates") > 0:
        found["not_finite"] = "updates were skipped for a loss or gradient that is not finite: lower actor.optimizer.lr"
    return found
