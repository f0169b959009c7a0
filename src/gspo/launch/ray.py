"""The ranks of a run on the nodes of a Ray cluster, which places them; they talk to each other as everywhere."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gspo.engine.server.ray_host import HOSTS, NAMESPACE, HostActor
from gspo.errors import RENDEZVOUS, Stopped, UserError
from gspo.launch.local import LocalRank
from gspo.launch.supervise import LOST, run_ranks, with_restarts
from gspo.recipe.sections import ClusterConfig

_WHERE = "gspo launch ray"
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """What a run asks Ray for.

    Example: RayJob(processes=16, gpus_per_process=1, address="auto") has a GPU for each of 16 ranks.
    """

    processes: int = 1
    gpus_per_process: int = 0
    cpus_per_process: int = 1
    address: str | None = None  # None: a cluster of this machine alone, which ends with the run
    max_failures: int = 3  # after which the run starts again from its newest checkpoint
    wait_seconds: int = 600  # for the cluster to have what is asked for


def run_on_ray(arguments: Sequence[str], job: RayJob, cluster: ClusterConfig, say: Callable[[str], object]) -> int:
    """Run gspo with these arguments as ranks on a Ray cluster, again where they fail; the exit code.

    `cluster` says which servers are placed beside them. UserError where there is no Ray, no such cluster, or where it
    does not have in time what is asked for.
    """
    with _connected(job, cluster) as directory:
        from ray.exceptions import RayError

        def run() -> int:
            try:
                with _placed(job, cluster, say) as (hosts, servers):
                    return run_ranks(_started(arguments, hosts, servers, job, directory))
            except RayError as error:  # a node has been lost before its ranks have started
                say(f"failed: the ranks could not be started: {type(error).__name__}: {error}")
                return 1

        return with_restarts(run, job.max_failures, say)


class _Host:
    """On a node, as an actor of Ray: runs one rank, as a process of its own."""

    def place(self) -> tuple[str, str, int]:
        """The node, its address, and a port of it that nothing listens on now."""
        import ray

        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), listener.getsockname()[1]

    def start(self, arguments: Sequence[str], environment: Mapping[str, Any], directory: str) -> None:
        """Start the rank."""
        # Ray's threads have Ctrl-C's signal blocked, and what they start would, too.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        options: dict[str, Any] = {"cwd": directory, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._rank, self._output = LocalRank(arguments, environment, **options), bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> tuple[int | None, str, bytes]:
        """Its exit code, how it has ended where that is below zero, and what it has written since it was asked last."""
        code = self._rank.poll()
        if code is not None:
            self._reader.join(1.0)
        output = bytes(self._output)
        del self._output[: len(output)]
        return code, self._rank.how_ended() if code is not None and code < 0 else "", output

    def send_signal(self, number: int) -> None:
        """Send it to the rank."""
        self._rank.send_signal(number)

    def _read(self) -> None:
        assert self._rank.stdout is not None
        while part := os.read(self._rank.stdout.fileno(), 2**16):
            self._output += part


class _RayRank:
    """A rank on a node of Ray's, with the methods of a process."""

    def __init__(self, host: Any, address: str) -> None:
        self.returncode: int | None = None
        self._host, self._asked = host, None
        self._lost = f"is lost, with its place on the node {address}"
        self._how = f"{self._lost} (no answer)"

    def poll(self) -> int | None:
        """Write what the rank has written; its exit code, which is below zero where its node is gone."""
        import ray

        if self.returncode is not None:
            return self.returncode
        self._asked = self._asked or self._host.poll.remote()
        if ray.wait([self._asked], timeout=0)[0]:
            try:
                self.returncode, self._how, output = ray.get(self._asked)
                sys.stdout.buffer.write(output)
                sys.stdout.buffer.flush()
            except ray.exceptions.RayError as error:
                self.returncode, self._how = LOST, f"{self._lost} ({type(error).__name__})"
            self._asked = None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it to the rank."""
        self._host.send_signal.remote(number)

    def how_ended(self) -> str:
        """Which signal has ended it, or that its node is gone."""
        return self._how


@contextmanager
def _connected(job: RayJob, cluster: ClusterConfig) -> Iterator[Path]:
    """To the cluster that the job names, or to a new one; yields a directory that nobody else may read."""
    # Whoever reaches a cluster without a token can run anything on it.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed", where=_WHERE, fix="pip install 'gspo[ray]'") from None
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    directory = tempfile.TemporaryDirectory(prefix="gspo-ray-")
    if job.address is None:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        asked = job.processes * job.cpus_per_process + cluster.engines * cluster.cpus_per_engine
        options |= {
            "num_cpus": max(len(os.sched_getaffinity(0)), asked),
            "include_dashboard": False,
            "object_store_memory": 100 * 2**20,
            "_temp_dir": directory.name,
        }
    try:
        if ":" in (job.address or "").removeprefix("ray://"):  # Ray would try for minutes
            host, _, port = str(job.address).removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address=job.address or "local", namespace=NAMESPACE, **options)
    except (OSError, ValueError, RuntimeError) as error:
        fix = "see that it runs (ray status), and that RAY_AUTH_TOKEN or ~/.ray/auth_token has its token"
        what = f"no such cluster: {str(error).partition(chr(10))[0]}"
        raise UserError(what, where=f"{_WHERE} --address {job.address}", fix=fix) from None
    try:
        signal.signal(signal.SIGTERM, _stop)  # where Ray has put its own, which ends the program as if nothing were
        yield Path(directory.name)
    finally:
        ray.shutdown()
        directory.cleanup()


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number))


@contextmanager
def _placed(
    job: RayJob, cluster: ClusterConfig, say: Callable[[str], object]
) -> Iterator[tuple[list[tuple[Any, str, str, int]], list[str]]]:
    """An actor for each rank, with its node, address and a port, and the names of the actors that start servers.

    The ranks of a node follow each other.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ranks = [{"CPU": job.cpus_per_process, "GPU": job.gpus_per_process}] * job.processes
    servers = [{"CPU": cluster.cpus_per_engine, "GPU": cluster.gpus_per_engine}] * cluster.engines
    asked = " and ".join(f"{len(alike)} times {_written(alike[0])}" for alike in (ranks, servers) if alike)
    group = placement_group([*ranks, *servers], strategy="PACK")

    def actor(kind: type, place: int, **options: Any) -> Any:
        amount, where = (*ranks, *servers)[place], PlacementGroupSchedulingStrategy(group, place)
        options |= {
            "num_cpus": amount["CPU"],
            "num_gpus": amount["GPU"],
            "max_restarts": 0,
            "scheduling_strategy": where,
        }
        return ray.remote(kind).options(**options).remote()

    try:
        if not _is_there(group, 5):
            say(f"waiting for the cluster to have {asked}; now it has {_written(ray.available_resources())} free")
        if not _is_there(group, job.wait_seconds):
            what = f"it has not had {asked} within {job.wait_seconds} s, but {_written(ray.available_resources())} free"
            raise UserError(what, where=_WHERE, fix="ask for less, or add nodes; --wait-seconds says how long to wait")
        actors = [actor(_Host, place) for place in range(len(ranks))]
        places = ray.get([host.place.remote() for host in actors])
        names = [f"gspo-{secrets.token_hex(8)}" for _ in servers]
        held = [actor(HostActor, len(ranks) + number, name=name) for number, name in enumerate(names)]
        ray.get([host.address.remote() for host in held])  # they are there; one without a handle would end
        yield sorted(((host, *at) for host, at in zip(actors, places, strict=True)), key=lambda host: host[1]), names
    finally:
        remove_placement_group(group)  # with its actors, and what they have started


def _is_there(group: Any, seconds: float) -> bool:
    """Wait so long for what is asked of the cluster: a second at a time, within which Ray would hear no signal."""
    began = time.monotonic()
    while not group.wait(1):
        if time.monotonic() - began > seconds:
            return False
    return True


def _written(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def _started(
    arguments: Sequence[str],
    hosts: Sequence[tuple[Any, str, str, int]],
    servers: Sequence[str],
    job: RayJob,
    directory: Path,
) -> list[_RayRank]:
    """Start the ranks: the first of them is where all meet, on this machine in a file of the directory."""
    import ray

    _, _, address, port = hosts[0]
    nodes, is_one_machine = [node for _, node, _, _ in hosts], len({address for _, _, address, _ in hosts}) == 1
    shared: dict[str, Any] = {"WORLD_SIZE": len(hosts), "OMP_NUM_THREADS": job.cpus_per_process, "MASTER_PORT": port}
    shared["MASTER_ADDR"] = "127.0.0.1" if is_one_machine else address
    if is_one_machine:
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if job.address is None:  # the port of a host would be open to others, too
        shared[RENDEZVOUS] = f"file://{directory}/{secrets.token_hex(8)}"
    if servers:
        shared[HOSTS] = " ".join((ray.get_runtime_context().gcs_address, *servers))
    started = []
    for rank, (actor, node, _, _) in enumerate(hosts):
        # Ray shows a rank the GPUs that are its own, and no others.
        local = 0 if job.gpus_per_process else nodes[:rank].count(node)
        environment = {**shared, "RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": nodes.count(node)}
        started.append(actor.start.remote(arguments, environment, str(Path.cwd())))
    ray.get(started)
    return [_RayRank(actor, address) for actor, _, address, _ in hosts]
