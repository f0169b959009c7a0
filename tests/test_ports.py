"""The ports of TRL's, verl's and AReaL's examples run offline, and have the numbers of the scripts beside them."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from gspo.model.load import fit_tokenizer
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.run.console import Display
from gspo.train import train

ROOT = Path(__file__).parents[1]
PORTS = ROOT / "recipes" / "ports"
TINY = yaml.safe_load(Path(__file__).with_name("tiny.yaml").read_text(encoding="utf-8"))["model"]["architecture"]
GUIDES = {
    library: (ROOT / f"docs/guides/from_{library}.md").read_text(encoding="utf-8")
    for library in ("trl", "verl", "areal")
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
VERL: list[dict[str, Any]] = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{n} + {n} = ? Output the final answer after ####"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"split": "train", "index": n},
    }
    for n in range(8)
]
GSM8K = [{"question": f"{n} + {n} = ?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(8)]
TLDR = [{"prompt": f"POST: a {n} b c\n\nTL;DR:", "completion": " a"} for n in range(8)]
SMALL = ["rollout.queries_per_step=4", "rollout.group_size=2", "rollout.max_new_tokens=8", "checkpoint.every=0"]


def original(library: str, first: str) -> str:
    """The settings of the original script: the block of its guide that begins so."""
    (block,) = [text for text in re.findall(r"^```text\n(.*?)^```", GUIDES[library], re.M | re.S) if first in text]
    return str(block)


def words_of(library: str, first: str) -> dict[str, Any]:
    """The values of `name=value` among them; of a dotted name the last two parts."""
    pairs = re.findall(r"([\w.$]+)=(\S+)", original(library, first))
    return {".".join(name.split(".")[-2:]): yaml.safe_load(value) for name, value in pairs}


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """The recipe of a port, as it lies beside its reward, shrunk to a model and data that are there."""
    for path in PORTS.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    tokenizer = fit_tokenizer([json.dumps([*VERL, *GSM8K, *TLDR]), "user assistant : Please put within \\ boxed { }"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("tokenizer")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VERL), "verl.parquet")
    Path("gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K), encoding="utf-8")
    Path("tldr.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TLDR), encoding="utf-8")

    def shrunk(name: str, data: str, *overrides: str) -> Recipe:
        model = f"model={json.dumps({'tokenizer': 'tokenizer', 'device': 'cpu', 'architecture': TINY})}"
        sizes = [size for size in SMALL if not any(own.startswith(size.partition("=")[0]) for own in overrides)]
        return load_recipe(Path(f"{name}.yaml"), ["steps=1", model, f"queries.path={data}", *sizes, *overrides])

    return shrunk


def rollouts(recipe: Recipe) -> list[Mapping[str, Any]]:
    lines = (recipe.run_dir / "rollouts" / "step_000001.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_trls_quickstart_trains_by_its_own_reward(port: Callable[..., Recipe]) -> None:
    recipe = port("trl_quickstart", "tldr.jsonl", "rollout.queries_per_step=1", "rollout.group_size=8")
    outcome = train(recipe, display=Display(quiet=True))
    samples = rollouts(recipe)
    assert [sample["reward"] for sample in samples] == [len(set(sample["completion"].lower())) for sample in samples]
    assert len({sample["reward"] for sample in samples}) > 1 and outcome.metrics[-1]["policy/grad_norm"] > 0


def test_verls_gsm8k_trains_from_its_parquet_file_by_its_own_reward(port: Callable[..., Recipe]) -> None:
    recipe = port("verl_gsm8k", "verl.parquet", "evaluation.path=verl.parquet", "evaluation.num_queries=2")
    train(recipe, display=Display(quiet=True))
    samples = rollouts(recipe)
    assert len(samples) == 8 and all(sample["reward"] in (0.0, 1.0) for sample in samples)
    assert {sample["prompt"].partition(" ####")[0] for sample in samples} <= {
        f"user: {row['prompt'][0]['content']}".partition(" ####")[0] for row in VERL
    }


def test_areals_gsm8k_gspo_trains_on_gsm8k(port: Callable[..., Recipe]) -> None:
    data = ["queries.config=null", "evaluation.path=gsm8k.jsonl", "evaluation.num_queries=2"]
    recipe = port("areal_gsm8k_gspo", "gsm8k.jsonl", *data)
    train(recipe, display=Display(quiet=True))
    samples = rollouts(recipe)
    assert len(samples) == 8
    assert all("Please put your final answer within \\boxed{}." in sample["prompt"] for sample in samples)


@pytest.mark.parametrize(("response", "score"), [("so\n#### 1,234", 1.0), ("#### 5 #### 1234", 1.0), ("1234", 0.0)])
def test_verls_reward_reads_the_last_number_behind_the_mark(response: str, score: float) -> None:
    names: dict[str, Any] = {}
    exec((PORTS / "verl_gsm8k.py").read_text(encoding="utf-8"), names)
    assert names["compute_score"]("openai/gsm8k", response, "1234") == score


def test_the_trl_port_has_trls_numbers() -> None:
    said, recipe = words_of("trl", "num_train_epochs"), load_recipe(PORTS / "trl_quickstart.yaml")
    rollout, actor, optimizer = recipe.rollout, recipe.actor, recipe.actor.optimizer
    script = original("trl", "GRPOTrainer")
    assert f'model="{recipe.model.path}"' in script and f'load_dataset("{recipe.queries.path}"' in script
    assert (optimizer.lr, optimizer.schedule) == (float(said["learning_rate"]), said["lr_scheduler_type"])
    assert optimizer.betas == (said["adam_beta1"], said["adam_beta2"])
    assert (optimizer.max_grad_norm, actor.kl.coefficient) == (said["max_grad_norm"], said["beta"])
    responses = said["per_device_train_batch_size"] * said["steps_per_generation"]
    assert (rollout.queries_per_step * rollout.group_size, rollout.group_size) == (responses, said["num_generations"])
    assert actor.mini_batches == said["steps_per_generation"] * said["num_iterations"]
    assert recipe.steps == said["num_train_epochs"] * 116_722 // rollout.queries_per_step
    assert (rollout.max_new_tokens, rollout.temperature) == (said["max_completion_length"], said["temperature"])
    assert (actor.clip_low, actor.clip_high) == (said["epsilon"], said["epsilon"])
    assert actor.importance_sampling_level == said["importance_sampling_level"]
    assert (actor.length_norm, actor.advantage) == ({"dapo": "mean"}[said["loss_type"]], said["scale_rewards"])
    assert (actor.gradient_checkpointing, recipe.checkpoint.every) == (True, said["save_steps"])


def test_the_verl_port_has_verls_numbers() -> None:
    said, recipe = words_of("verl", "main_ppo"), load_recipe(PORTS / "verl_gsm8k.yaml")
    rollout, actor, optimizer = recipe.rollout, recipe.actor, recipe.actor.optimizer
    size = said["data.train_batch_size"]
    assert (rollout.queries_per_step, rollout.group_size) == (size, said["rollout.n"])
    assert (rollout.max_new_tokens, rollout.temperature) == (
        said["data.max_response_length"],
        said["rollout.temperature"],
    )
    assert recipe.model.path == said["model.path"]
    assert actor.mini_batches == size // said["$A.ppo_mini_batch_size"]
    assert actor.micro_batch_tokens == said["$A.ppo_max_token_len_per_gpu"]
    assert (actor.clip_low, actor.clip_high) == (said["$A.clip_ratio_low"], said["$A.clip_ratio_high"])
    assert (optimizer.lr, optimizer.weight_decay) == (float(said["optim.lr"]), said["optim.weight_decay"])
    assert optimizer.max_grad_norm == said["$A.grad_clip"]
    steps = said["optim.lr_warmup_steps_ratio"] * said["trainer.total_training_steps"]
    assert optimizer.warmup_steps == steps * actor.mini_batches
    assert recipe.steps == min(said["trainer.total_epochs"] * (7473 // size), said["trainer.total_training_steps"])
    assert (recipe.checkpoint.every, recipe.evaluation.every) == (
        said["trainer.save_freq"],
        said["trainer.test_freq"],
    )
    assert actor.gradient_checkpointing and actor.kl.coefficient == 0 == actor.entropy_bonus


def test_the_areal_port_has_areals_numbers() -> None:
    said, recipe = yaml.safe_load(original("areal", "mb_spec")), load_recipe(PORTS / "areal_gsm8k_gspo.yaml")
    rollout, actor, optimizer, own = recipe.rollout, recipe.actor, recipe.actor.optimizer, said["actor"]
    size = said["train_dataset"]["batch_size"]
    assert (recipe.seed, recipe.model.path, recipe.model.dtype) == (said["seed"], own["path"], own["dtype"])
    assert (rollout.queries_per_step, recipe.queries.path) == (size, said["train_dataset"]["path"])
    sampled = {"n_samples": rollout.group_size, "max_new_tokens": rollout.max_new_tokens}
    assert {**sampled, "temperature": rollout.temperature} == said["gconfig"]
    assert (actor.mini_batches, actor.clip_low, actor.clip_high) == (own["ppo_n_minibatches"], *[own["eps_clip"]] * 2)
    assert actor.micro_batch_tokens == own["mb_spec"]["max_tokens_per_mb"]
    assert (optimizer.lr, optimizer.weight_decay) == (float(own["optimizer"]["lr"]), own["optimizer"]["weight_decay"])
    assert optimizer.betas == (own["optimizer"]["beta1"], own["optimizer"]["beta2"])
    assert (actor.correction, actor.correction_high) == ("decoupled", own["behav_imp_weight_cap"])
    assert (actor.kl.coefficient, actor.advantage) == (own["kl_ctl"], own["reward_norm"]["std_level"])
    assert actor.importance_sampling_level == own["importance_sampling_level"] and actor.gradient_checkpointing
    epoch = 7473 // size
    assert recipe.steps == said["total_train_epochs"] * epoch
    assert (recipe.checkpoint.every, recipe.evaluation.every) == (epoch, epoch)


@pytest.mark.parametrize("path", sorted(PORTS.glob("*.*")), ids=lambda path: path.name)
def test_a_guide_shows_the_port_as_it_is(path: Path) -> None:
    shown = f'title="recipes/ports/{path.name}"\n{path.read_text(encoding="utf-8")}```'
    assert sum(shown in guide for guide in GUIDES.values()) == 1
