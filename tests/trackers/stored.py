"""What each tracker has stored of a run, read from its own files."""

import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Stored:
    """What a tracker has, whatever it is."""

    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # step and numbers, each as often as stored
    run_of_rows: list[str] = field(default_factory=list)
    tables: dict[int, Any] = field(default_factory=dict)  # by step: rows
    markdown: dict[int, str] = field(default_factory=dict)  # by step, of TensorBoard: the same
    config: Any = None

    @property
    def runs(self) -> set[str]:
        return set(self.run_of_rows)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


def read_stored(name: str, run: Path) -> Stored:
    """What a tracker has of a run, and of others in its project."""
    return {"tensorboard": _in_tensorboard, "trackio": _in_trackio, "wandb": _in_wandb}[name](run)


def _in_tensorboard(run: Path) -> Stored:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found = Stored()
    for path in sorted(run.glob("events.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            values = event.summary.value
            numbers = {value.tag: value.simple_value for value in values if value.HasField("simple_value")}
            if numbers:
                found.rows.append((event.step, numbers))
                found.run_of_rows.append(run.name)
            for value in values:
                text = b"".join(value.tensor.string_val).decode()
                if value.tag == "recipe":
                    assert found.config is None, "the recipe is there twice"
                    found.config = yaml.safe_load(text)
                elif text:
                    assert value.tag == "samples" and value.metadata.plugin_data.plugin_name == "text"
                    found.markdown[event.step] = text
                    found.tables[event.step] = yaml.safe_load(text)
    return found


def _in_trackio(run: Path) -> Stored:
    found = Stored()
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / f"{_project(run)}.db") as database:
        for number, step, content in database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id"):
            numbers = json.loads(content)
            table = numbers.pop("samples", None)
            found.run_of_rows.append(number)
            found.rows.append((step, numbers))
            if table is not None:
                assert table["_type"] == "trackio.table"
                found.tables[step] = table["_value"]
        found.config = json.loads(database.execute("SELECT config FROM configs").fetchone()[0])
    return found


def _in_wandb(run: Path) -> Stored:
    from wandb.proto.wandb_internal_pb2 import Record

    found, number = Stored(), ""
    for path in sorted((run / "trackers" / "wandb").glob("offline-run-*/run-*.wandb")):
        for content in _leveldb_records(path.read_bytes()[7:], start=7):
            record = Record.FromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                number = record.run.run_id
                assert record.run.project == _project(run) and record.run.display_name == run.name
                found.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                numbers = {key: value for key, value in items.items() if not key.startswith(("_", "samples/"))}
                found.run_of_rows.append(number)
                found.rows.append((items["_step"], numbers))
                if "samples/path" in items:
                    table = json.loads((path.parent / "files" / items["samples/path"]).read_text())
                    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
                    found.tables[items["_step"]] = rows
    return found


def _project(run: Path) -> str:
    return str(yaml.safe_load((run / "recipe.yaml").read_text())["report"]["project"])


def _leveldb_records(data: bytes, *, start: int) -> Iterator[bytes]:
    """The records of a file of wandb's: LevelDB's log format, blocks of 32 KiB, a record's parts in one or several."""
    place, parts = 0, b""
    while place < len(data):
        left = 32768 - (place + start) % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole, or the last part
            yield parts
            parts = b""
