"""A server's processes: none outlives its trainer, whatever is killed, and one that cannot start says why."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.engine.server.real import ROOT, SHAPE, engine_of, shared_memory_of, vllm_python

from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey

LONG = RolloutConfig(max_new_tokens=300, group_size=8, logit_bias={f"id:{token}": -100.0 for token in range(3)})
KEY = SamplingKey(seed=0, step=1)
SECONDS = 10.0  # after which nothing may be left
START_SECONDS = 300.0
# A trainer with a server, which samples until it is killed; it says when that samples, and before that only starts.
# The server has a process for its worker and memory that they share, as a server of several GPUs has.
TRAINER = """
import sys
from pathlib import Path
from tests.conftest import SHAPE as SMALL, TEXTS
from tests.engine.server.real import SHAPE, engine_of
from tests.engine.server.test_vllm_process import KEY, LONG
from tests.samples import query_of
from gspo.model.load import fit_tokenizer
from gspo.model.policy import load_policy
from gspo.recipe.sections import ModelConfig
from gspo.rollout.sampler import Sampler

architecture = {"model_type": "qwen3", **SMALL, **SHAPE}
model = ModelConfig(architecture=architecture, tokenizer="fit", device="cpu")
policy = load_policy(model, fit_tokenizer(TEXTS), seed=0)
options = {"distributed_executor_backend": "mp"}
sampler = Sampler(engine_of(policy, Path(sys.argv[1]), longest_prompt=300, options=options), policy)
sampler.publish(0)
queries = [query_of([4, 5, 6], number) for number in range(8)]
while True:
    sampler.sample(queries, LONG, KEY, show_progress=lambda *_: print("sampling", flush=True))
"""


def supervisors(trainer: int) -> list[psutil.Process]:
    """Of the servers that a process has started, which has other children that may just end."""
    own = []
    for child in psutil.Process(trainer).children():
        with suppress(psutil.NoSuchProcess):  # also of zombies
            own += [child] if "gspo_supervise" in " ".join(child.cmdline()) else []
    return own


def assert_gone(processes: list[psutil.Process], memory: set[Path]) -> None:
    """None of them is left, but for zombies, nor the shared memory that they had."""
    give_up = time.monotonic() + SECONDS
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < give_up, left
        time.sleep(0.1)
    while left_memory := [path for path in memory if path.exists()]:
        assert time.monotonic() < give_up, left_memory
        time.sleep(0.1)


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def family(supervisor: psutil.Process) -> list[psutil.Process]:
    return [supervisor, *supervisor.children(recursive=True)]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that has begun to start its server."""
    vllm_python()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(supervisors(process.pid)) == 1, process)
    yield process
    process.kill()
    process.wait()


def wait_until(is_so: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    give_up = time.monotonic() + START_SECONDS
    while not is_so():
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.parametrize("with_supervisor", [False, True])
def test_a_server_that_is_starting_ends_with_its_trainer(
    trainer: "subprocess.Popen[str]", with_supervisor: bool
) -> None:
    (supervisor,) = supervisors(trainer.pid)
    wait_until(lambda: bool(supervisor.children()), trainer)
    time.sleep(3)  # before any worker watches for itself
    processes = family(supervisor)
    assert len(processes) >= 2
    for pid in (trainer.pid, supervisor.pid)[: 1 + with_supervisor]:
        os.kill(pid, signal.SIGKILL)
    assert_gone(processes, set())


def test_a_server_in_mid_request_ends_also_where_its_supervisor_is_killed_with_the_trainer(
    trainer: "subprocess.Popen[str]",
) -> None:
    """Where the trainer alone is killed tests/faults/test_servers.py has the test."""
    assert trainer.stdout is not None
    assert [trainer.stdout.readline() for _ in range(3)] == ["sampling\n"] * 3
    (supervisor,) = supervisors(trainer.pid)
    processes = family(supervisor)
    memory = shared_memory_of(processes)
    assert len(processes) >= 4 and memory
    for pid in (trainer.pid, supervisor.pid):
        os.kill(pid, signal.SIGKILL)
    assert_gone(processes, memory)


def test_a_server_that_cannot_start_ends_the_run_with_its_own_words_and_leaves_nothing(
    new_policy: Callable[..., Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", str(2**20))  # GiB
    with pytest.raises(UserError, match=r"it has ended while it started\n(.|\n)*Available memory .* is less"):
        engine_of(new_policy(**SHAPE), tmp_path)
    assert not supervisors(os.getpid())
