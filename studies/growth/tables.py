"""The table, in markdown, from the results alone."""

from collections.abc import Callable, Mapping

from studies.growth.jobs import ARMS, EXPERIMENT, GROWING, TERMS
from studies.harness.markdown import spread, table
from studies.harness.results import Result
from studies.harness.runs import Runs
from studies.harness.summary import Measure, mean
from studies.objectives.tables import status_line, verdict


def after(suite: str) -> Measure:
    """Pass@1 of a suite after the last step; 0 for a run that failed before it."""
    return lambda result: result.suites[suite][-1] if len(result.suites[suite]) > 1 else 0.0


def thousands_of_tokens(result: Result) -> float:
    """The tokens of all responses, in thousands."""
    return sum(result.values("response/mean_tokens")) * 32 * 8 / 1000  # of base.yaml


def minutes(result: Result) -> float:
    """The run's time on one core, with its evaluations."""
    return result.seconds["run"] / 60


MEASURES: Mapping[str, Measure] = {
    **{f"{name} sums": after(name) for name in TERMS},
    "thousands of tokens": thousands_of_tokens,
    "minutes": minutes,
}


def arms_table(runs: Runs) -> str:
    """A row an arm: means ± standard deviations over seeds, and the long sums minus those of the phases."""
    rows = []
    for arm in ARMS:
        own, growing = runs.of(EXPERIMENT, arm), runs.of(EXPERIMENT, GROWING)
        apart = "" if arm is GROWING else verdict(own, growing, after("long"))
        rows.append([arm.label, arm.what, str(len(own)), *(spread(own, each) for each in MEASURES.values()), apart])
    return table(["", "what is asked", "seeds", *MEASURES, "long sums minus the phases'"], rows)


def start_line(runs: Runs) -> str:
    """What the model that all runs begin from gets."""
    found = [result for arm in ARMS for result in runs.of(EXPERIMENT, arm).values()]
    parts = (f"{mean([result.suites[name][0] for result in found]):.3f} of the {name} sums" for name in TERMS)
    return f"Before reinforcement learning the model gets {', '.join(parts)}."


TABLES: Mapping[str, Callable[[Runs], str]] = {"status": status_line, "start": start_line, "arms": arms_table}
