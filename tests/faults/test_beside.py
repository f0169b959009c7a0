"""Faults while groups are sampled and scored beside the training: each query is trained on once an epoch."""

import json
import random
import time
from collections import Counter
from typing import Any

import pytest
from tests.faults.laboratory import ENGINE_SECONDS, Laboratory
from tests.faults.test_rewards import HARM, masked
from tests.faults.test_servers import assert_nothing_runs

STEPS, EPOCHS, ROWS = 9, 3, 12
BESIDE = (
    "rollout.max_staleness=2",
    "actor.old_logprobs=engine",
    "evaluation.num_queries=0",
    "rollout.max_new_tokens=20",
)
COLD = 3  # optimiser steps before the first of GSPO, which has two a step


@pytest.fixture(autouse=True)
def _nothing_is_left(laboratory: Laboratory) -> Any:
    yield
    assert_nothing_runs(laboratory)


def steps_of(laboratory: Laboratory) -> list[dict[str, Any]]:
    """The metrics of a whole run, whose rollouts have been looked at."""
    lines = [line for line in laboratory.lines() if line["step"] > 0]  # before that, an evaluation
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    files = sorted((laboratory.run / "rollouts").iterdir())
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    assert [len(own) for own in rows] == [16] * len(lines)
    trained = Counter(row["query"] for own in rows for row in own)
    if len(lines) == STEPS:
        assert len(trained) == ROWS and set(trained.values()) == {4 * EPOCHS}
    for step, own in enumerate(rows):
        assert all(0 <= 2 * step - row["policy_version"] <= 2 * 2 for row in own)  # two updates a step, two steps
    assert all(line["staleness/max"] <= 2 for line in lines)
    return lines


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_is_killed_at_any_time_loses_no_query_and_trains_on_none_twice(
    seed: int, laboratory: Laboratory
) -> None:
    moments = random.Random(seed)
    slow = ("slow_steps", {"seconds": 0.1})
    process = laboratory.start("train", "run.yaml", *BESIDE, f"steps={STEPS}", fault=slow)
    laboratory.wait_for("run/checkpoints/step_000001", process)
    statuses: list[int] = []
    while not statuses or statuses[-1] != 0:
        if len(statuses) < 2:
            time.sleep(moments.uniform(0.0, 0.8))
            process.send(9)
        statuses.append(process.wait(ENGINE_SECONDS))
        if statuses[-1] != 0:
            before = len(laboratory.lines())
            process = laboratory.start("resume", "run", fault=slow)
            while len(statuses) < 2 and process.is_running() and len(laboratory.lines()) <= before:
                time.sleep(0.01)
    assert statuses == [-9, -9, 0], laboratory.said
    steps_of(laboratory)


def test_a_reward_that_hangs_beside_the_training_masks_its_group_alone(laboratory: Laboratory) -> None:
    laboratory.reward(HARM.format(harm="time.sleep(600)"))
    limits = ("reward.0.time_limit_seconds=0.5", "rollout.queries_per_step=8")
    assert laboratory.start("train", "run.yaml", *BESIDE, *limits, "steps=3").wait(ENGINE_SECONDS) == 0, laboratory.said
    found = masked(laboratory)
    assert found and all("dog" in row["prompt"] for row in found)
    assert sum(line["reward/timed_out_rollouts"] for line in laboratory.lines()) == len(found)


def test_a_wall_clock_that_is_set_back_changes_nothing(laboratory: Laboratory) -> None:
    """Neither side ever compares its time with the other's."""
    fault = ("clock_set_back", {"count": COLD + 2})
    process = laboratory.start("train", "run.yaml", *BESIDE, f"steps={STEPS}", fault=fault)
    assert process.wait(ENGINE_SECONDS) == 0, laboratory.said
    steps_of(laboratory)


@pytest.mark.parametrize(("place", "count"), [("optimizer step", COLD + 5), ("group sampled", 3)])
def test_a_signal_saves_what_is_ahead(place: str, count: int, laboratory: Laboratory) -> None:
    """Also while the first step waits for its groups: those that have ended are not sampled again."""
    fault = ("signal_at", {"place": place, "count": count, "number": 15, "before": False})
    process = laboratory.start("train", "run.yaml", *BESIDE, f"steps={STEPS}", fault=fault)
    assert process.wait(ENGINE_SECONDS) == 143, laboratory.said
    state = json.loads((laboratory.run / "checkpoints" / laboratory.checkpoints()[-1] / "state.json").read_text())
    assert sum(drawn["group"] is not None for drawn in state["ahead"]) >= (3 if place == "group sampled" else 1)
    assert laboratory.start("resume", "run").wait(ENGINE_SECONDS) == 0, laboratory.said
    steps_of(laboratory)


def test_evaluations_judge_the_policy_of_their_step_and_dynamic_sampling_takes_from_what_is_ahead(
    laboratory: Laboratory,
) -> None:
    keys = ("rollout.dynamic_sampling=true", "evaluation.num_queries=1", "evaluation.every=1", "steps=4")
    assert laboratory.start("train", "run.yaml", *BESIDE, *keys).wait(ENGINE_SECONDS) == 0, laboratory.said
    for line in steps_of(laboratory):
        path = laboratory.run / "evaluation" / f"step_{line['step']:06d}.jsonl"
        judged = [json.loads(row) for row in path.read_text().splitlines()]
        assert judged and {row["policy_version"] for row in judged} == {2 * line["step"]}
        assert line["group/sampled"] >= 4  # of those the ones that differ are trained on
    assert max(line["staleness/max"] for line in steps_of(laboratory)) > 0
