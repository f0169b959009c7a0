"""The words at the end of a run: scores before and after, where the model lies, how to load it."""

import math
import re
import signal
from pathlib import Path
from typing import Any

from gspo.recipe.load import load_recipe
from gspo.run.summary import arithmetic, summary

PREFIX = "evaluation/held_out"


def evaluated(step: int, rate: float, error: float) -> dict[str, Any]:
    return {"step": step, f"{PREFIX}/pass_at_1": rate, f"{PREFIX}/standard_error": error}


def trained(step: int, reward: float, tokens: float) -> dict[str, Any]:
    return {"step": step, "reward/mean": reward, "response/mean_tokens": tokens}


LINES = [
    evaluated(0, 0.51, 0.02),
    trained(1, 0.4, 17.0),
    {**trained(2, 0.6, 20.0), **evaluated(2, 0.7, 0.02)},
    {**trained(3, 0.8, 26.0), **evaluated(3, 0.9, 0.01)},
]


def shown(lines: list[dict[str, Any]], model: Path = Path("runs/a/model"), **diagnoses: str) -> str:
    return summary(lines, diagnoses, model, 119.7)


def test_the_table_has_before_and_after_of_the_first_and_the_last_evaluation() -> None:
    text = shown(LINES)
    assert "0.510 ± 0.020 before → 0.900 ± 0.010 after" in text
    assert "0.400 → 0.800 (first and last of 3 steps)" in text
    assert "17.0 → 26.0 (" in text
    assert re.search(r"\ntime +2:00\n", text)
    assert "gspo resume runs/a steps=6" in text


def test_before_and_after_are_means_of_some_steps_for_a_single_one_is_noise() -> None:
    rewards = [0.0, math.nan, 1.0, 0.5, 0.5, 9.0, 9.0, 1.0, 1.0, 1.0, 0.0, 2.0]
    text = shown([trained(step, reward, 10.0 * step) for step, reward in enumerate(rewards, start=1)])
    assert "reward           0.500 → 1.000 (means of the first and the last 5 of 12 steps)\n" in text
    assert "response tokens  30.0 → 100.0 (means of the first and the last 5 of 12 steps)\n" in text
    assert "reward           nan → 0.500 (means of the first and the last 2 of 4 steps)" in shown(
        [trained(step, reward, 1.0) for step, reward in enumerate([math.nan, math.nan, 0.25, 0.75], start=1)]
    )


def test_what_does_not_exist_of_an_evaluation_is_not_told_as_a_number() -> None:
    text = shown([evaluated(0, math.nan, math.nan), *LINES[1:3], {**LINES[3], **evaluated(3, 1.0, math.nan)}])
    assert "pass@1 (held_out)  – before → 1.000 after\n" in text


def test_an_evaluation_in_which_every_response_has_failed_is_not_what_the_run_began_with() -> None:
    failed = {**evaluated(0, 0.0, 0.0), f"{PREFIX}/failed_fraction": 1.0}
    assert "0.510 ± 0.020 before → 0.900 ± 0.010 after" in shown([failed, *LINES])


def test_the_held_out_reward_is_in_the_table_where_it_is_another_number_than_pass_at_1() -> None:
    rewards = ({f"{PREFIX}/reward_mean": mean, f"{PREFIX}/reward_standard_error": 0.25} for mean in (6.0, 7.0))
    told = shown([{**line, **next(rewards)} for line in (LINES[0], LINES[-1])])
    assert "reward (held_out)  6.000 ± 0.250 before → 7.000 ± 0.250 after" in told
    same = [{**line, f"{PREFIX}/reward_mean": line[f"{PREFIX}/pass_at_1"]} for line in (LINES[0], LINES[-1])]
    assert "reward (held_out)" not in shown(same)


def test_a_set_may_be_called_as_its_metrics_are() -> None:
    rates = (
        {"evaluation/pass_at_1/pass_at_1": 0.5, "evaluation/pass_at_1/standard_error": error} for error in (0.25, 0.5)
    )
    told = shown([{**line, **next(rates)} for line in ({"step": 0}, trained(1, 0.4, 17.0))])
    assert "pass@1 (pass_at_1)  0.500 ± 0.250 before → 0.500 ± 0.500 after" in told


def test_the_table_says_where_the_model_lies_and_how_to_load_it() -> None:
    text = shown(LINES)
    assert "runs/a/model" in text and "runs/a/metrics.jsonl" in text
    assert 'AutoModelForCausalLM.from_pretrained("runs/a/model")' in text


def test_a_path_is_shown_as_it_is() -> None:
    assert 'from_pretrained("runs/[red]a/model")' in shown(LINES, Path("runs/[red]a/model"))


def test_the_diagnoses_are_repeated_at_the_end() -> None:
    assert "92% of groups" in shown(LINES, no_signal="92% of groups have equal rewards")


def test_a_run_that_ended_before_its_first_step_or_evaluation_has_a_table_too() -> None:
    assert "runs/a/model" in shown([])
    only_before = shown([LINES[0]])
    assert "after" not in only_before and "runs/a/model" in only_before


def test_a_run_that_a_signal_has_ended_says_so_and_names_its_checkpoint_and_its_own_metrics() -> None:
    model = Path("runs/a/checkpoints/step_000003_sampled/model")
    text = summary(LINES, {}, model, 125.0, signal=signal.SIGTERM)
    assert "by SIGTERM after 3 steps" in text.splitlines()[0]
    assert f'from_pretrained("{model}")' in text
    assert "runs/a/metrics.jsonl" in text
    assert "ended early" not in shown(LINES)
    assert "by SIGINT after 0 steps" in summary([], {}, model, 1.0, signal=2)


def test_the_arithmetic_of_a_recipe_is_said_in_a_sentence() -> None:
    overrides = ["rollout.queries_per_step=64", "rollout.group_size=8", "actor.mini_batches=4", "steps=50"]
    sentence = arithmetic(load_recipe(Path(__file__).parents[1] / "tiny.yaml", overrides))
    for number in ("64 queries", "8 responses", "512 sequences", "4 mini-batch", "of 128", "200 optimiser steps"):
        assert number in sentence
