"""A whole run: what it leaves on disk, what it counts, that it repeats itself, and that it learns."""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo import cli
from gspo.recipe.load import load_recipe, make_recipe
from gspo.recipe.schema import Recipe
from gspo.run.console import Display
from gspo.train import Outcome, train

pytestmark = pytest.mark.usefixtures("own_directory", "format_in_process")

TINY = Path(__file__).with_name("tiny.yaml")
ROLLOUT_FIELDS = {
    "query",
    "prompt",
    "completion",
    "reward",
    "advantage",
    "sequence_ratio",
    "clipped",
    "finish_reason",
    "policy_version",
}
METRICS = {  # DESIGN.md
    "step",
    "reward/mean",
    "reward/std",
    "group/zero_variance_fraction",
    "response/mean_tokens",
    "response/truncated_fraction",
    "clip/sequence_fraction",
    "clip/token_fraction",
    "ratio/sequence_mean",
    "ratio/sequence_min",
    "ratio/sequence_max",
    "policy/loss",
    "policy/grad_norm",
    "policy/entropy",
    "policy/learning_rate",
    "time/rollout_seconds",
    "time/reward_seconds",
    "time/advantage_seconds",
    "time/likelihood_seconds",
    "time/update_seconds",
    "time/checkpoint_seconds",
    "time/total_seconds",
    "throughput/generated_tokens_per_second",
    "throughput/trained_tokens_per_second",
    "memory/peak_bytes",
}
VARIES = ("time/", "throughput/", "memory/")  # between two runs of one recipe


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(recipe: Recipe, **given: Any) -> Outcome:
    return train(recipe, display=Display(quiet=True), **given)


@dataclass(frozen=True)
class Finished:
    path: Path
    recipe: Recipe
    exit_code: int

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.path / "metrics.jsonl") if line["step"] > 0]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return read_lines(self.path / "rollouts" / f"step_{step:06d}.jsonl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    path = tmp_path_factory.mktemp("finished") / "run"
    overrides = [
        f"output_dir={path}",
        "steps=3",
        "checkpoint.every=1",
        "checkpoint.keep=2",
        "evaluation.every=2",
        "reward=[{function: reasoning_gym}, {function: format, weight: 0.5, options: {pattern: '<answer>'}}]",
    ]
    return Finished(path, load_recipe(TINY, overrides), cli.main(["train", str(TINY), *overrides]))


def test_a_run_exits_with_0_and_leaves_exactly_the_run_directory(finished: Finished) -> None:
    assert finished.exit_code == 0
    assert {entry.name for entry in finished.path.iterdir()} - {"report.html"} == {
        "recipe.yaml",
        "lock",
        "cold_start",
        "cold_start.jsonl",
        "metrics.jsonl",
        "history.jsonl",
        "rollouts",
        "evaluation",
        "checkpoints",
        "model",
    }
    rollouts = [path.name for path in sorted((finished.path / "rollouts").iterdir())]
    assert rollouts == [f"step_{step:06d}.jsonl" for step in (1, 2, 3)]


def test_the_responses_of_each_evaluation_are_written_and_pass_as_often_as_the_metrics_have_it(
    finished: Finished,
) -> None:
    lines = {line["step"]: line for line in read_lines(finished.path / "metrics.jsonl")}
    files = sorted((finished.path / "evaluation").iterdir())
    assert [path.name for path in files] == [f"step_{step:06d}.jsonl" for step in (0, 2, 3)]
    for path in files:
        samples, line = read_lines(path), lines[int(path.stem.removeprefix("step_"))]
        assert statistics.fmean(sample["tokens"] for sample in samples) == line["evaluation/held_out/mean_tokens"]
        passed = [sample["rewards"]["reasoning_gym"] >= 1 for sample in samples]
        assert statistics.fmean(passed) == line["evaluation/held_out/pass_at_1"]
        assert len({sample["query"] for sample in samples}) == len(samples) == finished.recipe.evaluation.num_queries


def test_the_recipe_of_a_run_is_written_resolved_and_reads_back_equal(finished: Finished) -> None:
    assert load_recipe(finished.path / "recipe.yaml") == finished.recipe
    assert "clip_high: 0.0004" in (finished.path / "recipe.yaml").read_text(encoding="utf-8")  # a default, written out


def test_the_times_of_a_step_are_its_own(finished: Finished) -> None:
    for before, line in pairwise(read_lines(finished.path / "metrics.jsonl")):
        passed = line["time/elapsed_seconds"] - before["time/elapsed_seconds"]
        assert 0 < line["time/total_seconds"] + line.get("time/evaluation_seconds", 0) <= passed + 1e-3


def test_the_metrics_are_a_line_a_step_after_line_0_with_the_evaluation_before_training(finished: Finished) -> None:
    lines = read_lines(finished.path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    evaluated = [line["step"] for line in lines if "evaluation/held_out/pass_at_1" in line]
    assert evaluated == [0, 2, 3]


def test_the_evaluation_before_training_has_the_same_numbers_as_later_ones(finished: Finished) -> None:
    before, *later = read_lines(finished.path / "metrics.jsonl")
    alone = before.keys() - {"step", "time/elapsed_seconds"}
    for line in later:
        evaluated = {name for name in line if name.startswith("evaluation/") or name == "time/evaluation_seconds"}
        assert evaluated == (alone if line["step"] > 1 else set())
    assert "evaluation/held_out/format/mean" in alone and before["time/evaluation_seconds"] > 0


def test_every_metric_of_the_contract_is_in_every_step(finished: Finished) -> None:
    for line in finished.steps:
        assert METRICS - line.keys() == set()
        assert [name for name in line if name.startswith("mismatch/")]
        assert {"reward/reasoning_gym/mean", "reward/format/mean"} <= line.keys()


def test_every_metric_is_a_finite_number_or_a_list_of_them(finished: Finished) -> None:
    def numbers(value: Any) -> Iterator[Any]:
        if isinstance(value, list):
            for one in value:
                yield from numbers(one)
        else:
            yield value

    for line in finished.steps:
        for name, value in line.items():
            for number in numbers(value):
                if number is None and ("_by_length" in name or name.startswith("gradient/signal_to_noise")):
                    continue  # no response of such a length, or only one group with an advantage: this is tiny
                if number is None and "standard_error" in name:
                    continue  # one response a query, and none of them right
                assert isinstance(number, int | float) and math.isfinite(number), name


def test_the_rollouts_hold_every_field_of_every_response_group_after_group(finished: Finished) -> None:
    for step in (1, 2, 3):
        lines = finished.rollouts(step)
        assert all(line.keys() >= ROLLOUT_FIELDS for line in lines)
        assert [len(list(group)) for _, group in groupby(lines, key=lambda line: line["query"])] == [4] * 8


def test_the_policy_version_of_a_rollout_counts_the_updates_before_its_step(finished: Finished) -> None:
    for step in (1, 2, 3):
        assert {line["policy_version"] for line in finished.rollouts(step)} == {4 * (step - 1)}


def test_the_advantages_are_the_rewards_normalised_within_their_group(finished: Finished) -> None:
    varied = 0
    for step in (1, 2, 3):
        for _, lines in groupby(finished.rollouts(step), key=lambda line: line["query"]):
            group = list(lines)
            rewards = [line["reward"] for line in group]
            deviation = statistics.stdev(rewards)
            varied += deviation > 0
            for line in group:
                wanted = (line["reward"] - statistics.fmean(rewards)) / deviation if deviation else 0.0
                assert line["advantage"] == pytest.approx(wanted, abs=1e-9)
    assert varied > 0


def test_the_reward_is_the_weighted_sum_of_the_functions(finished: Finished) -> None:
    for line in finished.rollouts(1):
        parts = line["rewards"]
        assert line["reward"] == pytest.approx(parts["reasoning_gym"] + 0.5 * parts["format"])
        assert parts["format"] == float("<answer>" in line["completion"])


def test_the_metrics_agree_with_the_rollouts_beside_them(finished: Finished) -> None:
    for line in finished.steps:
        rollouts = finished.rollouts(line["step"])
        assert line["reward/mean"] == pytest.approx(statistics.fmean(r["reward"] for r in rollouts))
        assert line["reward/std"] == pytest.approx(statistics.stdev(r["reward"] for r in rollouts))
        assert line["response/mean_tokens"] == pytest.approx(statistics.fmean(r["tokens"] for r in rollouts))
        cut = statistics.fmean(r["finish_reason"] == "length" for r in rollouts)
        assert line["response/truncated_fraction"] == pytest.approx(cut)
        trained = [r for r in rollouts if r["advantage"] != 0]
        assert line["ratio/sequence_max"] == pytest.approx(max(r["sequence_ratio"] for r in trained))
        tokens = sum(r["tokens"] for r in trained)
        assert line["clip/token_fraction"] == pytest.approx(sum(r["clipped"] * r["tokens"] for r in trained) / tokens)


def test_a_response_without_advantage_has_no_ratio_and_every_other_has_one(finished: Finished) -> None:
    for line in finished.rollouts(2):
        assert (line["sequence_ratio"] is None) == (line["advantage"] == 0) == (line["clipped"] is None)


def test_the_first_mini_batch_is_never_clipped_and_later_ones_are(finished: Finished) -> None:
    by_mini_batch = [line["clip/token_fraction_by_mini_batch"] for line in finished.steps]
    assert all(fractions[0] == 0 and len(fractions) == 4 for fractions in by_mini_batch)
    assert any(max(fractions) > 0 for fractions in by_mini_batch)


def test_the_newest_checkpoints_are_kept_and_load(finished: Finished) -> None:
    from transformers import AutoModelForCausalLM

    checkpoints = sorted((finished.path / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step_000002", "step_000003"]
    for path in checkpoints:
        assert AutoModelForCausalLM.from_pretrained(path / "model").num_parameters() > 0


def test_the_final_model_and_tokenizer_load_and_are_those_of_the_last_step(finished: Finished) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(finished.path / "model")
    prompt = finished.rollouts(1)[0]["prompt"]
    assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
    model = AutoModelForCausalLM.from_pretrained(finished.path / "model")
    last = AutoModelForCausalLM.from_pretrained(finished.path / "checkpoints" / "step_000003" / "model")
    earlier = AutoModelForCausalLM.from_pretrained(finished.path / "checkpoints" / "step_000002" / "model")
    pairs = list(zip(model.parameters(), last.parameters(), earlier.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    assert not all(torch.equal(one, three) for one, _, three in pairs)


def lasting(lines: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """As text, for NaN is not equal to itself."""
    return [
        {name: repr(v) for name, v in line.items() if not name.startswith(VARIES) and not name.endswith("/seconds")}
        for line in lines
    ]


def test_a_seed_repeats_a_run_to_the_bit_and_another_seed_does_not() -> None:
    outcomes = [
        run(load_recipe(TINY, [f"seed={seed}", f"name={name}"]))
        for name, seed in [("one", 3), ("again", 3), ("two", 4)]
    ]
    one, again, two = (lasting(outcome.metrics) for outcome in outcomes)
    weights = [(outcome.model / "model.safetensors").read_bytes() for outcome in outcomes]
    assert one == again and weights[0] == weights[1]
    assert one != two and weights[0] != weights[2]


def test_no_rollouts_are_written_where_the_recipe_does_not_want_them() -> None:
    outcome = run(load_recipe(TINY, ["report.rollouts=false"]))
    assert not any((outcome.model.parent / folder).exists() for folder in ("rollouts", "evaluation"))


def test_without_an_evaluation_there_is_no_line_0() -> None:
    outcome = run(load_recipe(TINY, ["evaluation.num_queries=0"]))
    assert [line["step"] for line in outcome.metrics] == [1, 2]
    assert not (outcome.model.parent / "evaluation").exists()


def test_old_log_likelihoods_of_the_engine_have_no_mismatch_and_train_the_same_first_step() -> None:
    lines = [
        run(load_recipe(TINY, ["steps=1", f"name={source}", f"actor.old_logprobs={source}"])).metrics[-1]
        for source in ("engine", "recompute")
    ]
    assert lines[0]["mismatch/logprob_gap_max"] == 0
    assert 0 <= lines[1]["mismatch/logprob_gap_max"] < 1e-5
    assert lines[0]["policy/grad_norm"] == pytest.approx(lines[1]["policy/grad_norm"], rel=1e-3)


def test_gradient_checkpointing_changes_memory_only() -> None:
    lines = [
        run(load_recipe(TINY, [f"name=checkpointing_{on}", f"actor.gradient_checkpointing={on}"])).metrics[-1]
        for on in ("false", "true")
    ]
    assert lines[1]["mismatch/logprob_gap_max"] < 1e-5
    for name in ("reward/mean", "response/mean_tokens", "policy/grad_norm", "policy/entropy"):
        assert lines[1][name] == pytest.approx(lines[0][name], rel=1e-3), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reinforcement_learning_goes_on_from_the_weights_of_the_cold_start(dtype: str) -> None:
    from safetensors.torch import load_file

    still = ["actor.optimizer.lr=1e-30", f"model.dtype={dtype}", "steps=1", "evaluation.num_queries=0"]
    weights = [
        load_file(
            run(load_recipe(TINY, [*still, f"name={name}", f"cold_start.optimizer.lr={rate}"])).model
            / "model.safetensors"
        )
        for name, rate in (("learned", "1e-2"), ("untrained", "1e-30"))
    ]
    name = "model.layers.0.mlp.up_proj.weight"
    assert (weights[0][name] - weights[1][name]).abs().max() > 5e-3  # two supervised steps of 1e-2


SEVEN_TOKENS = 6


def sevens(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    return [completion.count("7") / SEVEN_TOKENS for completion in completions]


def sevens_recipe(**actor: Any) -> Recipe:
    architecture = load_recipe(TINY).model.architecture
    return make_recipe(
        {
            "name": "sevens",
            "steps": 15,
            "model": {"architecture": architecture, "tokenizer": "fit", "device": "cpu"},
            "rollout": {"queries_per_step": 8, "group_size": 8, "max_new_tokens": SEVEN_TOKENS},
            "evaluation": {"num_queries": 0},
            "actor": {"optimizer": {"lr": 1e-2}, **actor},
        }
    )


SEVENS_ROWS = [{"prompt": f"{first}{second}"} for first in range(8) for second in (first + 1, first + 2)]


@pytest.mark.parametrize(
    ("level", "clip_low", "clip_high"),
    [("sequence", 3e-3, 4e-3), ("sequence_token", 3e-3, 4e-3), ("token", 0.2, 0.27)],
)
def test_an_untrained_model_learns_to_say_seven(level: str, clip_low: float, clip_high: float) -> None:
    recipe = sevens_recipe(importance_sampling_level=level, clip_low=clip_low, clip_high=clip_high)
    outcome = run(recipe, queries=SEVENS_ROWS, reward=sevens)
    rewards = [line["reward/mean"] for line in outcome.metrics]
    assert rewards[0] < 0.25
    assert statistics.fmean(rewards[-3:]) > 0.8


def test_the_opposite_reward_unlearns_it() -> None:
    outcome = run(
        sevens_recipe(clip_low=3e-3, clip_high=4e-3),
        queries=SEVENS_ROWS,
        reward=lambda completions, **_: [-float(completion.count("7") > 0) for completion in completions],
    )
    rewards = [line["reward/mean"] for line in outcome.metrics]
    assert rewards[0] < -0.2 and statistics.fmean(rewards[-3:]) > -0.05


def test_gspo_and_gspo_token_train_alike_where_a_response_has_one_advantage() -> None:
    curves = []
    for level in ("sequence", "sequence_token"):
        recipe = sevens_recipe(importance_sampling_level=level).model_copy(update={"name": level, "steps": 3})
        curves.append([line["reward/mean"] for line in run(recipe, queries=SEVENS_ROWS, reward=sevens).metrics])
    assert curves[0] == pytest.approx(curves[1])


def test_a_reward_without_signal_trains_nothing() -> None:
    recipe = sevens_recipe().model_copy(update={"steps": 2})
    outcome = run(recipe, queries=SEVENS_ROWS, reward=lambda completions, **_: [1.0] * len(completions))
    for line in outcome.metrics:
        assert line["group/zero_variance_fraction"] == 1
        assert line["policy/grad_norm"] == 0 and line["policy/loss"] == 0
    assert "no_signal" in outcome.diagnoses
