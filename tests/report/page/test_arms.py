"""Runs side by side: which are one arm's, what they are called, where the arms' recipes differ."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import run_of

from gspo.report.page.arms import arms_of, differences


def test_runs_that_differ_in_what_teaches_nothing_are_one_arm_in_the_order_given() -> None:
    runs = [
        run_of(name="b-2", settings={"seed": 2}),
        run_of(name="b-1", settings={"seed": 1, "output_dir": "elsewhere"}),
        run_of(name="b-3", settings={"checkpoint": {"every_steps": 5}, "report": {"trackers": ["wandb"]}}),
    ]
    (arm,) = arms_of(runs)
    assert list(arm.runs) == runs
    assert arm.label == "b (3 seeds)"  # of the seeds 2, 1 and 0


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 7},
        {"actor": {"clip_low": 0.003, "clip_high": 0.005}},
        {"model": {"path": "another"}},
        {"flux": {"capacitor": 3}},
        {"reward": [{"function": "reasoning_gym", "weight": 0.5}]},
    ],
)
def test_any_other_key_makes_another_arm(changes: dict[str, Any]) -> None:
    first, second, third = run_of(name="a"), run_of(name="b", settings=changes), run_of(name="c", settings={"seed": 9})
    arms = arms_of([first, second, third])
    assert [list(arm.runs) for arm in arms] == [[first, third], [second]]


def test_the_order_of_keys_makes_no_other_arm() -> None:
    run = run_of()
    turned = replace(run, recipe={key: run.recipe[key] for key in reversed(list(run.recipe))})
    assert len(arms_of([run, turned])) == 1


def test_labels_are_unique() -> None:
    runs = [run_of(name="a", settings={"steps": steps}, path=Path("runs", str(steps))) for steps in (5, 6, 7)]
    labels = [arm.label for arm in arms_of(runs)]
    assert labels == ["a (runs/5)", "a (runs/6)", "a (runs/7)"]
    assert [arm.label for arm in arms_of([runs[0], run_of(name="b")])] == ["a", "b"]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["gspo-s0", "gspo-s1"], "gspo-s (2 seeds)"),
        (["gspo_1", "gspo_10"], "gspo (2 seeds)"),
        (["one", "two"], "one (2 seeds)"),
        (["same", "same"], "same (2 seeds)"),
        (["1", "12"], "1 (2 seeds)"),
    ],
)
def test_seeds_are_called_by_what_their_names_share(names: list[str], label: str) -> None:
    runs = [run_of(name=name, path=Path(str(seed)), settings={"seed": seed}) for seed, name in enumerate(names)]
    assert [arm.label for arm in arms_of(runs)] == [label]


@pytest.mark.parametrize(
    ("seeds", "label"),
    [
        ([1, 1], "gspo (2 runs of 1 seed(s))"),
        ([1, 2, 1], "gspo (3 runs of 2 seed(s))"),
        ([None, None], "gspo (2 runs of 1 seed(s))"),
        ([1, None], "gspo (2 seeds)"),
    ],
)
def test_runs_of_the_same_seed_are_not_called_seeds(seeds: list[int | None], label: str) -> None:
    runs = [run_of(name=f"gspo-{place}", settings={"seed": seed}) for place, seed in enumerate(seeds)]
    assert [arm.label for arm in arms_of(runs)] == [label]


def test_the_differing_keys_are_told_with_each_arms_value_and_no_others() -> None:
    runs = [
        run_of(name="a", settings={"actor": {"clip_low": 1e-3, "kl": {"in": "loss"}, "levels": [1, 2]}, "seed": 1}),
        run_of(name="b", settings={"actor": {"clip_low": 2e-3, "kl": {"in": "loss"}, "levels": [1]}, "seed": 2}),
        run_of(name="c", settings={"actor": None, "output_dir": "x", "report": {"tokens": False}}),
    ]
    assert differences(arms_of(runs)) == [
        ("actor.clip_low", ["0.001", "0.002", "–"]),
        ("actor.kl.in", ['"loss"', '"loss"', "–"]),
        ("actor.levels.0", ["1", "1", "–"]),
        ("actor.levels.1", ["2", "–", "–"]),
        ("actor", ["–", "–", "null"]),
    ]


def test_one_arm_differs_in_nothing() -> None:
    assert differences(arms_of([run_of(name="a"), run_of(name="b", settings={"seed": 3})])) == []


def test_a_missing_key_differs_from_null_and_from_an_empty_section() -> None:
    settings: list[dict[str, Any]] = [{}, {"x": None}, {"x": {}}]
    runs = [run_of(name=str(place), settings=keys) for place, keys in enumerate(settings)]
    assert differences(arms_of(runs)) == [("x", ["–", "null", "{}"])]


def test_recipes_of_other_versions_are_compared_too() -> None:
    odd: list[dict[Any, Any]] = [
        {"queries": None, "reward": None},
        {"model": "a-name", "actor": [], "report": 3},
        {True: 1, 2: {"x": {3: 4}}, "when": date(2026, 1, 1)},
    ]
    arms = arms_of([run_of(name=str(place), settings=keys) for place, keys in enumerate(odd)])
    assert len(arms) == 3
    rows = dict(differences(arms))
    assert rows["2.x.3"] == ["–", "–", "4"] and rows["model"] == ["–", '"a-name"', "–"]
    assert json.loads(rows["when"][2]) == "2026-01-01"
