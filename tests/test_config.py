"""The recipe: what YAML and overrides become, and that it says the same after a round trip."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo.config import Recipe
from gspo.config_file import dump_recipe, load_recipe, make_recipe
from gspo.errors import UserError

MINIMAL: dict[str, Any] = {"name": "a", "steps": 1, "model": {"path": "somewhere"}}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path / "minimal.yaml", "name: a\nsteps: 1\nmodel: {path: somewhere}\n")


def test_the_defaults_are_the_papers() -> None:
    recipe = make_recipe(MINIMAL)
    actor = recipe.actor
    assert actor.importance_sampling_level == "sequence"
    assert (actor.clip_low, actor.clip_high, actor.mini_batches) == (3e-4, 4e-4, 4)
    assert actor.old_logprobs == "recompute"
    assert recipe.run_dir == Path("runs/a")


def test_a_checkpoint_is_made_every_ten_minutes_and_two_are_kept_where_nothing_is_said(minimal: Path) -> None:
    checkpoint = make_recipe(MINIMAL).checkpoint
    assert (checkpoint.every, checkpoint.seconds, checkpoint.keep) == (0, 600.0, 2)
    assert load_recipe(minimal, ["checkpoint.seconds=null"]).checkpoint.seconds is None
    for override in ("checkpoint.seconds=0", "checkpoint.every=-1", "checkpoint.keep=0"):
        with pytest.raises(UserError, match=override.partition("=")[0]):
            load_recipe(minimal, [override])


def test_a_recipe_written_out_reads_back_equal(tmp_path: Path) -> None:
    for recipe in (make_recipe(MINIMAL), load_recipe(Path(__file__).with_name("tiny.yaml"))):
        assert load_recipe(write(tmp_path / "again.yaml", dump_recipe(recipe))) == recipe


def test_a_recipe_written_out_has_every_key(minimal: Path) -> None:
    written = yaml.safe_load(dump_recipe(load_recipe(minimal)))
    assert written.keys() == Recipe.model_fields.keys()
    assert written["actor"]["optimizer"]["betas"] == [0.9, 0.99]


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".1e-3"])
def test_every_way_to_write_a_small_number_is_a_number(minimal: Path, text: str) -> None:
    assert load_recipe(minimal, [f"actor.optimizer.lr={text}"]).actor.optimizer.lr == pytest.approx(1e-4)


def test_overrides_reach_sections_the_file_does_not_have_and_lists(minimal: Path) -> None:
    overrides = ["+cold_start.optimizer.lr=1e-2", "reward=[{function: math}]", "reward.0.weight=2", "rollout.top_k=5"]
    recipe = load_recipe(minimal, overrides)
    assert recipe.cold_start.optimizer.lr == 1e-2
    assert recipe.reward[0].weight == 2
    assert recipe.rollout.top_k == 5


def test_a_value_may_hold_an_equals_sign_and_null_clears_a_key(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["queries.system=a=b", "output_dir=somewhere", "output_dir=null"])
    assert recipe.queries.system == "a=b"
    assert recipe.run_dir == Path("runs/a")


def test_a_single_reward_is_a_list_of_one() -> None:
    assert len(make_recipe({**MINIMAL, "reward": {"function": "math"}}).reward) == 1


@pytest.mark.parametrize("written", ["math", "{function: math, weight: 3}"])
def test_a_single_reward_is_overridden_by_its_place_as_one_of_a_list_is(written: str, tmp_path: Path) -> None:
    text = f"name: x\nsteps: 1\nmodel: {{path: m}}\nreward: {written}\n"
    recipe = load_recipe(write(tmp_path / "one.yaml", text), ["reward.0.function=format"])
    assert [reward.function for reward in recipe.reward] == ["format"]
    assert recipe.reward[0].weight == (1 if written == "math" else 3)


def test_yaml_merge_keys_and_anchors_work(tmp_path: Path) -> None:
    text = (
        "name: a\nsteps: 1\nmodel: {path: x}\nactor:\n  optimizer: &adam {lr: 1e-4, warmup_steps: 3}\n"
        "cold_start:\n  optimizer: {<<: *adam, lr: 1e-2}\n"
    )
    recipe = load_recipe(write(tmp_path / "merged.yaml", text))
    assert (recipe.cold_start.optimizer.lr, recipe.cold_start.optimizer.warmup_steps) == (1e-2, 3)


def test_the_given_tree_is_not_changed_and_the_recipe_is_frozen() -> None:
    tree = {"name": "a", "steps": 1, "model": {"path": "somewhere"}}
    recipe = make_recipe(tree)
    assert tree == MINIMAL
    with pytest.raises(ValueError, match="frozen"):
        recipe.steps = 2


def test_an_unknown_key_names_the_nearest_one_at_every_depth() -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"sed": 1}, "seed"),
        ({"rollout": {"group_sise": 2}}, "rollout.group_size"),
        ({"cold_start": {"optimizer": {"beta": 1}}}, "cold_start.optimizer.betas"),
        ({"reward": [{"function": "math", "wait": 1}]}, "reward.0.weight"),
    ]
    for tree, hint in faults:
        with pytest.raises(UserError, match=f"did you mean {hint}?"):
            make_recipe({**MINIMAL, **tree})


@pytest.mark.parametrize(
    "override",
    [
        "actor.clip_high=.inf",
        "actor.clip_low=.nan",
        "rollout.temperature=.inf",
        "evaluation.pass_threshold=.nan",
        "actor.optimizer.betas=[0.9, 1.0]",
    ],
)
def test_a_number_that_is_none_is_refused_wherever_a_number_stands(minimal: Path, override: str) -> None:
    with pytest.raises(UserError, match=override.partition("=")[0]):
        load_recipe(minimal, [override])
