"""Choose each arm's learning rate from the grid, by the mean reward of its last steps, and write rates.json.

python -m studies.baselines.rates
"""

import json
import sys

from studies.baselines.arms import ARMS, GRID, GRID_SEED, RATES, RESULTS, TASKS, grid_jobs
from studies.harness.runs import Runs, read_runs
from studies.harness.summary import late_reward


def chosen(runs: Runs, task: str, name: str) -> float | None:
    """The rate with the highest late reward; the smaller one of two that are equal. None where a run is missing."""
    results = [runs.found.get((f"{task}_grid", f"{name}_{rate:g}"), {}).get(GRID_SEED) for rate in GRID]
    rewards = [late_reward(result) for result in results if result is not None]
    return GRID[rewards.index(max(rewards))] if len(rewards) == len(GRID) else None


def main() -> None:
    """Write the rates of the tasks whose grid is whole."""
    runs = read_runs(RESULTS, grid_jobs())
    rates = {task: {arm.name: chosen(runs, task, arm.name) for arm in ARMS} for task in TASKS}
    whole = {task: own for task, own in rates.items() if None not in own.values()}
    if not whole:
        sys.exit("no task's grid is whole yet: python -m studies.baselines.run")
    RATES.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
