"""The command that runs a recipe again: it is what a shell, or Python, takes, and it trains the same."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import data_in, run_of
from tests.report.page.made_runs import begun, ended, made_run

from gspo import cli
from gspo.recipe.load import dump_recipe, load_recipe
from gspo.recipe.schema import Recipe
from gspo.report.page.overview import rerun_command
from gspo.report.page.write import document
from gspo.report.run_files import read_run

TINY = Path(__file__).parents[2] / "tiny.yaml"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_command_runs_the_recipe_again_from_where_it_was_begun() -> None:
    home = "/a place/of'mine"
    run = run_of(name="mine", history=[begun(working_directory=home)], path=Path("my runs/a;b"))
    go, gspo = shlex.split(rerun_command(run).split(" && ")[0]), shlex.split(rerun_command(run).split(" && ")[1])
    assert go == ["cd", home]
    file = str(Path("my runs/a;b/recipe.yaml").absolute())
    assert gspo == ["gspo", "train", file, "name=mine-again", "output_dir=null"]
    assert rerun_command(run_of(name="mine")).startswith("gspo train ")


def test_the_command_is_from_where_the_run_was_last_taken_up() -> None:
    history = [begun(working_directory="old"), ended(), begun(event="resumed", working_directory="new"), ended()]
    assert rerun_command(run_of(history=history)).startswith("cd new && gspo train ")


@pytest.mark.parametrize(
    "settings",
    [{"reward": []}, {"reward": None}, {"queries": {"path": None, "procedural": None}}, {"queries": None}],
)
def test_of_what_came_from_python_the_command_is_python(settings: dict[str, Any]) -> None:
    run = run_of(settings=settings, path=Path('my "runs"', "a\\b"))
    called: list[Any] = []

    class Gspo:
        @staticmethod
        def load_recipe(path: str, overrides: list[str]) -> str:
            called.extend([path, *overrides])
            return "recipe"

        @staticmethod
        def train(recipe: str, *, queries: Any, reward: Any) -> None:
            called.append((recipe, queries, reward))

    eval(rerun_command(run).replace("…", "..."), {"gspo": Gspo})
    file = str((Path('my "runs"', "a\\b") / "recipe.yaml").absolute())
    assert called == [file, "name=made-again", "output_dir=null", ("recipe", ..., ...)]


def test_the_page_has_the_command_and_the_recipe_of_each_run() -> None:
    runs = [made_run(Path(name), name=name, steps=3) for name in ("a", "b")]
    shown = data_in(document([read_run(path) for path in runs]))["runs"]
    for run, path in zip(shown, runs, strict=True):
        assert run["rerun"] == rerun_command(read_run(path))
        assert run["recipe"] == (path / "recipe.yaml").read_text(encoding="utf-8")


def test_the_command_of_the_page_runs_the_same_recipe_under_another_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[Recipe, bool]] = []

    def run(recipe: Recipe, display: object, *, resume: bool) -> int:
        trained.append((recipe, resume))
        return 0

    monkeypatch.setattr(cli, "_run", run)
    path = Path("a run")
    path.mkdir()
    recipe = load_recipe(TINY, ["output_dir=elsewhere", "actor.clip_low=2e-3"])
    (path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    command = shlex.split(rerun_command(read_run(path)))
    assert cli.main(command[1:]) == 0, capsys.readouterr().err
    assert trained == [(recipe.model_copy(update={"name": "tiny-again", "output_dir": None}), False)]
