"""The tables, in markdown, from the results alone."""

import json
import math
from collections.abc import Callable, Mapping, Sequence

from studies.harness.markdown import NONE, number, spread, table
from studies.harness.results import Result, Results
from studies.harness.runs import Runs
from studies.harness.summary import Measure, difference, final_pass_at_1, mean, mean_of, mean_reward, over_seeds
from studies.objectives.arms import CRITIC_SEED, CRITIC_TRIALS, CUTS, GSPO, LENGTHS, OBJECTIVES, RANGES, UNBOUND, Length
from studies.objectives.jobs import OBJECTIVE, TRIAL
from studies.objectives.measures import MAX_GRAD_NORM, gain, is_apart, last, late, settled, share

LATE_REWARD = late("reward/mean")
CLIPPED = "clip/token_fraction"
GROUP_SIZE = 8  # rollout.group_size of base.yaml
STEPS_BOUND = share("policy/grad_norm", lambda norm: norm > MAX_GRAD_NORM)


def status_line(runs: Runs) -> str:
    """Whether all results are in."""
    made = sum(map(len, runs.found.values()))
    return f"{made} of {made + len(runs.missing)} runs are in. `–` in a table: no number."


def starts_table(runs: Runs) -> str:
    """The models that runs begin from."""
    rows = []
    for name in ("default", *(length.start.name for length in LENGTHS)):
        path = runs.directory / "starts" / f"{name}.json"
        if path.is_file():
            known = json.loads(path.read_text(encoding="utf-8"))
            rows.append([name, str(known["steps"]), f"{known['pass_at_1']:.3f}", f"{known['mean_tokens']:.1f}"])
    return table(["model", "cold-start steps", "pass@1", "response tokens"], rows)


def objectives_table(runs: Runs) -> str:
    """Every objective: what it learned, and what it was like on the way."""
    columns: dict[str, Measure] = {
        "late reward": LATE_REWARD,
        "mean reward": mean_reward,
        "pass@1 after": final_pass_at_1,
        "clipped tokens": mean_of(CLIPPED),
        "clipped sequences": mean_of("clip/sequence_fraction"),
        "entropy, last step": last("policy/entropy"),
        "response tokens, last step": last("response/mean_tokens"),
    }
    head = ["objective", "what is set", "seeds", *columns, "rollouts", "gradient norm, > 1 in", "late reward − GSPO"]
    rows = []
    for arm in OBJECTIVES:
        found = runs.of(OBJECTIVE, arm)
        cells = [spread(found, measure) for measure in columns.values()]
        rollouts = number(mean(over_seeds(found, _rollouts)), ",.0f")
        against = NONE if arm is GSPO else verdict(found, runs.of(OBJECTIVE, GSPO), LATE_REWARD)
        rows.append([arm.label, arm.what, str(len(found)), *cells, rollouts, _gradient(found), against])
    return table(head, rows)


def differences_table(runs: Runs) -> str:
    """Each objective minus GSPO, by three measures."""
    measures: dict[str, Measure] = {
        "late reward": LATE_REWARD,
        "mean reward": mean_reward,
        "pass@1 after": final_pass_at_1,
    }
    rows = []
    for arm in OBJECTIVES[1:]:
        pair = (runs.of(OBJECTIVE, arm), runs.of(OBJECTIVE, GSPO))
        rows.append([arm.label, *(verdict(*pair, measure) for measure in measures.values())])
    return table(["minus GSPO", *measures], rows)


def critic_table(runs: Runs) -> str:
    """The value model's learning rates that were tried."""
    rows = []
    for arm in CRITIC_TRIALS:
        found = runs.of(TRIAL, arm)
        lr = arm.overrides["critic.optimizer.lr"]
        cells = [spread(found, measure) for measure in (LATE_REWARD, mean_reward, final_pass_at_1)]
        rows.append([arm.label, f"{lr:g}", *cells])
    head = ["", "`critic.optimizer.lr`", f"late reward, seed {CRITIC_SEED}", "mean reward", "pass@1 after"]
    return table(head, rows)


def unbound_table(runs: Runs) -> str:
    """Sums over tokens with the gradient's norm as it comes, minus the same with the norm held at 1."""
    rows = []
    for arm in UNBOUND:
        found = runs.of(OBJECTIVE, arm)
        bound = next(one for one in OBJECTIVES if arm.name == f"{one.name}_unbound")
        against = [verdict(found, runs.of(OBJECTIVE, bound), measure) for measure in (LATE_REWARD, mean_reward)]
        norm = number(mean(over_seeds(found, mean_of("policy/grad_norm"))), ".2g")
        rows.append([arm.label, spread(found, LATE_REWARD), spread(found, mean_reward), norm, *against])
    head = ["`max_grad_norm: 1000`", "late reward", "mean reward", "gradient norm"]
    return table([*head, "late reward − at 1", "mean reward − at 1"], rows)


def lengths_table(runs: Runs) -> str:
    """Each range at each length of a model of its own: where it ended, what was learned."""
    rows = []
    for length in LENGTHS:
        for arm in RANGES:
            found = runs.of(length.name, arm)
            measures = (settled("policy/entropy"), settled(CLIPPED), _first_reward, gain)
            tokens, *cells = [spread(found, one) for one in (mean_of("response/mean_tokens"), *measures)]
            rows.append([tokens, arm.label, str(len(found)), *cells, _ends(found)])
    head = ["response tokens", "clip range", "seeds", "entropy", "clipped tokens", "reward at first"]
    return table([*head, "reward gain", "ε at the end"], rows)


def cuts_grid(runs: Runs) -> str:
    """One model, responses cut off: clipped tokens, a row a range, a column a length; where the range ended."""
    return _grid(runs, CUTS)


def lengths_grid(runs: Runs) -> str:
    """The same of a model a length."""
    return _grid(runs, LENGTHS)


def _grid(runs: Runs, lengths: Sequence[Length]) -> str:
    rows = []
    for arm in RANGES:
        found = [runs.of(length.name, arm) for length in lengths]
        rows.append([arm.label, *(spread(one, settled(CLIPPED)) for one in found)])
    itself = [runs.of(length.name, RANGES[-1]) for length in lengths]
    rows.append(["its ε at the end", *map(_ends, itself)])
    rows.append(["entropy", *(spread(one, settled("policy/entropy")) for one in itself)])
    return table(["clip range", *(f"about {length.tokens} tokens" for length in lengths)], rows)


def _ends(found: Results) -> str:
    return "/".join(number(mean(over_seeds(found, last(f"clip/{side}"))), ".2g") for side in ("low", "high"))


def _first_reward(result: Result) -> float:
    return mean(result.values("reward/mean")[:3])


def _rollouts(result: Result) -> float:
    """Sampled in the whole run, those that dynamic sampling left out too."""
    return sum(result.values("group/sampled")) * GROUP_SIZE or math.nan


def _gradient(found: Results) -> str:
    norm = number(mean(over_seeds(found, mean_of("policy/grad_norm"))), ".2g")
    return f"{norm}, {number(mean(over_seeds(found, STEPS_BOUND)), '.0%')}"


def verdict(arm: Results, other: Results, measure: Measure) -> str:
    """The paired difference ± its standard error; in bold where it is beyond the spread, else a tie."""
    found = difference(arm, other, measure)
    if not math.isfinite(found.mean):
        return NONE
    if not math.isfinite(found.paired_error):
        return f"{found.mean:+.3f}"
    text = f"{found.mean:+.3f} ± {found.paired_error:.3f}"
    return f"**{text}**" if is_apart(arm, other, measure) else f"{text}, tie"


TABLES: Mapping[str, Callable[[Runs], str]] = {
    "status": status_line,
    "starts": starts_table,
    "objectives": objectives_table,
    "differences": differences_table,
    "critic": critic_table,
    "unbound": unbound_table,
    "cuts": cuts_grid,
    "grid": lengths_grid,
    "lengths": lengths_table,
}
