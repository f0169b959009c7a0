"""How a process joins the other ranks, and leaves them."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from gspo.errors import UserError
from gspo.learner import ranks
from gspo.learner.ranks import joined


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Those of the groups that this process, the second of its host, has made: it stands for two ranks."""
    backends: list[str] = []

    def join(size: int, seconds: float, backend: str) -> None:
        backends.append(backend)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    monkeypatch.setattr(ranks, "_join", join)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    yield backends
    if dist.is_initialized():
        dist.destroy_process_group()


class _SlowStore:
    """Its calls go on after a rank has begun to leave."""

    def __init__(self) -> None:
        self.is_called = threading.Event()

    def set(self, *_: Any) -> None:
        self.is_called.set()
        ranks._life.ended.wait()
        time.sleep(0.05)


@pytest.mark.parametrize("error", [None, ValueError()])
def test_a_rank_that_has_left_has_no_thread_in_a_call_of_the_store(
    error: Exception | None, backends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the process ends, such a thread would abort it."""
    store = _SlowStore()
    monkeypatch.setattr(ranks, "_store", lambda: store)
    with suppress(ValueError), joined(seconds=0.02):
        store.is_called.wait()
        if error is not None:
            raise error
    assert "signs of life" not in [thread.name for thread in threading.enumerate()]


def test_ranks_need_gpus_of_their_own_only_where_they_compute_on_them(
    backends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with joined(seconds=20.0, device="cpu"):
        pass
    with pytest.raises(UserError, match=r"process 1 of its host.* has 1 GPUs"), joined(seconds=20.0, device="auto"):
        pass
    assert backends == ["gloo", "cpu:gloo,cuda:nccl"]
