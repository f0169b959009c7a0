"""The ranks of a run on the nodes of a Ray cluster, which places them; they talk to each other as everywhere."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gspo.engine.server.hosts import HOSTS, NAMESPACE, HostActor
from gspo.errors import RENDEZVOUS, Stopped, UserError
from gspo.launch.ranks import LOST, LocalRank, run_ranks, with_restarts
from gspo.recipe.sections import ClusterConfig

_WHERE = "gspo launch ray"
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """The resources that a run asks Ray for.

    Example: RayJob(processes=16, gpus_per_process=1, address="auto") has a GPU for each of 16 ranks.
    """

    processes: int = 1
    gpus_per_process: int = 0
    cpus_per_process: int = 1
    address: str | None = None  # None: a cluster of this machine alone, which ends with the run
    max_failures: int | None = None  # after which the run starts again from its newest checkpoint
    wait_seconds: int = 600  # for the cluster to have what is asked for


def run_on_ray(words: Sequence[str], job: RayJob, cluster: ClusterConfig, say: Callable[[str], object]) -> int:
    """Run gspo with these words as ranks on a Ray cluster, again where they fail; the exit code.

    `cluster` says which servers are placed beside them. UserError where there is no Ray, no such cluster, or where
    it does not have in time what is asked for.
    """
    with _connected(job, cluster) as directory:
        from ray.exceptions import RayError

        def run() -> int:
            try:
                with _placed(job, cluster, say) as actors:
                    return run_ranks(_started(words, actors, job, directory))
            except RayError as error:  # a node has been lost before its ranks have started
                say(f"failed: the ranks could not be started: {type(error).__name__}: {error}")
                return 1

        return with_restarts(run, job.max_failures, say)


class _Host(HostActor):
    """An actor of Ray's on a node: it runs one rank, or a server, as a process of its own."""

    def node(self) -> str:
        """The node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start_rank(self, words: Sequence[str], environment: Mapping[str, Any], directory: str) -> None:
        """Start the rank."""
        # Ray's threads have Ctrl-C's signal blocked, and what they start would, too.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        options: dict[str, Any] = {"cwd": directory, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._rank = LocalRank(words, environment, **options)
        os.set_blocking(self._rank.stdout.fileno(), False)  # type: ignore[union-attr]

    def poll(self) -> tuple[int | None, str, bytes]:
        """The process's exit code, how it has ended where that is below zero, and what it has written since asked."""
        code = self._rank.poll()
        return code, self._rank.how_ended() if (code or 0) < 0 else "", self._rank.stdout.read() or b""  # type: ignore[union-attr]

    def send_signal(self, number: int) -> None:
        """Send it to the rank."""
        self._rank.send_signal(number)


class _RayRank:
    """A rank on a node of Ray's, with the methods of a process."""

    def __init__(self, host: Any, address: str) -> None:
        self.returncode: int | None = None
        self._host, self._answer = host, host.poll.remote()
        self._lost = f"is lost, with its place on the node {address}"
        self._how = f"{self._lost} (no answer)"

    def poll(self) -> int | None:
        """Write what the rank has written; its exit code, which is below zero where its node is gone."""
        import ray

        if self.returncode is None and ray.wait([self._answer], timeout=0)[0]:
            try:
                self.returncode, self._how, output = ray.get(self._answer)
                sys.stdout.buffer.write(output)
                sys.stdout.buffer.flush()
                self._answer = self._host.poll.remote()
            except ray.exceptions.RayError as error:
                self.returncode, self._how = LOST, f"{self._lost} ({type(error).__name__})"
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it to the rank."""
        self._host.send_signal.remote(number)

    def how_ended(self) -> str:
        """Return which signal has ended it, or that its node is gone."""
        return self._how


@contextmanager
def _connected(job: RayJob, cluster: ClusterConfig) -> Iterator[str]:
    """Connect to the cluster that the job names, or to a new one; yields a directory that nobody else may read."""
    # Whoever reaches a cluster without a token can run anything on it.
    usual = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    usual |= {} if job.address else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ |= usual | os.environ
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed", where=_WHERE, fix="pip install 'gspo[ray]'") from None
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "namespace": NAMESPACE}
    with tempfile.TemporaryDirectory(prefix="gspo-ray-") as directory:
        if job.address is None:
            asked = job.processes * job.cpus_per_process + cluster.engines * cluster.cpus_per_engine
            options |= {"num_cpus": max(len(os.sched_getaffinity(0)), asked), "include_dashboard": False}
            options |= {"object_store_memory": 100 * 2**20, "_temp_dir": directory}
        try:
            host, _, port = (job.address or "").removeprefix("ray://").rpartition(":")
            if host:  # Ray would try for minutes
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            ray.init(address=job.address or "local", **options)
        except (OSError, ValueError, RuntimeError) as error:
            fix = "see that it runs (ray status), and that RAY_AUTH_TOKEN or ~/.ray/auth_token has its token"
            what = f"no such cluster: {str(error).partition(chr(10))[0]}"
            raise UserError(what, where=f"{_WHERE} --address {job.address}", fix=fix) from None
        try:
            signal.signal(signal.SIGTERM, _stop)  # where Ray's own ends the program as if nothing were
            yield directory
        finally:
            ray.shutdown()


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number))


@contextmanager
def _placed(job: RayJob, cluster: ClusterConfig, say: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    """The actors by their names: one for each rank, then one for each server."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ranks = [{"CPU": job.cpus_per_process, "GPU": job.gpus_per_process}] * job.processes
    servers = [{"CPU": cluster.cpus_per_engine, "GPU": cluster.gpus_per_engine}] * cluster.engines
    asked = " and ".join(f"{len(each)} times {_written(each[0])}" for each in (ranks, servers) if each)
    group, actors = placement_group([*ranks, *servers], strategy="PACK"), {}
    try:
        _wait_for_room(group, asked, job.wait_seconds, say)
        for place, amount in enumerate([*ranks, *servers]):
            options = {"num_cpus": amount["CPU"], "num_gpus": amount["GPU"], "max_restarts": 0}
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, place)
            name = f"gspo-{secrets.token_hex(8)}"
            actors[name] = ray.remote(_Host).options(name=name, **options).remote()
        yield actors
    finally:
        remove_placement_group(group)  # with its actors, and what they have started


def _wait_for_room(group: Any, asked: str, seconds: int, say: Callable[[str], object]) -> None:
    """Raise UserError where the cluster does not have in time what is asked."""
    import ray

    began = time.monotonic()
    if not group.wait(5):
        say(f"waiting for the cluster to have {asked}; now it has {_written(ray.available_resources())} free")
    while not group.wait(1):  # Ray would hear no signal within a longer one
        if time.monotonic() - began > seconds:
            what = f"it has not had {asked} within {seconds} s, but {_written(ray.available_resources())} free"
            raise UserError(what, where=_WHERE, fix="ask for less, or add nodes; --wait-seconds says how long to wait")


def _written(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def _started(words: Sequence[str], actors: Mapping[str, Any], job: RayJob, directory: str) -> list[_RayRank]:
    """Start the ranks, those of a node one after the other; all meet where the first is, or in the directory."""
    import ray

    names, everyone = list(actors), list(actors.values())
    node_of = ray.get([actor.node.remote() for actor in everyone])  # the servers', too, are there by now
    order = sorted(range(job.processes), key=lambda place: node_of[place])
    hosts, nodes = [everyone[place] for place in order], [node_of[place] for place in order]
    addresses = ray.get([host.address.remote() for host in hosts])
    shared: dict[str, Any] = {"WORLD_SIZE": job.processes, "OMP_NUM_THREADS": job.cpus_per_process}
    if job.address is None:  # the port of a host would be open to others, too
        shared[RENDEZVOUS] = f"file://{directory}/{secrets.token_hex(8)}"
    else:
        shared |= {"MASTER_ADDR": addresses[0], "MASTER_PORT": ray.get(hosts[0].free_port.remote(addresses[0]))}
    if len({*addresses}) == 1:
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if servers := names[job.processes :]:
        shared[HOSTS] = " ".join((ray.get_runtime_context().gcs_address, *servers))
    started = []
    for rank, (host, node) in enumerate(zip(hosts, nodes, strict=True)):
        # Ray shows a rank the GPUs that are its own, and no others.
        local = 0 if job.gpus_per_process else nodes[:rank].count(node)
        own = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": nodes.count(node)}
        started.append(host.start_rank.remote(words, shared | own, str(Path.cwd())))
    ray.get(started)
    return [_RayRank(host, address) for host, address in zip(hosts, addresses, strict=True)]
