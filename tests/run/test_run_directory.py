"""The run directory: created once, written line by line, readable as JSON whatever the numbers."""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.samples import sample_of

from gspo.errors import RunError, UserError
from gspo.learner.state import digest_of
from gspo.model.policy import Policy
from gspo.recipe.load import load_recipe, make_recipe
from gspo.recipe.schema import Recipe
from gspo.run import directory as run_directory
from gspo.run.directory import RunDirectory
from gspo.run.place import check_place
from gspo.run.plain_files import EVALUATION, rollout_files
from gspo.run.recorder import rollout_lines
from gspo.types import Failure, Query, Sample, Score, SequenceStats


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe({"name": "a", "steps": 1, "model": {"path": "m"}, "output_dir": str(tmp_path / "deep" / "run")})


@pytest.fixture
def directory(recipe: Recipe) -> RunDirectory:
    return RunDirectory.create(recipe)


def strict(line: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_directory_is_made_with_its_recipe_and_only_once(recipe: Recipe, directory: RunDirectory) -> None:
    assert load_recipe(directory.path / "recipe.yaml") == recipe
    with pytest.raises(UserError, match="never overwrites"):
        RunDirectory.create(recipe)


def test_a_file_in_the_place_of_the_directory_is_not_overwritten(recipe: Recipe) -> None:
    recipe.run_dir.parent.mkdir(parents=True)
    recipe.run_dir.write_text("precious", encoding="utf-8")
    with pytest.raises(UserError, match=str(recipe.run_dir)):
        RunDirectory.create(recipe)
    assert recipe.run_dir.read_text(encoding="utf-8") == "precious"


def test_looking_whether_a_directory_is_free_changes_nothing(recipe: Recipe) -> None:
    recipe.run_dir.mkdir(parents=True)
    check_place(recipe)  # empty: free
    assert recipe.run_dir.is_dir()
    RunDirectory.create(recipe)


def test_numbers_that_are_not_finite_are_written_as_null(directory: RunDirectory) -> None:
    line = {"a": math.nan, "b": [1.0, math.inf], "c": -math.inf, "d": 0.1 + 0.2, "e": "é", "f": None, "g": 3}
    directory.append("metrics.jsonl", line)
    directory.append("metrics.jsonl", {"step": 2})
    first, second = (directory.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert strict(first) == {"a": None, "b": [1.0, None], "c": None, "d": 0.1 + 0.2, "e": "é", "f": None, "g": 3}
    assert strict(second) == {"step": 2}


def test_only_a_line_with_a_number_that_is_not_finite_is_gone_through(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone_through: list[Any] = []

    def spy(value: Any) -> Any:
        gone_through.append(value)
        return writable(value)

    writable = run_directory.writable
    monkeypatch.setattr(run_directory, "writable", spy)
    lines: list[dict[str, Any]] = [{"a": [0.1 + 0.2, None], "b": {"c": "NaN é"}}, {"a": [[math.nan]], "b": 1.5}]
    for line in lines:
        before = len(gone_through)
        directory.append("metrics.jsonl", line)
        assert (len(gone_through) > before) == (line is lines[1])
    first, second = (directory.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert strict(first) == lines[0] and strict(second) == {"a": [[None]], "b": 1.5}
    assert "é" in first


def test_a_line_of_any_numbers_and_text_can_be_written_and_read(directory: RunDirectory) -> None:
    lines: list[dict[str, Any]] = [
        {"columns": {"a": math.nan, "b": [{"c": -math.inf}], "é\ud800": 1}},
        {"failure": "half of a pair: \ud83d", "columns": {"a": "é"}},
    ]
    path = directory.write_rollouts(1, lines)
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert strict(first) == {"columns": {"a": None, "b": [{"c": None}], "é\\ud800": 1}}
    assert strict(second) == {"failure": "half of a pair: \\ud83d", "columns": {"a": "é"}}


def small_samples(
    reward: float | None = 1.0, *, failure: Failure | None = None, ratio: float | None = None
) -> tuple[Sample, ...]:
    """Two samples of one query; the first has this reward and, where the update has trained it, this ratio."""
    query = Query(id="rows:1", prompt="p", text="rendered p", prompt_ids=(1,), columns={})
    stats = SequenceStats(
        mini_batch=0,
        num_tokens=2,
        num_clipped=1,
        sequence_ratio=ratio or 0.0,
        entropy_sum=1.0,
        old_logprobs=torch.full((2,), -1.0),
        log_ratios=torch.tensor([0.25, -0.125]),
    )
    first = sample_of(
        query,
        [3, 4],
        text="line\nbreak",
        finish_reason="stop",
        versions=((8, 2),),
        score=Score(reward=reward, parts={"f": reward}, failure=failure),
        advantage=0.5,
        stats=None if ratio is None else stats,
    )
    second = replace(first, text="second", score=Score(reward=0.0, parts={"f": 0.0}), advantage=0.0, stats=None)
    return first, second


def test_a_rollout_says_why_it_has_no_reward(directory: RunDirectory) -> None:
    failure = Failure(kind="crashed", message="f: ended with signal 11")
    path = directory.write_rollouts(1, rollout_lines(small_samples(None, failure=failure)))
    found = [strict(line)["failure"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert found == ["f: ended with signal 11", None]


def test_a_rollout_is_a_line_with_what_the_model_read_said_and_got(directory: RunDirectory) -> None:
    path = directory.write_rollouts(3, rollout_lines(small_samples(ratio=1.25)))
    assert path.name == "step_000003.jsonl"
    first, second = (strict(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "query": "rows:1",
        "prompt": "rendered p",
        "prompt_words": [9, 10],
        "columns": {},
        "completion": "line\nbreak",
        "reward": 1.0,
        "rewards": {"f": 1.0},
        "failure": None,
        "advantage": 0.5,
        "sequence_ratio": 1.25,
        "clipped": 0.5,
        "mini_batch": 0,
        "tokens": 2,
        "finish_reason": "stop",
        "policy_version": 8,
    }
    assert (second["sequence_ratio"], second["clipped"]) == (None, None)


def test_rollouts_are_json_too_where_a_ratio_is_not_finite_or_a_reward_is_none(directory: RunDirectory) -> None:
    path = directory.write_rollouts(1, rollout_lines(small_samples(None, ratio=math.nan)))
    first = strict(path.read_text(encoding="utf-8").splitlines()[0])
    assert first["reward"] is None and first["sequence_ratio"] is None


def test_a_directory_is_one_runs_until_that_run_has_closed_it(recipe: Recipe, directory: RunDirectory) -> None:
    with pytest.raises(UserError, match="is writing to this directory"):
        RunDirectory(directory.path)
    directory.close()
    again = RunDirectory(directory.path)
    assert again.path == directory.path and load_recipe(again.path / "recipe.yaml") == recipe
    again.close()


def test_a_directory_that_exists_is_refused_with_how_to_go_on_where_it_is_a_runs(
    recipe: Recipe, directory: RunDirectory
) -> None:
    directory.close()
    with pytest.raises(UserError, match=r"gspo.train\(recipe, queries=…, reward=…, resume=True\);"):
        check_place(recipe)
    (directory.path / "recipe.yaml").rename(directory.path / "other")
    with pytest.raises(UserError, match="never overwrites") as caught:
        check_place(recipe)
    assert "resume" not in str(caught.value)


def test_the_recipe_is_replaced_by_the_one_the_run_goes_on_with(recipe: Recipe, directory: RunDirectory) -> None:
    further = recipe.model_copy(update={"steps": 7})
    directory.write_recipe(further)
    assert load_recipe(directory.path / "recipe.yaml") == further
    assert not list(directory.path.glob("unfinished_*"))


def test_metrics_read_back_are_the_lines_that_were_written_with_nan_for_what_was_not_finite(
    directory: RunDirectory,
) -> None:
    assert directory.metrics() == []
    directory.append("metrics.jsonl", {"step": 1, "a": 0.1 + 0.2, "b": [1.0, 2.0]})
    directory.append("metrics.jsonl", {"step": 2, "a": math.inf, "b": [math.nan, 1.0]})
    one, two = directory.metrics()
    assert one == {"step": 1, "a": 0.1 + 0.2, "b": [1.0, 2.0]}
    assert math.isnan(two["a"]) and math.isnan(two["b"][0]) and two["b"][1] == 1.0


def test_cutting_back_leaves_what_there_was_at_the_checkpoint(directory: RunDirectory, tmp_path: Path) -> None:
    assert directory.log_bytes() == {}
    directory.append("cold_start.jsonl", {"step": 1, "text": "é"})
    sizes = directory.log_bytes()
    assert sizes == {"cold_start.jsonl": (directory.path / "cold_start.jsonl").stat().st_size}
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "cold_start.jsonl").write_bytes((directory.path / "cold_start.jsonl").read_bytes())
    directory.append("cold_start.jsonl", {"step": 2})
    directory.append("metrics.jsonl", {"step": 0})
    directory.write_rollouts(1, rollout_lines(small_samples()))
    aside = directory.cut_back(logs)
    assert directory.log_bytes() == sizes  # metrics.jsonl was not there
    assert aside is not None and {path.name for path in aside.iterdir()} == {"metrics.jsonl", "rollouts"}
    (logs / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    for step in (1, 2, 10):
        directory.write_rollouts(step, rollout_lines(small_samples()))
    for step in (0, 2, 4):
        directory.write_rollouts(step, rollout_lines(small_samples()), folder=EVALUATION)
    assert directory.cut_back(logs) is None
    assert list(rollout_files(directory.path, EVALUATION)) == [0, 2]
    assert [line["step"] for line in directory.metrics()] == [1, 2]
    assert [path.name for path in sorted((directory.path / "rollouts").iterdir())] == [
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]


def test_a_copy_beside_a_rollout_file_is_left_alone(directory: RunDirectory, tmp_path: Path) -> None:
    copies = (
        "step_000001-copy.jsonl",
        "step_000009.bak.jsonl",
        "step_9.jsonl",
        "step_0000009.jsonl",
        "step_\u0669.jsonl",
    )
    for step in (1, 9):
        directory.write_rollouts(step, rollout_lines(small_samples()))
    for name in copies:
        (directory.path / "rollouts" / name).write_text("mine")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    directory.cut_back(tmp_path)
    assert {path.name for path in (directory.path / "rollouts").iterdir()} == {"step_000001.jsonl", *copies}


def test_a_file_of_rollouts_is_on_the_disk_once_it_is_written(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, str]] = []
    monkeypatch.setattr(
        run_directory, "sync", lambda path: synced.append((path, "" if path.is_dir() else path.read_text()))
    )
    path = directory.write_rollouts(1, [{"a": 1}])
    assert synced == [(path, '{"a":1}\n'), (path.parent, "")]


def test_a_directory_of_it_may_be_a_link_to_another_disk(directory: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (directory.path / "rollouts").symlink_to(tmp_path / "disk")
    directory.write_rollouts(1, rollout_lines(small_samples()))
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["step_000001.jsonl"]


def _replace(path: Path) -> None:
    shutil.copytree(path, path.with_name("copy"))
    shutil.rmtree(path)
    path.with_name("copy").rename(path)  # it may have got the number of the one that has gone


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _let_in_another(path: Path) -> None:
    (path / "lock").unlink()
    RunDirectory(path)


@pytest.mark.parametrize(
    "lose",
    [
        shutil.rmtree,
        lambda path: path.rename(path.with_name("moved")),
        _replace,
        _empty,
        _let_in_another,
        lambda path: (path.rename(path.with_name("moved")), path.write_text("a file")),
        lambda path: (path.rename(path.with_name("moved")), path.symlink_to("nowhere")),
    ],
    ids=["removed", "moved", "replaced", "emptied", "another run's", "a file", "a dangling link"],
)
def test_a_run_whose_directory_has_gone_writes_nothing_and_makes_none(
    lose: Callable[[Path], object], directory: RunDirectory, new_policy: Callable[..., Policy]
) -> None:
    directory.append("metrics.jsonl", {"step": 1})
    lose(directory.path)
    before = sorted(directory.path.parent.rglob("*"))
    for write in (
        lambda: directory.append("metrics.jsonl", {"step": 2}),
        lambda: directory.write_rollouts(3, rollout_lines(small_samples())),
        lambda: directory.save_model(new_policy(seed=1), None),
    ):
        with pytest.raises(RunError, match=r"was moved, removed or replaced(.|\n)*fix: put it back"):
            write()
    assert sorted(directory.path.parent.rglob("*")) == before


def test_a_directory_behind_a_link_is_the_runs_until_the_link_is_another(recipe: Recipe, tmp_path: Path) -> None:
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    recipe.run_dir.parent.mkdir(parents=True, exist_ok=True)
    recipe.run_dir.symlink_to(tmp_path / "disk")
    directory = RunDirectory.create(recipe)
    directory.append("metrics.jsonl", {"step": 1})
    recipe.run_dir.unlink()
    recipe.run_dir.symlink_to(tmp_path / "other")
    with pytest.raises(RunError, match="moved, removed or replaced"):
        directory.append("metrics.jsonl", {"step": 2})
    directory.close()


@pytest.mark.parametrize("lose", [Path.unlink, lambda log: log.write_text(""), lambda log: os.truncate(log, 12)])
def test_a_log_that_has_lost_lines_is_not_gone_on_with(lose: Callable[[Path], object], directory: RunDirectory) -> None:
    for step in (1, 2):
        directory.append("metrics.jsonl", {"step": step})
    assert directory.log_bytes() == {"metrics.jsonl": 24}
    lose(directory.path / "metrics.jsonl")
    for write in (lambda: directory.append("metrics.jsonl", {"step": 3}), directory.log_bytes):
        with pytest.raises(RunError, match=r"metrics.jsonl was removed, or has lost lines(.|\n)*fix: gspo resume"):
            write()


def test_what_is_set_aside_is_kept_whole_and_out_of_the_way(directory: RunDirectory) -> None:
    assert directory.cut_back(None) is None
    for number in (1, 2):
        directory.append("metrics.jsonl", {"step": number})
        directory.write_rollouts(number, rollout_lines(small_samples()))
        aside = directory.cut_back(None)
        assert aside == directory.path / f"set_aside_{number}"
        assert json.loads((aside / "metrics.jsonl").read_text()) == {"step": number}
        assert [path.name for path in (aside / "rollouts").iterdir()] == [f"step_00000{number}.jsonl"]
        assert directory.log_bytes() == {} and not (directory.path / "rollouts").exists()


def test_the_final_model_is_replaced_whole_by_that_of_a_run_with_more_steps(
    directory: RunDirectory, new_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, further = new_policy(seed=1), new_policy(seed=2)
    directory.save_model(policy, None)
    first = (directory.model / "model.safetensors").read_bytes()

    def half(self: Policy, path: Path, weights: Any = None) -> None:
        path.mkdir()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "save", half)
        with pytest.raises(RunError, match=r"model could not be written: (.|\n)*No space"):
            directory.save_model(further, None)
    assert (directory.model / "model.safetensors").read_bytes() == first
    directory.save_model(further, None)
    assert (directory.model / "model.safetensors").read_bytes() != first
    assert [path.name for path in sorted(directory.path.iterdir())] == ["lock", "model", "recipe.yaml"]


def test_the_final_model_has_the_weights_that_are_given_with_it(
    directory: RunDirectory, new_policy: Callable[..., Policy]
) -> None:
    weights = new_policy(seed=2).weights()
    directory.save_model(new_policy(seed=1), weights)
    assert digest_of(load_file(directory.model / "model.safetensors")) == digest_of(weights)
