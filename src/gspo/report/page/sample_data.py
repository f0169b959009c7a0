"""The samples of a page: an index of where each group of responses lies, what each query got, and single groups.

A page carries as many groups as fit, chosen by a hash of the query; `gspo view` reads each one when it is looked at.
"""

import base64
import gzip
import hashlib
import json
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gspo.errors import UserError
from gspo.report.run_files import RunFiles
from gspo.report.samples import Sample, cut_into_tokens, pass_threshold, passes
from gspo.report.shapes import sample as sample_of
from gspo.report.shapes import section
from gspo.run.plain_files import EVALUATION, FOLDERS, for_reading, parsed, rollout_files

_MAX_BYTES = 12_000_000  # of the files, in a page: packed a half of that at most, and mostly a twentieth
_MAX_QUERIES = 5_000  # in a page's table
_PROMPT = 120  # characters of it in the table
_DIGITS = 3  # of a token's number: finer than any colour
_BINS = 6  # rewards of more values than that are shown in ranges
_UNKNOWN: Sample = {
    **dict.fromkeys(("reward", "failure", "advantage", "sequence_ratio", "clipped", "mini_batch", "policy_version")),
    **{"completion": "", "rewards": {}, "tokens": 0, "finish_reason": "unknown"},
}
_OF_GROUP = ("query", "prompt", "columns")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the responses to a query lie in a step's file, and what they got."""

    query: str
    spans: Sequence[tuple[int, int]]  # of lines: the first byte, and how many
    passed: int
    mean: float | None  # reward


class SampleSet:
    """The samples in a folder of a run; what of them is in memory is the index alone."""

    def __init__(self, run: RunFiles, folder: str, name: str) -> None:
        self.steps: dict[int, list[Place]] = {}
        self.name, self.kind = name, "evaluation" if folder == EVALUATION else "training"
        self._path, self._folder, self._threshold = run.path, folder, pass_threshold(run)
        self._off = section(run.recipe, "report").get("rollouts") is False
        self._files: Mapping[int, Path] = {}
        self._seen: dict[int, tuple[int, int]] = {}  # size and time of each file, as it was when it was read
        self._prompts: dict[str, str] = {}
        self._rewards: dict[int, Counter[float | None]] = {}

    def look(self, seconds: float = math.inf) -> int:
        """Read the files that are new or have changed, the last steps first; how many are left when the time is up."""
        self._files = files = rollout_files(self._path, self._folder)
        for step in self.steps.keys() - files.keys():
            del self.steps[step], self._seen[step], self._rewards[step]
        states = {step: state for step, path in files.items() if (state := _state(path))}
        changed = [step for step, state in sorted(states.items(), reverse=True) if self._seen.get(step) != state]
        until = time.monotonic() + seconds
        for number, step in enumerate(changed):
            if number and time.monotonic() > until:
                return len(changed) - number
            self._read(step, files[step])
            self._seen[step] = states[step]
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
        samples = [sample_of(line) for line in map(parsed, lines) if line is not None]
        first = samples[0] if samples else {}
        shown = [self._shown(sample) for sample in samples]
        return {"query": spans[0].query, **{key: first.get(key) for key in _OF_GROUP[1:]}, "samples": shown}

    def index(self, places: Mapping[tuple[int, int], int] | None = None, left: int = 0) -> dict[str, Any]:
        """The queries, and what each got in each step; `places` are those of the groups that a page carries.

        Without them every group is there, at its own place.
        """
        named = dict.fromkeys(place.query for step in sorted(self.steps) for place in self.steps[step])
        kept = set(named if places is None else _by_hash(named)[:_MAX_QUERIES])
        numbers = {query: number for number, query in enumerate(query for query in named if query in kept)}
        steps = []
        for step, found in sorted(self.steps.items()):
            own = [number if places is None else places.get((step, number)) for number in range(len(found))]
            groups = [
                [numbers[place.query], len(place.spans), place.passed, place.mean, number]
                for place, number in zip(found, own, strict=True)
                if place.query in numbers
            ]
            steps.append({"step": step, "groups": groups})
        queries = [[query, self._prompts[query]] for query in numbers]
        about = {"name": self.name, "kind": self.kind, "told": self._told(places, len(named) - len(numbers), left)}
        return {**about, "queries": queries, "steps": steps, "rewards": self._distribution()}

    def _read(self, step: int, path: Path) -> None:
        groups: dict[str, list[tuple[int, int, Sample]]] = {}
        rewards: Counter[float | None] = Counter()
        start = 0
        with open(path, "rb", opener=for_reading) as file:
            for line in file:
                if line.endswith(b"\n") and (content := parsed(line)) is not None:
                    sample = sample_of(content)
                    query, reward = str(sample.get("query")), sample.get("reward")
                    self._prompts.setdefault(query, str(sample.get("prompt", ""))[-_PROMPT:])
                    rewards[reward if reward is None else _short(reward)] += 1
                    few = {name: sample.get(name) for name in ("reward", "rewards", "failure")}
                    groups.setdefault(query, []).append((start, len(line), few))
                start += len(line)
        self._rewards[step] = rewards
        self.steps[step] = [self._place(query, found) for query, found in groups.items()]

    def _place(self, query: str, found: Sequence[tuple[int, int, Sample]]) -> Place:
        rewards = [sample["reward"] for _, _, sample in found if sample["reward"] is not None]
        return Place(
            query=query,
            spans=tuple((start, size) for start, size, _ in found),
            passed=sum(passes(sample, self._threshold) is True for _, _, sample in found),
            mean=_short(fmean(rewards)) if rewards else None,
        )

    def _shown(self, sample: Sample) -> dict[str, Any]:
        """The line as the page shows it: without what its group says, and with whether it passes."""
        shown = {key: value for key, value in {**_UNKNOWN, **sample}.items() if key not in _OF_GROUP}
        for name in ("token_log_ratios", "token_advantages"):
            if isinstance(numbers := shown.get(name), list):
                shown[name] = [None if number is None else _short(number) for number in numbers]
        if cut_into_tokens(shown) is None:  # the page could not tell whose a number is
            shown = {name: None if name.startswith("token_") else value for name, value in shown.items()}
        return {**shown, "passed": passes(sample, self._threshold)}

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
        rows = [(label, [*map(_short, row)]) for label, row in zip([*labels, "none"], table, strict=True) if any(row)]
        return {"steps": steps, "labels": [f"reward {label}" for label, _ in rows], "shares": [row for _, row in rows]}

    def _told(self, places: Mapping[tuple[int, int], int] | None, num_unnamed: int, left: int) -> str:
        if not self.steps and not left:
            why = "The recipe has report.rollouts: false: no samples were kept."
            return why if self._off else "There are no samples yet."
        if left:
            return f"{left:,} files of steps are still to be read."
        total = sum(map(len, self.steps.values()))
        if places is None or len(places) == total:
            return f"All samples of {f'all {len(self.steps):,} steps' if len(self.steps) > 1 else 'the one step'}."
        steps = len({step for step, _ in places})
        table = f" The table leaves out {num_unnamed:,} queries." if num_unnamed else ""
        return (
            f"This page carries {len(places):,} of {total:,} groups, from {steps:,} of {len(self.steps):,} steps, "
            f"chosen by a hash of the query; gspo view {self._path} shows all.{table}"
        )


def sample_sets(runs: Sequence[RunFiles], *, live: bool = False) -> list[SampleSet]:
    """Those of each run's training, and of its evaluations where it has kept any, or may yet."""
    names = Counter(run.name for run in runs)
    return [
        SampleSet(run, folder, run.name if names[run.name] == 1 else str(run.path))
        for run in runs
        for folder in FOLDERS
        if live or folder != EVALUATION or rollout_files(run.path, folder)
    ]


def samples_json(runs: Sequence[RunFiles]) -> str:
    """What a page carries of the runs' samples, all packed: an index, and the groups of each step."""
    sets = sample_sets(runs)
    indices, contents = [], []
    for samples in sets:
        samples.look()
        places, packed = _carried(samples, _MAX_BYTES // len(sets))
        indices.append(samples.index(places))
        contents.append(packed)
    return json.dumps({"live": False, "index": _packed(indices), "contents": contents})


def _carried(samples: SampleSet, max_bytes: int) -> tuple[dict[tuple[int, int], int], dict[int, str]]:
    """The groups of a page: where each is in what its step carries, and that, packed."""
    chosen = _chosen(samples.steps, max_bytes)
    places, packed = {}, {}
    for step in samples.steps:
        own = sorted(place for at, place in chosen if at == step)
        places.update({(step, place): number for number, place in enumerate(own)})
        groups = [samples.group(step, place) for place in own]
        packed[step] = _packed(groups)
    return places, packed


def _chosen(steps: Mapping[int, Sequence[Place]], max_bytes: int) -> set[tuple[int, int]]:
    """Of every step as many groups as there is room for, the same queries in each as far as can be."""
    named = {place.query for places in steps.values() for place in places}
    ranks = {query: rank for rank, query in enumerate(_by_hash(named)[:_MAX_QUERIES])}
    order = []
    for number, (step, places) in enumerate(sorted(steps.items())):
        spread = 0 if number == len(steps) - 1 else int(f"{number:032b}"[::-1], 2)  # the ends, the middle, quarters …
        known = sorted((ranks[place.query], at) for at, place in enumerate(places) if place.query in ranks)
        order += [(turn, spread, step, at) for turn, (_, at) in enumerate(known)]
    chosen = set()
    for _, _, step, at in sorted(order):
        if (size := sum(size for _, size in steps[step][at].spans)) <= max_bytes:
            chosen.add((step, at))
            max_bytes -= size
    return chosen


def _by_hash(queries: Iterable[str]) -> list[str]:
    return sorted(queries, key=lambda query: hashlib.sha256(query.encode(errors="replace")).digest())


def _packed(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _short(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def _state(path: Path) -> tuple[int, int] | None:
    """What changes when a file does; None where it has gone."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns
