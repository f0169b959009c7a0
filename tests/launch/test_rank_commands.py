"""What the command line says and returns in a process that is one of several ranks."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo import cli
from gspo.errors import HAS_LAUNCHER, SILENT, OtherRankError, Stopped, UserError
from gspo.learner import ranks

TINY = str(Path(__file__).parents[1] / "tiny.yaml")
As = Callable[..., int]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> As:
    """The exit code of a command that ends by an error in the rank of this number, of two."""

    def end(error: BaseException, rank: int) -> int:
        def fail(options: object) -> None:
            raise error

        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setitem(cli._COMMANDS, "check", fail)
        return cli.main(["check", TINY])

    return end


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the command has waited, in place of waiting."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


@pytest.mark.parametrize("error", [Stopped(15), KeyboardInterrupt()])
def test_a_signal_is_said_by_the_first(ended: As, error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [ended(error, rank) for rank in (0, 1)]
    assert codes[0] == codes[1] > 128
    assert capsys.readouterr().err.count("ended by") == 1


def test_an_error_that_nobody_expects_names_the_rank(ended: As, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(ValueError("odd"), 1) == 1
    said = capsys.readouterr().err
    assert said.index("ValueError: odd") < said.index("failed: rank 1 has ended by ValueError") < said.index("fix:")


def test_a_silent_rank_hides_no_exit_code_from_what_takes_the_highest(
    ended: As, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HAS_LAUNCHER, raising=False)
    assert ended(OtherRankError("said elsewhere"), 1) == 1 < ended(UserError("wrong"), 0) == 2
    monkeypatch.setenv(HAS_LAUNCHER, "yes")
    assert ended(OtherRankError("said elsewhere"), 1) == SILENT


def test_wrong_input_is_left_to_the_first_rank_until_all_have_joined(
    ended: As, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where rank 0 does not meet it, and so nobody ends this one, it is said after all."""
    assert ended(UserError("wrong"), 0) == 2 and not waits
    assert ended(UserError("wrong"), 1) == 2 and len(waits) == 1
    monkeypatch.setattr(ranks, "num_ranks", lambda: 2)
    assert ended(UserError("wrong"), 1) == 2 and len(waits) == 1
    assert capsys.readouterr().err.count("error: wrong") == 3


def test_a_new_name_is_said_by_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/tiny/model").mkdir(parents=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cli, "_run", lambda recipe, *_, **__: print(recipe.name))
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["train", TINY, "--new"]) == 0
    said = capsys.readouterr().out
    assert said.count("new: this run is tiny-2") == 1 and said.splitlines().count("tiny-2") == 2


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "RANK"])
def test_an_environment_that_makes_no_sense_is_named(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", variable: "abc"}.items():
        monkeypatch.setenv(name, value)
    options = ["--processes", "2"] if variable == "WORLD_SIZE" else ["--new"]
    assert cli.main(["train", TINY, *options]) == 2
    said = capsys.readouterr().err
    assert f"{variable} is 'abc'" in said and "fix:" in said
