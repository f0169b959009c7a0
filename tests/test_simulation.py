"""The simulation of sampling beside training against what can be computed by hand, and its rates from runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from benchmarks import simulate as benchmark
from benchmarks.simulation import PROBE_TOKENS, PROBES, Rates, Setting, simulate

RATES = Rates(decode=lambda rows: 1.0 + 0.5 * rows, publish=2.0, update=lambda tokens: 3.0 + 0.25 * tokens)
PUBLISH = RATES.publish + PROBE_TOKENS * RATES.decode(PROBES)


def lengths(number: int) -> Sequence[int]:
    """Of a group: of 1 to 31 tokens."""
    return [1 + (7 * number + 11 * row) % 31 for row in range(3)]


def decoded(sizes: Sequence[int], rates: Rates = RATES) -> float:
    """Seconds of rows that start together: each step has those that are as long."""
    return sum(rates.decode(sum(size > step for size in sizes)) for step in range(max(sizes)))


@pytest.mark.parametrize("servers", [1, 2])
def test_synchronous_steps_take_what_their_parts_do(servers: int) -> None:
    steps = simulate(Setting(staleness=0, queries=4, servers=servers), RATES, lengths, steps=3)
    for number, step in enumerate(steps):
        groups = [lengths(place) for place in range(4 * number, 4 * number + 4)]
        shares = [[size for group in groups[place::servers] for size in group] for place in range(servers)]
        assert step.tokens == sum(map(sum, groups))
        assert step.waited == pytest.approx(max(map(decoded, shares)))
        assert step.total == pytest.approx(PUBLISH + step.waited + RATES.update(step.tokens))


def test_rows_and_requests_wait_for_room() -> None:
    one_row = simulate(Setting(staleness=0, queries=4, rows=1), RATES, lengths, steps=1)
    assert one_row[0].waited == pytest.approx(one_row[0].tokens * RATES.decode(1))
    one_request = simulate(Setting(staleness=0, queries=4, requests=1), RATES, lengths, steps=1)
    assert one_request[0].waited == pytest.approx(sum(decoded(lengths(number)) for number in range(4)))


def test_the_cache_slows_decoding_and_new_weights_have_it_read_again() -> None:
    held = simulate(Setting(staleness=0, queries=1, prompt=10), replace(RATES, held=0.01), lambda _: [20], steps=1)
    # As an integral over the tokens held, and not token by token.
    assert held[0].waited == pytest.approx(20 * RATES.decode(1) + 0.01 * (20 * 10 + 20**2 / 2))
    beside = Setting(staleness=1, queries=1, prompt=0)
    kept, read = (
        simulate(
            beside, replace(RATES, prefill=own, update=lambda _: 150.0), lambda number: [499 * number + 1], steps=2
        )
        for own in (0.0, 0.1)
    )
    # One token beside the first group, and 150 s of it alone.
    assert read[1].total - kept[1].total == pytest.approx(0.1 * (1 + 150 / RATES.decode(1)))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_rules_of_the_source_hold(staleness: int) -> None:
    drawn: list[int] = []
    trained: list[int] = []

    def draw(number: int) -> Sequence[int]:
        drawn.append(number)
        assert len(drawn) - len(trained) * 4 <= 4 * (staleness + 1)
        return lengths(number)

    def update(tokens: int) -> float:
        trained.append(tokens)
        return 20.0

    simulate(Setting(staleness=staleness, queries=4), replace(RATES, update=update), draw, steps=7)
    assert drawn == [*range(28)]  # nothing that no step trains on
    assert trained == [sum(sum(lengths(4 * step + place)) for place in range(4)) for step in range(7)]


def test_where_the_trainer_is_slower_only_it_is_waited_for() -> None:
    slow = replace(RATES, update=lambda _: 1000.0, update_beside=1.5, decode_beside=2.0)
    setting = Setting(staleness=1, queries=4)
    for number, step in enumerate(simulate(setting, slow, lengths, steps=5)[1:-1], start=1):
        # The next step's groups are decoded meanwhile, half as fast, and make the trainer slower for as long.
        beside = 2.0 * decoded([size for place in range(4) for size in lengths(4 * number + 4 + place)])
        assert step.waited == 0
        assert step.total == pytest.approx(PUBLISH + 1000.0 + beside * (1 - 1 / 1.5))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Directories as runs leave them whose steps are simulated."""
    rates = replace(RATES, prefill=0.01)
    plain = Setting(staleness=0, queries=4)
    for name, setting in {
        "small": plain,
        "large": replace(plain, queries=12),
        "long": replace(plain, prompt=benchmark.LONG_PROMPT),
        "run_0_1_0": plain,
    }.items():
        write(tmp_path / name, setting, rates)
    for name in ("pair_0", "pair_1"):
        decode, update = (lambda rows: 2 * RATES.decode(rows)), (lambda tokens: 3 * RATES.update(tokens))
        write(tmp_path / name, plain, replace(rates, decode=decode, update=update))
    for name, staleness in (("run_1_1_0", 1), ("run_2_1_0", 2)):
        beside = replace(rates, decode_beside=2.0, update_beside=3.0)
        write(tmp_path / name, replace(plain, staleness=staleness), beside)
    return tmp_path


def test_the_rates_are_those_of_the_runs(runs: Path) -> None:
    rates = benchmark.rates_of(runs)
    assert [rates.decode(0), rates.decode(1)] == pytest.approx([1.0, 1.5], rel=1e-6)
    assert [rates.update(0), rates.update(4)] == pytest.approx([3.0, 4.0], rel=1e-6)
    assert [rates.prefill, rates.publish] == pytest.approx([0.01, 2.0], rel=1e-6)
    assert [rates.decode_beside, rates.update_beside] == pytest.approx([2.0, 3.0], rel=0.02)


def test_what_is_simulated_is_printed_beside_what_was_measured(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "Cluster", partial(benchmark.Cluster, queries=2, group=2))
    benchmark.compare(runs)
    ratios = [line.split("|")[4] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [float(ratio) for ratio in ratios[1:]] == pytest.approx([1.0, 1.0, 1.0], abs=0.02)
    benchmark.main([])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 9 and len({row.count("|") for row in rows}) == 1


def write(directory: Path, setting: Setting, rates: Rates, *, num_steps: int = 6) -> None:
    """A run directory's files of steps that are simulated, as far as they are read."""
    (directory / "rollouts").mkdir(parents=True)
    numbers, elapsed, lines = count(), 0.0, []
    for number, step in enumerate(simulate(setting, rates, lengths, steps=num_steps), start=1):
        elapsed += step.total
        lines.append(
            {
                "step": number,
                "time/total_seconds": step.total - 0.5,  # the rest is between steps
                "time/elapsed_seconds": elapsed,
                "time/rollout_seconds": step.waited,
                "engine/publish_seconds": step.total - step.waited - rates.update(step.tokens),
            }
        )
        sizes = [(place, size) for place in range(setting.queries) for size in lengths(next(numbers))]
        rows = [json.dumps({"query": f"q{place}", "tokens": size}) for place, size in sizes]
        (directory / "rollouts" / f"step_{number:06d}.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
