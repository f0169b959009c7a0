"""Faults 12 to 14: rewards that are no numbers, that raise, never return, or take their process down."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.laboratory import AS_EVER, SECONDS, Laboratory, differing

Unbroken = Callable[..., dict[str, Any]]
WIDE = "rollout.queries_per_step=8"  # a group of 4 is an eighth of a step
ALONE = "evaluation.num_queries=0"  # it counts failures and goes on: the training is to meet them first
LIMIT = "reward.0.time_limit_seconds=0.5"
KINDS = ("raised", "crashed", "timed_out", "invalid")
# What goes wrong for one query, whose first letter may differ from one response to the next.
HARM = (
    AS_EVER
    + """
import ctypes, os, pathlib, subprocess, time

def score(prompts, completions, **columns):
    values = as_ever(completions, **columns)
    if "dog" in prompts[0]:
        {harm}
    return values
"""
)


def masked(laboratory: Laboratory) -> list[dict[str, Any]]:
    """The rollouts without a reward, of all steps."""
    paths = sorted((laboratory.run / "rollouts").iterdir())
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [line for line in lines if line["reward"] is None]


@pytest.mark.parametrize(
    ("harm", "kind", "of_each_group"),
    [
        ("values[0] = float('nan')", "invalid", 1),
        ("values[3] = float('inf')", "invalid", 1),
        ("values[1] = 'good'", "invalid", 1),
        ("return values[:-1]", "invalid", 4),
        ("return None", "invalid", 4),
        ("raise ValueError('no dogs')", "raised", 4),
        ("ctypes.string_at(0)", "crashed", 4),
        ("os._exit(3)", "crashed", 4),
        ("time.sleep(600)", "timed_out", 4),
        ("while True: pass", "timed_out", 4),
    ],
)
def test_what_is_no_reward_masks_its_rollouts_and_the_run_goes_on(
    harm: str, kind: str, of_each_group: int, laboratory: Laboratory
) -> None:
    laboratory.reward(HARM.format(harm=harm))
    assert laboratory.train(WIDE, LIMIT) == 0, laboratory.said
    found = masked(laboratory)
    assert found and all("dog" in line["prompt"] for line in found)
    assert all(line["advantage"] == 0 and line["failure"] for line in found)  # not a reward of 0
    steps = [line for line in laboratory.lines() if line["step"] > 0]
    assert sum(line[f"reward/{kind}_rollouts"] for line in steps) == len(found)
    assert len(found) % of_each_group == 0
    assert all(line[f"reward/{other}_rollouts"] == 0 for line in steps for other in KINDS if other != kind)
    assert all(line["reward/masked_fraction"] in (0, of_each_group / 32) for line in steps)


def test_a_reward_that_does_not_apply_is_no_failure(laboratory: Laboratory) -> None:
    laboratory.reward(HARM.format(harm="return [None] * len(values)"))
    assert laboratory.train(WIDE) == 0, laboratory.said
    assert masked(laboratory)
    assert all(line["reward/masked_fraction"] == 0 for line in laboratory.lines() if line["step"] > 0)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("return [float('nan')] * 4", "nan"),
        ("raise ValueError('the judge is away')", "the judge is away"),
        ("ctypes.string_at(0)", "SIGSEGV"),
        ("time.sleep(600)", "0.5 s"),
    ],
)
def test_too_many_end_the_run_with_the_reason_and_the_step_is_begun_again(
    harm: str, words: str, laboratory: Laboratory, unbroken: Unbroken
) -> None:
    good = (laboratory.home / "reward.py").read_text()
    after_step_1 = f'if pathlib.Path("run/checkpoints/step_000001").exists():\n            {harm}'
    laboratory.reward(HARM.format(harm=after_step_1).replace('if "dog" in prompts[0]', "if True"))
    assert laboratory.train(LIMIT, ALONE, fault=("slow_steps", {"seconds": 0.05})) == 2, laboratory.said
    for part in (words, "score", "fix:", "gspo resume run"):
        assert part in laboratory.said, laboratory.said
    assert laboratory.checkpoints()[-1] in ("step_000001", "step_000002"), laboratory.said
    laboratory.reward(good)
    assert laboratory.resume("reward.0.time_limit_seconds=20") == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken(ALONE))


CHILDREN = """
import os, pathlib, subprocess, time

def score(completions, **columns):
    if pathlib.Path("run/checkpoints/step_000001").exists() and not pathlib.Path("pids").exists():
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        pathlib.Path("unfinished_pids").write_text(f"{os.getpid()} {child.pid}")
        pathlib.Path("unfinished_pids").rename("pids")
        time.sleep(600)
    return [text.count("a") - 0.1 * len(text) for text in completions]
"""


def test_a_reward_that_never_returns_is_ended_with_its_children(laboratory: Laboratory) -> None:
    laboratory.reward(CHILDREN)
    assert laboratory.train(WIDE, LIMIT, ALONE, fault=("slow_steps", {"seconds": 0.05})) == 0, laboratory.said
    assert {line["failure"] is None for line in masked(laboratory)} == {False}
    for pid in (laboratory.home / "pids").read_text().split():
        wait_until_gone(int(pid))


@pytest.mark.parametrize("number", [9, 15])
def test_no_process_of_a_reward_outlives_its_run(number: int, laboratory: Laboratory) -> None:
    laboratory.reward(CHILDREN.replace(", start_new_session=True", ""))
    process = laboratory.start("train", "run.yaml", WIDE, fault=("slow_steps", {"seconds": 0.05}))
    laboratory.wait_for("pids", process)
    process.send(number)
    assert process.wait() in (-9, 143)
    for pid in (laboratory.home / "pids").read_text().split():
        wait_until_gone(int(pid))


def wait_until_gone(pid: int) -> None:
    give_up = time.monotonic() + SECONDS
    while is_running(pid):
        assert time.monotonic() < give_up, f"process {pid} is still there"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether there is such a process that is not merely waiting to be reaped by whoever has inherited it."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
