"""The steps of a run as it writes them: each line once, up to what is announced; and a few tables."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.trackers.made import COLUMNS, METRICS, NUMBERS, MadeRun

from gspo.metrics.numbers import scalars
from gspo.report.run_files import LAST, lines_up_to, read_run, table_of


def test_names_are_those_of_the_metrics_and_what_is_no_number_is_left_out() -> None:
    odd = {"a/text": "1", "a/nan": float("nan"), "a/infinite": [float("inf"), 1], "a/table": {"b": 1}, "a/none": []}
    assert scalars({"step": 4, **METRICS, **odd}) == {**NUMBERS, "a/infinite/1": 1}


def test_each_line_is_read_once_up_to_what_is_announced(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    numbers: list[int] = []

    def announced() -> Iterator[int]:
        yield 1  # before there is a file
        log.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
        yield 1
        assert numbers == [0, 1]
        with log.open("a") as file:
            file.write('not json\n[]\n{"step": 3}\n{"step": 4')
        yield 3
        assert numbers == [0, 1, 2, 3]
        with log.open("a") as file:
            file.write("2}\n")
        yield LAST
        pytest.fail("more is asked for after the last step")

    for line in lines_up_to(tmp_path, announced()):
        numbers.append(line["step"])
    assert numbers == [0, 1, 2, 3, 42]


@pytest.mark.parametrize(("steps", "with_table"), [(3, range(1, 4)), (20, range(1, 21)), (100, range(5, 101, 5))])
def test_at_most_twenty_steps_have_a_table_the_last_among_them(tmp_path: Path, steps: int, with_table: range) -> None:
    made = MadeRun(tmp_path / "made", steps=steps)
    for step in range(steps + 1):
        made.step(step, rollouts=9)
    run = read_run(made.path)
    tables: dict[int, Any] = {step: table for step in range(steps + 1) if (table := table_of(run, step))}
    assert list(tables) == list(with_table)
    assert all(len(table) == 8 and list(table[0]) == COLUMNS for table in tables.values())


def test_a_table_is_what_any_tracker_can_write(tmp_path: Path) -> None:
    made = MadeRun(tmp_path / "made", steps=1)
    run = read_run(made.path)
    assert table_of(run, 1) == []  # report.rollouts: false
    (made.path / "rollouts").mkdir()
    row = {**dict.fromkeys(COLUMNS), "query": "q", "completion": "\ud83d"}
    (made.path / "rollouts" / "step_000001.jsonl").write_text(f"{json.dumps(row)}\nnot json\n")
    (table,) = table_of(run, 1)
    assert table["completion"] == "\\ud83d" and table["reward"] is None and table["query"] == "q"
    yaml.safe_dump(table).encode()
