"""The cold start: what carries the loss, that it falls, that no cut changes it, and that RL goes on from there."""

import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gspo
from gspo.errors import UserError
from gspo.learner.optimizer import Optimizer, StepReport
from gspo.learner.sft import encode_demonstrations, fit, rows_of_steps
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood
from gspo.queries.bridge import Bridge
from gspo.queries.row import Row
from gspo.recipe.load import load_recipe, make_recipe
from gspo.recipe.sections import ActorConfig, ColdStartConfig, ColdStartOptimizerConfig, QueriesConfig
from gspo.train import train

TINY = Path(__file__).parents[1] / "tiny.yaml"
NewPolicy = Callable[..., Policy]
SHOWN = Row(id="shown:1", prompt="1 + 2 =")


def recipe_of(steps: int, rows_per_step: int, **optimizer: Any) -> ColdStartConfig:
    settings = ColdStartOptimizerConfig(**{"lr": 1e-2, "schedule": "linear", **optimizer})
    return ColdStartConfig(steps=steps, rows_per_step=rows_per_step, demonstrations="a:b", optimizer=settings)


def supervise(
    policy: Policy,
    optimizer: Optimizer,
    examples: Sequence[TokenSequence],
    settings: ColdStartConfig,
    actor: ActorConfig,
    *,
    seed: int = 0,
    num_done: int = 0,
    **given: Any,
) -> list[tuple[float, StepReport]]:
    """The loss and the report of each step that is left."""
    recipe = load_recipe(TINY).model_copy(update={"cold_start": settings, "seed": seed})
    steps = rows_of_steps(examples, recipe)[num_done:]
    return [fit(policy, optimizer, rows, micro_batch_tokens=actor.micro_batch_tokens, **given) for rows in steps]


def learn(
    policy: Policy, examples: Sequence[TokenSequence], settings: ColdStartConfig, actor: ActorConfig, *, seed: int = 0
) -> list[tuple[float, StepReport]]:
    optimizer = Optimizer(policy.model, settings.optimizer, total_steps=settings.steps)
    return supervise(policy, optimizer, examples, settings, actor, seed=seed)


def test_the_loss_falls_to_almost_nothing_on_a_few_rows(
    new_policy: NewPolicy, ragged_sequences: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe", initializer_range=0.05, num_experts=2)
    examples = ragged_sequences(6, vocabulary=len(policy.tokenizer), longest=6)
    (first, _), *others = learn(policy, examples, recipe_of(120, 6), actor_of())
    assert len(others) == 119
    assert first == pytest.approx(torch.tensor(len(policy.tokenizer)).log().item(), abs=0.5)
    last, report = others[-1]
    assert last < 0.1
    assert report.learning_rate == pytest.approx(1e-2 / 120)


def test_only_completion_tokens_carry_loss(
    new_policy: NewPolicy,
    ragged_sequences: Any,
    actor_of: Any,
    plain_logprobs: Any,
    recording_optimizer: Any,
) -> None:
    policy = new_policy("qwen3")
    examples = ragged_sequences(5, vocabulary=len(policy.tokenizer))
    loss = -plain_logprobs(policy, examples).mean()  # the mean over the completions' tokens, not over rows
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    policy.model.zero_grad()
    ((found_loss, _),) = supervise(policy, recording_optimizer(policy.model), examples, recipe_of(1, 5), actor_of())
    assert found_loss == pytest.approx(loss.item(), rel=1e-5)
    (found,) = recording_optimizer.gradients
    assert (found - expected).norm() / expected.norm() <= 1e-5


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_gradient_does_not_depend_on_micro_batches_or_chunks(
    family: str, new_policy: NewPolicy, ragged_sequences: Any, actor_of: Any, recording_optimizer: Any, monkeypatch: Any
) -> None:
    policy = new_policy(family)
    examples = ragged_sequences(12, vocabulary=len(policy.tokenizer))
    losses = []
    for micro_batch_tokens, chunk_tokens in [(10**6, 10**6), (1, 10**6), (50, 3), (10**6, 1)]:
        monkeypatch.setattr("gspo.model.head.MAX_LOGITS", chunk_tokens * len(policy.tokenizer))
        actor = actor_of(micro_batch_tokens=micro_batch_tokens)
        ((loss, _),) = supervise(policy, recording_optimizer(policy.model), examples, recipe_of(1, 12), actor)
        losses.append(loss)
    whole, *others = recording_optimizer.gradients
    differences = [float((gradient - whole).norm() / whole.norm()) for gradient in others]
    print(f"cold start, {family}: largest relative difference of the gradient {max(differences):.1e}")
    assert max(differences) <= 1e-5
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.parametrize(("num_rows", "rows_per_step"), [(6, 2), (5, 2), (3, 8)])
def test_every_row_comes_once_an_epoch(
    num_rows: int, rows_per_step: int, new_policy: NewPolicy, actor_of: Any, monkeypatch: Any
) -> None:
    policy = new_policy()
    examples = [TokenSequence(prompt_ids=(4,), response_ids=torch.tensor([5 + n])) for n in range(num_rows)]
    seen: list[int] = []

    def noting(policy: Policy, rows: Sequence[TokenSequence], **arguments: Any) -> Any:
        assert len(rows) == rows_per_step
        seen.extend(int(row.response_ids[0]) - 5 for row in rows)
        return response_likelihood(policy, rows, **arguments)

    monkeypatch.setattr("gspo.learner.sft.response_likelihood", noting)
    learn(policy, examples, recipe_of(2 * num_rows, rows_per_step), actor_of())
    epochs = [seen[start : start + num_rows] for start in range(0, len(seen), num_rows)]
    assert len(epochs) >= 4
    # Rows of equal length keep their order within a step, so whole epochs can be read off.
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_seed_decides_the_order(new_policy: NewPolicy, ragged_sequences: Any, actor_of: Any) -> None:
    def losses(seed: int) -> list[float]:
        policy = new_policy()
        examples = ragged_sequences(8, vocabulary=len(policy.tokenizer))
        return [loss for loss, _ in learn(policy, examples, recipe_of(4, 2), actor_of(), seed=seed)]

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


def test_a_cold_start_taken_up_sees_the_rows_that_were_left(
    new_policy: NewPolicy, ragged_sequences: Any, actor_of: Any
) -> None:
    recipe = recipe_of(6, 3)
    whole, broken = new_policy(), new_policy()
    examples = ragged_sequences(8, vocabulary=len(whole.tokenizer))
    expected = learn(whole, examples, recipe, actor_of())
    optimizer = Optimizer(broken.model, recipe.optimizer, total_steps=recipe.steps)
    found = supervise(broken, optimizer, examples, recipe_of(4, 3), actor_of())
    found += supervise(broken, optimizer, examples, recipe, actor_of(), num_done=4)
    assert found == expected
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), broken.model.parameters(), strict=True))


def test_a_stop_is_asked_for_before_each_part_of_the_gradient(
    new_policy: NewPolicy, ragged_sequences: Any, actor_of: Any, recording_optimizer: Any
) -> None:
    policy, looks = new_policy(), []
    parameters = list(policy.model.parameters())
    examples = ragged_sequences(4, vocabulary=len(policy.tokenizer))
    optimizer, actor = recording_optimizer(policy.model), actor_of(micro_batch_tokens=1)

    def check_stop() -> None:
        looks.append((len(recording_optimizer.gradients), any(p.grad is not None for p in parameters)))

    supervise(policy, optimizer, examples, recipe_of(2, 2), actor, check_stop=check_stop)
    assert looks == [(0, False), (0, True), (1, False), (1, True)]


def test_demonstrations_are_prompt_and_completion_closed_by_the_end_token(new_policy: NewPolicy) -> None:
    policy = new_policy()
    prompts, texts = ["1 + 2 = 3", "3", "7 - 4"], ["1 + 2 = 3", "a cat sat on the mat", ""]
    rows = [Row(id=f"t:{n}", prompt=prompt) for n, prompt in enumerate(prompts)]
    examples = encode_demonstrations(policy, QueriesConfig(template="so: {prompt}"), [*zip(rows, texts, strict=True)])
    end = policy.tokenizer.eos_token_id
    assert end in policy.stop_ids
    for example, prompt, text in zip(examples, prompts, texts, strict=True):
        assert [*example.prompt_ids] == policy.tokenizer(f"so: {prompt}").input_ids
        assert example.response_ids[-1] == end
        assert policy.tokenizer.decode(example.response_ids[:-1]) == text


@pytest.mark.parametrize("has_template", [True, False])
def test_results_of_tools_stand_as_in_a_rollout_and_carry_no_loss(has_template: bool, new_policy: NewPolicy) -> None:
    policy = new_policy()
    bridge, end = Bridge(policy.tokenizer, QueriesConfig()), policy.tokenizer.eos_token_id
    bridge.role = "user" if has_template else None
    said = [("assistant", "7 - 4"), ("tool", "3"), ("tool", "1"), ("assistant", "so: 3!")]
    messages = [{"role": role, "content": text} for role, text in said]
    (example,) = encode_demonstrations(policy, QueriesConfig(), [(SHOWN, messages)], bridge)
    first, last = ([*policy.tokenizer(text).input_ids] for text in ("7 - 4", "so: 3!"))
    first += [end] * has_template  # without one a call ends a turn
    between = bridge.tokens(["3", "1"], last=first[-1])
    assert example.response_ids.tolist() == [*first, *between, *last, end]
    written = torch.tensor([True] * len(first) + [False] * len(between) + [True] * (len(last) + 1))
    assert example.loss_mask is not None and torch.equal(example.loss_mask, written)
    expected = response_likelihood(policy, [dataclasses.replace(example, loss_mask=None)]).logprobs[written]
    optimizer = Optimizer(policy.model, ColdStartOptimizerConfig(), total_steps=1)
    loss, _ = fit(policy, optimizer, [example], micro_batch_tokens=100)
    assert loss == pytest.approx(-expected.mean().item())


def test_a_tokenizer_without_an_end_token_is_refused(new_policy: NewPolicy) -> None:
    policy = new_policy()
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="end token"):
        encode_demonstrations(dataclasses.replace(policy, tokenizer=tokenizer), QueriesConfig(), [(SHOWN, "3")])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reinforcement_learning_goes_on_from_the_cold_started_weights(dtype: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(3) for b in range(3)]
    path = tmp_path / "demonstrations.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe = make_recipe(
        {
            "name": "cold",
            "steps": 1,
            "output_dir": str(tmp_path / "run"),
            "model": {
                "architecture": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 8, **shape},
                "tokenizer": "fit",
                "dtype": dtype,
                "device": "cpu",
            },
            "cold_start": {"steps": 80, "path": str(path), "rows_per_step": 9, "optimizer": {"lr": 1e-2}},
            "rollout": {"queries_per_step": 4, "group_size": 4, "max_new_tokens": 4},
            "actor": {"optimizer": {"lr": 1e-9}},
            "evaluation": {"num_queries": 0},
        }
    )

    def lengths(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float(len(completion) + number) for number, completion in enumerate(completions)]

    outcome = train(recipe, queries=[{"prompt": row["prompt"]} for row in rows], reward=lengths)
    tokenizer = AutoTokenizer.from_pretrained(outcome.model)
    model = AutoModelForCausalLM.from_pretrained(outcome.model).float()
    losses = []
    for row in rows:
        prompt, answer = (tokenizer(text, return_tensors="pt").input_ids for text in (row["prompt"], row["completion"]))
        logits = model(torch.cat([prompt, answer], 1)).logits[0, prompt.shape[1] - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, answer[0]).item())
    lines = [json.loads(line) for line in (outcome.model.parent / "cold_start.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 81)]
    first = lines[0]["loss"]
    assert lines[-1]["loss"] < 0.5 * first
    assert sum(losses) / len(losses) < 0.6 * first


def test_train_is_callable_by_its_public_name_also_after_its_module_was_imported() -> None:
    assert sys.modules["gspo.train"]
    assert callable(gspo.train)  # a second run in the same notebook


def test_a_demonstration_longer_than_the_model_is_refused(new_policy: Any) -> None:
    policy = new_policy(max_position_embeddings=8)
    with pytest.raises(UserError, match="the model 8 positions") as refusal:
        encode_demonstrations(policy, QueriesConfig(), [(SHOWN, "3"), (SHOWN, "1 + 2 = 3")])
    assert refusal.value.where == "cold start, row shown:1"
