"""The table, in markdown, from the results alone."""

from collections.abc import Callable, Mapping

from studies.harness.markdown import spread, table
from studies.harness.results import Result
from studies.harness.runs import Runs
from studies.harness.summary import Measure, mean, mean_of, mean_reward
from studies.objectives.measures import LATE, late
from studies.objectives.tables import status_line, verdict
from studies.turns.jobs import ARMS, EXPERIMENT, GSPO, TRAJECTORY

LATE_REWARD = late("reward/mean")


def tokens_a_turn(result: Result) -> float:
    """How many tokens the policy writes in a turn, in the last steps."""
    names = ("response/mean_tokens", "turns/written_fraction", "turns/mean")
    columns = [result.values(name)[-LATE:] for name in names]
    return mean([tokens * written / turns for tokens, written, turns in zip(*columns, strict=True)])


MEASURES: Mapping[str, Measure] = {
    "late reward": LATE_REWARD,
    "mean reward": mean_reward,
    "turns, late": late("turns/mean"),
    "tokens a turn, late": tokens_a_turn,
    "clipped tokens, late": late("clip/token_fraction"),
    "norm of the gradient": mean_of("policy/grad_norm"),
}


def arms_table(runs: Runs) -> str:
    """A row an arm: means ± standard deviations over seeds, and the late reward minus those of two arms."""
    rows, others = [], (GSPO, TRAJECTORY)
    for arm in ARMS:
        own = runs.of(EXPERIMENT, arm)
        apart = ["" if arm is other else verdict(own, runs.of(EXPERIMENT, other), LATE_REWARD) for other in others]
        rows.append([arm.label, arm.what, str(len(own)), *(spread(own, each) for each in MEASURES.values()), *apart])
    minus = [f"late reward minus that of {words}" for words in ("GSPO", "credit by trajectory")]
    return table(["", "what is set", "seeds", *MEASURES, *minus], rows)


TABLES: Mapping[str, Callable[[Runs], str]] = {"status": status_line, "arms": arms_table}
