"""Files of AReaL, verl and TRL become recipes that load and have the values one works out by hand."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.needs import needs

from gspo.importing.read import read_theirs, table_of
from gspo.importing.write import import_recipe
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.recipe.yaml_text import leaves

FILES = Path(__file__).with_name("files")
NAMES = sorted(path.name for path in FILES.iterdir())
CATEGORIES = ("translated:", "implied:", "different on purpose:", "not here:", "not known:")
PAPER = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

def reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

dataset = load_dataset("openai/gsm8k", "main", split="train")
batch = 64
args = GRPOConfig(
    importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, beta=0.04,
    per_device_train_batch_size=batch, steps_per_generation=4, max_steps=400, warmup_steps=8, num_iterations=2,
    max_completion_length=256 * 2, seed=drawn(), some_new_key=3, vllm_importance_sampling_mode="token_mask",
)
if __name__ == "__main__":
    GRPOTrainer("x", model="Qwen/Qwen2.5-0.5B", args=args, reward_funcs=[accuracy_reward, reward],
                train_dataset=dataset).train()
"""


def recipe_of(path: Path, folder: Path, *overrides: str) -> tuple[Recipe, str, list[str]]:
    """The recipe of a file, its text, and the list of what became of each key."""
    text, lines = import_recipe(path, overrides, folder)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return load_recipe(folder / "recipe.yaml"), text, lines


def values(recipe: Recipe, wanted: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key in wanted:
        node: Any = recipe.model_dump(mode="json")
        for part in key.split("."):
            node = node[part]
        found[key] = node
    return found


def categories(lines: list[str]) -> dict[str, list[str]]:
    """The keys in each category of the list; those of infrastructure are only counted."""
    found, category = dict[str, list[str]](), ""
    for line in lines:
        category = category if line.startswith("  ") else line
        if line.startswith("  ") and category in CATEGORIES:
            found.setdefault(category, []).append(line.strip().partition(": ")[0])
    return found


WANTED: dict[str, dict[str, Any]] = {
    "areal_gsm8k_grpo.yaml": {
        "name": "gsm8k-grpo-trial0",
        "seed": 1,
        "steps": 10 * (7473 // 256),
        "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "model.dtype": "bfloat16",
        "queries.path": "openai/gsm8k",
        "queries.config": "main",
        "queries.template": "{prompt}\nPlease put your final answer within \\boxed{}.",
        "queries.max_prompt_tokens": 1024,
        "queries.overlong": "filter",
        "rollout.queries_per_step": 256,
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 1024,
        "rollout.max_staleness": 2,
        "actor.importance_sampling_level": "token",
        "actor.advantage": "group",
        "actor.length_norm": "mean",
        "actor.clip_low": 0.4,
        "actor.clip_high": 0.4,
        "actor.mini_batches": 1,
        "actor.kl.coefficient": 0,
        "actor.old_logprobs": "recompute",
        "actor.correction": "mis",
        "actor.correction_high": 5.0,
        "actor.optimizer.lr": 1.7e-5,
        "actor.optimizer.betas": [0.9, 0.999],
        "actor.optimizer.weight_decay": 0.017,
        "actor.optimizer.warmup_steps": 0,  # 0.001 of 290 steps
        "checkpoint.every": 29,
        "evaluation.every": 29,
        "evaluation.num_queries": 1319,
    },
    "areal_gsm8k_gspo.yaml": {
        "actor.importance_sampling_level": "sequence",
        "actor.correction": "decoupled",  # a sequence has no single tokens to drop
        "actor.correction_high": 5.0,
        "actor.mini_batches": 1,
    },
    "verl_grpo.sh": {
        "name": "verl_grpo_example_gsm8k-qwen3_8b_function_rm",
        "steps": 15 * (7473 // 1024),
        "model.path": "Qwen/Qwen3-8B",
        "queries.path": str(Path("~/data/gsm8k/train.parquet").expanduser()),
        "queries.max_prompt_tokens": 512,
        "queries.overlong": "filter",
        "rollout.queries_per_step": 1024,
        "rollout.group_size": 5,
        "rollout.max_new_tokens": 1024,
        "actor.surrogate": "dual_clip",
        "actor.dual_clip": 3.0,
        "actor.importance_sampling_level": "token",
        "actor.length_norm": "mean",
        "actor.clip_low": 0.2,
        "actor.clip_high": 0.2,
        "actor.mini_batches": 4,
        "actor.kl.coefficient": 0.001,
        "actor.kl.place": "loss",
        "actor.kl.estimator": "k3",
        "actor.optimizer.lr": 1e-6,
        "actor.optimizer.weight_decay": 0.01,
        "checkpoint.every": 20,
        "evaluation.every": 5,
        "evaluation.temperature": 0,
    },
    "verl_gspo.sh": {
        "steps": 10 * (7473 // 512),
        "queries.path": "/data/gsm8k/train.parquet",
        "rollout.group_size": 16,
        "rollout.max_new_tokens": 8192,
        "rollout.overlong": "keep",
        "actor.surrogate": "clip",
        "actor.importance_sampling_level": "sequence",
        "actor.length_norm": "own",
        "actor.clip_low": 3e-4,
        "actor.clip_high": 4e-4,
        "actor.mini_batches": 4,
        "actor.micro_batch_tokens": 2 * (2048 + 8192),
        "actor.optimizer.warmup_steps": 25 * 4,  # 5 % of verl's 500 rollout batches, with 4 updates each
        "actor.optimizer.weight_decay": 0.1,
        "evaluation.temperature": 1.0,
    },
    "trl_game.py": {
        "seed": 42,
        "model.path": "Qwen/Qwen3-4B",
        "queries.chat_template_kwargs": {"enable_thinking": False},
        "rollout.queries_per_step": 4 * 2 // 8,
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 2048,
        "rollout.environment": "trl_game.py:Game",
        "actor.length_norm": "mean",
        "actor.clip_low": 0.2,
        "actor.mini_batches": 1,
        "actor.optimizer.schedule": "linear",
        "actor.gradient_checkpointing": True,
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_the_values_worked_out_by_hand(name: str, tmp_path: Path) -> None:
    recipe, _, _ = recipe_of(FILES / name, tmp_path)
    wanted = dict(WANTED[name])
    if environment := wanted.get("rollout.environment"):  # found beside the recipe, wherever that is
        wanted["rollout.environment"] = os.path.join(tmp_path, os.path.relpath(FILES / environment, tmp_path))  # noqa: PTH118
    assert values(recipe, wanted) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_file_is_in_one_category_and_none_is_unknown(name: str) -> None:
    _, lines = import_recipe(FILES / name)
    found = [key for keys in categories(lines).values() for key in keys]
    (count,) = (int(number) for line in lines for number in re.findall(r"^where it runs: .*?: (\d+) keys", line))
    _, given = read_theirs(FILES / name)
    assert len(found) == len({*found}) and {*found} <= given.keys()
    assert len(found) + count == len(given)
    assert "not known:" not in lines


@pytest.mark.parametrize("name", NAMES)
def test_the_origin_of_each_value_is_beside_it(name: str) -> None:
    text, lines = import_recipe(FILES / name)
    comments = "\n".join(line.partition(" # ")[2] for line in text.splitlines())
    for key in categories(lines)["translated:"]:
        assert re.search(rf"(^|; ){re.escape(key)}: ", comments, re.M), key
    bare = [line for line in text.splitlines()[1:] if not line.endswith(":") and " # " not in line]
    assert bare == []


@pytest.mark.parametrize(
    ("name", "port", "other"),
    [
        (
            "areal_gsm8k_gspo.yaml",
            "areal_gsm8k_gspo.yaml",
            {
                "name",
                "evaluation.num_queries",
                "evaluation.temperature",
                "queries.max_prompt_tokens",
                "queries.overlong",
            }
            | {"rollout.max_staleness"},
        ),
        (
            "verl_gspo.sh",
            "verl_gsm8k.yaml",
            {
                "name",
                "evaluation.num_queries",
                "evaluation.path",
                "queries.path",
                "queries.prompt",
                "reward.0.function",
            },
        ),
    ],
)
def test_a_recipe_is_the_port_made_by_hand_but_for_what_that_leaves_out(
    name: str, port: str, other: set[str], tmp_path: Path
) -> None:
    imported, _, _ = recipe_of(FILES / name, tmp_path)
    by_hand = load_recipe(Path(__file__).parents[2] / "recipes" / "ports" / port)
    first, second = (leaves(recipe.model_dump(mode="json")) for recipe in (imported, by_hand))
    assert {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)} == other


def test_the_list_says_that_one_mini_batch_has_no_ratio_and_what_to_set() -> None:
    _, lines = import_recipe(FILES / "areal_gsm8k_gspo.yaml")
    (note,) = (line for line in lines if line.startswith("note:"))
    assert "the ratio is 1 at every update" in note
    assert note.endswith("propose: actor.mini_batches=4 actor.clip_low=3e-4 actor.clip_high=4e-4")
    _, lines = import_recipe(FILES / "areal_gsm8k_gspo.yaml", ["actor.ppo_n_minibatches=4"])
    assert not any(line.startswith("note:") for line in lines)


def test_an_override_makes_a_grpo_file_of_areal_one_of_gspo(tmp_path: Path) -> None:
    recipe, _, _ = recipe_of(FILES / "areal_gsm8k_grpo.yaml", tmp_path, "+actor.importance_sampling_level=sequence")
    assert recipe.actor.importance_sampling_level == "sequence"


def test_python_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "paper.py"
    path.write_text(PAPER, encoding="utf-8")
    recipe, _, lines = recipe_of(path, tmp_path)
    wanted = {
        "steps": 400 // (4 * 2),
        "queries.path": "openai/gsm8k",
        "queries.config": "main",
        "rollout.queries_per_step": 64 * 4 // 8,
        "rollout.max_new_tokens": 512,
        "actor.mini_batches": 4,
        "actor.epochs": 2,
        "actor.length_norm": "own",
        "actor.clip_low": 3e-4,
        "actor.clip_high": 4e-4,
        "actor.kl.coefficient": 0.04,
        "actor.optimizer.warmup_steps": 8,
        "seed": 42,
    }
    assert values(recipe, wanted) == wanted
    functions = [Path(reward.function).name for reward in recipe.reward]
    assert functions == ["trl.rewards:accuracy_reward", "paper.py:reward"]
    found = categories(lines)
    assert found["not known:"] == ["some_new_key"]
    assert "  seed: drawn(): it is computed by the program" in lines
    assert found["implied:"] == ["vllm_importance_sampling_mode"]  # there is no vLLM


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ("loss_type=dr_grpo scale_rewards=none", {"actor.length_norm": "constant", "actor.advantage": "group_mean"}),
        ("loss_type=bnpo scale_rewards=batch", {"actor.length_norm": "mean", "actor.advantage": "batch"}),
        ("loss_type=cispo epsilon_high=5", {"actor.surrogate": "cispo", "actor.clip_high": 4.0}),
        ("loss_type=sapo", {"actor.surrogate": "sapo", "actor.sapo_temperature": [1.0, 1.05]}),
        ("loss_type=luspo importance_sampling_level=sequence", {"actor.surrogate": "luspo"}),
        ("delta=4.0", {"actor.surrogate": "dual_clip", "actor.dual_clip": 4.0}),
        ("num_processes=8 gradient_accumulation_steps=4", {"rollout.queries_per_step": 32, "actor.mini_batches": 1}),
        (
            "num_processes=8 gradient_accumulation_steps=4 steps_per_generation=1",  # four generations for an update
            {"rollout.queries_per_step": 32, "actor.mini_batches": 1},
        ),
        ("num_processes=8 generation_batch_size=256", {"rollout.queries_per_step": 32, "actor.mini_batches": 2}),
        ("mask_truncated_completions=true", {"rollout.overlong": "mask"}),
        (
            "use_vllm=true vllm_importance_sampling_mode=token_truncate",
            {"actor.correction": "tis", "actor.correction_high": 3.0},
        ),
        (
            "use_vllm=true vllm_importance_sampling_mode=token_truncate vllm_importance_sampling_cap=2.0",
            {"actor.correction": "tis", "actor.correction_high": 2.0},
        ),
        ("use_vllm=true", {"actor.correction": "none"}),  # the product over a response has no counterpart
        ("num_processes=8 max_steps=80 warmup_steps=0.1", {"actor.optimizer.warmup_steps": 8}),
        ("weight_decay=0.1", {"actor.optimizer.no_decay": ["*norm*", "*.bias"]}),
        ("num_processes=8 max_steps=80 warmup_ratio=0.1", {"steps": 80, "actor.optimizer.warmup_steps": 8}),
    ],
)
def test_settings_of_trl_have_their_counterparts(settings: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    recipe, _, _ = recipe_of(FILES / "trl_game.py", tmp_path, "per_device_train_batch_size=8", *settings.split())
    assert values(recipe, wanted) == wanted


A = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (f"{A}.loss_agg_mode=seq-mean-token-mean", {"actor.length_norm": "own"}),
        (f"{A}.loss_agg_mode=seq-mean-token-sum-norm", {"actor.length_norm": "constant"}),
        (f"{A}.policy_loss.loss_mode=geo_mean", {"actor.surrogate": "gmpo"}),
        ("algorithm.norm_adv_by_std_in_grpo=False", {"actor.advantage": "group_mean"}),
        ("algorithm.adv_estimator=rloo", {"actor.advantage": "leave_one_out"}),
        (
            f"{A}.use_kl_loss=False algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True "
            "algorithm.kl_penalty=low_var_kl",
            {"actor.kl.place": "reward", "actor.kl.estimator": "k3"},
        ),
        (
            "algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=0",
            {"rollout.max_rounds": 4},
        ),
        (f"{A}.use_kl_loss=False", {"actor.kl.coefficient": 0.0}),
        (f"{A}.kl_loss_type=mse", {"actor.kl.estimator": "k2"}),
        (f"{A}.ppo_mini_batch_size=512 {A}.ppo_epochs=2", {"actor.mini_batches": 2, "actor.epochs": 2}),
        (f"{A}.optim.lr_warmup_steps=10", {"actor.optimizer.warmup_steps": 40}),
        ("trainer.total_training_steps=50", {"steps": 50}),
        ("custom_reward_function.path=score.py", {}),
    ],
)
def test_settings_of_verl_have_their_counterparts(settings: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    recipe, _, _ = recipe_of(FILES / "verl_grpo.sh", tmp_path, *settings.split())
    assert values(recipe, wanted) == wanted
    assert recipe.reward[0].function == ("score.py:compute_score" if "score.py" in settings else "math")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ("actor.reward_norm.std_level=null", {"actor.advantage": "group_mean"}),
        ("actor.reward_norm.std_level=batch", {"actor.advantage": "batch"}),
        ("actor.reward_norm.mean_leave1out=true", {"actor.advantage": "leave_one_out"}),
        ("actor.eps_clip=0.2 actor.eps_clip_higher=0.28", {"actor.clip_low": 0.2, "actor.clip_high": 0.28}),
        ("actor.c_clip=3.5", {"actor.surrogate": "dual_clip", "actor.dual_clip": 3.5}),
        ("actor.use_sapo_loss=true actor.use_decoupled_loss=false", {"actor.surrogate": "sapo"}),
        ("actor.use_decoupled_loss=false", {"actor.correction": "ignore", "actor.old_logprobs": "recompute"}),
        ("actor.use_decoupled_loss=false rollout.max_head_offpolicyness=0", {"actor.correction": "none"}),
        (
            "actor.use_decoupled_loss=false actor.recompute_logprob=false",
            {"actor.correction": "none", "actor.old_logprobs": "engine"},
        ),
        ("actor.kl_ctl=0.1", {"actor.kl.coefficient": 0.1, "actor.kl.place": "loss", "actor.kl.estimator": "k2"}),
        (
            "actor.overlong_reward_penalty=true actor.overlong_tokens=256",
            {"rollout.overlong": "penalty", "rollout.overlong_margin": 0.25},
        ),
        ("total_train_steps=7", {"steps": 7}),
        ("actor.ppo_n_minibatches=3", {"actor.mini_batches": 1}),  # 3 does not divide 256
    ],
)
def test_settings_of_areal_have_their_counterparts(settings: str, wanted: dict[str, Any], tmp_path: Path) -> None:
    recipe, _, _ = recipe_of(FILES / "areal_gsm8k_grpo.yaml", tmp_path, *settings.split())
    assert values(recipe, wanted) == wanted


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("grpo.json", '{"learning_rate": 2e-6, "num_generations": 4, "model": "a/b", "reward_funcs": "c:d"}'),
        ("grpo.yaml", "learning_rate: 2e-6\nnum_generations: 4\nmodel_name_or_path: a/b\nreward_funcs: 'c:d'\n"),
        ("grpo.py", 'GRPOTrainer(model="a/b", args=GRPOConfig("out", learning_rate=2e-6, num_generations=2 * 2))'),
    ],
)
def test_trl_is_read_from_json_yaml_and_python_alike(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    recipe, _, _ = recipe_of(tmp_path / name, tmp_path)
    wanted = {"model.path": "a/b", "actor.optimizer.lr": 2e-6, "rollout.group_size": 4, "rollout.queries_per_step": 2}
    assert values(recipe, wanted) == wanted


def test_the_hydra_yaml_of_verl_is_read_as_its_command_line(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for key, value in read_theirs(FILES / "verl_grpo.sh")[1].items():
        *sections, last = key.split(".")
        node = tree
        for name in sections:
            node = node.setdefault(name, {})
        node[last] = value
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    from_yaml, from_script = (recipe_of(path, tmp_path)[0] for path in (tmp_path / "verl.yaml", FILES / "verl_grpo.sh"))
    assert from_yaml == from_script


@needs("trl")
def test_the_defaults_of_trl_are_its_own() -> None:
    from trl import GRPOConfig

    theirs = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    ours = {key: value for key, value in table_of("trl")["defaults"].items() if "." not in key}
    del ours["num_processes"]
    assert {key: theirs[key] for key in ours} == ours


def test_a_secret_is_written_nowhere() -> None:
    text, lines = import_recipe(FILES / "trl_game.py", ["hub_token=hf_secret", "wandb_api_key=own_secret"])
    assert "secret" not in "\n".join([text, *lines])
