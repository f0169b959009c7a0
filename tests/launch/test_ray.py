"""Runs on a real Ray cluster of two nodes, which are this machine twice."""

import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.needs import needs

pytestmark = needs("ray")

TINY = Path(__file__).parents[1] / "tiny.yaml"
SECONDS = 300
KEYS = ["name=job", "evaluation.num_queries=0", "checkpoint.every=2"]


class Cluster:
    """A cluster that wants a token; each of its nodes has a core."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        port = self.address.partition(":")[2]
        self._directory = directory
        self.nodes = [
            self.start("--head", "--port", port, "--include-dashboard", "false", "--temp-dir", str(directory))
        ]

    def start(self, *options: str) -> "subprocess.Popen[bytes]":
        """A node of its own, until its process ends."""
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "1", *options]
        command += ["--node-ip-address", "127.0.0.1", "--object-store-memory", str(80 * 2**20)]
        with (self._directory / "output").open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def add_node(self) -> None:
        """One more node, with a resource that no other has, for Ray takes seconds to see that one is lost."""
        self.newest = f"node_{secrets.token_hex(4)}"
        self.nodes.append(self.start("--address", self.address, "--resources", json.dumps({self.newest: 1})))

    def lose_node(self) -> None:
        """The last one is gone, with all that runs there."""
        node = self.nodes.pop()
        for process in (*psutil.Process(node.pid).children(recursive=True), node):
            process.kill()
        node.wait(SECONDS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Of two nodes."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="gspo-ray-") as directory:
        names = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
        for name, value in {**names, "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        started = Cluster(Path(directory))
        began, (host, port) = time.monotonic(), started.address.split(":")
        while socket.socket().connect_ex((host, int(port))):
            assert time.monotonic() - began < SECONDS
            time.sleep(0.2)
        started.add_node()
        yield started
        while started.nodes:
            started.lose_node()


def test_a_run_goes_on_when_a_node_is_lost_and_another_comes(
    cluster: Cluster, tmp_path: Path, launch: Callable[..., "subprocess.Popen[str]"]
) -> None:
    run = launch("steps=400", "--processes", "2", "--address", cluster.address)
    _wait_until((tmp_path / "runs/job/checkpoints/step_000002").exists, run)
    assert (tmp_path / "runs/job/checkpoints/step_000002/state_1.safetensors").exists()  # the second rank's
    cluster.lose_node()
    cluster.add_node()
    output = tmp_path / "output"
    _wait_until(lambda: "resumed from runs/job/checkpoints/" in output.read_text(), run)
    said = output.read_text()
    assert re.search(r"failed: rank \d is lost, with its place on the node", said)
    assert said.count("failed: ") == 1 and "starting again from the newest checkpoint, after failure 1 of 3" in said
    run.send_signal(signal.SIGINT)
    assert run.wait(SECONDS) == 128 + signal.SIGINT
    assert output.read_text().count("saved: runs/job/checkpoints/") == 1
    _wait_until(lambda: not _ranks(tmp_path), run)


# What rank 0 does: it starts a server on the node that is not the head, ends it, and starts another.
SERVER = """
import sys
from pathlib import Path
import ray
from gspo.engine.server.hosts import HostActor, RayHost
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
actor = ray.remote(HostActor).options(num_cpus=0, resources={sys.argv[2]: 1}).remote()
host = RayHost(actor, "another")
port = host.free_port()
command = [sys.executable, "-u", "-m", "http.server", "--bind", host.address, str(port)]
for _ in range(2):
    server = host.start(command, {"OWN": "value"}, Path("log").absolute())
    while "Serving" not in server.said():
        assert not server.has_ended(0.1), server.said()
    print("own", host.address, port, flush=True)
    sys.stdin.readline()
    server.end()
    print("own", server.has_ended(), server.said(), flush=True)
try:
    host.start(command, {}, Path("log").absolute())
except Exception as error:
    print("own", error, flush=True)
"""


def test_a_server_runs_where_ray_has_placed_it_and_is_lost_with_its_node(cluster: Cluster, tmp_path: Path) -> None:
    def heard() -> list[str]:
        assert rank.stdout is not None
        lines = [""]
        while not lines[-1].startswith("own "):  # what Ray says comes in between
            lines.append(rank.stdout.readline())
            assert lines[-1], "".join(lines)
        return lines[-1].split()[1:]

    def tell() -> str:
        print(file=rank.stdin, flush=True)
        return " ".join(heard())

    command = [sys.executable, "-c", SERVER, cluster.address, cluster.newest]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as rank:  # type: ignore[call-overload]
        address, port = heard()
        socket.create_connection((address, int(port)), SECONDS).close()
        assert "True" in tell() and heard() == [address, port]
        cluster.lose_node()
        lost = f"a server's host {address} is lost"
        assert lost in tell() and lost in " ".join(heard())
    assert socket.socket().connect_ex((address, int(port)))
    cluster.add_node()


@pytest.mark.parametrize(
    ("options", "token", "reason"),
    [
        (["--address", "ADDRESS"], "6" * 64, "no such cluster"),
        (["--address", "127.0.0.1:1"], "5" * 64, "no such cluster"),
        (["--address", "ADDRESS", "--gpus-per-process", "1", "--wait-seconds", "1"], "5" * 64, "0 GPU free"),
    ],
)
def test_what_ray_cannot_give_is_said(
    options: list[str],
    token: str,
    reason: str,
    cluster: Cluster,
    tmp_path: Path,
    launch: Callable[..., "subprocess.Popen[str]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    run = launch(*[cluster.address if option == "ADDRESS" else option for option in options])
    assert run.wait(SECONDS) == 2
    assert reason in (tmp_path / "output").read_text()
    assert not (tmp_path / "runs").exists()


def test_a_signal_ends_the_wait_for_room(
    cluster: Cluster, tmp_path: Path, launch: Callable[..., "subprocess.Popen[str]"]
) -> None:
    run = launch("--address", cluster.address, "--processes", "3")
    _wait_until(lambda: "waiting for the cluster to have 3 times" in (tmp_path / "output").read_text(), run)
    run.send_signal(signal.SIGTERM)
    assert run.wait(SECONDS) == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in (tmp_path / "output").read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `gspo launch ray` in a directory of its own, and ends it with the test."""
    started = []

    def start(*options: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "gspo", "launch", "ray", str(TINY), *KEYS, *options]
        with (tmp_path / "output").open("w") as output:
            run = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output, text=True)
        started.append(run)
        return run

    yield start
    for run in started:
        run.kill()
        run.wait()


def _ranks(directory: Path) -> list[str]:
    """The processes that work in a directory."""
    return [str(own) for own in psutil.process_iter(["cwd"]) if own.info["cwd"] == str(directory)]


def _wait_until(is_so: Callable[[], object], run: "subprocess.Popen[str]") -> None:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < SECONDS and run.poll() in (None, 128 + signal.SIGTERM)
        time.sleep(0.2)
