"""The directory of an evaluation: each judged response is appended to a file, of which evaluation.json is made."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gspo.errors import UserError, writable
from gspo.evaluation.compare import differences
from gspo.evaluation.held_out import SAMPLING_KEY, held_out_score

EVALUATION_FILE, UNFINISHED = "evaluation.json", "unfinished.jsonl"
FORMAT = 1

Line = Mapping[str, Any]  # of judged_lines


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Have the directory for this process alone, until it ends, however that is; UserError where another has it."""
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a+b", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            what = f"{file.read().decode().strip() or 'another process'} is writing to this directory"
            fix = "wait for it or end it, or give another --out"
            raise UserError(what, where=str(directory), fix=fix) from None
        with _writing(directory):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield


@dataclass(kw_only=True)
class Judged:
    """What a directory has of a suite.

    Example: Judged(about={"settings": …, "data": {"num_rows": 1319, …}}).questions["gsm8k:7"][0]["passed"]
    """

    about: Mapping[str, Any]
    questions: dict[str, dict[int, Line]] = field(default_factory=dict)  # the responses by query and sample
    seconds: Sequence[float] = (0.0, 0.0)  # of sampling, and of judging
    rating: Mapping[str, Any] | None = None

    @property
    def lines(self) -> list[Line]:
        return [line for samples in self.questions.values() for line in samples.values()]

    @property
    def is_whole(self) -> bool:
        return len(self.questions) == self.about["data"]["num_rows"]

    def add(self, lines: Sequence[Line], seconds: Sequence[float]) -> None:
        """Take in judged responses; `seconds` is how long sampling and judging took."""
        for line in lines:
            self.questions.setdefault(line["query"], {})[line["sample"]] = line
        self.seconds = [a + b for a, b in zip(self.seconds, seconds, strict=True)]


class Journal:
    """What is judged so far in a directory, by suite; a process that is killed loses nothing that was added.

    `model` is what the evaluation is of. UserError where the directory holds that of another model, or no evaluation.
    """

    def __init__(self, directory: Path, model: Mapping[str, Any]) -> None:
        self.path, self.suites = directory, dict[str, Judged]()
        self._model, self._engine = dict(model), dict[str, str]()
        for name, read in ((EVALUATION_FILE, self._read_finished), (UNFINISHED, self._read_unfinished)):
            path = directory / name
            try:
                if path.exists() and (content := path.read_bytes()):
                    read(content)
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                what = f"this is no evaluation that gspo has written: {type(error).__name__}: {error}"
                raise UserError(what, where=str(path), fix="give another --out, or remove the file") from None

    def begin(self, suite: str, about: Mapping[str, Any]) -> Judged:
        """What is judged of the suite already; UserError where that was done in another way."""
        about = json.loads(json.dumps(about))
        if suite not in self.suites:
            self._append([{"suite": suite, "about": about}])
            self.suites[suite] = Judged(about=about)
        before = self.suites[suite].about
        if pairs := differences(before, {**about, "data": {**about["data"], "path": before["data"]["path"]}}):
            key, (then, now) = next(iter(pairs.items()))
            what = f"it has {suite} with {key} {then[:80]}, and now it is {now[:80]}"
            if key.startswith("settings.code."):
                function = key.removeprefix("settings.code.")
                what = f"it has {suite} with other code of the reward function {function} than there is now"
            fix = "give another --out, or the same settings and data to go on with it; or delete it to judge anew"
            raise UserError(what, where=str(self.path), fix=fix)
        return self.suites[suite]

    def add(self, suite: str, lines: Sequence[Line], seconds: Sequence[float]) -> None:
        """Write judged responses, all those to some questions; `seconds` is how long sampling and judging took."""
        lines = [writable(line) for line in lines]
        self._append([*({"suite": suite, "line": line} for line in lines), {"suite": suite, "seconds": seconds}])
        self.suites[suite].add(lines, seconds)

    def finish(self, engine: Mapping[str, str], ratings: Mapping[str, Any]) -> dict[str, Any]:
        """Write evaluation.json, of the suites that are judged whole, with new ratings; what it holds.

        Without an `engine`, since nothing was left to sample, it is that of before.
        """
        tree: dict[str, Any] = {"format": FORMAT, "gspo": version("gspo"), "model": self._model}
        tree |= {"engine": dict(engine) or self._engine, "seed": SAMPLING_KEY.seed, "suites": {}}
        for name, judged in self.suites.items():
            judged.rating = ratings.get(name, judged.rating)
            if judged.is_whole:
                numbers = numbers_of(judged.lines)
                numbers |= {"seconds_sampling": judged.seconds[0], "seconds_judging": judged.seconds[1]}
                numbers |= {"rating": judged.rating} if judged.rating else {}
                tree["suites"][name] = {**judged.about, "numbers": numbers, "responses": judged.lines}
        path = self.path / EVALUATION_FILE
        new = path.with_name(f"{EVALUATION_FILE}.new")
        with _writing(path), new.open("w", encoding="utf-8") as file:
            file.write(json.dumps(tree, ensure_ascii=False, allow_nan=False))
            file.flush()
            os.fsync(file.fileno())
            new.replace(path)
            if all(judged.is_whole for judged in self.suites.values()):
                (self.path / UNFINISHED).unlink(missing_ok=True)
        return tree

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        path = self.path / UNFINISHED
        with _writing(path), path.open("a", encoding="utf-8") as file:
            for record in [{"model": self._model}, *records] if file.tell() == 0 else records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read_finished(self, content: bytes) -> None:
        tree = json.loads(content)
        if tree["format"] != FORMAT:
            raise ValueError(f"its format is {tree['format']}, not {FORMAT}")
        self._check_model(tree["model"])
        self._engine = dict(tree["engine"])
        for name, suite in tree["suites"].items():
            numbers = suite["numbers"]
            about = {key: suite[key] for key in ("settings", "data")}
            self.suites[name] = Judged(about=about, rating=numbers.get("rating"))
            self.suites[name].add(suite["responses"], [numbers["seconds_sampling"], numbers["seconds_judging"]])

    def _read_unfinished(self, content: bytes) -> None:
        """What a killed process has left: whole questions only; the torn last line is cut off."""
        whole = content[: content.rfind(b"\n") + 1]
        published = {*self.suites}  # the process was killed before it could remove this file
        for record in map(json.loads, whole.splitlines()):
            if "model" in record:
                self._check_model(record["model"])
            elif (name := record["suite"]) not in published:
                if "about" in record:
                    self.suites[name] = Judged(about=record["about"])
                lines = [record["line"]] if "line" in record else []
                self.suites[name].add(lines, record.get("seconds", (0.0, 0.0)))
        for judged in self.suites.values():
            size = judged.about["settings"]["samples"]
            judged.questions = {query: own for query, own in judged.questions.items() if len(own) == size}
        os.truncate(self.path / UNFINISHED, len(whole))

    def _check_model(self, model: Mapping[str, Any]) -> None:
        if model["sha256"] != self._model["sha256"]:
            what = f"it holds the evaluation of another model, {model['path']}; this is {self._model['path']}"
            raise UserError(what, where=str(self.path), fix="give another --out")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "make room there, or give another --out; the same command goes on with what is judged"
        raise UserError(f"cannot be written: {error.strerror}", where=str(path), fix=fix) from None


def numbers_of(lines: Sequence[Line]) -> dict[str, Any]:
    """The numbers of a suite's judged responses, as evaluation.json has them: null for what does not exist."""
    score = held_out_score(lines, [*lines[0]["rewards"]])
    numbers = {
        "pass_at_1": score.pass_at_1.mean,
        "error_over_questions": score.pass_at_1.error_over_questions,
        "error_over_samples": score.pass_at_1.error_over_samples,
        "reward_mean": score.reward.mean,
        "reward_error": score.reward.error_over_questions,
        "mean_response_tokens": score.mean_response_tokens,
        "truncated_fraction": score.truncated_fraction,
        "pass_at_k": {"1": score.pass_at_1.mean, **{str(k): rate for k, rate in score.pass_at_k.items()}},
        "num_questions": score.pass_at_1.num_questions,
        "num_responses": score.num_responses,
        "num_unjudged": score.num_unjudged,
        "num_failed": score.num_failed,
        "first_failure": score.first_failure or None,
    }
    return dict(writable(numbers))
