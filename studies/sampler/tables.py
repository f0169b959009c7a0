"""The tables, in markdown, from the results alone."""

from collections.abc import Callable, Mapping

import numpy as np

from studies.harness.markdown import spread, table
from studies.harness.results import Result
from studies.harness.runs import Runs
from studies.harness.summary import Measure, common_compute, mean, mean_of
from studies.objectives.tables import status_line, verdict
from studies.sampler.jobs import ARMS, EVERY, ORDER, TASKS

EQUAL = mean_of("group/zero_variance_fraction")


def after(evaluation: int) -> Measure:
    """Pass@1 of the held-out queries at an evaluation, of which 0 is before training."""
    return lambda result: result.pass_at_1[evaluation] if len(result.pass_at_1) > evaluation else 0.0


def at(compute: float) -> Measure:
    """The same once so much was spent, on straight lines between the evaluations."""

    def measure(result: Result) -> float:
        spent = [0.0, *result.compute()[EVERY - 1 :: EVERY]]
        return float(np.interp(compute, spent, result.pass_at_1))

    return measure


def compute(result: Result) -> float:
    """Forward-token equivalents of the run, in thousands."""
    return result.compute()[-1] / 1000


def arms_table(runs: Runs) -> str:
    """A row an arm on a task: means ± standard deviations over seeds, and the differences from the order, by seed."""
    rows = []
    for task, start in TASKS.items():
        budget = common_compute([runs.of(start.name, arm) for arm in ARMS])
        measures = {"half": after(1), "end": after(2), "budget": at(budget)}
        for arm in ARMS:
            own, order = runs.of(start.name, arm), runs.of(start.name, ORDER)
            cells = [spread(own, measure) for measure in (EQUAL, *measures.values(), compute)]
            pairs = [verdict(own, order, measure) for measure in (EQUAL, measures["end"], measures["budget"])]
            rows.append([task, arm.label, str(len(own)), *cells, *(pairs if arm is not ORDER else [""] * 3)])
    head = ["", "queries", "seeds", "equal-reward groups", f"pass@1 after {EVERY} steps", f"after {2 * EVERY}"]
    head += ["at equal compute", "compute", "minus the order's: equal-reward groups", f"after {2 * EVERY}"]
    head += ["at equal compute"]
    return table(head, rows)


def start_line(runs: Runs) -> str:
    """What the models that the runs begin from get."""
    parts = []
    for task, start in TASKS.items():
        found = [result for arm in ARMS for result in runs.of(start.name, arm).values()]
        parts.append(f"{mean([result.pass_at_1[0] for result in found]):.3f} of the {task}")
    return f"Before reinforcement learning the models get {' and '.join(parts)}."


TABLES: Mapping[str, Callable[[Runs], str]] = {"status": status_line, "start": start_line, "arms": arms_table}
