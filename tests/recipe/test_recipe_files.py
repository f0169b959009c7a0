"""Where the files of a recipe lie: beside it, else in the working directory; for overrides the other way round."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.recipe.files import check_files
from gspo.recipe.load import dump_recipe, load_recipe
from gspo.recipe.schema import Recipe

TREE: dict[str, Any] = {
    "name": "a",
    "steps": 1,
    "model": {"path": "models/policy", "tokenizer": "./tokens"},
    "queries": {"path": "rows.jsonl"},
    "evaluation": {"path": "exam.jsonl"},
    "cold_start": {"path": "worked.jsonl"},
    "reward": ["mine.py:f", {"function": "rewards/other.py:g"}, "math", "package.module:h"],
    "actor": {"kl": {"coefficient": 0.1, "reference": "reference"}},
}
FILES = ("rows.jsonl", "exam.jsonl", "worked.jsonl", "mine.py", "rewards/other.py", "math", "Qwen/Qwen3-8B")
FOLDERS = ("models/policy", "tokens", "reference")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe in the directory `sub`."""
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/my.yaml").write_text(json.dumps(TREE), encoding="utf-8")
    return tmp_path


def make(root: str) -> None:
    for name in FILES:
        Path(root, name).parent.mkdir(parents=True, exist_ok=True)
        Path(root, name).touch()
    for name in FOLDERS:
        Path(root, name).mkdir(parents=True)


def paths(recipe: Recipe) -> list[str | None]:
    functions = [reward.function for reward in recipe.reward]
    named = [recipe.model.path, recipe.model.tokenizer, recipe.queries.path, recipe.evaluation.path]
    return [*named, recipe.cold_start.path, recipe.actor.kl.reference, *functions]


WRITTEN = ["models/policy", "./tokens", "rows.jsonl", "exam.jsonl", "worked.jsonl", "reference"]
WRITTEN += ["mine.py:f", "rewards/other.py:g", "math", "package.module:h"]


def test_the_files_beside_the_recipe_are_taken_before_those_in_the_working_directory(home: Path) -> None:
    make("sub")
    make(".")
    recipe = load_recipe("sub/my.yaml")
    assert paths(recipe) == [*(os.path.join("sub", name) for name in WRITTEN[:8]), *WRITTEN[8:]]  # noqa: PTH118
    assert recipe.run_dir == Path("runs/a")
    check_files(recipe, "sub/my.yaml")


def test_what_is_not_beside_the_recipe_is_as_it_was_written_and_so_is_a_hub_id(home: Path) -> None:
    make(".")
    assert paths(load_recipe("sub/my.yaml")) == WRITTEN
    check_files(load_recipe("sub/my.yaml"), "sub/my.yaml")
    Path("my.yaml").write_text(json.dumps(TREE), encoding="utf-8")
    for path in ("my.yaml", "./my.yaml", home / "my.yaml"):
        assert paths(load_recipe(path)) == WRITTEN


def test_overrides_are_looked_up_in_the_working_directory_first(home: Path) -> None:
    for name in ("here.jsonl", "sub/here.jsonl", "sub/there.jsonl", "sub/there.py", "sub/more.py"):
        Path(name).touch()
    recipe = load_recipe("sub/my.yaml", ["queries.path=here.jsonl", "evaluation={path: there.jsonl}"])
    assert (recipe.queries.path, recipe.evaluation.path) == ("here.jsonl", "sub/there.jsonl")
    recipe = load_recipe("sub/my.yaml", ["reward=there.py:f", "reward+=more.py:g", "reward.2.function=there.py:h"])
    assert paths(recipe)[6:] == ["sub/there.py:f", "sub/more.py:g", "sub/there.py:h"]


@pytest.mark.parametrize("beside", ["history.jsonl", "manifest.json"])
def test_a_recipe_that_a_run_has_written_says_the_same_whatever_lies_beside_it(home: Path, beside: str) -> None:
    make(".")
    recipe = load_recipe("sub/my.yaml")
    make("runs/a")
    Path("runs/a/recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    Path("runs/a", beside).touch()
    assert load_recipe("runs/a/recipe.yaml") == recipe


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("queries.path=rwos.jsonl", "queries.path: rwos.jsonl: no such file"),
        ("evaluation.path=sub/x.jsonl", "evaluation.path: sub/x.jsonl: no such file"),
        ("reward=absent.py:f", "reward.0.function: absent.py: no such file"),
        ("model.path=./nowhere", "model.path: ./nowhere: no such directory"),
        ("actor.kl.reference=a/b/c", "actor.kl.reference: a/b/c: no such directory"),
    ],
)
def test_a_missing_file_is_named_with_its_key_both_places_and_those_there_are(
    override: str, said: str, home: Path
) -> None:
    make("sub")
    with pytest.raises(UserError) as error:
        check_files(load_recipe("sub/my.yaml", [override]), "sub/my.yaml")
    text = str(error.value)
    assert text.startswith(said)
    assert f"looked up beside the recipe ({home / 'sub'}) and in the working directory ({home})" in text
    if override.startswith("queries"):
        assert "there are: exam.jsonl, rows.jsonl, worked.jsonl" in text


def test_a_file_that_the_recipe_does_not_use_may_be_missing(home: Path) -> None:
    make("sub")
    unused = ["cold_start={steps: 0, path: absent.jsonl}", "actor.kl={coefficient: 0, reference: ./absent}"]
    unused += ["evaluation={num_queries: 0, path: absent.jsonl}", "model.path=org/model"]
    check_files(load_recipe("sub/my.yaml", unused), "sub/my.yaml")
