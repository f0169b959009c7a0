"""The recipe: what YAML and overrides become, and that it says the same after a round trip."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gspo.errors import MAX_BYTES, UserError
from gspo.recipe.load import dump_recipe, load_recipe, make_recipe
from gspo.recipe.schema import Recipe

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
    for recipe in (make_recipe(MINIMAL), load_recipe(Path(__file__).parents[1] / "tiny.yaml")):
        assert load_recipe(write(tmp_path / "again.yaml", dump_recipe(recipe))) == recipe


def test_a_recipe_written_out_has_every_key(minimal: Path) -> None:
    written = yaml.safe_load(dump_recipe(load_recipe(minimal)))
    assert written.keys() == Recipe.model_fields.keys()
    assert written["actor"]["optimizer"]["betas"] == [0.9, 0.99]


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".1e-3"])
def test_every_way_to_write_a_small_number_is_a_number(minimal: Path, text: str) -> None:
    assert load_recipe(minimal, [f"actor.optimizer.lr={text}"]).actor.optimizer.lr == pytest.approx(1e-4)


def test_overrides_reach_sections_the_file_does_not_have_and_lists(minimal: Path) -> None:
    overrides = ["rollout.top_k=4", "+cold_start.optimizer.lr=1e-2", "reward=[{function: math}]"]
    overrides += ["reward.0.weight=2", "rollout.top_k=5"]  # the last one holds
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


def test_a_single_reward_is_overridden_by_its_key_too(tmp_path: Path) -> None:
    text = "name: x\nsteps: 1\nmodel: {path: m}\nreward: {function: math}\n"
    assert load_recipe(write(tmp_path / "one.yaml", text), ["reward.weight=3"]).reward[0].weight == 3


def test_names_in_a_list_of_rewards_are_overridden_by_their_place(tmp_path: Path) -> None:
    text = "name: x\nsteps: 1\nmodel: {path: m}\nreward: [exact_match, {function: math}]\n"
    overrides = ["reward.0.weight=2", "reward.1.weight=3"]
    rewards = load_recipe(write(tmp_path / "names.yaml", text), overrides).reward
    assert [(reward.function, reward.weight) for reward in rewards] == [("exact_match", 2), ("math", 3)]


@pytest.mark.parametrize("written", ["", "reward: format", "reward: [format]", "reward: {function: format}"])
def test_a_list_is_added_to_by_a_plus_and_by_the_place_after_its_end(written: str, tmp_path: Path) -> None:
    path = write(tmp_path / "one.yaml", f"name: x\nsteps: 1\nmodel: {{path: m}}\n{written}\n")
    end = 1 if written else 0
    overrides = ["reward+=math", "+reward+=[{function: a.py:f, weight: 2}, b.py:g]"]
    overrides += [f"reward.{end + 3}.function=c.py:h", f"reward.{end + 3}.weight=3", "report.trackers+=trackio"]
    recipe = load_recipe(path, [*overrides, "report.trackers+=[wandb]", "rollout.stop_tokens+=<x>"])
    functions = [reward.function for reward in recipe.reward]
    assert functions == [*["format"] * end, "math", "a.py:f", "b.py:g", "c.py:h"]
    assert [reward.weight for reward in recipe.reward[end:]] == [1, 2, 1, 3]
    assert recipe.report.trackers == ("trackio", "wandb") and recipe.rollout.stop_tokens == ("<x>",)
    with pytest.raises(UserError, match=r"command line: reward\.\d\.function: this key is needed and missing"):
        load_recipe(path, [f"reward.{end}.weight=2"])
    with pytest.raises(UserError, match=r"command line: steps: should be a valid integer"):
        load_recipe(path, ["steps+=1"])


def test_an_override_of_a_section_leaves_its_alias_elsewhere_as_it_is(tmp_path: Path) -> None:
    text = "name: a\nsteps: 1\nmodel: {path: x}\nactor: {optimizer: &adam {lr: 1e-4}}\ncold_start: {optimizer: *adam}\n"
    recipe = load_recipe(write(tmp_path / "aliased.yaml", text), ["actor.optimizer.lr=1e-2"])
    assert (recipe.actor.optimizer.lr, recipe.cold_start.optimizer.lr) == (1e-2, 1e-4)


@pytest.mark.parametrize("name", ["2026-13-01", "2026-01-01", "2001-12-14t21:59:43.10-05:00"])
def test_a_date_is_text(name: str, minimal: Path) -> None:
    assert load_recipe(minimal, [f"output_dir={name}"]).output_dir == name


def test_text_that_looks_like_a_number_reads_back_as_text(tmp_path: Path, minimal: Path) -> None:
    options = {"function": "m:f", "options": {"a": "1e-3", "b": "2026-13-01", "c": "0x10", "d": 1e-3}}
    recipe = make_recipe({**MINIMAL, "reward": [options]})
    again = load_recipe(write(tmp_path / "again.yaml", dump_recipe(recipe)))
    assert again.reward[0].options == options["options"]


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
NO_YAML = {
    "a value of no kind": ("seed: !!int abc", "line 4"),
    "a bool of no kind": ("seed: !!bool abc", "line 4"),
    "a tag of a date": ("seed: !!timestamp x", "line 4"),
    "a tag of bytes": ("seed: !!binary /w==", "line 4"),
    "no digits": ("seed: 0x_", "line 4"),
    "5,000 digits": (f"seed: {'9' * 5000}", "line 4"),
    "5,000 hexadecimal digits": (f"seed: 0x{'f' * 5000}", "seed: should be less than .* thousands of digits"),
    "no character": (r'output_dir: "\UFFFFFFFF"', "line 4"),
    "brackets": (f"output_dir: {'[' * 20_000}", "line 4, column .*: nested too deeply"),
    "a hundred levels": (f"output_dir: {'[' * 100}{']' * 100}", "levels deep"),
    "aliases": (BOMB, "more than 10,000 values"),
    "merged aliases": (
        BOMB.replace("[x,x,x,x,x,x,x,x,x,x]", "{x: 1}").replace("[*", "{<<: [*").replace("]", "]}"),
        "more than",
    ),
    "an alias of itself": ("output_dir: &a {b: *a}", "nested more than 50 levels deep"),
    "an alias of a long text": (f"a: &a {'x' * 100_000}\nb: [{'*a,' * 20}]", "more than 10,000 values"),
}


@pytest.mark.parametrize("fault", NO_YAML)
def test_yaml_that_cannot_be_used_is_refused_with_its_line(fault: str, tmp_path: Path) -> None:
    text, said = NO_YAML[fault]
    with pytest.raises(UserError, match=said) as caught:
        load_recipe(write(tmp_path / "bad.yaml", f"name: a\nsteps: 1\nmodel: {{path: x}}\n{text}\n"))
    assert len(str(caught.value).encode()) <= MAX_BYTES


def test_yaml_that_cannot_be_used_is_refused_in_an_override_too(minimal: Path) -> None:
    for value in ("!!int abc", "0x_", "9" * 5000, "[" * 20_000, "&a [*a]"):
        with pytest.raises(UserError, match="override 'seed="):
            load_recipe(minimal, [f"seed={value}"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=true", "steps: should be a number, not True"),
        ("report.tokens=maybe", "report.tokens: should be a valid boolean, not 'maybe'"),
        ("reward.0.options=[1]", "reward.0.options: should be a mapping"),
        ("actor.clip_low=wide", "actor.clip_low: should be a valid number, not 'wide'"),
        ("actor.optimizer.betas=[true, 0.9]", "actor.optimizer.betas.0: should be a number, not True"),
        ("actor.clip_low=true", "actor.clip_low: should be a number"),
        ("reward.².weight=2", "takes an index from 0 to 1, which adds to it"),
        (f"reward.{'0' * 5000}.weight=2", "takes an index from 0 to 1"),
        ("reward.0.function.x=2", "reward.0.function: should be a valid string"),
        (f"seed={2**64}", "seed: should be less than"),
        (f"steps={10**100}", "steps: should be less than"),
        ("rollout.group_size=1000000000000", "rollout.group_size: should be less than or equal to 65536"),
        (
            "queries={procedural: {task: chain_sum, size: 1000000000000}}",
            "queries.procedural.size: should be less than",
        ),
        ("evaluation.num_queries=1000000000000", "evaluation.num_queries: should be less than or equal to 1048576"),
        ("evaluation.samples=1000000000000", "evaluation.samples: should be less than or equal to 65536"),
        ("rollout.temperature=1e-320", "rollout.temperature: should be greater than or equal to 0.000001"),
        ("reward.0.weight=1e308", "reward.0.weight: should be less than or equal to 1000000"),
        (f"name={'a' * 300}", "at most 255"),
        (f"output_dir={'b' * 300}", "output_dir: this path has a name of more than 255 bytes"),
        (f"output_dir={'é' * 200}", "output_dir: this path has a name of more than 255 bytes"),
        (f"output_dir={'b/' * 2500}", "output_dir: this path has more than 4000 bytes"),
        (r'output_dir="a\0b"', "output_dir: this path holds a NUL character"),
        (r'output_dir="a\ud800"', "output_dir: this path holds half of a surrogate pair"),
        (r'queries.system="a\ud800"', "queries.system: holds half of a surrogate pair"),
        (r'reward.0.options={"a": ["\ud800"]}', "reward.0.options: holds half of a surrogate pair"),
        (f"queries.path={'c' * 300}", "queries.path: this path"),
        (f"model.path={'c' * 300}", "model.path: this path"),
        (f"reward.0.function={'c' * 300}.py:f", "reward.0.function: this path"),
    ],
    ids=lambda text: text[:40],
)
def test_a_value_that_nothing_can_be_done_with_is_refused_by_its_key(override: str, said: str, tmp_path: Path) -> None:
    text = "name: a\nsteps: 1\nmodel: {path: x}\nreward: [exact_match]\n"
    with pytest.raises(UserError, match=said) as caught:
        load_recipe(write(tmp_path / "a.yaml", text), [override])
    assert len(str(caught.value).encode()) <= MAX_BYTES


def test_a_value_that_a_key_cannot_have_is_refused_with_the_keys_meaning(minimal: Path) -> None:
    with pytest.raises(UserError, match=r"steps: should be a valid integer, not 'many': Rollout batches to train on"):
        load_recipe(minimal, ["steps=many"])
    with pytest.raises(UserError, match=r"checkpoint\.keep: should be greater than 0, not 0: How many of the newest"):
        load_recipe(minimal, ["checkpoint.keep=0"])


def test_a_value_of_any_size_is_shown_in_short(minimal: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.every: should be a valid integer") as caught:
        load_recipe(minimal, [f"checkpoint.every=[{'[x, x], ' * 1000}{'y' * 10_000}]"])
    assert len(str(caught.value)) < 500
    with pytest.raises(UserError, match="thousands of digits"):
        make_recipe({**MINIMAL, "output_dir": 10**5000})


def test_a_tilde_is_the_home_directory(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    recipe = load_recipe(minimal, ["output_dir=~/runs/a", "queries.path=~/rows.jsonl"])
    assert (recipe.run_dir, recipe.queries.path) == (Path("/home/me/runs/a"), "/home/me/rows.jsonl")


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.turn_separator=x", "rollout.turn_separator: here it is rollout.segment_separator"),
        ("reward.0.per=turn", "reward.0.per: turn: here it is per: segment"),
    ],
)
def test_a_renamed_key_or_value_is_refused_with_its_new_name(override: str, message: str, tmp_path: Path) -> None:
    text = "name: a\nsteps: 1\nmodel: {path: x}\nreward: [exact_match]\n"
    key, _, value = override.partition("=")
    with pytest.raises(UserError, match=message):
        load_recipe(write(tmp_path / "a.yaml", text), [override])
    section: dict[str, Any] = {"rollout": {"turn_separator": None if value == "null" else value}}
    if key.startswith("reward"):
        section = {"reward": [{"function": "math", "per": "turn"}]}
    with pytest.raises(UserError, match=message):
        make_recipe({**MINIMAL, **section})
    with pytest.raises(UserError, match=message):
        load_recipe(write(tmp_path / "b.yaml", yaml.safe_dump({**MINIMAL, **section})))


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("actor.importance_sampling_level=sequnce", "not 'sequnce': did you mean sequence?"),
        ("report.trackers=[wndb]", "did you mean wandb?"),
    ],
)
def test_a_value_that_is_nearly_one_of_a_choice_names_it(override: str, hint: str, minimal: Path) -> None:
    with pytest.raises(UserError, match=hint.replace("?", r"\?")):
        load_recipe(minimal, [override])


def test_rules_hold_for_a_recipe_made_in_python_too() -> None:
    with pytest.raises(ValueError, match=r"actor\.mini_batches \(4\) must divide"):
        Recipe(name="a", steps=1, model={"path": "x"}, rollout={"queries_per_step": 6})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="per: segment needs"):
        Recipe.model_validate({**MINIMAL, "reward": [{"function": "math", "per": "segment"}]})


def test_a_merged_mapping_may_itself_override_what_it_merges(tmp_path: Path) -> None:
    text = "name: a\nsteps: 1\nmodel: {path: x}\nactor: {optimizer: {<<: &b {<<: {lr: 1e-4}, lr: 1e-3}, eps: 1e-7}}\n"
    assert load_recipe(write(tmp_path / "merged.yaml", text)).actor.optimizer.lr == 1e-3
