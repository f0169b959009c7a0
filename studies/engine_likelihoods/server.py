"""A vLLM server of its own for each precision, which all runs of that precision use, one after the other."""

import secrets
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gspo.engine.server.fleet import KEY_VARIABLE
from gspo.engine.server.hosts import ServerProcess, free_port
from gspo.engine.server.vllm import VllmApi
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import ServerConfig
from studies.engine_likelihoods.jobs import BASE

SECONDS = 600.0  # to get ready in


@contextmanager
def vllm_servers(
    python: str, model: Path, dtypes: Sequence[str], logs: Path
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The key and, by dtype, the addresses of servers for models of that shape; they end with the block.

    Their weights are dummies until a run publishes its own.
    """
    recipe, key = load_recipe(BASE), secrets.token_urlsafe(32)
    api = VllmApi(ServerConfig(python=python), max_rows=recipe.rollout.max_rows, returns_experts=False)
    assert recipe.model.architecture is not None
    longest = recipe.model.architecture["max_position_embeddings"]
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_bytes((model / "config.json").read_bytes())
        urls, processes = dict[str, str](), list[ServerProcess]()
        for dtype in dtypes:
            port = free_port()
            command = api.command(
                model=folder, address="127.0.0.1", port=port, max_length=longest, dtype=dtype, kind="cpu"
            )
            environment = {**api.environment(key), "OMP_NUM_THREADS": "1"}
            processes.append(ServerProcess(command, environment, logs / f"vllm_{dtype}.log"))
            stack.callback(processes[-1].end)
            urls[dtype] = f"http://127.0.0.1:{port}"
        for process, url in zip(processes, urls.values(), strict=True):
            _wait(process, url)
        yield key, urls


def _wait(process: ServerProcess, url: str) -> None:
    started = time.monotonic()
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            if process.has_ended() or time.monotonic() - started > SECONDS:
                raise SystemExit(f"vLLM is not ready: {process.log}\n    {process.said()}") from None
            time.sleep(0.25)


__all__ = ["KEY_VARIABLE", "vllm_servers"]
