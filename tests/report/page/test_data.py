"""The JSON that the page draws: columns of numbers, which runs are seeds of one arm, and what became of each run."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import run_of, steps_of
from tests.report.page.made_runs import begun, ended, metrics_line

from gspo.metrics.definitions import families
from gspo.report.page.data import MOST_CURVES, arms_of, differences, named_diagnoses, rounded, run_data, state_sentence
from gspo.report.run_files import RunFiles

CUT = "response/truncated_fraction"


def run_in(*runs: Any) -> dict[str, Any]:
    """The first run of the page's data, as a browser reads it."""
    shown: dict[str, Any] = json.loads(json.dumps(run_data(runs), allow_nan=False))["runs"][0]
    return shown


def test_each_metric_is_a_column_with_a_place_for_each_step() -> None:
    log = [metrics_line(step) for step in range(7)]
    run = run_in(run_of(log))
    assert run["steps"] == [*range(7)]
    assert run["columns"]["reward/mean"] == [None, *(line["reward/mean"] for line in log[1:])]
    assert run["columns"]["policy/entropy"][4] is None  # a gap
    assert [step for step, value in enumerate(run["columns"]["evaluation/held_out/pass_at_1"]) if value] == [0, 3, 6]
    assert all(len(column) == 7 for column in run["columns"].values())
    assert set(log[1]) - {"step"} <= set(run["columns"])


def test_a_list_is_a_row_of_its_numbers_and_a_column_without_any_number_is_left_out() -> None:
    lines = [{"step": 1, "x": [1.5, None, 2.5], "y": [[1], [2, 3]]}, {"step": 2, "x": [3] * 100, "z": None}]
    assert run_in(run_of(lines))["columns"] == {"x": [[1.5, None, 2.5], [3] * MOST_CURVES], "y": [[1, 2, 3], None]}


NUMBERS = {0.123456789: 0.12346, 1.0003456789: 1.000346, 0.9996543: 0.999654, -1234567.0: -1234600, 3: 3, 4.0: 4}


@pytest.mark.parametrize(
    ("value", "shown"), [*NUMBERS.items(), *dict.fromkeys([None, float("inf"), 1e300, 10**400, "x"]).items()]
)
def test_a_number_has_the_digits_that_a_curve_shows(value: Any, shown: Any) -> None:
    assert rounded(value) == shown


@pytest.mark.parametrize(("max_staleness", "stage"), [(0, "rollout"), (1, "total")])
def test_tokens_and_time_so_far_stand_beside_the_steps(max_staleness: int, stage: str) -> None:
    rate, seconds = "throughput/generated_tokens_per_second", f"time/{stage}_seconds"
    log: list[dict[str, Any]] = [
        {"step": 0, "time/elapsed_seconds": 5.0},
        {"step": 1, rate: 100.0, seconds: 2.0, "time/elapsed_seconds": 8.0},
        {"step": 2, rate: None, seconds: 2.0, "time/elapsed_seconds": 9.0},
        {"step": 3, rate: 50.0, seconds: 3.0, "time/elapsed_seconds": 20.0},
    ]
    run = run_in(run_of(log, settings={"rollout": {"max_staleness": max_staleness}}))
    assert run["tokens"] == [0, 200, 200, 350] and run["time"] == "0.333 min"
    assert run["minutes"] == [0.083333, 0.13333, 0.15, 0.33333]


def test_the_metrics_of_the_runs_have_their_definitions() -> None:
    log = [{"step": 1, "reward/mean": 1.0, "evaluation/a b/pass_at_1": 0.5, "mine": 1.0, "reward/f/mean": 1.0}]
    definitions = run_data([run_of(log)])["definitions"]
    names = {"evaluation/a b/pass_at_1": "evaluation/<set>/pass_at_1", "reward/f/mean": "reward/<function>/mean"}
    assert {name: known for name, (known, _, _) in definitions.items()} == {"reward/mean": "reward/mean", **names}
    known = {name: definition for family in families() for name, definition in family.metrics.items()}
    for name, text, healthy in definitions.values():
        assert (known[name].text, known[name].healthy) == (text, healthy)


def test_the_last_words_of_the_run_and_the_steps_after_which_it_was_resumed_are_there() -> None:
    again = begun(event="resumed", step=3, introduction="a\nb")
    history = [begun(), ended("stopped"), begun(event="resumed"), ended(), again, ended()]
    run = run_in(run_of([metrics_line(1)], history=history))
    assert run["resumed"] == [3] and run["introduction"] == ["a", "b"]


@pytest.mark.parametrize(("level", "clips"), [("sequence", True), ("sequence_token", True), ("token", False)])
def test_the_clip_range_is_drawn_where_it_is_of_the_sequence_ratio(level: str, clips: bool) -> None:
    assert run_in(run_of(settings={"actor": {"importance_sampling_level": level}}))["clips_sequences"] is clips


def test_runs_of_one_name_are_told_apart_by_their_directories() -> None:
    runs = [run_of(name="same", path=Path(place)) for place in ("x", "y")] + [run_of(name="other")]
    assert [run["label"] for run in run_data(runs)["runs"]] == ["x", "y", "other"]


def test_runs_that_differ_in_what_teaches_nothing_are_one_arm_in_the_order_given() -> None:
    runs = [
        run_of(name="b-2", settings={"seed": 2}),
        run_of(name="b-1", settings={"seed": 1, "output_dir": "elsewhere"}),
        run_of(name="b-3", settings={"checkpoint": {"every_steps": 5}, "report": {"trackers": ["wandb"]}}),
    ]
    turned = replace(runs[0], recipe={key: runs[0].recipe[key] for key in reversed(list(runs[0].recipe))})
    assert arms_of(runs) == [("b (3 seeds)", runs)] and len(arms_of([runs[0], turned])) == 1
    assert differences(runs) == []
    other = run_of(name="c", settings={"reward": [{"function": "reasoning_gym", "weight": 0.5}]})
    data = run_data([runs[0], other, runs[1]])
    assert data["arms"] == [{"label": "b (2 seeds)", "runs": [0, 2]}, {"label": "c", "runs": [1]}]
    assert data["differences"] == [("reward.0.weight", ["1.0", "0.5"])]


@pytest.mark.parametrize(
    ("seeds", "label"),
    [
        ({"gspo-s0": 0, "gspo-s1": 1}, "gspo-s (2 seeds)"),
        ({"gspo_1": 1, "gspo_10": 2}, "gspo (2 seeds)"),
        ({"one": 0, "two": 1}, "one (2 seeds)"),
        ({"gspo-0": 1, "gspo-1": 2, "gspo-2": 1}, "gspo (3 runs of 2 seed(s))"),
    ],
)
def test_seeds_are_called_by_what_their_names_share(seeds: Mapping[str, int], label: str) -> None:
    runs = [run_of(name=name, settings={"seed": seed}) for name, seed in seeds.items()]
    assert [own for own, _ in arms_of(runs)] == [label]


def test_arms_of_one_label_are_told_apart() -> None:
    runs = [run_of(name="a", settings={"steps": steps}, path=Path("runs", str(steps))) for steps in (5, 6, 7)]
    assert [label for label, _ in arms_of(runs)] == ["a (runs/5)", "a (runs/6)", "a (runs/7)"]


def test_the_differing_keys_are_told_with_each_arms_value_and_no_others() -> None:
    runs = [
        run_of(name="a", settings={"actor": {"clip_low": 1e-3, "kl": {"in": "loss"}, "levels": [1, 2]}, "seed": 1}),
        run_of(name="b", settings={"actor": {"clip_low": 2e-3, "kl": {"in": "loss"}, "levels": [1]}, "seed": 2}),
        run_of(name="c", settings={"actor": {}, "output_dir": "x", "report": {"tokens": False}}),
    ]
    assert differences(runs) == [
        ("actor.clip_low", ["0.001", "0.002", "–"]),
        ("actor.kl.in", ['"loss"', '"loss"', "–"]),
        ("actor.levels.0", ["1", "1", "–"]),
        ("actor.levels.1", ["2", "–", "–"]),
        ("actor", ["–", "–", "{}"]),
    ]


AGAIN = "it can be resumed: gspo resume runs/made"


@pytest.mark.parametrize(
    ("state", "reason", "told"),
    [
        ("finished", None, "finished: 3 of 6 steps"),
        ("finished", "hook watch: enough", "finished: 3 of 6 steps; ended by hook watch: enough"),
        ("running", None, "still running: 3 of 6 steps so far"),
        ("stopped", "SIGTERM", f"stopped by SIGTERM after 3 of 6 steps; {AGAIN}"),
        ("interrupted", None, f"interrupted at once after 3 of 6 steps; {AGAIN}"),
        ("failed", "the disk is full", f"failed after 3 of 6 steps ({AGAIN}): the disk is full"),
        ("killed", None, f"killed, or crashed, after 3 of 6 steps; {AGAIN}"),
        ("unknown", None, "3 of 6 steps; nothing here says whether it still runs"),
    ],
)
def test_each_state_is_a_sentence(state: str, reason: str | None, told: str) -> None:
    run = run_of(steps_of("x", [1, 2, 3]), history=[begun(), ended(state, reason)], state=state)
    assert state_sentence(run) == told


def cut(percent: int, when: str) -> str:
    return f"{percent}% of responses cut off at rollout.max_new_tokens: raise it (step {when})"


@pytest.mark.parametrize(
    ("cuts", "told"),
    [
        # The mean of ten is at least a quarter from the fifth of 0.6, at the tenth step, to the sixth 0 after the last.
        ([0.0] * 5 + [0.6] * 10 + [0.0] * 15, [cut(30, "12 to 22")]),
        ([0.0] * 9 + [1.0] + [0.3] * 9, [cut(37, "17 to 21, and still at the end")]),
        ([0.25] * 10 + [0.0], [cut(25, "12")]),
        ([0.0, 0.9], [cut(45, "4, and still at the end")]),  # a short run is judged by what there is
        ([], []),
    ],
)
def test_a_diagnosis_is_told_in_its_last_words_with_the_steps_at_which_it_held(
    cuts: list[float], told: list[str]
) -> None:
    assert named_diagnoses(run_of(steps_of(CUT, cuts, first=3))) == told


def test_several_diagnoses_are_told_each_with_its_own_steps() -> None:
    log = steps_of(CUT, [0.5] * 10 + [0.0] * 10, first=3)
    for place, line in enumerate(log):
        line["mismatch/logprob_gap_mean"] = 1.0 if place >= 15 else 0.0
    sentences = named_diagnoses(run_of(log))
    assert [sentence.split(" (step")[1] for sentence in sentences] == [" 12 to 17)", " 18 to 22, and still at the end)"]


def test_the_recipes_actor_decides_and_one_of_another_version_is_read_as_the_default() -> None:
    def told(**actor: Any) -> list[str]:
        return named_diagnoses(run_of(steps_of("clip/token_fraction", [0.0] * 12), settings={"actor": actor}))

    (inert,) = told()
    assert "narrow them" in inert and inert.endswith("(step 10 to 12, and still at the end)")
    assert told(mini_batches=1) == [] and told(mini_batches=1, flux=3) == [inert]


def test_what_could_not_be_read_is_said() -> None:
    notes = ["2 line(s) of metrics.jsonl could not be read"]
    run: RunFiles = replace(run_of(history=[begun(), ended()]), notes=notes)
    assert run_in(run)["notes"] == notes and run_in(run)["diagnoses"] == []
