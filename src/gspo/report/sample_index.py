"""Where each group of a run's responses lies in its files, and what each query got: all that is in memory of them."""

import json
import math
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from gspo.errors import UserError, printable
from gspo.report.run_files import RunFiles, labels_of
from gspo.report.samples import Sample, cut_into_tokens, cut_prompt, interest, pass_threshold, passes, read_sample
from gspo.run.plain_files import EVALUATION, ROLLOUTS, for_reading, rollout_files

_PROMPT = 120  # characters of it in the table
_DIGITS = 3  # of a token's number: finer than any colour
_BINS = 6  # rewards of more values than that are shown in ranges
_UNKNOWN: Sample = {
    **dict.fromkeys(("reward", "failure", "advantage", "sequence_ratio", "clipped", "mini_batch", "policy_version")),
    **{"rewards": {}, "tokens": 0, "finish_reason": "unknown"},
}
# But in another form:
_NOT_SHOWN = ("set", "query", "prompt", "prompt_words", "columns", "completion", "token_characters")
_SET = re.compile(rb'\{"set": ?("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the responses to a query lie in a step's file, and what they got."""

    query: str
    spans: Sequence[tuple[int, int]]  # of lines: the first byte, and how many
    passed: int
    mean: float | None  # reward
    interest: int


class SampleSet:
    """The samples of training, or of one of the sets that a run is evaluated on; in memory is the index alone."""

    def __init__(self, run: RunFiles, folder: str, name: str, evaluated: str | None = None) -> None:
        self.steps: dict[int, list[Place]] = {}
        self.key = run.path, folder, evaluated
        kind = "evaluation" if evaluated is None else f"evaluation on {printable(evaluated)}"
        self.name, self.kind = name, kind if folder == EVALUATION else "training"
        self._path, self._folder, self._evaluated = self.key
        self._threshold = pass_threshold(run, evaluated)
        self._files: Mapping[int, Path] = {}
        self._seen: dict[int, tuple[int, int]] = {}  # size and time of each file, as it was when it was read
        self._prompts: dict[str, str] = {}
        self._rewards: dict[int, Counter[float | None]] = {}
        self._not_read: dict[int, int] = {}  # lines of each file

    def look(self, seconds: float = math.inf) -> int:
        """Read the files that are new or have changed, the last steps first; how many are left when the time is up."""
        self._files = files = rollout_files(self._path, self._folder)
        for step in self.steps.keys() - files.keys():
            del self.steps[step], self._seen[step], self._rewards[step], self._not_read[step]
        states = {step: state for step, path in files.items() if (state := file_state(path))}
        changed = [step for step, state in sorted(states.items(), reverse=True) if self._seen.get(step) != state]
        until = time.monotonic() + seconds
        for number, step in enumerate(changed):
            if number and time.monotonic() > until:
                return len(changed) - number
            self._seen[step] = states[step]
            try:
                self._read(step, files[step])
            except OSError:  # it has gone meanwhile, or may not be read
                self.steps[step], self._rewards[step], self._not_read[step] = [], Counter(), 0
        return 0

    @property
    def state(self) -> frozenset[tuple[int, tuple[int, int]]]:
        """What changes when there is more to see."""
        return frozenset(self._seen.items())

    def group(self, step: int, place: int) -> dict[str, Any]:
        """The group at a place of a step's file, as the page shows it; UserError where the file no longer has it."""
        spans = self.steps.get(step, [])[place : place + 1]
        try:
            with open(self._files[step], "rb", opener=for_reading) as file:
                lines = [file.read(size) for start, size in spans[0].spans if file.seek(start) == start]
        except (OSError, LookupError):
            where = str(self._path / self._folder)
            raise UserError(f"these samples of step {step} are no longer there", where=where) from None
        # The file may be another one by now.
        samples = [sample for sample in map(read_sample, lines) if sample and sample["query"] == spans[0].query]
        first = samples[0] if samples else {}
        columns = "; ".join(f"{name}: {value}" for name, value in first.get("columns", {}).items())
        texts = {"query": spans[0].query, "prompt": cut_prompt(first), "columns": columns}
        return readable({**texts, "samples": [self._shown(sample) for sample in samples]})

    def index(self, carried: Mapping[int, int] | None = None, left: int = 0) -> dict[str, Any]:
        """The queries, and what each got in each step.

        A group is [number of its query, responses, passed, mean reward, place, interest].
        A page has the steps that `carried` names, and of each the first groups, as many as it says.
        """
        shown = sorted(self.steps if carried is None else carried)
        named = dict.fromkeys(place.query for step in shown for place in self.steps[step])
        numbers = {query: number for number, query in enumerate(named)}
        steps = []
        for step in shown:
            num_carried, groups = math.inf if carried is None else carried[step], []
            for number, place in enumerate(self.steps[step]):
                at = number if number < num_carried else None
                groups.append([numbers[place.query], len(place.spans), place.passed, place.mean, at, place.interest])
            steps.append({"step": step, "groups": groups})
        queries = [[printable(query), self._prompts[query]] for query in named]
        about = {"name": self.name, "kind": self.kind, "coverage": self._coverage(carried, left)}
        return {**about, "queries": queries, "steps": steps, "rewards": self._distribution()}

    def _read(self, step: int, path: Path) -> None:
        groups: dict[str, list[tuple[int, int, Sample]]] = {}
        rewards: Counter[float | None] = Counter()
        start = num_not_read = 0
        with open(path, "rb", opener=for_reading) as file:
            for line in file:
                is_own = self._folder != EVALUATION or _set_of(line) == self._evaluated
                is_own &= line.endswith(b"\n")  # else it is still being written
                sample = read_sample(line) if is_own else None
                num_not_read += is_own and sample is None
                if sample is not None:
                    query, reward = sample["query"], sample.get("reward")
                    before, words, behind = cut_prompt(sample)
                    shown = words.strip()[:_PROMPT] or (before + behind)[-_PROMPT:]
                    self._prompts.setdefault(query, printable(shown))
                    rewards[reward if reward is None else _short(reward)] += 1
                    groups.setdefault(query, []).append((start, len(line), sample))
                start += len(line)
        self._rewards[step], self._not_read[step] = rewards, num_not_read
        self.steps[step] = [self._place(query, responses) for query, responses in groups.items()]

    def _place(self, query: str, responses: Sequence[tuple[int, int, Sample]]) -> Place:
        rewards = [reward for _, _, sample in responses if (reward := sample.get("reward")) is not None]
        return Place(
            query=query,
            spans=tuple((start, size) for start, size, _ in responses),
            passed=sum(passes(sample, self._threshold) is True for _, _, sample in responses),
            mean=_short(fmean(rewards)) if rewards else None,
            interest=interest([sample for _, _, sample in responses]),
        )

    def _shown(self, sample: Sample) -> dict[str, Any]:
        """The line as the page shows it: cut into tokens, without what its group says, and with whether it passes."""
        shown = {key: value for key, value in {**_UNKNOWN, **sample}.items() if key not in _NOT_SHOWN}
        tokens = cut_into_tokens(sample)
        for name in ("token_log_ratios", "token_advantages"):
            numbers = sample.get(name) if tokens else None  # else nobody could tell whose a number is
            shown[name] = numbers and [None if number is None else _short(number) for number in numbers]
        return {**shown, "texts": tokens or [sample.get("completion", "")], "passed": passes(sample, self._threshold)}

    def _distribution(self) -> dict[str, Any]:
        """What share of a step's responses got which reward, or a reward of which range."""
        steps = [step for step in sorted(self._rewards) if self._rewards[step]]
        values = sorted({reward for step in steps for reward in self._rewards[step] if reward is not None})
        ends, labels = values, [f"{value:g}" for value in values]  # the highest reward of each kind
        if len(values) > _BINS:  # the lowest and the highest reward, such as 0 and 1, are kinds of their own
            low, high = values[0], values[-1]
            between = [low + (high - low) * place / (_BINS - 2) for place in range(1, _BINS - 2)]
            ends = [low, *between, math.nextafter(high, low), high]
            labels = [f"{low:g}", *(f"up to {end:.3g}" for end in ends[1:-2]), f"below {high:g}", f"{high:g}"]
        table = [[0.0] * len(steps) for _ in [*ends, None]]
        for column, step in enumerate(steps):
            for reward, number in self._rewards[step].items():
                row = len(ends) if reward is None else bisect_left(ends, reward)
                table[row][column] += number / self._rewards[step].total()
        rows = zip([*labels, "none"], table, strict=True)
        return {"steps": steps, "series": {f"reward {label}": [*map(_short, row)] for label, row in rows if any(row)}}

    def _coverage(self, carried: Mapping[int, int] | None, left: int) -> str:
        if left:
            return f"{left:,} files of steps are still to be read."
        num_steps, num_groups = len(self.steps), sum(map(len, self.steps.values()))
        if not num_steps:
            return "There are no samples yet, or report.rollouts is false: then none are kept."
        said = f"All samples of {f'all {num_steps:,} steps' if num_steps > 1 else 'the one step'}."
        if carried is not None and (num_carried := sum(carried.values())) < num_groups:
            last = f"those of the last {sum(map(bool, carried.values())):,} of {num_steps:,} steps"
            table = f" The table begins with step {min(carried):,}." if len(carried) < num_steps else ""
            page = f"This page carries {num_carried:,} of {num_groups:,} groups, {last}"
            said = f"{page}; gspo view {self._path} shows all.{table}"
        num_not_read = sum(self._not_read.values())
        return f"{said} {num_not_read:,} line(s) could not be read." if num_not_read else said


def sample_sets(runs: Sequence[RunFiles]) -> list[SampleSet]:
    """Those of each run's training, and of each set that it has kept evaluated responses of so far."""
    sets = []
    for run, label in zip(runs, labels_of(runs), strict=True):
        files = rollout_files(run.path, EVALUATION).values()
        evaluated = dict.fromkeys(name for path in files for name in _sets_in(path, file_state(path)))
        sets += [SampleSet(run, ROLLOUTS, label), *(SampleSet(run, EVALUATION, label, name) for name in evaluated)]
    return sets


@lru_cache(maxsize=4096)
def _sets_in(path: Path, state: tuple[int, int] | None) -> tuple[str | None, ...]:
    """The sets that a file has responses of, in order; it is read again when its state is another."""
    with suppress(OSError), open(path, "rb", opener=for_reading) as file:
        return tuple(dict.fromkeys(_set_of(line) for line in file if line.endswith(b"\n")))
    return ()


def _set_of(line: bytes) -> str | None:
    """The set that an evaluated response belongs to: its line begins with it; None in runs of a single set."""
    quoted = _SET.match(line)
    try:
        return str(json.loads(quoted[1])) if quoted else None
    except ValueError:  # what is quoted may be no text of JSON
        return None


def readable(value: Any) -> Any:
    """The value with the hidden characters of each text in it written out."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(name): readable(inner) for name, inner in value.items()}
    holds_text = isinstance(value, list) and value and isinstance(value[0], str | Mapping)
    return [*map(readable, value)] if holds_text else value


def _short(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def file_state(path: Path) -> tuple[int, int] | None:
    """What changes when a file does; None where it has gone."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns
