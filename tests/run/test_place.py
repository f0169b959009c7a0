"""Where a new run may go: beside one that is there under a new name, or in its place; nothing is lost by a mistake."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo.errors import UserError
from gspo.recipe.load import load_recipe, make_recipe
from gspo.recipe.schema import Recipe
from gspo.run.console import Display
from gspo.run.directory import RunDirectory
from gspo.run.place import check_place, move_old_run, renamed

TINY = Path(__file__).parents[1] / "tiny.yaml"
SHORT = ["steps=1", "evaluation.num_queries=0", "cold_start.steps=0"]


def recipe_of(**keys: Any) -> Recipe:
    return make_recipe({"name": "a", "steps": 1, "model": {"path": "m"}, **keys})


def made(**keys: Any) -> Path:
    """The directory of a run that has ended, with a file of each kind that there may be."""
    directory = RunDirectory.create(recipe_of(**keys))
    directory.close()
    for name in ("checkpoints/step_000001/manifest.json", "rollouts/step_000001.jsonl", "trackers/wandb.json"):
        (directory.path / name).parent.mkdir(parents=True)
    for name in ("metrics.jsonl", "set_aside_1", "report.html", "events.out.tfevents.17.host", "unfinished_model"):
        (directory.path / name).touch()
    return directory.path


def files_in(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


def refused(recipe: Recipe) -> str:
    before = files_in(recipe.run_dir)
    with pytest.raises(UserError) as error:
        move_old_run(recipe, print)
    assert files_in(recipe.run_dir) == before
    return str(error.value)


def test_what_is_there_is_refused_with_the_three_ways_on() -> None:
    made()
    with pytest.raises(UserError, match=r"exists, and a run never overwrites another(.|\n)*resume.*--new.*--overwrite"):
        check_place(recipe_of())


def test_a_run_that_has_ended_is_kept_under_another_name(tmp_path: Path) -> None:
    path, notes = made(), list[str]()
    (path / "notes.txt").touch()
    files = [file.relative_to(path) for file in files_in(path)]
    for number in (1, 2):
        move_old_run(recipe_of(), notes.append)
        assert notes.pop() == f"overwrite: the run that was there is now in {tmp_path}/runs/a.old-{number}"
        move_old_run(recipe_of(), notes.append)  # nothing is there: nothing to do
        assert notes == [] and files_in(path) == []
        RunDirectory.create(recipe_of(seed=7)).close()
        assert [entry.name for entry in files_in(path)] == ["lock", "recipe.yaml"]
    old = Path("runs/a.old-1")
    assert [file.relative_to(old) for file in files_in(old)] == files
    assert load_recipe("runs/a.old-2/recipe.yaml").seed == 7


def test_a_directory_that_is_a_link_stays_one() -> None:
    made()
    Path("runs/a").rename("elsewhere")
    Path("runs/a").symlink_to(Path("elsewhere").absolute())
    move_old_run(recipe_of(), print)
    assert Path("runs/a").is_symlink() and files_in(Path("elsewhere")) == []
    assert Path("elsewhere.old-1/recipe.yaml").is_file()


def test_what_is_no_run_or_goes_on_is_not_replaced() -> None:
    path = made()
    holder = RunDirectory(path)
    assert "is writing to this directory" in refused(recipe_of())
    holder.close()
    check_place(recipe_of(), overwrite=True)
    for name in ("recipe.yaml", "lock"):
        (path / name).rename("elsewhere")
        assert "this is not a run's directory, so it is not overwritten" in refused(recipe_of())
        Path("elsewhere").rename(path / name)
    Path("file").touch()
    assert "this is not a run's directory" in refused(recipe_of(output_dir="file"))


def test_an_old_run_that_cannot_be_renamed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made()

    def busy(*_: Any) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", busy)
    assert "runs/a: the old run cannot be renamed: Device or resource busy" in refused(recipe_of())


def test_a_run_that_the_recipe_starts_from_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made()
    assert "model.path is in the run that is to be overwritten" in refused(recipe_of(model={"path": "runs/a/model"}))
    assert "reward.0.function is in" in refused(recipe_of(reward="runs/a/rollouts/f.py:f"))
    monkeypatch.chdir("runs/a/rollouts")
    assert "the working directory" in refused(recipe_of(output_dir=".."))


@pytest.mark.parametrize("output", [None, "out/of/it"])
def test_a_new_name_is_the_next_that_is_free_for_the_run_and_its_directory(output: str | None) -> None:
    recipe, notes = recipe_of(output_dir=output), list[str]()
    home = output or "runs/a"
    assert renamed(recipe, notes.append) == recipe and notes == []
    made(output_dir=output)
    second = renamed(recipe, notes.append)
    assert (second.name, str(second.run_dir)) == ("a-2", f"{home}-2")
    Path(f"{home}-2").mkdir()
    assert renamed(recipe, notes.append).name == "a-2"  # it is empty
    Path(f"{home}-2/x").touch()
    third = renamed(recipe, notes.append)
    assert (third.name, str(third.run_dir)) == ("a-3", f"{home}-3")
    assert notes[-1] == f"new: this run is a-3, in {home}-3"
    assert make_recipe(third.model_dump()) == third


def test_from_python_a_run_is_replaced_or_gets_a_number_once_the_new_recipe_is_proven() -> None:
    tree = load_recipe(TINY, SHORT).model_dump(mode="json")
    call = partial(gspo.train, display=Display(quiet=True))
    first = call(tree)
    with pytest.raises(UserError, match="never overwrites"):
        call(tree)
    assert call(tree, new=True).model == Path("runs/tiny-2/model")
    assert load_recipe("runs/tiny-2/recipe.yaml").name == "tiny-2"
    before = files_in(Path("runs/tiny"))
    Path("mine.py").write_text("def f(completions, **columns):\n    return [1 / 0]\n", encoding="utf-8")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        call({**tree, "reward": "mine.py:f"}, overwrite=True)
    assert files_in(Path("runs/tiny")) == before
    urls = {"engine": "vllm", "vllm": {"urls": ["http://127.0.0.1:9"], "start_seconds": 1}}
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9"):
        call({**tree, "rollout": {**tree["rollout"], **urls}}, overwrite=True)
    assert len(files_in(Path("runs/tiny.old-1"))) == len(before)  # it lies there, and the name is free
    again = call({**tree, "seed": 3}, overwrite=True)
    assert load_recipe("runs/tiny.old-1/recipe.yaml").seed != 3
    assert again.model == first.model and load_recipe("runs/tiny/recipe.yaml").seed == 3
    (line,) = Path("runs/tiny/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["reward/mean"] == again.metrics[0]["reward/mean"]
    for both in (("overwrite", "new"), ("overwrite", "resume"), ("new", "resume")):
        options: dict[str, Any] = dict.fromkeys(both, True)
        with pytest.raises(UserError, match="give one of resume, overwrite and new"):
            call(tree, **options)
