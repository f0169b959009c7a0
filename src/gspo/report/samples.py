"""The responses of a run: read back by query, and as the page has them, a group when somebody looks at it."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gspo.report.run_files import RunFiles, labels_of, section
from gspo.run.plain_files import EVALUATION, ROLLOUTS, read_json_lines, rollout_files

# Of a token's |log ratio|, the numbers at which its colour gets stronger: the same in every view, so that the noise of
# rounding has no colour, and a step can be compared with another. tokens.js has them, too.
LEVELS = (0.001, 0.01, 0.1, 0.5)
Sample = Mapping[str, Any]  # a line of rollouts/step_*.jsonl; docs/reference/run_directory.md has its keys
Groups = Mapping[str, Sequence[Sample]]  # the responses to each query, both in the order in which they were sampled
_PROMPT = 120  # characters of it in the table
_BINS = 6  # rewards of more values than that are shown in ranges
# The page has them in another form, or not at all:
_NOT_SHOWN = {"set", "query", "prompt", "prompt_words", "columns", "completion", "token_characters", "versions"}

Verdict = Callable[[Sample], bool | None]  # whether a response passes
Contents = Mapping[int, list[dict[str, Any]]]  # the groups that a page has, by step
State = tuple[int, int] | None


@lru_cache(maxsize=4)  # a step's groups are mostly asked for one after another
def read_groups(path: Path, state: State, evaluated: str | None = None) -> tuple[Groups, int]:
    """The groups of a step's file in this state, and how many of its lines cannot be read."""
    samples, num_bad = read_json_lines(path)
    return by_query(sample for sample in samples if sample.get("set") == evaluated), num_bad


def by_query(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """The responses to each query, both in their order."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["query"], []).append(sample)
    return groups


def pass_threshold(run: RunFiles, evaluated: str | None = None) -> float:
    """Return what a response must get to pass: the recipe's, or that of the suite of this name."""
    evaluation = section(run.recipe, "evaluation")
    suites = {suite["name"]: suite for suite in evaluation.get("suites", ())}
    return float(suites.get(evaluated, evaluation).get("pass_threshold", 1.0))


def passes(sample: Sample, threshold: float) -> bool | None:
    """Tell whether a response passes by the first reward function that applies; None: none applies."""
    for function, part in sample["rewards"].items():
        if part is not None:
            return bool(part >= threshold)
        if str(sample["failure"]).startswith(f"reward function {function}: "):
            return False
    return None


def interest(group: Sequence[Sample]) -> int:
    """Rank a group by how much it shows: 0 of equal rewards; 2 or more where a later mini-batch trained it; else 1."""
    rewards = {sample["reward"] for sample in group} - {None}
    moved = [sample.get("mini_batch") or 0 for sample in group if sample.get("sequence_ratio") not in (None, 1.0)]
    return 0 if len(rewards) < 2 else 2 + max(moved) if any(moved) else 1


def cut_prompt(sample: Sample) -> list[str]:
    """The prompt in three parts, of which the second is the user's last words; empty where it is not said where."""
    prompt = sample["prompt"]
    start, end = sample.get("prompt_words") or (len(prompt), len(prompt))
    return [prompt[:start], prompt[start:end], prompt[end:]]


def cut_into_tokens(sample: Sample) -> Sequence[str] | None:
    """The text that each token of a response makes; None where the file does not say."""
    text, lengths = sample["completion"], sample.get("token_characters")
    return lengths and [text[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


class Step(NamedTuple):
    """The rewards of each query in a step."""

    rows: Sequence[Sequence[Any]]  # its id, responses, judged and passed ones, mean reward, interest
    prompts: Mapping[str, str]  # their beginnings
    rewards: Counter[float | None]
    num_bad: int  # lines of its file


def step_of(groups: Groups, passes: Verdict, num_bad: int = 0) -> Step:
    """Count what the groups got."""
    rows, prompts, rewards = [], {}, Counter[float | None]()
    for query, group in groups.items():
        verdicts = [passes(sample) for sample in group]
        scores = [sample["reward"] for sample in group if sample["reward"] is not None]
        mean, num_judged = _short(fmean(scores)) if scores else None, len(group) - verdicts.count(None)
        rows.append([query, len(group), num_judged, verdicts.count(True), mean, interest(group)])
        rewards.update(_short(sample["reward"]) for sample in group)
        before, words, behind = cut_prompt(group[0])
        prompts[query] = words.strip()[:_PROMPT] or (before + behind)[-_PROMPT:]
    return Step(rows, prompts, rewards, num_bad)


def index_of(steps: Mapping[int, Step], contents: Contents | None) -> dict[str, Any]:
    """Return what each query got by step; of a page with contents, how many of a step's groups are in it."""
    prompts = {query: prompt for own in steps.values() for query, prompt in own.prompts.items()}
    carried = {step: len(own.rows if contents is None else contents.get(step, ())) for step, own in steps.items()}
    index = [{"step": step, "carried": carried[step], "groups": own.rows} for step, own in steps.items()]
    return {"prompts": prompts, "steps": index}


def shown_group(group: Sequence[Sample], passes: Verdict) -> dict[str, Any]:
    """The group as the page shows it: each response in its tokens, and with whether it passes."""
    samples = []
    for sample in group:
        shown = {key: value for key, value in sample.items() if key not in _NOT_SHOWN}
        for name in ("token_log_ratios", "token_advantages"):
            shown[name] = [*map(_short, sample.get(name) or ())]
        samples.append(shown | {"texts": cut_into_tokens(sample) or [sample["completion"]], "passed": passes(sample)})
    columns = "; ".join(f"{name}: {value}" for name, value in group[0].get("columns", {}).items())
    return {"query": group[0]["query"], "prompt": cut_prompt(group[0]), "columns": columns, "samples": samples}


def fitting(groups: Iterable[tuple[int, dict[str, Any]]], max_bytes: int) -> Contents:
    """The groups by step, up to the first one that does not fit."""
    contents: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for step, group in groups:
        max_bytes -= len(json.dumps(group))
        if max_bytes < 0:
            break
        contents[step].append(group)
    return contents


@dataclass(frozen=True)
class SampleSet:
    """The samples of training, or of one of the sets that a run is evaluated on."""

    path: Path
    evaluated: str | None
    label: str
    threshold: float

    @property
    def state(self) -> Mapping[int, tuple[Path, State]]:
        """The file of each step, and what changes when that does."""
        files = rollout_files(self.path, EVALUATION if self.evaluated else ROLLOUTS)
        return {step: (path, file_state(path)) for step, path in files.items()}

    def group(self, step: int, place: int) -> dict[str, Any]:
        """The group at a place of a step; LookupError where its file no longer has it."""
        groups, _ = read_groups(*self.state[step], self.evaluated)
        return shown_group([*groups.values()][place], self._passes)

    def contents(self, max_bytes: int) -> Contents:
        """The groups that a page has: the first ones of each step, from the last step on, as many as fit."""
        files = sorted(self.state.items(), reverse=True)
        groups = ((step, group) for step, file in files for group in read_groups(*file, self.evaluated)[0].values())
        return fitting(((step, shown_group(group, self._passes)) for step, group in groups), max_bytes)

    def index(self, contents: Contents | None = None) -> dict[str, Any]:
        """Return what the page says of the set: with these contents, or of a server, which reads any group."""
        steps = {step: _step(*file, self.evaluated, self.threshold) for step, file in self.state.items()}
        kind = f"evaluation on {self.evaluated}" if self.evaluated else "training"
        about = {"name": self.label, "kind": kind, "coverage": self._coverage(steps, contents)}
        return {**about, **index_of(steps, contents), "rewards": _distribution(steps)}

    def _passes(self, sample: Sample) -> bool | None:
        return passes(sample, self.threshold)

    def _coverage(self, steps: Mapping[int, Step], contents: Contents | None) -> str:
        num_groups = sum(len(own.rows) for own in steps.values())
        num_bad = sum(own.num_bad for own in steps.values())
        num_carried = num_groups if contents is None else sum(map(len, contents.values()))
        if not steps:
            return "There are no samples yet, or report.rollouts is false: then none are kept."
        said = "All samples."
        if num_carried < num_groups:
            said = f"This page has {num_carried:,} of {num_groups:,} groups, those of the last steps"
            said += f"; gspo view {self.path} shows all."
        return f"{said} {num_bad:,} line(s) could not be read." if num_bad else said


def sample_sets(runs: Sequence[RunFiles]) -> list[SampleSet]:
    """Return those of each run's training, and of each set that it has kept evaluated responses of so far."""
    sets = []
    for run, label in zip(runs, labels_of(runs), strict=True):
        scores = dict.fromkeys(name for line in run.lines for name in line if name.endswith("/pass_at_1"))
        names = [name.removeprefix("evaluation/").removesuffix("/pass_at_1") for name in scores]
        evaluated = names if rollout_files(run.path, EVALUATION) else []
        sets += [SampleSet(run.path, name, label, pass_threshold(run, name)) for name in (None, *evaluated)]
    return sets


@cache
def _step(path: Path, state: State, evaluated: str | None, threshold: float) -> Step:
    groups, num_bad = read_groups(path, state, evaluated)
    return step_of(groups, lambda sample: passes(sample, threshold), num_bad)


def file_state(path: Path) -> State:
    """Return what changes when a file does; None where there is none."""
    with suppress(FileNotFoundError):
        about = path.stat()
        return about.st_size, about.st_mtime_ns
    return None


def _distribution(steps: Mapping[int, Step]) -> dict[str, Any]:
    """Return what share of a step's responses got which reward, or of many values a reward of which range."""
    values = sorted({reward for own in steps.values() for reward in own.rewards if reward is not None})
    labels: dict[float | None, str] = {value: f"{value:g}" for value in values}
    for value in values[1:-1] if len(values) > _BINS else ():
        size = (values[-1] - values[0]) / (_BINS - 2)
        labels[value] = f"below {values[0] + size * ((value - values[0]) // size + 1):.3g}"
    labels[None] = "none"
    series = {f"reward {label}": [0.0] * len(steps) for label in labels.values()}
    for place, own in enumerate(steps.values()):
        for reward, number in own.rewards.items():
            series[f"reward {labels[reward]}"][place] += number / own.rewards.total()
    return {"steps": [*steps], "series": {label: row for label, row in series.items() if any(row)}}


def _short(number: float | None) -> float | None:
    """Round to three digits: finer than any colour."""
    return None if number is None else float(f"{number:.3g}")
