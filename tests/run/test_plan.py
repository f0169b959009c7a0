"""A plan for GPUs that are not here: what fits by the formula of memory, and what a step's time goes by."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from gspo import cli
from gspo.check import check
from gspo.errors import UserError
from gspo.recipe.load import load_recipe, make_recipe, overridden
from gspo.recipe.schema import Recipe
from gspo.run.memory import memory_of
from gspo.run.minutes import Work, in_words, operations, work_of
from gspo.run.plan import (
    CARDS,
    PROMPT_TOKENS,
    Gpus,
    Servers,
    changes_to_fit,
    gpus_of,
    largest_micro_batch,
    numbers_that_fit,
    plan,
    seconds_of,
    servers_of,
)

DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MIXTURE: dict[str, Any] = {
    **DENSE,
    **EXPERTS,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "head_dim": 128,
}


TOKENS = "actor.importance_sampling_level=sequence_token"  # have advantages of their own, by a teacher


def recipe_of(*words: str, **sections: Any) -> Recipe:
    tree: dict[str, Any] = {"name": "p", "steps": 10, "model": {"path": "m"}, "queries": {"path": "absent.jsonl"}}
    tree |= {"reward": "math", **sections}
    for word in words:
        tree = overridden(tree, word)
    return make_recipe(tree)


def sized(recipe: Recipe, shape: dict[str, Any]) -> tuple[Any, Work]:
    config = AutoConfig.for_model(**shape)
    return config, work_of(recipe, config, PROMPT_TOKENS, 2)


def most(recipe: Recipe, config: Any, num_ranks: int) -> float:
    options: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "device": torch.device("cuda"), "num_ranks": num_ranks}
    return max(sum(parts.values()) for parts in memory_of(recipe, config, **options).values())


@pytest.mark.parametrize(
    ("text", "number", "name"),
    [
        ("8xH100-80GB", 8, "H100-80GB"),
        ("16Xa100-40gb", 16, "A100-40GB"),
        ("H200", 1, "H200-141GB"),
        ("2xRTX4090", 2, "RTX4090-24GB"),
    ],
)
def test_gpus_are_read(text: str, number: int, name: str) -> None:
    assert gpus_of(text) == Gpus(number=number, name=name)


@pytest.mark.parametrize("text", ["8xH1000", "0xH100-80GB", "5000xH100-80GB", "A100", "eight", "", "8x"])
def test_other_gpus_are_refused_with_all_that_there_are(text: str) -> None:
    with pytest.raises(UserError, match="--on") as error:
        gpus_of(text)
    assert "H100-80GB" in str(error.value) and "L4-24GB" in str(error.value)


def test_sizes_of_a_mixture_are_those_of_its_layers() -> None:
    config, work = sized(recipe_of(), MIXTURE)
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    other = 4 * (attention + 128 * 2048 + 2 * 2048 + 2 * 128) + 2048 + 2 * 152_064 * 2048
    assert work.in_experts == 4 * 128 * 3 * 2048 * 768
    assert work.parameters == work.in_experts + other
    assert work.active == pytest.approx(work.in_experts / 16 + other)
    assert work.chosen == pytest.approx(1 / 16)
    assert work.cached == 2 * 2 * 4 * 4 * 128
    assert config.num_hidden_layers == work.layers


def test_what_is_proposed_fits_and_the_step_before_it_does_not() -> None:
    gpus, recipe = gpus_of("8xH100-80GB"), recipe_of("rollout.max_new_tokens=4096")
    config, work = sized(recipe, DENSE)
    assert most(recipe, config, 8) > gpus.room
    changes = changes_to_fit(recipe, config, gpus, work, 8)
    assert changes == ["actor.micro_batch_tokens=4608"]
    assert most(recipe_of("rollout.max_new_tokens=4096", *changes), config, 8) <= gpus.room
    assert most(recipe_of("rollout.max_new_tokens=4096", "actor.micro_batch_tokens=8192"), config, 8) > gpus.room


def test_what_no_change_makes_fit_has_none() -> None:
    recipe, gpus = recipe_of(), gpus_of("1xL4")
    config, work = sized(recipe, {**DENSE, "num_hidden_layers": 56})
    assert changes_to_fit(recipe, config, gpus, work, 1) is None
    config, work = sized(recipe, DENSE)
    with_adapter = changes_to_fit(recipe, config, gpus, work, 1)
    assert with_adapter is not None and with_adapter[-1] == "model.lora={}"


def test_the_largest_micro_batch_fits_and_its_double_does_not() -> None:
    gpus, recipe = gpus_of("8xH200"), recipe_of("actor.micro_batch_tokens=2048")
    config, work = sized(recipe, DENSE)
    tokens = largest_micro_batch(recipe, config, gpus, work, 8)
    assert most(recipe_of(f"actor.micro_batch_tokens={tokens}"), config, 8) <= gpus.room
    assert most(recipe_of(f"actor.micro_batch_tokens={2 * tokens}"), config, 8) > gpus.room


def test_fewer_gpus_than_the_least_do_not_fit() -> None:
    recipe, gpus = recipe_of("actor.micro_batch_tokens=2048"), gpus_of("32xA100-80GB")
    config, work = sized(recipe, DENSE)
    numbers = numbers_that_fit(recipe, config, gpus, work, 32)
    assert 1 < numbers[0] < 32 and numbers == [*range(numbers[0], 33)]
    assert most(recipe, config, numbers[0]) <= gpus.room < most(recipe, config, numbers[0] - 1)


def test_one_gpu_may_fit_where_a_few_do_not_since_it_gathers_nothing() -> None:
    words = ["model.lora={}", "actor.micro_batch_tokens=1536", "actor.gradient_checkpointing=true"]
    recipe, gpus = recipe_of(*words, "rollout.max_rows=8"), gpus_of("8xL4")
    config, work = sized(recipe, DENSE)
    fitting = [number for number in range(1, 9) if most(recipe, config, number) <= gpus.room]
    assert fitting[0] == 1 and 2 not in fitting
    assert numbers_that_fit(recipe, config, gpus, work, 8) == fitting


def test_what_is_proposed_is_smaller_than_what_the_recipe_has_and_of_the_stage_that_is_short() -> None:
    gpus, words = gpus_of("1xH100-80GB"), ["actor.micro_batch_tokens=1600", "rollout.max_new_tokens=1024"]
    config, work = sized(recipe_of(*words), {**DENSE, "num_hidden_layers": 4, "num_key_value_heads": 28})
    assert changes_to_fit(recipe_of(*words), config, gpus, work, 1) == ["rollout.max_rows=64"]
    assert changes_to_fit(recipe_of(*words, "rollout.max_rows=60"), config, gpus, work, 1) == []
    small = replace(gpus, name="A10-24GB")
    words += ["actor.gradient_checkpointing=true", "rollout.max_rows=60"]
    assert changes_to_fit(recipe_of(*words), config, small, work, 1) == ["model.lora={}"]


def test_time_goes_by_products_and_by_what_is_read() -> None:
    recipe = recipe_of("actor.micro_batch_tokens=500000", "actor.old_logprobs=engine", "rollout.max_new_tokens=4096")
    _, work = sized(recipe, DENSE)
    sampling, training = seconds_of(recipe, work, gpus_of("1xH100-80GB"), Servers())
    tokens = 64 * (8 * 4096 + 512)
    assert training == pytest.approx(6 * work.parameters * tokens / (0.4 * 989e12))
    cache = 512 * work.cached * (512 + 4096 / 2)
    prompts = 2 * work.parameters * 64 * 512 / (0.4 * 989e12)
    assert sampling == pytest.approx(prompts + 4096 * (2 * work.parameters + cache) / (0.6 * 3350e9))
    half = seconds_of(recipe, work, gpus_of("2xH100-80GB"), Servers())
    assert half[1] == pytest.approx(training / 2)
    assert sampling / 2 < half[0] < sampling, "each reads all weights"


def test_small_micro_batches_wait_for_weights_of_other_ranks() -> None:
    times = []
    for tokens in (1536, 3072):
        recipe = recipe_of(f"actor.micro_batch_tokens={tokens}")
        _, work = sized(recipe, DENSE)
        times.append(seconds_of(recipe, work, gpus_of("16xRTX4090"), Servers())[1])
    micro_batches = 64 * (8 * 1024 + 512) // 4 // 16 // 1536 + 1
    assert times[0] == pytest.approx(8 * work.parameters * 4 * micro_batches / 14e9)
    assert times[1] < 0.6 * times[0]


def test_between_hosts_the_network_is_the_slowest_link() -> None:
    recipe = recipe_of("actor.micro_batch_tokens=1536", "model.lora={}")
    _, work = sized(recipe, DENSE)
    micro_batches = {number: -(-64 * (8 * 1024 + 512) // 4 // number // 1536) for number in (8, 16)}
    for number, link in ((8, 60e9), (16, 50e9)):
        slow = replace(work, active=1)  # so that nothing but the exchange takes time
        gathered = 2 * 2 * work.parameters * 4 * micro_batches[number]
        found = seconds_of(recipe, slow, gpus_of(f"{number}xH100-PCIe-80GB"), Servers())[1]
        assert found == pytest.approx(gathered / link), "of an adapter no gradient of all weights is exchanged"


def test_ranks_that_share_nothing_exchange_the_gradient_once_an_update() -> None:
    recipe = recipe_of("trainer.sharding=none", "actor.micro_batch_tokens=1536")
    _, work = sized(recipe, DENSE)
    found = seconds_of(recipe, replace(work, active=1), gpus_of("8xRTX4090"), Servers())[1]
    assert found == pytest.approx(2 * 4 * work.parameters * 4 / 14e9)


def test_passes_of_a_step_are_counted() -> None:
    """In operations for each parameter and token: 2 forwards, 4 backwards, 2 where weights have no gradient."""
    engine = "actor.old_logprobs=engine"
    assert operations(recipe_of(engine)) == 6
    assert operations(recipe_of(engine, "model.lora={}")) == 4
    assert operations(recipe_of(engine, "actor.gradient_checkpointing=true", "actor.epochs=2")) == 16
    assert operations(recipe_of(engine, "actor.kl.coefficient=0.1")) == 8
    assert operations(recipe_of(engine, TOKENS, "teacher.path=t")) == 8
    assert operations(recipe_of()) == 6 + 2 * 3 / 4


def test_a_token_of_the_embedded_engine_takes_what_launching_its_kernels_takes() -> None:
    """An H200 took 27 ms for a token of 28 layers."""
    recipe = recipe_of("rollout.queries_per_step=8")
    _, work = sized(recipe, {**DENSE, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14})
    sampling, _ = seconds_of(recipe, work, gpus_of("1xH200"), Servers())
    assert sampling == pytest.approx(1024 * 0.027, rel=0.03)


def test_a_token_goes_through_the_experts_that_it_chooses_and_its_neighbours_read_more() -> None:
    recipe = recipe_of("rollout.queries_per_step=4", "rollout.group_size=2", "actor.old_logprobs=engine")
    _, work = sized(recipe, MIXTURE)
    sampling, training = seconds_of(recipe, work, gpus_of("1xL4"), Servers())
    assert training == pytest.approx(6 * work.active * 4 * (2 * 1024 + 512) / (0.4 * 121e12))
    read = 2 * (work.parameters - work.in_experts * (15 / 16) ** 8) + 8 * work.cached * (512 + 1024 / 2)
    prompts = 2 * work.active * 4 * 512 / (0.4 * 121e12)
    assert sampling == pytest.approx(prompts + 1024 * read / (0.6 * 300e9))


def test_servers_have_the_gpus_that_the_recipe_names() -> None:
    def found(**sections: Any) -> Servers:
        recipe = recipe_of(**sections)
        return servers_of(recipe, *sized(recipe, DENSE), gpus_of("8xH100-80GB"))

    assert found(rollout={"engine": "vllm", "vllm": {"python": "p", "devices": ["0,1", "2,3"]}}) == Servers(
        number=2, gpus=4
    )
    cluster = {"engines": 3, "gpus_per_engine": 2}
    assert found(rollout={"engine": "sglang"}, cluster=cluster) == Servers(number=3, gpus=6)
    urls = ["http://one:8000", "http://two:8000"]
    assert found(rollout={"engine": "vllm", "vllm": {"urls": urls}}) == Servers(number=2), "which are elsewhere"
    assert found() == Servers()


def test_a_split_is_chosen_where_the_recipe_names_none() -> None:
    """No other split has a step that is shorter by more than a twentieth, and the rest can train the model."""
    sections = {"engine": "vllm", "vllm": {"python": "p"}, "max_staleness": 2}
    recipe, gpus = recipe_of(rollout=sections), gpus_of("8xH100-80GB")
    config, work = sized(recipe, DENSE)
    chosen = servers_of(recipe, config, work, gpus)
    assert chosen.number == chosen.gpus < 7
    splits = [Servers(number=number, gpus=number) for number in range(1, 7)]
    steps = {split.gpus: max(seconds_of(recipe, work, gpus, split)) for split in splits}
    assert steps[chosen.gpus] <= 1.05 * min(steps.values())
    assert changes_to_fit(recipe, config, gpus, work, 8 - chosen.gpus) is not None


def test_servers_that_sample_ahead_do_so_while_others_train(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "num_hidden_layers": 2}))
    servers = {"engine": "vllm", "vllm": {"python": "p", "devices": ["0", "1"]}}
    lines = []
    for staleness in (0, 1):
        rollout = {**servers, "max_staleness": staleness, "max_new_tokens": 4096}
        recipe = recipe_of(rollout=rollout, model={"path": str(tmp_path)})
        lines.append(next(line for line in plan(recipe, "8xH100-80GB") if line.startswith("time")))
    recipe = recipe_of(rollout=rollout, model={"path": str(tmp_path)})
    _, work = sized(recipe, {**DENSE, "num_hidden_layers": 2})
    parts = seconds_of(recipe, work, gpus_of("8xH100-80GB"), Servers(number=2, gpus=2))
    for line, seconds in zip(lines, (sum(parts), max(parts)), strict=True):
        assert f"a step about {in_words(seconds)}:" in line


def test_servers_elsewhere_take_no_gpu_and_no_time_that_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "num_hidden_layers": 2}))
    recipe = recipe_of(rollout={"engine": "vllm", "vllm": {"urls": ["http://a:1"]}}, model={"path": str(tmp_path)})
    said = "\n".join(plan(recipe, "2xA100-80GB"))
    assert "processes   2," in said and "servers     1 elsewhere" in said and " 0 s sampling" in said


def test_a_server_that_cannot_hold_the_weights_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "num_hidden_layers": 56}))
    rollout = {"engine": "vllm", "vllm": {"python": "p", "devices": ["0"]}}
    assert (
        "do not hold its weights and one response"
        in list(plan(recipe_of(rollout=rollout, model={"path": str(tmp_path)}), "8xL4"))[-1]
    )


@pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_a_plan_needs_config_json_and_nothing_else(
    shape: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 2}))
    recipe = tmp_path / "r.yaml"
    recipe.write_text("{name: r, steps: 5, model: {path: .}, queries: {path: absent.jsonl}, reward: absent:function}")
    assert cli.main(["plan", str(recipe), "--on", "4xA100-80GB", "queries.max_prompt_tokens=300"]) == 0
    said = capsys.readouterr().out
    assert "4 × A100-80GB: 80 GiB, 312 TFLOP/s" in said and "prompts of 300 tokens" in said
    assert "processes   4," in said and "in the update: it fits" in said and "5 steps" in said
    assert "tokens of responses a second and GPU" in said


def test_what_is_too_much_is_said_with_what_would_fit(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    recipe = recipe_of("rollout.max_new_tokens=4096", model={"path": str(tmp_path)})
    said = "\n".join(plan(recipe, "8xH100-80GB"))
    assert "in the update: TOO MUCH" in said and "it fits with actor.micro_batch_tokens=4608" in said
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "num_hidden_layers": 56}))
    lines = list(plan(recipe, "1xL4"))
    assert "no setting that gspo knows of makes it fit" in lines[-1], "and no time of what cannot be"


def test_all_gpus_are_left_to_servers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MIXTURE, "num_hidden_layers": 1}))
    rollout = {"engine": "vllm", "vllm": {"python": "p", "devices": ["0", "1"]}}
    assert (
        "none is left to train on" in list(plan(recipe_of(rollout=rollout, model={"path": str(tmp_path)}), "2xL4"))[-1]
    )


def test_a_cards_name_has_its_memory() -> None:
    for name, card in CARDS.items():
        assert 0.9 * int(name.rpartition("-")[2].removesuffix("GB")) <= card.memory <= 192


def test_a_check_plans_with_the_prompts_of_the_data() -> None:
    few = ["queries.procedural.size=64", "evaluation.num_queries=8"]
    lines = list(check(load_recipe(Path(__file__).parents[2] / "recipes" / "arithmetic.yaml", few), on="1xL4"))
    queries = next(line for line in lines if line.startswith("one prompt"))
    planned = next(line for line in lines if line.startswith("lengths"))
    longest = int(planned.split("prompts of ")[1].split()[0])
    assert int(queries.split()[2]) <= longest < 40
    assert any(line.startswith("on          1 × L4-24GB") for line in lines)


def test_a_vocabulary_that_only_the_tokenizer_knows_is_said_to_be_assumed() -> None:
    architecture = {key: value for key, value in DENSE.items() if key != "vocab_size"} | {"num_hidden_layers": 2}
    recipe = recipe_of(model={"architecture": architecture, "tokenizer": "fit"})
    assert any("the vocabulary is taken to be of 151,936 tokens" in line for line in plan(recipe, "1xH100-80GB"))


def test_a_teacher_is_counted_by_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, "num_hidden_layers": 2}))
    recipe = recipe_of(TOKENS, f"teacher.path={tmp_path}", model={"path": str(tmp_path)})
    assert any(line.split()[:1] == ["teacher"] for line in plan(recipe, "1xH200"))


def test_the_guides_examples_are_what_the_command_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.memory import plans

    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    guide = (root / "docs" / "guides" / "memory.md").read_text(encoding="utf-8")
    assert all(f"```text\n{example}\n```" in guide for example in plans().split("\n\n"))
