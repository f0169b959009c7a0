"""The tables, in markdown, from the results alone."""

import math
from collections.abc import Callable, Mapping
from functools import partial

from studies.harness.markdown import spread, table
from studies.harness.results import Result
from studies.harness.runs import Runs
from studies.harness.summary import Measure, final_pass_at_1, mean, mean_of, mean_reward
from studies.objectives.measures import late
from studies.objectives.tables import status_line, verdict
from studies.staleness.jobs import ARMS, ETAS, experiment

LATE_REWARD = late("reward/mean")


def by_staleness(runs: Runs, measure: Measure | None = None) -> str:
    """Mean ± standard deviation over seeds, of the ratios without a measure: a row an arm, a column an η."""
    rows = []
    for arm in ARMS:
        own = measure or (_of_policies if arm.overrides.get("actor.old_logprobs") == "recompute" else _of_engine)
        rows.append([arm.label, arm.what, *(spread(runs.of(experiment(eta), arm), own) for eta in ETAS)])
    return table(["", "what is set", *(f"η = {eta}" for eta in ETAS)], rows)


_of_policies = mean_of("ratio/staleness_log_std")


def _of_engine(result: Result) -> float:
    """With the first mini-batch's, which that metric leaves out."""
    pairs = zip(result.values("ratio/staleness_log_std"), result.values("ratio/mismatch_log_std"), strict=True)
    return mean([math.hypot(*pair) for pair in pairs])


def lost(runs: Runs, measure: Measure) -> str:
    """The same minus that of η = 0, seed by seed."""
    rows = []
    for arm in ARMS:
        fresh = runs.of(experiment(0), arm)
        rows.append([arm.label, *(verdict(runs.of(experiment(eta), arm), fresh, measure) for eta in ETAS[1:])])
    return table(["minus η = 0", *(f"η = {eta}" for eta in ETAS[1:])], rows)


def against_gspo(runs: Runs) -> str:
    """Each arm's late reward minus that of GSPO's fixed range at the same η."""
    rows = []
    for arm in ARMS[1:]:
        pairs = [(runs.of(experiment(eta), arm), runs.of(experiment(eta), ARMS[0])) for eta in ETAS]
        rows.append([arm.label, *(verdict(*pair, LATE_REWARD) for pair in pairs)])
    return table(["minus GSPO", *(f"η = {eta}" for eta in ETAS)], rows)


TABLES: Mapping[str, Callable[[Runs], str]] = {
    "status": status_line,
    "late": partial(by_staleness, measure=LATE_REWARD),
    "lost": partial(lost, measure=LATE_REWARD),
    "mean": partial(by_staleness, measure=mean_reward),
    "lost_mean": partial(lost, measure=mean_reward),
    "pass": partial(by_staleness, measure=final_pass_at_1),
    "gspo": against_gspo,
    "clipped": partial(by_staleness, measure=mean_of("clip/token_fraction")),
    "ratios": by_staleness,
}
