"""A cold start and ten steps with a real vLLM server: the reward rises."""

import json
from pathlib import Path

from tests.engine.server.real import vllm_python

from gspo import cli

TINY = Path(__file__).with_name("tiny.yaml")
OVERRIDES = [
    "steps=10",
    "model.architecture.head_dim=32",
    "rollout.engine=vllm",
    "rollout.queries_per_step=16",
    "rollout.group_size=8",
    "actor.optimizer.lr=5e-3",
]


def test_ten_steps_with_a_real_server_raise_the_reward(tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = [f"rollout.vllm.python={vllm_python()}", f"output_dir={run}"]
    assert cli.main(["train", str(TINY), *OVERRIDES, *own]) == 0
    before, *lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert before["step"] == 0
    assert [line["step"] for line in lines] == list(range(1, 11))
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    for line in lines:
        assert line["engine/probe_gap_max"] < 1e-5 and line["mismatch/logprob_gap_max"] < 1e-5
        assert line["engine/publish_seconds"] > 0
        assert line["engine/retries"] == line["engine/restarts"] == 0
