"""The table, in markdown, from the results alone."""

from collections.abc import Callable, Mapping

from studies.harness.markdown import spread, table
from studies.harness.results import Result
from studies.harness.runs import Runs
from studies.harness.summary import Measure, mean, mean_reward
from studies.objectives.measures import LATE, late
from studies.objectives.tables import status_line, verdict
from studies.turns.jobs import ARMS, EXPERIMENT, GSPO

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
}


def arms_table(runs: Runs) -> str:
    """A row an arm: means ± standard deviations over seeds, and both rewards minus GSPO's."""
    rows, gspo = [], runs.of(EXPERIMENT, GSPO)
    for arm in ARMS:
        own = runs.of(EXPERIMENT, arm)
        apart = [verdict(own, gspo, measure) if arm is not GSPO else "" for measure in (LATE_REWARD, mean_reward)]
        rows.append([arm.label, arm.what, str(len(own)), *(spread(own, each) for each in MEASURES.values()), *apart])
    return table(["", "what is set", "seeds", *MEASURES, "late reward minus GSPO's", "mean reward minus GSPO's"], rows)


TABLES: Mapping[str, Callable[[Runs], str]] = {"status": status_line, "arms": arms_table}
