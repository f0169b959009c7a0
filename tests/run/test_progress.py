"""The run's records on disk: every kind comes back bit by bit, and nothing but these kinds is read or run."""

import ast
import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gspo
from gspo.learner.optimizer import Noise, StepReport
from gspo.learner.update import MiniBatchReport
from gspo.learner.volatility import Activation
from gspo.run.progress import Best, Progress, decode, encode
from gspo.types import Batch, Drawn, Experts, Failure, Group, Query, Sample, Score, SequenceStats, Turn

NUMBERS = [0.1 + 0.2, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 1e-7]
QUERIES = {
    f"rows:{n}": Query(id=f"rows:{n}", prompt="p", text="é p", prompt_ids=(n, 2), columns={"a": [n, None]})
    for n in range(3)
}
PREFIX = torch.arange(12, dtype=torch.uint8).view(3, 2, 2)  # what a group's members share


def sample(query: Query, size: int, text: str = "é\n\ud800 $tensor", **filled: Any) -> Sample:
    logprobs = torch.tensor([*NUMBERS, *range(size)][:size], dtype=torch.float32)
    return Sample(
        turns=(Turn(role="assistant", text="3", num_tokens=2, num_calls=1),),
        query=query,
        token_ids=torch.arange(size),
        loss_mask=torch.arange(size) % 2 == 0,
        text=text,
        finish_reason="length" if size else "stop",
        sampler_logprobs=logprobs,
        versions=((2**40, size), (2**40 + 1, 0)),
        experts=experts(PREFIX, 3),
        **filled,
    )


def experts(prefix: Tensor, tokens: int) -> Experts:
    return Experts(prefix=prefix, row=torch.arange(tokens * 4, dtype=prefix.dtype).view(tokens, 2, 2))


def stats(number: float) -> SequenceStats:
    return SequenceStats(
        mini_batch=1,
        num_tokens=2,
        num_clipped=0,
        sequence_ratio=number,
        entropy_sum=number,
        old_logprobs=torch.tensor([number, -0.0], dtype=torch.float64).float(),
        log_ratios=torch.tensor([-number, 0.0]),
    )


COUNTS = Activation(load=torch.tensor([[2**40, 0]]), changed=torch.tensor([3]), compared=torch.tensor([4]))
FAILED = Score(reward=None, parts={"f": None, "g": -0.0}, failure=Failure(kind="timed_out", message="f: 60 s"))
GROUPS = tuple(Group(samples=(sample(query, 9), sample(query, 0), sample(query, 1, ""))) for query in QUERIES.values())
SCORED = Batch(
    groups=tuple(
        Group(samples=tuple(sample(query, 2, score=own) for own in (Score(reward=n, parts={"f": n}), FAILED)))
        for query, n in zip([*QUERIES.values()] * 3, NUMBERS, strict=False)
    ),
    dropped=GROUPS[:1],
    reward_seconds={"f": 0.25},
)
FILLED: dict[str, Any] = {
    "score": FAILED,
    "reference_logprobs": torch.tensor(NUMBERS),
    "values": torch.empty(0),
    "masked": True,
    "advantage": -0.0,
    "token_advantages": torch.tensor(NUMBERS),
    "returns": torch.tensor([1.0, 2.0]),
    "old_logprobs": torch.tensor(NUMBERS).float(),
    "old_experts": experts(PREFIX.short() + 300, 2),
}
TRAINED = Batch(groups=(Group(samples=tuple(sample(QUERIES["rows:1"], 2, **FILLED, stats=stats(n)) for n in NUMBERS)),))
REPORTS = tuple(
    MiniBatchReport(
        loss=number,
        step=StepReport(grad_norm=number, learning_rate=1e-6, applied=math.isfinite(number)),
        num_trained=2 if number > 0 else 0,
        balance_loss=number,
        activation=COUNTS if number > 0 else None,
        noise=Noise(signal=number, noise=1.0) if number > 0 else None,
    )
    for number in NUMBERS
)
PROGRESS = Progress(
    steps=2**33,
    skipped_in_a_row=4,
    seconds=1.5,
    diagnoses={"no_signal": "92% of groups"},
    rollout_files={"step_000001.jsonl": 12},
    batch=TRAINED,
    batches_drawn=7,
    ahead=(
        Drawn(query=TRAINED.groups[0].query, key_step=13, group=TRAINED.groups[0]),
        Drawn(query=TRAINED.groups[0].query, key_step=14, temperature=0.9),
    ),
    learning_rate_factor=0.5,
    temperature=0.9,
    best=Best(metric="reward/mean", best_is="highest", value=0.7, step=12, misses=2),
    ended=("hook on_step: enough", 20),
    reports=REPORTS,
    stage_seconds={"rollout": 0.1, "update": 2.0},
)


def through_the_disk(value: Any, directory: Path) -> Any:
    text, tensors = encode(value)
    save_file(tensors, directory / "t")
    return decode(text, load_file(directory / "t") if tensors else {}, QUERIES)


def same(one: Any, two: Any) -> bool:
    """Equal bit by bit, and of the same kind."""
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, two)]
        return one.dtype == two.dtype and one.shape == two.shape and bits[0].equal(bits[1])
    if isinstance(one, Query):
        return one is two
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(two, field.name)) for field in dataclasses.fields(one))
    if isinstance(one, Mapping):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return struct.pack("d", one) == struct.pack("d", two) if isinstance(one, float) else one == two


@pytest.mark.parametrize(
    "value",
    [PROGRESS, Progress(), GROUPS[0], SCORED, TRAINED, FAILED, *REPORTS[:3]],
    ids=lambda value: type(value).__name__,
)
def test_a_record_comes_back_bit_by_bit(value: Any, tmp_path: Path) -> None:
    assert same(value, value)
    assert same(through_the_disk(value, tmp_path), value)


def test_every_kind_of_record_that_progress_can_hold_comes_back(tmp_path: Path) -> None:
    def kinds_in(hint: Any) -> set[type]:
        found = set().union(*map(kinds_in, get_args(hint))) if get_args(hint) else set()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= {hint}.union(*(kinds_in(one) for one in get_type_hints(hint).values()))
        return found

    def kinds_of(value: Any) -> set[type]:
        if isinstance(value, tuple | list):
            return set().union(*map(kinds_of, value))
        if isinstance(value, Mapping):
            return kinds_of(list(value.values()))
        if not dataclasses.is_dataclass(value):
            return set()
        return {type(value)}.union(*(kinds_of(getattr(value, field.name)) for field in dataclasses.fields(value)))

    assert kinds_in(Progress) == kinds_of(PROGRESS) >= {Progress, Sample, Query, Failure, SequenceStats}
    assert kinds_of(through_the_disk(PROGRESS, tmp_path)) == kinds_of(PROGRESS)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int64", "bool"])
def test_a_tensor_keeps_dtype_shape_and_bits_beside_others(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    some = [torch.tensor(NUMBERS, dtype=torch.float64), torch.tensor(3.5), torch.empty(2, 0), torch.ones(3, 2).T]
    tensors = tuple((tensor.nan_to_num() if dtype == "int64" else tensor).to(kind) for tensor in some)
    value = {"a": (tensors[0], torch.ones(2), *tensors[1:]), "b": tensors[:1]}
    assert same(through_the_disk(value, tmp_path), value)


def test_views_of_one_memory_are_told_apart(tmp_path: Path) -> None:
    square = torch.arange(9, dtype=torch.int32).view(3, 3)
    views = {"rows": square, "columns": square.T, "bits": square.view(torch.float32), "row": square[0]}
    assert same(through_the_disk(views, tmp_path), views)


def test_lists_come_back_as_tuples(tmp_path: Path) -> None:
    value = {"a": [1, [2.0, "x"], None, True], "b": {}, "c": {"1": "one", "2": {"x": []}}}
    expected = {"a": (1, (2.0, "x"), None, True), "b": {}, "c": {"1": "one", "2": {"x": ()}}}
    assert same(through_the_disk(value, tmp_path), expected)


@dataclasses.dataclass
class Stranger:
    command: str


def test_a_kind_that_is_not_known_is_neither_written_nor_read() -> None:
    for value in (Stranger("rm"), {"a": (Stranger("rm"),)}, Score(reward=1.0, parts={"f": Stranger("rm")})):  # type: ignore[dict-item]
        with pytest.raises((TypeError, KeyError), match="Stranger"):
            encode(value)
    for name in ("Stranger", "Path", "eval", "Query"):
        with pytest.raises(KeyError, match=name):
            decode(json.dumps({"$record": name, "command": "rm"}), {}, QUERIES)
    with pytest.raises(KeyError, match="rows:9"):
        decode('{"$query": "rows:9"}', {}, QUERIES)


def test_what_json_has_no_form_for_is_not_written() -> None:
    for value in ({1, 2}, object(), 1j):
        with pytest.raises(TypeError):
            encode({"a": value})


def test_nothing_outside_the_reward_processes_reads_what_could_be_run() -> None:
    pickles = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    home = Path(gspo.__file__).parent
    found = []
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            reads = isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save", "np.load")
            if reads or pickles & {part for name in names for part in name.split(".")}:
                found.append(path.relative_to(home).as_posix())
    writes_only = ["engine/server/vllm_transfer.py"]  # handles of a GPU's memory, for vLLM
    isolated = ("reward/", "sandbox/harness.py")  # the latter within the sandbox, code that a program may not write
    assert [path for path in found if not path.startswith(isolated)] == writes_only
    text = (home / writes_only[0]).read_text(encoding="utf-8")
    assert text.count("pickle.") == text.count("pickle.dumps(") == 1
