"""The numbers of a mixture of experts against their definitions, by hand; what a step keeps, before and after disk."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.samples import sample_of

from gspo.learner.optimizer import StepReport
from gspo.learner.update import MiniBatchReport
from gspo.learner.volatility import Activation
from gspo.metrics.step import expert_metrics
from gspo.recipe.load import load_recipe
from gspo.run.directory import RunDirectory
from gspo.run.progress import decode, encode
from gspo.types import Experts, Group, Query, Sample

TINY = Path(__file__).parents[1] / "tiny.yaml"
QUERY = Query(id="q:1", prompt="p", text="p", prompt_ids=(1, 2, 3), columns={})


def counts(
    changed: Sequence[int] = (0, 0), compared: Sequence[int] = (0, 0), load: Sequence[Sequence[int]] = ((1, 1), (1, 1))
) -> Activation:
    return Activation(load=torch.tensor(load), changed=torch.tensor(changed), compared=torch.tensor(compared))


def report(
    activation: Activation | None = None,
    *,
    after: Activation | None = None,
    balance_loss: float = 0.0,
    num_trained: int = 1,
) -> MiniBatchReport:
    step = StepReport(grad_norm=1.0, learning_rate=1e-4, applied=True)
    return MiniBatchReport(
        loss=0.0,
        step=step,
        num_trained=num_trained,
        activation=activation,
        after=after,
        balance_loss=balance_loss,
    )


def metrics(*reports: MiniBatchReport) -> dict[str, Any]:
    return dict(expert_metrics([], reports))


def test_a_dense_model_has_no_such_numbers() -> None:
    assert metrics(report(), report()) == {}


def test_changes_are_weighed_by_what_was_compared() -> None:
    line = metrics(
        report(counts()),
        report(counts((1, 3), (10, 10))),
        report(counts((9, 6), (30, 30))),
        report(counts((0, 2), (2, 2))),
    )
    assert line["moe/expert_change_fraction"] == pytest.approx(21 / 84)
    assert line["moe/expert_change_fraction_by_layer"] == pytest.approx([10 / 42, 11 / 42])
    assert line["moe/expert_change_fraction_by_update"] == pytest.approx([4 / 20, 15 / 60, 2 / 4])
    assert "mismatch/expert_fraction" not in line  # the engine recorded nothing


def test_the_first_mini_batch_tells_the_engines_experts_from_the_trainers() -> None:
    line = metrics(report(counts((1, 2), (10, 20))), report(counts((5, 5), (10, 10))))
    assert line["mismatch/expert_fraction"] == pytest.approx(3 / 30)
    assert line["moe/expert_change_fraction"] == pytest.approx(10 / 20)
    assert line["moe/expert_change_fraction_by_update"] == pytest.approx([10 / 20])


def test_a_batchs_only_update_is_told_by_its_sample() -> None:
    line = metrics(report(counts((9, 9), (9, 9)), after=counts((1, 2), (6, 6))))
    assert line["moe/expert_change_fraction"] == pytest.approx(3 / 12)
    assert line["moe/expert_change_fraction_by_layer"] == pytest.approx([1 / 6, 2 / 6])
    assert line["moe/expert_change_fraction_by_update"] == pytest.approx([3 / 12])
    assert line["mismatch/expert_fraction"] == 1
    alone = metrics(report(counts(), after=None))
    assert not any("change" in name for name in alone)


def test_a_mini_batch_without_an_advantage_is_null_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = metrics(report(), report(counts((1, 1), (4, 4))), report(), report(counts((2, 0), (4, 4))))
    assert line["moe/expert_change_fraction"] == pytest.approx(4 / 16)
    by_update = line["moe/expert_change_fraction_by_update"]
    assert by_update[0] == 0.25 == by_update[2] and math.isnan(by_update[1])
    directory = RunDirectory.create(load_recipe(TINY))
    directory.append("metrics.jsonl", line)
    written = json.loads((directory.path / "metrics.jsonl").read_text(encoding="utf-8"))
    assert written["moe/expert_change_fraction_by_update"] == [0.25, None, 0.25]


def test_load_is_added_up_over_the_mini_batches_and_compared_with_an_even_one() -> None:
    first, second = [[4, 0, 2, 0], [1, 1, 1, 1]], [[4, 0, 0, 2], [2, 2, 0, 0]]
    line = metrics(report(counts(load=first)), report(), report(counts(load=second)))
    assert line["moe/busiest_expert_load_by_layer"] == pytest.approx([8 / 3, 3 / 2])
    assert line["moe/busiest_expert_load"] == pytest.approx((8 / 3 + 3 / 2) / 2)
    assert line["moe/idle_expert_fraction"] == pytest.approx(1 / 8)  # one expert of the first layer
    even = metrics(report(counts(load=[[3, 3], [5, 5]])))
    assert even["moe/busiest_expert_load_by_layer"] == [1, 1] and even["moe/idle_expert_fraction"] == 0


def test_the_balance_loss_is_the_mean_over_the_trained_sequences_and_told_only_where_it_is_on() -> None:
    some, many = report(counts(), balance_loss=1.5), report(counts(), balance_loss=2.0, num_trained=3)
    line = metrics(some, report(counts(), num_trained=0), many)
    assert line["moe/balance_loss"] == pytest.approx((1.5 + 3 * 2.0) / 4)
    assert "moe/balance_loss" not in metrics(report(counts()), report(counts()))


def drawn(tokens: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(tokens, 3, 2, dtype=dtype)


def sample(experts: Experts | None, old: Experts | None = None) -> Sample:
    return sample_of(QUERY, [5], experts=experts, old_experts=old)


def recorded_bytes(samples: Sequence[Sample]) -> Any:
    return expert_metrics(samples, [report(counts())])["moe/recorded_bytes"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_what_a_group_shares_is_counted_once_and_a_resume_changes_no_byte(dtype: torch.dtype, tmp_path: Path) -> None:
    prefix, other, empty = drawn(4, dtype), drawn(4, dtype), drawn(0, dtype)
    group = [Experts(prefix=prefix, row=drawn(n, dtype)) for n in (5, 1, 2)]
    alone = [Experts(prefix=other, row=drawn(3, dtype)), *(Experts(prefix=empty, row=drawn(2, dtype)) for _ in "ab")]
    size = torch.empty(0, dtype=dtype).element_size() * 3 * 2  # bytes a token
    assert recorded_bytes(list(map(sample, group))) == size * (4 + 5 + 1 + 2)
    assert recorded_bytes(list(map(sample, [*group, *alone]))) == size * (12 + 4 + 3 + 2 + 2)
    assert recorded_bytes([]) == 0
    old = [*group[:2], *[None] * 5]
    held = Group(samples=tuple(map(sample, (*group, *alone, None), old)))
    for trip in range(3):  # a run may be resumed any number of times
        # The engine's and π_old's are the same tensors here: whoever names them, they are kept once.
        assert recorded_bytes(held.samples) == size * (12 + 4 + 3 + 2 + 2)
        text, tensors = encode(held)
        assert tensors[str(dtype).removeprefix("torch.")].nbytes == size * (12 + 4 + 3 + 2 + 2)
        save_file(tensors, tmp_path / str(trip))
        held = decode(text, load_file(tmp_path / str(trip)), {QUERY.id: QUERY})
