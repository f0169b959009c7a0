"""Whatever a run's files hold, it is shown as far as it can be, or refused in a sentence."""

import io
import json
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.report.page.made_runs import metrics_line, rollouts, write_run

from gspo.errors import UserError
from gspo.metrics.numbers import scalars
from gspo.report.page.write import document
from gspo.report.run_files import read_run
from gspo.report.show import show
from gspo.report.steps import LAST, lines_up_to, table_of

NUM_ROUNDS = 150  # a random change of a good run in each, the same ones every time
FILES = ("metrics.jsonl", "history.jsonl", "cold_start.jsonl", "rollouts/step_000001.jsonl")
ODD: list[Any] = [
    *(None, True, -1, 0, 2**53 + 1, 10**30, 10**400, -0.5, 1e308, 5e-324, float("nan"), float("inf")),
    *("", "x", "\x1b[2J", "\ud800", "</script>", "9" * 4301, "2026-13-01"),
    *([], [1], [None, "x"], [[1, [2]], 3], [1e308, 1e308, -1e308], {}, {"a": {"b": [1]}}, {"": None}),
    json.loads("[" * 60 + "]" * 60),
]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run() -> Path:
    """One of all kinds of files, all well."""
    sections = {"actor": {"clip_low": 0.003}, "report": {"rollouts": True}, "rollout": {"group_size": 4}}
    settings = {"name": "a", "steps": 2, "model": {}, "evaluation": {"pass_threshold": 1.0}, **sections}
    samples = [{**line, "columns": {"answer": "5", "level": 2}} for line in rollouts(2)[::3]]
    path = write_run(Path("a"), settings=settings, lines=map(metrics_line, range(3)), samples={1: samples})
    (path / "cold_start.jsonl").write_text('{"step": 1, "loss": 0.5, "learning_rate": 0.1, "applied": true}\n')
    return path


def changed(rng: random.Random, value: Any) -> Any:
    """The value with another one, or without one, somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        rest = {name: item for name, item in value.items() if name != key}
        return rest if rng.random() < 0.1 else {**rest, key: changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.5:
        place = rng.randrange(len(value))
        return [*value[:place], changed(rng, value[place]), *value[place + 1 :]]
    return rng.choice(ODD)


def damaged(rng: random.Random, line: str) -> str:
    """What a full disk or a power failure leaves of a line, in one or two."""
    place = rng.randrange(len(line))
    return line[:place] + rng.choice(["", "\n", "\x00" * (len(line) - place), line[place + 1 :]])


def changed_text(rng: random.Random, text: str, *, is_rollouts: bool) -> str:
    """A file's text with up to three changes in it; a line of responses may be cut, too."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(lines))
        if is_rollouts and rng.random() < 0.2:
            lines[place] = damaged(rng, lines[place])
        else:
            with suppress(ValueError):  # a change before has cut the line
                lines[place] = json.dumps(changed(rng, json.loads(lines[place])))
    return "".join(f"{line}\n" for line in lines)


def look(path: Path) -> None:
    """Make everything of a run that is made of one; what its page is drawn of is JSON to a browser, too."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    run = read_run(path)
    page = document([run])
    for name in ("data", "samples-data"):
        (text,) = re.findall(f'id="{name}">([^<]*)</script>', page)
        json.loads(text, parse_constant=refuse)
    for as_json in (False, True):
        console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
        show(path, step=None, query=None, as_json=as_json, console=console)
    for line in lines_up_to(path, [LAST]):
        json.dumps([scalars(line), table_of(run, line["step"])], allow_nan=False).encode()


def test_whatever_a_file_holds_is_shown_or_refused(run: Path) -> None:
    look(run)
    for number in range(NUM_ROUNDS):
        rng = random.Random(number)
        file = run / rng.choice(FILES)
        whole = file.read_text(encoding="utf-8")
        file.write_text(changed_text(rng, whole, is_rollouts="rollouts" in file.parts), encoding="utf-8")
        try:
            with suppress(UserError):
                look(run)
        except Exception as error:
            error.add_note(f"round {number}, {file}: {file.read_text(encoding='utf-8')}")
            raise
        file.write_text(whole, encoding="utf-8")
