"""The tables and the answer, in markdown, from the results alone."""

import json
import math
from collections.abc import Callable, Mapping

from studies.engine_likelihoods.arms import ARMS, DTYPES, GRPO, GSPO, OBJECTIVES, SEEDS, Arm, Objective, Start
from studies.engine_likelihoods.measures import LATE_REWARD, Change, change, in_first_mini_batch
from studies.engine_likelihoods.runs import Runs
from studies.harness.markdown import NONE, spread, table
from studies.harness.results import Result
from studies.harness.summary import Measure, final_pass_at_1, mean_of, mean_reward

_OLD = {"engine": "the engine's", "recompute": "recomputed"}
_HEAD = ["vLLM in", "objective", "π_old"]


def status_line(runs: Runs) -> str:
    """Whether all results are in."""
    made = sum(map(len, runs.found.values()))
    return f"{made} of {made + len(runs.missing)} runs are in. `–` in a table: no number."


def answer(runs: Runs) -> str:
    """Whether the claim holds here; only of results that are there."""
    claim, other = (change(runs, objective, "bfloat16", LATE_REWARD) for objective in (GSPO, GRPO))
    if claim.seeds < 2:
        return "No answer yet: that takes two seeds of GSPO with vLLM in bfloat16."
    which = "the likelihoods of vLLM in bfloat16"
    held = {
        "tolerated": f"**The claim holds at this size**: GSPO tolerates {which}.",
        "not tolerated": f"**The claim does not hold at this size**: GSPO loses by {which}.",
        "open": f"**The claim stays open**: the seeds are too far apart to say whether GSPO tolerates {which}.",
    }[claim.verdict]
    beside = f"GSPO: {_sentence(claim)}. GRPO: {_sentence(other)}."
    same = other.seeds >= 2 and other.verdict == claim.verdict
    return f"{held} {beside}" + (" So this does not set the two objectives apart." if same else "")


def starts_table(runs: Runs) -> str:
    """The model of each seed."""
    rows = []
    for name in (Start(seed=seed).name for seed in SEEDS):
        path = runs.directory / "starts" / f"{name}.json"
        if path.is_file():
            known = json.loads(path.read_text(encoding="utf-8"))
            rows.append([name, f"{known['parameters']:,}", f"{known['pass_at_1']:.3f}", f"{known['mean_tokens']:.1f}"])
    return table(["model", "parameters", "pass@1", "response tokens"], rows)


def figure_link(runs: Runs) -> str:
    """The figure, once there is something in it."""
    return "![training reward by step](figures/reward.svg)" if runs.found else NONE


def mismatch_table(runs: Runs) -> str:
    """How far engine and trainer are apart, by token and by sequence, beside what clipping allows and updates move."""
    columns: dict[str, Measure] = {
        "a token, mean": mean_of("hook/token_gap_mean"),
        "a token, largest of a step": mean_of("hook/token_gap_max"),
        "a sequence": mean_of("ratio/mismatch_log_std"),
        "a sequence, by the updates": mean_of("ratio/staleness_log_std"),
    }
    rows = [
        [*_names(arm), *(spread(runs.of(arm), measure) for measure in columns.values()), *_against_range(runs, arm)]
        for arm in ARMS
    ]
    return table([*_HEAD, *columns, "clip range", "mismatch / `clip_low`"], rows)


def clipped_table(runs: Runs) -> str:
    """What clipping leaves without a gradient, and how much of that the mismatch alone does."""
    columns: dict[str, Measure] = {
        "tokens": mean_of("clip/token_fraction"),
        "sequences": mean_of("clip/sequence_fraction"),
        "tokens, before any update": in_first_mini_batch("clip/token_fraction"),
        "sequences, before any update": in_first_mini_batch("clip/sequence_fraction"),
    }
    return _by_arm(runs, columns)


def learning_table(runs: Runs) -> str:
    """What was learned."""
    columns: dict[str, Measure] = {
        "late reward": LATE_REWARD,
        "mean reward": mean_reward,
        "pass@1 before": lambda result: result.pass_at_1[0] if result.pass_at_1 else math.nan,
        "pass@1 after": final_pass_at_1,
        "broken off": lambda result: float(result.failed is not None),
    }
    return _by_arm(runs, columns)


def differences_table(runs: Runs) -> str:
    """The engine's likelihoods minus recomputed ones, seed by seed."""
    measures: dict[str, Measure] = {
        "late reward": LATE_REWARD,
        "mean reward": mean_reward,
        "pass@1 after": final_pass_at_1,
        "clipped tokens": mean_of("clip/token_fraction"),
    }
    rows = []
    for dtype in DTYPES:
        for objective in OBJECTIVES:
            found = [change(runs, objective, dtype, measure) for measure in measures.values()]
            rows.append([dtype, objective.label, *map(_interval, found), _verdict(found[0])])
    return table(["vLLM in", "objective", *measures, "late reward"], rows)


def _by_arm(runs: Runs, columns: Mapping[str, Measure]) -> str:
    rows = [
        [*_names(arm), str(len(runs.of(arm))), *(spread(runs.of(arm), measure) for measure in columns.values())]
        for arm in ARMS
    ]
    return table([*_HEAD, "seeds", *columns], rows)


def _names(arm: Arm) -> list[str]:
    return [arm.dtype, arm.objective.label, _OLD[arm.old]]


def _against_range(runs: Runs, arm: Arm) -> list[str]:
    """The range, and the mismatch of what it clips (a sequence, or a token) in its units."""
    low, high = arm.objective.clip
    clips = _unit(arm.objective)

    def share(result: Result) -> float:
        return clips(result) / low

    return [f"{low:g}/{high:g}", spread(runs.of(arm), share)]


def _unit(objective: Objective) -> Measure:
    return mean_of("ratio/mismatch_log_std" if objective is GSPO else "hook/token_gap_mean")


def _interval(found: Change) -> str:
    if not math.isfinite(found.mean):
        return NONE
    if not math.isfinite(found.low):
        return f"{found.mean:+.3f}"
    text = f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
    return f"**{text}**" if found.is_apart else text


def _verdict(found: Change) -> str:
    return found.verdict if found.seeds >= 2 else NONE


def _sentence(found: Change) -> str:
    if not math.isfinite(found.low):
        return "no number"
    return (
        f"late reward {found.mean:+.3f} (95 %: {found.low:+.3f} to {found.high:+.3f}, {found.seeds} seeds), "
        f"{found.verdict}"
    )


TABLES: Mapping[str, Callable[[Runs], str]] = {
    "status": status_line,
    "answer": answer,
    "starts": starts_table,
    "mismatch": mismatch_table,
    "clipped": clipped_table,
    "figure": figure_link,
    "learning": learning_table,
    "differences": differences_table,
}
