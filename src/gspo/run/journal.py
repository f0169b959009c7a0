"""The directory of an evaluation: what is judged is on the disk at once, in the end as evaluation.json."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.evaluation.held_out import SAMPLING_KEY, held_out_score
from gspo.run.lock import Lock
from gspo.run.plain_files import replace_text

EVALUATION_FILE, UNFINISHED = "evaluation.json", "unfinished.jsonl"
FORMAT = 1

Line = dict[str, Any]  # of judged_lines


@dataclass(kw_only=True)
class Judged:
    """What a directory has of a suite.

    Example: Judged(about={"settings": …, "data": {"num_rows": 1319, …}}, lines=[…]).is_whole
    """

    about: Mapping[str, Any]
    lines: list[Line] = field(default_factory=list)
    seconds: Sequence[float] = (0.0, 0.0)  # of sampling, and of judging
    rating: Mapping[str, Any] | None = None

    @property
    def questions(self) -> set[str]:
        """The ids of those that are judged."""
        return {line["query"] for line in self.lines}

    @property
    def is_whole(self) -> bool:
        """Whether all questions are judged."""
        return len(self.questions) == self.about["data"]["num_rows"]


class Journal:
    """The responses judged so far, by suite; a process that is killed loses none of those that were added.

    `model` is what the directory's evaluation is of. UserError where it holds that of another model, or no evaluation.
    """

    def __init__(self, directory: Path, model: Mapping[str, Any]) -> None:
        self.path, self.suites = directory, dict[str, Judged]()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot be made: {error.strerror}", where=str(directory), fix="give --out DIR") from None
        self._model, self._unfinished, self._engine = dict(model), directory / UNFINISHED, dict[str, str]()
        self._lock = Lock(directory)
        try:
            self._read(directory / EVALUATION_FILE, self._read_finished)
            self._read(self._unfinished, self._read_unfinished)
        except UserError:
            self._lock.release()
            raise

    def close(self) -> None:
        """Let another process have the directory."""
        self._lock.release()

    def begin(self, suite: str, about: Mapping[str, Any]) -> set[str]:
        """The ids of the suite's questions that are judged already; UserError where that was done in another way."""
        judged = self.suites.get(suite)
        if judged is None:
            self.suites[suite] = judged = Judged(about=json.loads(json.dumps(about)))
            self._append([{"suite": suite, "about": judged.about}])
        moved = {**about, "data": {**about["data"], "path": judged.about["data"].get("path")}}
        if judged.about != json.loads(json.dumps(moved)):
            what = f"it has {suite} with {_difference(judged.about, moved)}"
            fix = "give another --out, or the same settings and data to go on with it; or delete it to judge anew"
            raise UserError(what, where=str(self.path), fix=fix)
        return judged.questions

    def add(self, suite: str, lines: Sequence[Line], seconds: Sequence[float]) -> None:
        """Write judged responses, all those to some questions; `seconds` is how long sampling and judging took."""
        judged = self.suites[suite]
        self._append([*({"suite": suite, "line": line} for line in lines), {"suite": suite, "seconds": seconds}])
        judged.lines += lines
        judged.seconds = _sums(judged.seconds, seconds)

    def finish(self, engine: Mapping[str, str], ratings: Mapping[str, Any]) -> dict[str, Any]:
        """Write evaluation.json, of the suites that are judged whole, with new ratings; what it holds.

        Without an `engine`, since nothing was left to sample, it is that of before.
        """
        tree: dict[str, Any] = {"format": FORMAT, "gspo": version("gspo"), "model": self._model}
        tree |= {"engine": dict(engine) or self._engine, "seed": SAMPLING_KEY.seed, "suites": {}}
        for name, judged in self.suites.items():
            judged.rating = ratings.get(name, judged.rating)
            if judged.is_whole:
                seconds = {"seconds_sampling": judged.seconds[0], "seconds_judging": judged.seconds[1]}
                numbers = numbers_of(judged.lines) | seconds | ({"rating": judged.rating} if judged.rating else {})
                tree["suites"][name] = {**judged.about, "numbers": numbers, "responses": judged.lines}
        self._lock.check()
        with self._writing(self.path / EVALUATION_FILE):
            replace_text(self.path / EVALUATION_FILE, json.dumps(tree, ensure_ascii=False, allow_nan=False))
            if all(judged.is_whole for judged in self.suites.values()):
                self._unfinished.unlink(missing_ok=True)
        return tree

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._lock.check()
        with self._writing(self._unfinished), self._unfinished.open("ab") as file:
            header = [{"model": self._model}] if file.tell() == 0 else []
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [*header, *lines])
            file.write(text.encode(errors="replace"))
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            fix = "make room, then run the same command again: it goes on"
            raise UserError(f"cannot be written: {error.strerror}", where=str(path), fix=fix) from None

    def _read(self, path: Path, read: Callable[[bytes], None]) -> None:
        try:
            if path.exists() and (content := path.read_bytes()):
                read(content)
                for judged in self.suites.values():
                    if judged.is_whole or judged.lines:
                        numbers_of(judged.lines)  # as is done in the end: any error says that gspo has not written it
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            what = f"this is no evaluation that gspo has written: {type(error).__name__}: {error}"
            raise UserError(what, where=str(path), fix="give another --out, or remove the file") from None

    def _read_finished(self, content: bytes) -> None:
        tree = json.loads(content)
        if tree["format"] != FORMAT:
            raise ValueError(f"its format is {tree['format']}, not {FORMAT}")
        self._check_model(tree["model"])
        self._engine = dict(tree["engine"])
        for name, suite in tree["suites"].items():
            numbers = suite["numbers"]
            self.suites[name] = Judged(
                about={key: suite[key] for key in ("settings", "data")},
                lines=suite["responses"],
                seconds=[numbers["seconds_sampling"], numbers["seconds_judging"]],
                rating=numbers.get("rating"),
            )

    def _read_unfinished(self, content: bytes) -> None:
        """What a killed process has left: whole questions only; the torn last line is cut off."""
        whole = content[: content.rfind(b"\n") + 1]
        model, *records = [json.loads(line) for line in whole.splitlines()] or [None]
        if model is not None:  # else it was killed in its first write
            self._check_model(model["model"])
        known = {name: judged.questions for name, judged in self.suites.items()}
        read: dict[tuple[str, str], dict[int, Line]] = {}  # by suite and question, then by sample
        for record in records:
            name = record["suite"]
            judged = self.suites.setdefault(name, Judged(about=record.get("about", {})))
            if "seconds" in record and name not in known:
                judged.seconds = _sums(judged.seconds, record["seconds"])
            if "line" in record:
                line = record["line"]
                read.setdefault((name, line["query"]), {})[line["sample"]] = line
        for (name, query), lines in read.items():
            if len(lines) == self.suites[name].about["settings"]["samples"] and query not in known.get(name, ()):
                self.suites[name].lines += lines.values()
        os.truncate(self._unfinished, len(whole))

    def _check_model(self, model: Mapping[str, Any]) -> None:
        if model["sha256"] != self._model["sha256"]:
            what = f"it holds the evaluation of another model, {model['path']}; this is {self._model['path']}"
            raise UserError(what, where=str(self.path), fix="give another --out")


def _sums(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


def numbers_of(lines: Sequence[Line]) -> dict[str, Any]:
    """The numbers of a suite's judged responses, as evaluation.json has them: null for what does not exist."""
    score = held_out_score(lines, [*lines[0]["rewards"]])
    measured = {
        "pass_at_1": score.pass_at_1.mean,
        "error_over_questions": score.pass_at_1.error_over_questions,
        "error_over_samples": score.pass_at_1.error_over_samples,
        "reward_mean": score.reward.mean,
        "reward_error": score.reward.error_over_questions,
        "mean_response_tokens": score.mean_response_tokens,
        "truncated_fraction": score.truncated_fraction,
    }
    numbers = {name: value if math.isfinite(value) else None for name, value in measured.items()}
    at_k = {"1": numbers["pass_at_1"], **{str(k): rate for k, rate in score.pass_at_k.items()}}
    counts = {
        "num_questions": score.pass_at_1.num_questions,
        "num_responses": score.num_responses,
        "num_unjudged": score.num_unjudged,
        "num_failed": score.num_failed,
        "first_failure": score.first_failure or None,
    }
    return {**numbers, "pass_at_k": at_k, **counts}


def _difference(before: Any, now: Any, key: str = "") -> str:
    """The first key in which two trees differ, with both values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                if key == "settings.code":
                    return f"other code of the reward function {name} than there is now"
                return _difference(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
    return (
        f"{key} {json.dumps(before, ensure_ascii=False)[:80]}, and now it is {json.dumps(now, ensure_ascii=False)[:80]}"
    )
