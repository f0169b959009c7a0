"""Faults 1, 2, 3 and 15: a process killed at any instant; resumed, the run ends bit by bit as if it never had been."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.faults.laboratory import Laboratory, Server, differing

Unbroken = Callable[..., dict[str, Any]]
COLD = 3  # optimiser steps before the first of GSPO, which has two a step
SHORT = ("steps=2", "checkpoint.keep=1", "evaluation.num_queries=0")
PARTS = 8  # that the operations of a save are shared out to


@pytest.mark.parametrize(
    ("place", "count", "before"),
    [
        ("sampling", 1, True),
        ("sampling", 40, True),
        ("old likelihoods", 2, True),
        ("gradient", 1, True),
        ("gradient", 5, False),
        ("optimizer step", 1, True),  # in the cold start
        ("optimizer step", COLD, False),
        ("optimizer step", COLD + 3, False),  # between the mini-batches of step 2
        ("optimizer step", COLD + 8, True),
        ("cold gradient", 2, True),
        ("cold end", 1, True),  # its last checkpoint is written and is not its result yet
        ("cold end", 1, False),
        ("snapshot", 2, True),
        ("snapshot", 3, False),
        ("publish", 1, True),
        ("publish", 3, False),  # committed, the old one not yet pruned
    ],
)
def test_a_killed_run_goes_on_bit_by_bit(
    place: str, count: int, before: bool, laboratory: Laboratory, unbroken: Unbroken
) -> None:
    fault = ("signal_at", {"place": place, "count": count, "before": before})
    assert laboratory.train(fault=fault) == -9
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())


@pytest.mark.parametrize("place", ["sampling", "gradient", "optimizer step", "cold gradient"])
def test_a_run_saved_at_every_safe_point_and_killed_again_and_again_goes_on_bit_by_bit(
    place: str, laboratory: Laboratory, unbroken: Unbroken
) -> None:
    everywhere = "checkpoint.seconds=1e-9"
    places: list[str] = []
    count = {"sampling": 15, "gradient": 5, "optimizer step": 3, "cold gradient": 2}[place]
    fault = ("signal_at", {"place": place, "count": count, "before": False, "saved": True})
    status = laboratory.train(everywhere, fault=fault)
    while status == -9 and len(places) < 40:  # every life gets a little further
        status = laboratory.resume(fault=fault)
        places.append(laboratory.said)
    assert status == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken())
    assert len(places) > 1
    if place == "optimizer step":
        assert any("_batch: " in said for said in places), places  # killed between two mini-batches


@pytest.fixture(scope="module")
def operations(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Each write, sync and rename of an unbroken run: their names, and digests of what there was on the disk."""
    laboratory = Laboratory(server, tmp_path_factory.mktemp("operations"))
    log = laboratory.home / "operations"
    assert laboratory.train(*SHORT, fault=("kill_in_save", {"operation": -1, "path": str(log)})) == 0, laboratory.said
    names, digests = zip(*(line.split("\t") for line in log.read_text().splitlines()), strict=True)
    return {"names": list(names), "digests": list(digests)}


@pytest.mark.parametrize("part", range(PARTS))
def test_a_run_killed_at_any_write_sync_or_rename_of_a_save_goes_on_from_the_one_before(
    part: int, laboratory: Laboratory, unbroken: Unbroken, operations: dict[str, list[str]]
) -> None:
    """At one of those that leave the same files, for a resume finds nothing else of the process."""
    expected, names = unbroken(*SHORT), operations["names"]
    kinds = {name.split()[1] for name in names}
    assert {"write_text", "save_file", "write_bytes", "model", "sync", "move_into_place", "remove"} <= kinds
    first_of_second = names.index("after move_into_place unfinished_step_000001") + 2  # its folder is synced too
    cold_end = names.index("before move_into_place step_000003")
    numbers = [*range(cold_end, cold_end + 4), *range(first_of_second, len(names))]
    leaving = {operations["digests"][number]: number for number in reversed(numbers)}
    for operation in sorted(leaving.values())[part::PARTS]:
        again = laboratory.beside(f"kill_{operation}")
        fault = ("kill_in_save", {"operation": operation, "path": str(again.home / "operations")})
        assert again.train(*SHORT, fault=fault) == -9, names[operation]
        assert again.resume() == 0, (names[operation], again.said)
        assert "resumed from run/c" in again.said, names[operation]
        assert not differing(again.result(), expected), names[operation]


@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize("place", ["sampling", "optimizer step"])
def test_a_run_goes_on_with_the_right_queries_on_the_last_and_first_step_of_an_epoch(
    step: int, place: str, laboratory: Laboratory, unbroken: Unbroken
) -> None:
    six = "steps=6"
    count = COLD + 2 * step - 1 if place == "optimizer step" else 6 * step  # of at most 6 tokens
    fault = ("signal_at", {"place": place, "count": count})
    without = (six, "evaluation.num_queries=0", "queries.limit=12")
    assert laboratory.train(*without, fault=fault) == -9
    assert laboratory.checkpoints()[-1] in (f"step_{step - 1:06d}", f"step_{step - 2:06d}")
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), unbroken(*without))
    seen = [
        json.loads(line)["query"]
        for path in sorted((laboratory.run / "rollouts").iterdir())
        for line in path.read_text().splitlines()[::4]
    ]
    for epoch in (seen[:12], seen[12:]):
        assert len(epoch) == len(set(epoch)) == 12


@pytest.mark.parametrize(
    ("place", "before"), [("best model", True), ("best model copied", False), ("best model", False)]
)
def test_killed_while_the_best_model_is_replaced_a_resume_puts_the_same_one_in_place(
    place: str, before: bool, laboratory: Laboratory
) -> None:
    keys = ("checkpoint.best=policy/learning_rate", "checkpoint.best_is=lowest")  # which falls: each step is the best
    whole = laboratory.beside("whole")
    assert whole.train(*keys) == 0, whole.said
    assert laboratory.train(*keys, fault=("signal_at", {"place": place, "count": 2, "before": before})) == -9
    assert laboratory.resume() == 0, laboratory.said
    assert not differing(laboratory.result(), whole.result())
    found, expected = (
        {path.name: path.read_bytes() for path in (one.run / "best_model").iterdir()} for one in (laboratory, whole)
    )
    assert found == expected and json.loads(found["best.json"])["step"] == 4
