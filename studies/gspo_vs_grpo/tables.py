"""The tables, in markdown, from the results alone."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from studies.gspo_vs_grpo.arms import ARMS, FACTORS, MAIN, MOE_ARMS, STARTS
from studies.gspo_vs_grpo.clips import chosen_names
from studies.gspo_vs_grpo.jobs import Variant
from studies.gspo_vs_grpo.runs import Runs
from studies.harness.markdown import NONE, number, spread, table
from studies.harness.results import LISTS, Result, Results
from studies.harness.summary import (
    Measure,
    common_compute,
    difference,
    final_pass_at_1,
    has_collapsed,
    largest,
    late_reward,
    mean,
    mean_of,
    mean_reward,
    over_seeds,
    reward_at,
)

EXPERT_CHANGE = "moe/expert_change_fraction"
# The paper's Figure 1 sets GSPO against GRPO with replay.
PAIRS = (
    ("gspo_moe", "grpo_moe"),
    ("gspo_moe", "grpo_r2_moe"),
    ("grpo_r2_moe", "grpo_moe"),
    ("gspo_r2_moe", "gspo_moe"),
    ("gspo_dense", "grpo_dense"),
)
FACTOR_PAIRS = PAIRS[:4]
LABELS = {arm.name: arm.label for arm in ARMS}
FACTOR_ROWS = ((MAIN.name, MAIN), *((f"factors/{condition.name}", condition) for condition in FACTORS))


def starts_table(runs: Runs) -> str:
    """The models that runs begin from."""
    rows = []
    for start in STARTS.values():
        path = runs.directory / "starts" / f"{start.name}.json"
        if path.is_file():
            known = json.loads(path.read_text(encoding="utf-8"))
            sizes = [f"{known[name]:,}" for name in ("parameters", "active_parameters", "steps")]
            score = [f"{known['pass_at_1']:.3f}", f"{known['mean_tokens']:.1f}", f"{known['seconds']}"]
            rows.append([start.name, start.what, *sizes, *score])
    head = ["name", "model", "parameters", "active a token", "cold-start steps", "pass@1", "response tokens", "s"]
    return table(head, rows)


def tuning_table(runs: Runs) -> str:
    """The sweep: late reward and clipped tokens of each arm with each range, the chosen one in bold."""
    chosen, rows = chosen_names(runs.directory), []
    for arm in ARMS:
        cells = [arm.label]
        for name, (low, high) in arm.clips.items():
            found = runs.of(f"tune/{name}", arm)
            clipped = mean(over_seeds(found, mean_of("clip/token_fraction")))
            text = f"{low:g}/{high:g}: {spread(found, late_reward)}, {number(clipped, '.2g')} clipped"
            cells.append(f"**{text}**" if chosen.get(arm.name) == name else text)
        rows.append(cells)
    return table(["arm", "narrow", "middle", "wide"], rows)


def main_table(runs: Runs) -> str:
    """The comparison: each arm over its seeds."""
    columns: dict[str, Measure] = {
        "late reward": late_reward,
        "mean reward": mean_reward,
        "pass@1 after": final_pass_at_1,
        "response tokens, last step": lambda result: _last(result.values("response/mean_tokens")),
        "clipped tokens": mean_of("clip/token_fraction"),
        "clipped sequences": mean_of("clip/sequence_fraction"),
        "experts changed": mean_of(EXPERT_CHANGE),
        "largest gradient norm": largest("policy/grad_norm"),
    }
    rows = []
    for arm in ARMS:
        found = runs.of(MAIN.name, arm)
        cells = [spread(found, measure) for measure in columns.values()]
        rows.append([arm.label, str(len(found)), *cells, _fate(found)])
    return table(["arm", "seeds", *columns, "collapsed / failed"], rows)


def difference_table(runs: Runs) -> str:
    """One arm minus another, with both standard errors."""
    main = {arm.name: runs.of(MAIN.name, arm) for arm in ARMS}
    budgets = {arm.model: common_compute([main[one.name] for one in ARMS if one.model == arm.model]) for arm in ARMS}
    rows = []
    for one, other in PAIRS:
        at_compute = reward_at(budgets["moe" if one.endswith("moe") else "dense"])
        measures = (late_reward, mean_reward, at_compute, final_pass_at_1)
        cells = [_difference(main[one], main[other], measure) for measure in measures]
        rows.append([_minus(one, other), *cells])
    return table(["difference", "late reward", "mean reward", "reward at equal compute", "pass@1 after"], rows)


def factor_table(runs: Runs) -> str:
    """Each condition: late reward of each arm, and what sets them apart."""
    rows = []
    for experiment, condition in FACTOR_ROWS:
        found = {arm.name: runs.of(experiment, arm) for arm in MOE_ARMS}
        differences = [_difference(found[one], found[other], late_reward) for one, other in FACTOR_PAIRS]
        fates = ", ".join(_fate(found[arm.name]) for arm in MOE_ARMS)
        rewards = [spread(found[arm.name], late_reward) for arm in MOE_ARMS]
        rows.append([f"{condition.name}: {condition.what}", *rewards, *differences, fates])
    head = ["condition", *(arm.label for arm in MOE_ARMS), *(_minus(*pair) for pair in FACTOR_PAIRS)]
    return table([*head, "collapsed / failed, by arm"], rows)


def observed_table(runs: Runs) -> str:
    """Each condition: clipped tokens, and experts changed by one update, of each arm."""
    rows = []
    for experiment, condition in FACTOR_ROWS:
        found = [runs.of(experiment, arm) for arm in MOE_ARMS]
        clipped = [number(mean(over_seeds(one, mean_of("clip/token_fraction"))), ".2g") for one in found]
        changed = [number(mean(over_seeds(one, _changed_by_one_update)), ".2g") for one in found]
        rows.append([condition.name, " / ".join(clipped), " / ".join(changed)])
    order = " / ".join(arm.label for arm in MOE_ARMS)
    return table(["condition", f"clipped tokens: {order}", "experts changed by one update"], rows)


def _changed_by_one_update(result: Result) -> float:
    by_update = result.means.get("moe/expert_change_fraction_by_update", ())
    return math.nan if not by_update or by_update[0] is None else by_update[0]


def expert_table(runs: Runs) -> str:
    """Changed experts by layer and by updates since π_old, of the arms whose routers are free."""
    rows = []
    for experiment, condition in FACTOR_ROWS:
        for arm in (one for one in MOE_ARMS if not one.replays):
            found = runs.of(experiment, arm).values()
            by = [_list_means(result.means.get(name, ()) for result in found) for name in LISTS]
            if any(by):
                rows.append(
                    [condition.name, arm.label, *(", ".join(number(value, ".2g") for value in one) for one in by)]
                )
    return table(["condition", "arm", "by layer, first to last", "after 1, 2, … updates"], rows)


def _list_means(rows: Iterable[Sequence[float | None]]) -> list[float]:
    known = [[math.nan if value is None else value for value in row] for row in rows if row]
    return [mean(column) for column in zip(*known, strict=True)]


def _difference(arm: Results, other: Results, measure: Measure) -> str:
    found = difference(arm, other, measure)
    if math.isnan(found.mean):
        return NONE
    if math.isnan(found.paired_error):
        return f"{found.mean:+.3f}"
    return f"{found.mean:+.3f} ± {found.unpaired_error:.3f} ({found.paired_error:.3f})"


def _minus(one: str, other: str) -> str:
    """How a difference between two arms is written."""
    first, second = (f"({label})" if " + " in label else label for label in (LABELS[one], LABELS[other]))
    return f"{first} − {second}"


def _fate(runs: Results) -> str:
    if not runs:
        return NONE
    failed = sum(result.failed is not None for result in runs.values())
    return f"{sum(has_collapsed(result) for result in runs.values())} / {failed}"


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else math.nan


def status_line(runs: Runs) -> str:
    """Whether all results are in, and are the study's own."""
    made = sum(map(len, runs.found.values()))
    line = f"{made} of {made + len(runs.missing)} runs are in. `–` in a table: no number."
    departs = runs.variant != Variant()
    return line + (f" **A trial, not the study**: {runs.variant}; the sizes below are not its own." if departs else "")


TABLES: Mapping[str, Callable[[Runs], str]] = {
    "status": status_line,
    "starts": starts_table,
    "tuning": tuning_table,
    "main": main_table,
    "differences": difference_table,
    "factors": factor_table,
    "observed": observed_table,
    "experts": expert_table,
}
