"""Environments of other libraries, as the guides show them: a taskset of verifiers, and a server of OpenEnv."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs
from tests.queries.chat_templates import PUBLISHED, byte_tokenizer

from gspo.run.plain_files import read_json_lines
from gspo.train import train

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
TASKSET = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    goal: int

class Tools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

class Sum(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.ToolsetConfig())] * WITH_TOOLS

    @vf.reward
    async def letters(self, trace) -> float:
        return len(set(trace.branches[-1].messages[-1].content or "")) / 100

class Counting(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for number in range(2):
            yield Sum(Data(idx=number, prompt=f"What is {number} + 2?", goal=number + 2))

__all__ = ["Counting"]
if __name__ == "__main__":
    Tools.run()
'''
RECIPE: dict[str, Any] = {
    **{"name": "others", "steps": 1, "model": {"path": "tiny", "device": "cpu"}, "actor": {"mini_batches": 1}},
    **{"evaluation": {"num_queries": 0}, "report": {"tokens": False}},
}
ROLLOUT = {"queries_per_step": 2, "group_size": 4, "max_turns": 3, "max_context": 2000}


def shown(guide: str, title: str) -> str:
    """A file that a guide shows."""
    text = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    found = re.search(f'```python title="{title}"\n(.*?)```', text, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(autouse=True)
def _tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model with a chat template, in a working directory whose modules programs find."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PUBLISHED["chatml"]
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained("tiny")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer)}
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained("tiny")


def lines_of_run() -> list[dict[str, Any]]:
    return list(read_json_lines(Path("runs/others/rollouts/step_000001.jsonl"))[0])


@needs("verifiers", "uvicorn")
@pytest.mark.parametrize("with_tools", [False, True])
def test_a_taskset_of_verifiers_is_trained_as_an_agent(with_tools: bool) -> None:
    Path("counting.py").write_text(TASKSET.replace("WITH_TOOLS", str(int(with_tools))))
    Path("my_taskset.py").write_text(shown("agents", "my_taskset.py"))
    Path("tasks.jsonl").write_bytes(subprocess.run([sys.executable, "my_taskset.py"], check=True, stdout=-1).stdout)
    rollout = {**ROLLOUT, "group_size": 2, "max_new_tokens": 30, "agent": "my_taskset.py:play"}
    train({**RECIPE, "queries": {"path": "tasks.jsonl"}, "rollout": rollout, "reward": "agent"})
    lines = lines_of_run()
    assert len(lines) == 4 and all(line["failure"] is None and line["reward"] > 0 for line in lines)
    for line in lines:
        said = [turn[1] for turn in line["turns"] if turn[0] == "assistant"]
        assert line["reward"] == pytest.approx(len(set(said[-1])) / 100, abs=0.011)


@pytest.fixture
def server() -> Iterator[int]:
    """The echo of `openenv init`, with as many sessions as are needed at a time."""
    subprocess.run([sys.executable, "-m", "openenv.cli", "init", "echo_env"], check=True, capture_output=True)
    app = Path("echo_env/server/app.py")
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=9,"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    environment = {**os.environ, "ENABLE_WEB_INTERFACE": "false"}
    with subprocess.Popen(command, cwd="echo_env", env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield port
        finally:
            process.terminate()


@needs("openenv")
def test_an_openenv_server_is_an_environment_and_gets_its_sessions_back(server: int) -> None:
    Path("my_openenv.py").write_text(shown("tools", "my_openenv.py").replace("8000", str(server)))
    Path("prompts.jsonl").write_text('{"prompt": "Say something."}\n{"prompt": "Say more."}\n')
    rollout = {**ROLLOUT, "max_new_tokens": 150, "environment": "my_openenv.py:Echo"}
    del rollout["max_context"]
    train({**RECIPE, "steps": 3, "queries": {"path": "prompts.jsonl"}, "rollout": rollout, "reward": "environment"})
    lines = lines_of_run()
    assert len(lines) == 8 and all(line["failure"] is None for line in lines)
    for line in lines:
        assert line["turns"][0][:2] == ["user", " Echo Env environment ready!"]
        said = [turn[1] for turn in line["turns"] if turn[0] == "assistant"]
        echoed = [turn[1] for turn in line["turns"][1:] if turn[0] == "user"]
        assert echoed == said[: len(echoed)]
