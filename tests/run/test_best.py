"""The best model by a metric, kept whole whatever happens, and the early end of a run that gets no better."""

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.breaking_off import GRADIENT, SAMPLING, differing, logged, recipe_of, result, train
from transformers import AutoModelForCausalLM

import gspo
from gspo.errors import UserError
from gspo.recipe.sections import EarlyStopConfig
from gspo.run.progress import Best, next_best, reason_to_stop

FAST = ("cold_start.steps=0", "evaluation.num_queries=0", "rollout.queries_per_step=4", "rollout.max_new_tokens=6")
BEST = Path("runs/kept/best_model")


def lines_of(*values: float | None) -> list[dict[str, Any]]:
    return [{"step": step, "a": value} if value is not None else {"step": step} for step, value in enumerate(values)]


def followed(settings: Any, *values: float | None) -> tuple[Best | None, str | None]:
    best, reason = None, None
    for line in lines_of(*values):
        best = next_best(best, line, settings.metric, settings.best_is, settings.min_improvement)
        reason = reason_to_stop(best, line, settings)
    return best, reason


def test_a_step_without_the_metric_is_no_candidate() -> None:
    settings = EarlyStopConfig(metric="a")
    assert followed(settings, None, 1.0, None, 3.0, math.nan, 2.0)[0] == Best(
        metric="a", best_is="highest", value=3.0, step=3, misses=1
    )
    assert followed(settings.model_copy(update={"best_is": "lowest"}), 2.0, 1.0, 3.0)[0] == Best(
        metric="a", best_is="lowest", value=1.0, step=1, misses=1
    )
    assert followed(settings, None, math.nan) == (None, None)


def test_another_metric_starts_anew() -> None:
    old = Best(metric="b", best_is="highest", value=9.0, step=0)
    assert next_best(old, {"step": 1}, "a", "highest") is None
    assert next_best(old, {"step": 1, "b": 3.0}, "b", "lowest") == Best(metric="b", best_is="lowest", value=3.0, step=1)


@pytest.mark.parametrize(
    ("settings", "values", "reason"),
    [
        ({"patience": 2}, [1, 2, 2, None], None),
        ({"patience": 2}, [1, 2, 2, None, 1], "a was 2 at step 1; 2 values were no better"),
        ({"patience": 2}, [1, 2, 2, 3, 1], None),
        ({"patience": 2, "best_is": "lowest"}, [1, 2, 2], "a was 1 at step 0; 2 values were no better"),
        ({"patience": 2, "min_improvement": 0.5}, [1, 1.5, 1.25], "a was 1 at step 0; 2 values were no better"),
        ({"patience": 2, "min_improvement": 0.25}, [1, 1.5, 1.25], None),
        ({"goal": 2}, [1, 1.9], None),
        ({"goal": 2}, [1, 2], "a is 2, and the goal is 2"),
        ({"goal": 2, "best_is": "lowest"}, [3, 2], "a is 2, and the goal is 2"),
        ({"goal": 2, "patience": 9, "min_improvement": 1}, [1.5, 2], "a is 2, and the goal is 2"),
        ({"goal": 2}, [1, 2, None], None),
    ],
)
def test_when_a_run_is_ended_early(settings: Any, values: list[float | None], reason: str | None) -> None:
    found = followed(EarlyStopConfig(metric="a", **settings), *values)[1]
    assert found == (reason and f"early_stop: {reason}")


def scripted(monkeypatch: pytest.MonkeyPatch, *rewards: float) -> None:
    """reward/mean of the steps, whatever their samples are."""
    recorder = importlib.import_module("gspo.run.recorder")
    original = recorder.step_metrics

    def step_metrics(*arguments: Any) -> Any:
        log = BEST.with_name("metrics.jsonl")
        return {**original(*arguments), "reward/mean": rewards[len(logged(log)) if log.exists() else 0]}

    monkeypatch.setattr(recorder, "step_metrics", step_metrics)


def kept(*overrides: str) -> Any:
    return recipe_of("kept", "checkpoint.best=reward/mean", *FAST, *overrides)


def best_step() -> tuple[int, float]:
    best = json.loads((BEST / "best.json").read_text())
    return best["step"], best["value"]


def weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def test_the_best_steps_model_is_kept_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, 0.1, 0.7, 0.3, 0.2)
    train(kept("steps=4", "checkpoint.seconds=null", "checkpoint.keep=4"))
    assert best_step() == (2, 0.7)
    checkpoints = {path.name for path in (BEST.parent / "checkpoints").iterdir()}
    assert checkpoints == {"step_000001", "step_000002", "step_000004"}  # of each new best, and of the end
    assert weights(BEST) == weights(BEST.parent / "checkpoints/step_000002/model") != weights(BEST.parent / "model")
    AutoModelForCausalLM.from_pretrained(BEST)


def test_rotation_leaves_the_best_model_and_the_newest_checkpoint_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, 0.7, 0.1, 0.3, 0.8)
    train(kept("checkpoint.every=1", "checkpoint.keep=1"))
    assert [path.name for path in (BEST.parent / "checkpoints").iterdir()] == ["step_000003"]
    assert best_step() == (1, 0.7)
    train(kept("steps=4"), resume=True)
    assert best_step() == (4, 0.8) and weights(BEST) == weights(BEST.parent / "model")


@pytest.mark.parametrize("place", ["copytree", "sync", "first rename", "second rename", "clear"])
def test_a_kill_while_the_best_model_is_replaced_leaves_a_whole_one_and_a_resume_the_right_one(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing thread ends there, as with its process; what it had done is on the disk."""
    directory = importlib.import_module("gspo.run.directory")
    scripted(monkeypatch, 0.1, 0.7, 0.2)
    train(kept("steps=1"))
    before = weights(BEST)
    with monkeypatch.context() as patch:
        _kill_at(patch, place, directory)
        with pytest.raises(gspo.RunError):
            train(kept("steps=2"), resume=True)
    if BEST.exists():
        assert best_step() == ((2, 0.7) if place == "clear" else (1, 0.1))
        assert (weights(BEST) == before) == (place != "clear")
    else:  # between two renames: both are there, whole, under other names
        assert place == "second rename"
        assert {path.name for path in BEST.parent.glob("*_best_model")} == {
            "replaced_best_model",
            "unfinished_best_model",
        }
    train(kept("steps=2"), resume=True)
    assert best_step() == (2, 0.7)
    assert weights(BEST) == weights(BEST.parent / "checkpoints/step_000002/model")
    left = {path.name for path in BEST.parent.glob("*_best_model")}
    assert left == ({"replaced_best_model"} if place == "clear" else set())  # whole, and goes with the next one


def _kill_at(patch: pytest.MonkeyPatch, place: str, directory: Any) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        raise OSError(5, "killed here")

    if "rename" in place:
        original, name = Path.rename, "best_model" if place == "first rename" else "unfinished_best_model"
        patch.setattr(Path, "rename", lambda self, to: killed() if self.name == name else original(self, to))
    elif place == "clear":
        original_clear = directory.clear

        def clear(path: Path, **keywords: Any) -> None:
            if path.name == "replaced_best_model" and path.exists():
                killed()
            original_clear(path, **keywords)

        patch.setattr(directory, "clear", clear)
    else:
        patch.setattr(*((directory.shutil, "copytree") if place == "copytree" else (directory, "sync")), killed)


def test_broken_off_and_resumed_best_model_and_early_stop_are_those_of_the_unbroken_run(
    broken_off: Callable[..., Any],
) -> None:
    stop = "early_stop={metric: reward/std, patience: 1, best_is: lowest}"
    keys = ("checkpoint.best=reward/mean", stop, "steps=9", *FAST)
    unbroken = train(recipe_of("unbroken", *keys))
    assert unbroken.reason is not None and 2 <= unbroken.metrics[-1]["step"] < 9
    broken = recipe_of("broken", *keys)
    broken_off(broken, SAMPLING, 8)
    broken_off(broken, GRADIENT, 2, resume=True)
    assert train(broken, resume=True).reason == unbroken.reason
    assert differing(result("broken"), result("unbroken")) == []
    files = [
        {path.name: path.read_bytes() for path in Path("runs", name, "best_model").iterdir()}
        for name in ("broken", "unbroken")
    ]
    assert files[0] == files[1]


def test_the_model_before_training_is_a_candidate_and_a_run_goes_on_from_there(broken_off: Callable[..., Any]) -> None:
    keys = ("checkpoint.best=evaluation/held_out/mean_tokens", "steps=1", "cold_start.steps=0")
    recipe = recipe_of("broken", *keys)
    broken_off(recipe, GRADIENT, 1)
    assert "step_000000" in {path.name for path in Path("runs/broken/checkpoints").iterdir()}
    first = json.loads(Path("runs/broken/best_model/best.json").read_text())
    assert first["step"] == 0
    assert [line["step"] for line in train(recipe, resume=True).metrics] == [0, 1]
    train(recipe_of("unbroken", *keys))
    assert differing(result("broken"), result("unbroken")) == []
    best = [Path("runs", name, "best_model/best.json").read_text() for name in ("broken", "unbroken")]
    assert best[0] == best[1]


def test_with_more_steps_a_run_that_was_stopped_early_has_its_patience_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, 0.7, 0.1, 0.3, 0.2, 0.2)
    stop = "early_stop={metric: reward/mean, patience: 2}"
    assert train(kept("steps=8", stop)).metrics[-1]["step"] == 3
    outcome = train(kept("steps=9", stop), resume=True)
    assert outcome.metrics[-1]["step"] == 5
    assert outcome.reason == "early_stop: reward/mean was 0.7 at step 1; 2 values were no better"


def test_a_goal_that_is_reached_before_training_ends_the_run_there() -> None:
    metric = "evaluation/held_out/truncated_fraction"
    outcome = train(recipe_of("reached", "cold_start.steps=0", f"early_stop={{metric: {metric}, goal: 0}}"))
    assert [line["step"] for line in outcome.metrics] == [0] and "the goal is 0" in outcome.reason
    assert (outcome.model / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "checkpoint.best=reward/means",
            r"checkpoint\.best: no metric is called reward/means\n  fix: did you mean reward/mean",
        ),
        (
            "early_stop={metric: evaluation/heldout/pass_at_1, goal: 1}",
            r"early_stop\.metric: no metric is called (.|\n)*did you mean evaluation/held_out/pass_at_1",
        ),
        ("checkpoint.best=flux", "see docs/reference/metrics.md"),
    ],
)
def test_a_metric_that_no_run_has_is_refused_before_anything_is_loaded(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train(recipe_of("refused", override))
    assert not Path("runs").exists()
