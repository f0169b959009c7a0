"""The processes that train one model together: which of them this one is, and what they tell each other.

One process is a rank of one. Unless it says otherwise a function is a collective: all ranks have to call it.
Rank 0 alone collects, writes and talks; the others run the trainer's verbs (trainer.py).
"""

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from signal import Signals
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from gspo.errors import (
    HAS_LAUNCHER,
    RENDEZVOUS,
    SILENT,
    LostRankError,
    OtherRankError,
    RunError,
    Stopped,
    UserError,
    listed,
    printable,
)
from gspo.loop import in_thread
from gspo.model.sharding import Sharding
from gspo.rank_environment import number_of, world_size

T = TypeVar("T")
_START_SECONDS = 600.0  # within which all ranks have to be there
_END_SECONDS = 10.0  # for a call of the store's that is under way at the end
_OF_RANKS = re.compile(
    "gloo|NCCL|TCPStore|FileStore|[Bb]roken pipe|pair closure|Connection (closed|reset)"
)  # in errors of torch's


@dataclass
class _Life:
    """The state of the other ranks as this process knows it: which of them still give signs of life."""

    seconds: float  # of silence, after which a rank counts as lost
    arrivals: int = 0  # meetings that this process has come to
    exchanges: int = 0  # with the others
    seen: dict[int, tuple[str, float]] = field(default_factory=dict)  # by rank: its last sign, and when it was new
    gpu_waits_since: float | None = None  # it has done nothing new since: None where it is up to date
    ended: threading.Event = field(default_factory=threading.Event)


_life = _Life(seconds=60.0)
_joined = count()  # of this process's joins: the same on all ranks


def num_ranks() -> int:
    """Return how many processes train together. No collective."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0. No collective."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def joined(seconds: float, device: str = "auto") -> Iterator[None]:
    """Join the processes that were started together, as the environment names them (RANK, WORLD_SIZE, …: torchrun).

    `device` is that of `model.device`. A rank that is silent for so many seconds, or keeps the others waiting in a
    collective for as long, is lost: within the block LostRankError then says which one it is.
    """
    size = world_size()
    if dist.is_initialized() or size == 1:
        with losses_named():
            yield
        return
    uses_gpus = _uses_gpus(device)
    _join(size, seconds, "cpu:gloo,cuda:nccl" if uses_gpus else "gloo")
    _life.__init__(seconds=seconds)  # type: ignore[misc]
    threads = [in_thread("signs of life", _give_signs, _life)]
    try:
        with losses_named():
            if uses_gpus:
                on_all(_take_gpu)
                threads.append(in_thread("the GPU's progress", _follow_gpu, _life, torch.cuda.current_device()))
            yield
        dist.destroy_process_group()  # not after an error: what others still wait for would hold it up
    finally:
        _life.ended.set()
        wait(threads, _END_SECONDS)  # a process that ends while a thread is in a call of the store's aborts


def _uses_gpus(device: str) -> bool:
    return not device.startswith("cpu") and torch.cuda.is_available()


def _join(size: int, seconds: float, backend: str) -> None:
    """Find the other ranks; UserError where the environment does not say how."""
    place, start = os.environ.get(RENDEZVOUS, "env://"), timedelta(seconds=_START_SECONDS)
    # NCCL's own watchdog would abort the process, without a word of which rank is lost: `_give_signs` ends it instead.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if not os.environ.get("RANK"):
        fix = "start it by --processes or torchrun, or unset WORLD_SIZE"
        raise UserError(f"WORLD_SIZE is {size}, and there is no RANK", where="environment", fix=fix)
    number = number_of("RANK", 0)
    try:
        store, number, size = next(rendezvous(place, number, size, timeout=start))
        store = dist.PrefixStore(f"joined {next(_joined)}", store)  # torchrun's outlives one call of `train`
        store.set(f"here/{number}", "")
        store.wait([f"here/{other}" for other in range(size)], start)
        dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        what = f"the {size} ranks have not found each other: {error}"
        raise RunError(f"{what}\n  fix: see that all of them start, and reach MASTER_ADDR and MASTER_PORT") from None


def _take_gpu() -> None:
    """Compute on the GPU of this rank's own; UserError where its host has fewer. No collective."""
    local, num_gpus = number_of("LOCAL_RANK", 0), torch.cuda.device_count()
    if local >= num_gpus:
        what = f"rank {rank()} is process {local} of its host, counted from 0, which has {num_gpus} GPUs"
        fix = "start one process for each GPU, or train on the CPU: model.device=cpu"
        raise UserError(what, where="--processes", fix=fix)
    torch.cuda.set_device(local)


@contextmanager
def losses_named() -> Iterator[None]:
    """Errors of the connection to other ranks become LostRankError, which names the rank. No collective."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if num_ranks() == 1 or not _is_of_connection(error):
            raise
        raise _loss(error) from error


def gathered(value: T) -> list[T]:
    """Return what every rank has given, in their order. It is pickled: ranks trust each other."""
    if num_ranks() == 1:
        return [value]
    _life.exchanges += 1
    values: list[Any] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values


def highest(value: int) -> int:
    """The highest number that any rank has given."""
    if num_ranks() == 1:
        return value
    _life.exchanges += 1
    number = torch.tensor(value)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def add_up(tensors: Sequence[Tensor]) -> None:
    """Add the gradients of all ranks up, in place: of parameters that each rank has whole, which FSDP2 leaves alone."""
    if own := [tensor for tensor in tensors if not isinstance(tensor, DTensor)]:
        _life.exchanges += 1
        flat = torch.cat([tensor.flatten() for tensor in own])
        dist.all_reduce(flat)
        for tensor, summed in zip(own, flat.split([tensor.numel() for tensor in own]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def meet() -> None:
    """Wait until every rank is here, however long it takes, as long as all are alive."""
    if num_ranks() > 1:
        _meet(range(num_ranks()))


def tell(kind: str, *content: Any) -> None:
    """Say something to the other ranks, which wait for it (`told`); rank 0 calls it."""
    if num_ranks() > 1:
        _meet([])
        _broadcast((kind, content))


def told() -> tuple[str, tuple[Any, ...]]:
    """Return what rank 0 says next: the others wait for it, however long it takes, as long as that is alive."""
    _meet([0])
    said: tuple[str, tuple[Any, ...]] = _broadcast(None)
    return said


def on_all(make: Callable[[], T], errors: type[Exception] = Exception) -> T:
    """Return what each rank makes for itself. Where any of them fails, all do, and only the first of these says why.

    Other errors than those named are raised at once. Where ranks wait for each other within `make`, it has to be
    UserError: what they all meet alike. One that fails alone would not be heard of before the others have waited.
    """
    if num_ranks() == 1:
        return make()
    failure: Exception | None = None
    try:
        made = make()
    except errors as error:
        if is_of_all(error):  # of a call within
            raise
        failure = error
    meet()
    failed = [other for other, is_failure in enumerate(gathered(failure is not None)) if is_failure]
    if not failed:
        return made
    if failure is not None and rank() == failed[0]:
        raise of_all(failure)
    raise of_all(OtherRankError(f"rank {failed[0]} has failed"))


def stop_all(signal: Signals | None) -> None:
    """Raise Stopped on all ranks where a signal has come to any of them."""
    if number := highest(0 if signal is None else int(signal)):
        raise of_all(Stopped(Signals(number)))


def is_of_all(error: BaseException) -> bool:
    """Tell whether all ranks know of an error, so that they can still do something together. No collective."""
    return num_ranks() == 1 or getattr(error, "is_of_all_ranks", False)


def sharding_of(setting: str, device: torch.device, dtype: torch.dtype) -> Sharding | None:
    """Return all ranks as `trainer.sharding` has it: `full`, `hybrid` (each host has all shards) or `none` (copies).

    None on one rank, which has the whole model to itself.
    """
    size = num_ranks()
    if size == 1:
        return None
    if setting == "full":
        return Sharding(mesh=init_device_mesh(device.type, (size,)), dtype=dtype, on_all=on_all)
    within = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if setting == "hybrid" else 1
    if len(sizes := set(gathered(within))) > 1:
        what = f"hosts have different numbers of processes: {listed([*map(str, sorted(sizes))])}"
        raise UserError(what, where="trainer.sharding: hybrid", fix="start as many on each, or set full")
    names = ("copies", "shards")
    mesh = init_device_mesh(device.type, (size // within, within), mesh_dim_names=names)
    return Sharding(mesh=mesh, dtype=dtype, on_all=on_all)


def leave_note(key: str, text: str) -> None:
    """Say something that other ranks can wait for; from any thread. No collective."""
    _store().set(key, text)


def wait_for_note(key: str, by: int) -> str:
    """Return what a rank says under a key, once it does, as long as it is alive; from any thread. No collective.

    Of other ranks than 0, only rank 0 knows whether they are.
    """
    while not _store().check([key]):
        time.sleep(0.02)
        _check_alive(by)
    return str(_store().get(key).decode())


def of_all(error: BaseException) -> BaseException:
    """The error, marked as one that all ranks know of. No collective."""
    error.is_of_all_ranks = True  # type: ignore[attr-defined]
    return error


def _broadcast(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _meet(others: Iterable[int]) -> None:
    """Come to the next meeting, and wait for these others to come to it."""
    _life.arrivals += 1
    _store().set(f"arrivals/{rank()}", str(_life.arrivals))
    for other in others:
        pause = 0.0005
        while not _has_come(other):
            time.sleep(pause)
            pause = min(0.05, 1.5 * pause)
            _check_alive(other)


def _check_alive(other: int) -> None:
    if other in _life.seen and time.monotonic() - _life.seen[other][1] > _life.seconds:
        raise _lost(other, f"has given no sign of life for {_life.seconds:g} s")


def _has_come(other: int) -> bool:
    key = f"arrivals/{other}"
    return _store().check([key]) and int(_store().get(key)) >= _life.arrivals


def _give_signs(life: _Life) -> None:
    """Say again and again that this process lives, and how far it is; note when others last did."""
    others, number = range(1, num_ranks()) if rank() == 0 else [0], 0
    while not life.ended.wait(life.seconds / 20):
        since = life.gpu_waits_since
        if since is not None and time.monotonic() - since > life.seconds:
            _give_up()
        number += 1
        try:
            _store().set(f"sign/{rank()}", f"{number} {life.exchanges}")
            for other in others:
                sign = _store().get(f"sign/{other}").decode() if _store().check([f"sign/{other}"]) else ""
                if other not in life.seen or life.seen[other][0] != sign:
                    life.seen[other] = (sign, time.monotonic())
        except Exception:  # the group is gone, which its collectives will say
            return


def _follow_gpu(life: _Life, device: int) -> None:
    """Note since when the GPU has come no further: in a collective of NCCL's it waits for a rank without end."""
    stream = torch.cuda.default_stream(device)
    while not life.ended.wait(life.seconds / 20):
        life.gpu_waits_since = time.monotonic()
        mark = torch.cuda.Event(blocking=True)  # that its host sleeps meanwhile
        mark.record(stream)
        mark.synchronize()
        life.gpu_waits_since = None


def _give_up() -> None:
    """End this process, and say which rank is lost: its main thread is in a call of CUDA's that raises nothing."""
    error = _loss(RuntimeError("timed out"))
    is_silent = isinstance(error, OtherRankError)
    with suppress(OSError):
        print("" if is_silent else f"failed: {printable(str(error))}\n", end="", file=sys.stderr, flush=True)
    os._exit(SILENT if is_silent and HAS_LAUNCHER in os.environ else 1)


def _is_of_connection(error: BaseException) -> bool:
    """Tell whether it comes from torch.distributed, whose errors have no type of their own."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    is_collective = last.endswith("/torch/distributed/distributed_c10d.py")
    return isinstance(error, dist.DistError) or is_collective or bool(_OF_RANKS.search(str(error)))


def _loss(error: BaseException) -> RunError:
    """Return which rank is lost, as far as this one can tell."""
    silence = {other: time.monotonic() - at for other, (_, at) in _life.seen.items()}
    if silence and max(silence.values()) > _life.seconds / 4:
        other = max(silence, key=lambda each: silence[each])
        return _lost(other, f"has given no sign of life for {silence[other]:.0f} s")
    exchanges = {other: int(sign.split()[1]) for other, (sign, _) in _life.seen.items() if sign}
    behind = [other for other, number in exchanges.items() if number < _life.exchanges]
    if behind and "imed out" in str(error):
        counts = f"it has come to exchange {exchanges[behind[0]]} with them, rank {rank()} to {_life.exchanges}"
        return _lost(behind[0], f"has kept the others waiting for {_life.seconds:g} s: {counts}")
    if HAS_LAUNCHER in os.environ:  # which says how it has ended
        return OtherRankError("another rank has ended")
    what = "another rank does not answer: it has ended, and says why, or is stuck"
    return LostRankError(what) if rank() == 0 else OtherRankError(what)


def _lost(other: int, how: str) -> RunError:
    """Make the error that one rank reports, and about which the others keep silent."""
    fix = "gspo resume goes on from the last checkpoint; trainer.timeout_seconds says how long ranks wait"
    what = f"rank {other} {how}\n  fix: {fix}"
    return LostRankError(what) if rank() == (1 if other == 0 else 0) else OtherRankError(what)
