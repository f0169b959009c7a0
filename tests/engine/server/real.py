"""Real vLLM servers for the tests: their interpreter, one that somebody else has started, and engines that ask it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.needs import VLLM, require

from gspo import loop
from gspo.engine.make import make_engine
from gspo.engine.server.engine import ServerEngine
from gspo.engine.server.hosts import Process, ThisHost
from gspo.engine.server.server import new_client, start_server
from gspo.engine.server.vllm import VllmApi
from gspo.model.policy import Policy
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import VllmConfig

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of servers too: they share the cores with each other and the tests

ROOT = Path(__file__).parents[3]
# The least of vLLM's kernel for mixtures; so wide a model needs smaller weights for the same exactness.
EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 32, "initializer_range": 0.1}
KEY = "the key of the tests"
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
LONGEST = 1024  # tokens of prompt and response
SHAPE = {
    "head_dim": 32,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
}  # vLLM's attention on a CPU knows no smaller heads
START_SECONDS = 300.0


def vllm_python() -> str:
    """The interpreter that has vLLM; without one the test is skipped."""
    require("vllm")
    return os.environ.get("GSPO_VLLM_PYTHON") or str(VLLM / "bin" / "python")


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server with no policy's weights, as somebody else has started it."""

    url: str
    process: Process


@contextmanager
def running_server(policy: Policy, directory: Path) -> Iterator[RunningServer]:
    """Start a server for policies of this shape; in the end nothing is left of it."""
    settings = VllmConfig(python=vllm_python())
    lora = LORA if policy.routing is None else {}
    api = VllmApi(settings, max_rows=64, returns_experts=False, at_publish="recompute", lora=lora)  # for any run
    policy.model.config.architectures = [type(policy.model).__name__]
    policy.model.config.save_pretrained(directory)
    options = {"model": directory, "max_length": LONGEST, "dtype": "float32", "kind": "cpu"}
    client = new_client()
    server = start_server(api, client, ThisHost(), number=0, directory=directory, key=KEY, **options)
    assert server.process is not None
    try:
        loop.run(server.wait_until_ready(START_SECONDS, max_length=LONGEST))
        yield RunningServer(url=server.url, process=server.process)
    finally:
        loop.start(client.aclose()).result()
        server.end()


def engine_of(
    policy: Policy, directory: Path, *, longest_prompt: int = 100, keys: Sequence[str] = (), **vllm: Any
) -> ServerEngine:
    """An engine, started or found; keywords are keys of rollout.vllm, and `keys` others of a recipe."""
    recipe = load_recipe(ROOT / "tests" / "tiny.yaml", ["rollout.engine=vllm", *keys])
    settings = VllmConfig(**vllm) if "python" in vllm else VllmConfig(python=vllm_python(), **vllm)
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"vllm": settings})})
    longest = longest_prompt + recipe.rollout.max_new_tokens
    engine = make_engine(recipe, policy, directory=directory, longest_sequence=longest)
    assert isinstance(engine, ServerEngine)
    return engine


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """The shared memory of multiprocessing that the processes have; none of it is another server's."""
    paths = {Path(own.path) for process in processes for own in process.memory_maps()}
    return {path for path in paths if path.match("/dev/shm/psm_*") and path.exists()}
