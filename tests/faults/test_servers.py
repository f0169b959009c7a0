"""Faults of an engine that is a server: real runs, a real vLLM, and whoever dies, every step is done once."""

import time
from pathlib import Path

import psutil
import pytest
from tests.engine.server.real import vllm_python
from tests.faults.laboratory import ENGINE_SECONDS, Laboratory

COLD = 3  # optimiser steps before the first of GSPO, which has two a step
ARCHITECTURE = (
    "{model_type: qwen3, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 1, head_dim: 32, tie_word_embeddings: true, max_position_embeddings: 64}"
)


@pytest.fixture
def overrides() -> tuple[str, ...]:
    """A run that starts a vLLM server."""
    engine = ("rollout.engine=vllm", f"rollout.vllm.python={vllm_python()}")
    return (*engine, f"model.architecture={ARCHITECTURE}", "evaluation.num_queries=0")


def processes_in(directory: Path) -> list[psutil.Process]:
    """What was started in a directory and has not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_runs(laboratory: Laboratory) -> None:
    give_up = time.monotonic() + 10
    while left := processes_in(laboratory.home):
        assert time.monotonic() < give_up, left
        time.sleep(0.1)


def assert_each_step_once(laboratory: Laboratory) -> None:
    lines = laboratory.lines()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["engine/probe_gap_max"] < 1e-5 for line in lines)
    rollouts = [path.read_text().splitlines() for path in sorted((laboratory.run / "rollouts").iterdir())]
    assert [len(rows) for rows in rollouts] == [16] * 4


def test_a_killed_run_leaves_no_server_and_goes_on_with_a_new_one_also_where_that_is_killed(
    laboratory: Laboratory, overrides: tuple[str, ...]
) -> None:
    fault = ("signal_at", {"place": "optimizer step", "count": COLD + 3})  # between the mini-batches of step 2
    assert laboratory.start("train", "run.yaml", *overrides, fault=fault).wait(ENGINE_SECONDS) == -9
    assert_nothing_runs(laboratory)
    fault = ("kill_server_at", {"calls": [("optimizer step", 2)]})
    assert laboratory.start("resume", "run", fault=fault).wait(ENGINE_SECONDS) == 0, laboratory.said
    assert_each_step_once(laboratory)
    restarts = [line["engine/restarts"] for line in laboratory.lines()]
    assert restarts[:2] == [0, 0] and sum(restarts) == 1, restarts
    assert_nothing_runs(laboratory)
