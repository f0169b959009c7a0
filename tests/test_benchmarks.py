"""The benchmarks' cost model against a count of the real model's operations, and their small runs."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import gpu, gpu_speed, levers, rating, scaling
from benchmarks.cost import Shape, decode_bytes, decode_flops, update_flops
from benchmarks.decode import MODELS
from benchmarks.engines import publishing, sampling
from benchmarks.peer import workloads
from tests.sampling import sampler_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from gspo.model.policy import Policy
from gspo.rollout.keys import SamplingKey
from gspo.types import Group

ATTENTION = ("attention", "bmm")


def counted(tokens: int) -> tuple[Shape, int, int]:
    """Operations of a forward pass over one sequence: those of matrices, and those of attention (not halved)."""
    config = Qwen3Config(**{key: value for key, value in gpu_speed.TOY.items() if key != "model_type"})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    counts = counter.get_flop_counts()["Global"]
    attention = sum(count for name, count in counts.items() if any(part in str(name) for part in ATTENTION))
    return Shape.of(config), sum(counts.values()) - attention, attention


def test_the_cost_model_counts_what_the_model_computes() -> None:
    tokens = 24
    shape, matrices, attention = counted(tokens)
    # The rotary embedding's product of positions and frequencies is left out of the model of costs.
    assert shape.trunk_flops(tokens, 0) + shape.head_flops(tokens) == pytest.approx(matrices, rel=1e-3)
    if attention:
        assert shape.trunk_flops(0, tokens * tokens) == attention


def test_costs_of_groups_add_up() -> None:
    shape, _, _ = counted(4)
    prompts, responses = [7, 3], [[5, 2], [1, 4]]
    assert update_flops(shape, prompts, responses) == sum(
        update_flops(shape, [prompt], [group]) for prompt, group in zip(prompts, responses, strict=True)
    )
    assert update_flops(shape, [7], [[5]]) == 3 * decode_flops(shape, [7], [[5]])
    # A prompt is counted once, whatever the size of its group.
    twice = 2 * decode_flops(shape, [7], [[5]]) - decode_flops(shape, [7], [[5, 5]])
    assert twice == shape.trunk_flops(7, 7 * 8 // 2)
    weights = shape.layers * shape.matrices + shape.hidden * shape.vocabulary
    one, two = (decode_bytes(shape, [7], [[5] * n], width=4) for n in (1, 2))
    assert two - one == one - 4 * 5 * weights  # a row more costs its own keys and values, not the weights


def test_the_gpu_benchmark_runs_small_and_the_engine_agrees_with_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_speed.main(["--quick", "--repeats", "1"])
    shown = capsys.readouterr().out
    assert "decode: " in shown and "update: " in shown
    found = re.search(r"largest ([0-9.e+-]+)", shown)
    assert found is not None and float(found[1]) < 1e-4


def test_a_part_of_the_gpus_measurements_is_run_once_and_again_only_where_time_was_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(gpu, "_SAVING_SECONDS", 0.1)
    codes = {"good": "print('measured')", "bad": "exit(1)", "long": "import time; print('begun'); time.sleep(60)"}
    parts = {name: [sys.executable, "-c", code] for name, code in codes.items()}
    for _ in range(3):
        gpu.run_parts(parts, tmp_path, seconds=3.0)
    lines = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    ends = [(line["part"], line["how"]) for line in lines]
    assert ends == [("good", "done"), ("bad", "failed"), ("long", "short of time"), ("long", "cut off")]
    assert (tmp_path / "good.txt").read_text() == "measured\n"
    assert (tmp_path / "long.txt").read_text().startswith("begun\n")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less still than --quick does; peak and bandwidth are measured in the GPU's benchmark."""
    monkeypatch.setattr(scaling, "matmul_peak", lambda *_: 1e9)
    monkeypatch.setattr(scaling, "memory_bandwidth", lambda *_: 1e9)
    monkeypatch.setattr(scaling, "TOKENS", 8)
    for sizes, least in (("LENGTHS", 16), ("GROUPS", 2), ("VOCABULARIES", 100)):
        monkeypatch.setattr(scaling, sizes, [least])
    work = replace(workloads.WORKLOADS["short"], sequences=32, max_new_tokens=8)
    monkeypatch.setitem(workloads.WORKLOADS, "short", work)
    lever, _, without = levers.LEVERS[0]
    monkeypatch.setattr(levers, "LEVERS", [(lever, ["short"], without)])


@pytest.mark.parametrize("benchmark", [scaling, levers])
def test_small_runs_print_their_tables(benchmark: object, small: None, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--quick"])  # type: ignore[attr-defined]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) >= 3 and len({row.count("|") for row in rows[:3]}) == 1


def test_the_tables_of_the_guide_to_ratings_are_those_that_its_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rating.main(["--players", "2"])
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "rating.md").read_text(encoding="utf-8")
    shapes = [
        [re.sub(r" [-+\d.± %]+(?=\|)", " number ", line) for line in text.splitlines() if line.startswith("| ")]
        for text in (capsys.readouterr().out, guide[guide.index("python -m benchmarks.rating") :])
    ]
    assert len(shapes[0]) > 20 and set(shapes[0]) <= set(shapes[1])


def test_the_models_to_publish_are_as_large_as_they_are_called() -> None:
    for name, shape in ((name, model.architecture) for name, model in publishing.MODELS.items()):
        if isinstance(shape, Path):
            continue
        config = AutoConfig.for_model(**{"vocab_size": 100, **shape})
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(config).num_parameters()
        assert size == pytest.approx(float(name.removesuffix("M")) * 1e6, rel=0.15)


def test_all_engines_do_the_same_work() -> None:
    work = sampling.Work(sequences=16, tokens=5)
    policy = sampling.new_policy(next(iter(MODELS.values())))
    row = sampling.table_row(work, policy, sampler_of(replace(policy, stop_ids=(-1,))), rounds=1)
    assert len(row) == len(sampling.HEAD)
    with pytest.raises(SystemExit, match="same work"):
        sampling.check_lengths(replace(work, tokens=6), _groups(work, policy))
    assert len({query.prompt_ids for query in sampling.WORKS[-1].queries(policy)}) > 1


def _groups(work: sampling.Work, policy: Policy) -> Sequence[Group]:
    sampler = sampler_of(replace(policy, stop_ids=(-1,)))
    return sampler.sample(work.queries(policy), work.settings, SamplingKey(seed=0, step=1))


def test_parts_that_overlap_count_once() -> None:
    watched = publishing.Watched()
    with watched.part("outer"), watched.part("inner"):
        pass
    with watched.part("inner"):
        pass
    assert watched.seconds().keys() == {"outer", "inner"}
    assert publishing.covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (0.5, 1.0)]) == 4.0
