"""The directory of an evaluation: each judged response is appended to a file, of which evaluation.json is made."""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gspo.errors import UserError, writable, writing
from gspo.evaluation.compare import differences
from gspo.evaluation.held_out import SAMPLING_KEY, numbers_of

EVALUATION_FILE, UNFINISHED = "evaluation.json", "unfinished.jsonl"
FORMAT = 1
NO_ROOM = "make room there, or give another --out; the same command goes on with what is judged"
_OF_A_RUN = ("num_masked", "num_judged_by", "function_means")  # numbers that evaluation.json does not have
_SECONDS = ("seconds_sampling", "seconds_judging")
_NEW = "evaluation.json.new"  # until it is whole


class Journal:
    """The judgements in a directory; a process that is killed loses nothing that was added.

    `suites` has, by name, the settings, data, numbers and responses of each as evaluation.json has them. UserError
    where the directory holds the evaluation of another model than `model`, or no evaluation.
    """

    def __init__(self, directory: Path, model: Mapping[str, Any]) -> None:
        self.path, self.suites = directory, dict[str, dict[str, Any]]()
        self._model, self._engine = dict(model), dict[str, str]()
        for name, read in ((EVALUATION_FILE, self._read_finished), (UNFINISHED, self._read_unfinished)):
            path = directory / name
            try:
                if path.exists() and (content := path.read_bytes()):
                    read(content)
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                what = f"this is no evaluation that gspo has written: {type(error).__name__}: {error}"
                raise UserError(what, where=str(path), fix="give another --out, or remove the file") from None

    def begin(self, suite: str, about: Mapping[str, Any]) -> set[str]:
        """The ids of the suite's questions that are judged; UserError where that was with other settings or data."""
        about = json.loads(json.dumps(about))
        if suite not in self.suites:
            self._append([{"suite": suite, "about": about}])
        before = {key: self.suites[suite][key] for key in about}
        about["data"]["path"] = before["data"]["path"]  # the same data may lie elsewhere
        for key, (then, now) in differences(before, about).items():
            what = f"it has {suite} with {key} {then[:80]}, and now it is {now[:80]}"
            if key.startswith("settings.code."):
                function = key.removeprefix("settings.code.")
                what = f"it has {suite} with other code of the reward function {function} than there is now"
            fix = "give another --out, or the same settings and data to go on with it; or delete it to start over"
            raise UserError(what, where=str(self.path), fix=fix)
        return self.judged(suite)

    def judged(self, suite: str) -> set[str]:
        """The ids of the suite's questions that are judged."""
        return {line["query"] for line in self.suites[suite]["responses"]}

    def add(self, suite: str, lines: Sequence[Mapping[str, Any]], seconds: Sequence[float]) -> None:
        """Write judged responses, all those to some questions; `seconds` are of sampling and of judging."""
        self._append([*({"suite": suite, "line": line} for line in lines), {"suite": suite, "seconds": seconds}])

    def finish(self, engine: Mapping[str, str], ratings: Mapping[str, Any]) -> dict[str, Any]:
        """Write evaluation.json, of the suites that are judged whole, with new ratings; what it holds.

        Without an `engine`, since nothing was left to sample, it is that of before.
        """
        whole = {name: own for name, own in self.suites.items() if len(self.judged(name)) == own["data"]["num_rows"]}
        for name, suite in whole.items():
            rating = {"rating": ratings[name]} if name in ratings else {}
            numbers = writable(numbers_of(suite["responses"]))
            kept = {key: own for key, own in numbers.items() if key not in _OF_A_RUN}
            suite["numbers"] = {**kept, **suite["numbers"], **rating}
        tree: dict[str, Any] = {"format": FORMAT, "gspo": version("gspo"), "model": self._model}
        tree |= {"engine": dict(engine) or self._engine, "seed": SAMPLING_KEY.seed, "suites": whole}
        final, new = self.path / EVALUATION_FILE, self.path / _NEW
        with writing(final, NO_ROOM), new.open("w", encoding="utf-8") as file:
            file.write(json.dumps(tree, ensure_ascii=False, allow_nan=False))
            file.flush()
            os.fsync(file.fileno())
            new.replace(final)
            if len(whole) == len(self.suites):
                (self.path / UNFINISHED).unlink(missing_ok=True)
        return tree

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        path, records = self.path / UNFINISHED, writable(records)
        with writing(path, NO_ROOM), path.open("a", encoding="utf-8") as file:
            for record in [{"model": self._model}, *records] if file.tell() == 0 else records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for record in records:
            self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        if "about" in record:
            self.suites[record["suite"]] = {**record["about"], "numbers": dict.fromkeys(_SECONDS, 0.0), "responses": []}
        suite = self.suites[record["suite"]]
        suite["responses"] += [record["line"]] if "line" in record else []
        for name, seconds in zip(_SECONDS, record.get("seconds", ()), strict=False):
            suite["numbers"][name] += seconds

    def _read_finished(self, content: bytes) -> None:
        tree = json.loads(content)
        if tree["format"] != FORMAT:
            raise ValueError(f"its format is {tree['format']}, not {FORMAT}")
        self._check_model(tree["model"])
        self._engine, self.suites = tree["engine"], tree["suites"]

    def _read_unfinished(self, content: bytes) -> None:
        """Take what a killed process has left, but for responses that it was writing, which are cut off."""
        lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
        records = [*map(json.loads, lines)]
        while records and "line" in records[-1]:  # they end with their seconds
            records.pop()
        if records:  # else the process was killed in its first write
            self._check_model(records[0]["model"])
        published = {*self.suites}  # the process was killed before it removed this file
        for record in records[1:]:
            if record["suite"] not in published:
                self._take(record)
        os.truncate(self.path / UNFINISHED, sum(map(len, lines[: len(records)])))

    def _check_model(self, model: Mapping[str, Any]) -> None:
        if model["sha256"] != self._model["sha256"]:
            what = f"it holds the evaluation of another model, {model['path']}; this is {self._model['path']}"
            raise UserError(what, where=str(self.path), fix="give another --out")
