"""Hooks: what they see, what they may ask for, what becomes of one that fails, and that a resumed run asks the same."""

import io
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.breaking_off import GRADIENT, SAMPLING, differing, logged, recipe_of, result, train

import gspo
from gspo.errors import UserError
from gspo.run.console import Display
from gspo.run.hooks import Action, call_hooks, fault_of, load_hooks

FAST = ("cold_start.steps=0", "evaluation.num_queries=0", "rollout.queries_per_step=4", "rollout.max_new_tokens=6")


def printed(recipe: Any, **given: Any) -> str:
    text = io.StringIO()
    gspo.train(recipe, display=Display(Console(file=text, width=250)), **given)
    return text.getvalue()


def asked(*hooks: Any, line: Any = None) -> Action:
    """What hooks ask for after a step; the first error is raised."""
    named = {f"hook_{place}": hook for place, hook in enumerate(hooks)}

    def fail(name: str, error: BaseException) -> None:
        raise fault_of(name, error, named[name])

    return call_hooks(named, line or {"step": 3, "list": [1.0]}, lambda: [{"reward": 1.0}], fail)


def test_a_hook_sees_the_steps_line_and_the_lines_of_its_rollouts() -> None:
    seen: list[Any] = []
    outcome = train(
        recipe_of("seen", "steps=2"),
        on_step=lambda step, metrics, samples: seen.append((step, metrics, len(samples), list(samples))),
    )
    assert [step for step, *_ in seen] == [1, 2]  # not after the evaluation before training
    for step, metrics, number, samples in seen:
        lines = Path(f"runs/seen/rollouts/step_{step:06d}.jsonl").read_text().splitlines()
        assert samples == [json.loads(line) for line in lines] and number == len(lines)
        line = outcome.metrics[step]
        changed = {name for name, value in line.items() if repr(metrics.get(name)) != repr(value)}
        assert changed == {"time/hooks_seconds", "time/elapsed_seconds"}


def test_what_a_hook_does_to_what_it_is_given_changes_nothing() -> None:
    def spoil(step: int, metrics: Any, samples: Any) -> None:
        metrics["list"].clear()
        metrics.clear()
        samples[0].clear()

    line, rewards = {"step": 3, "list": [1.0]}, []
    asked(spoil, lambda step, metrics, samples: rewards.append(samples[0]["reward"]), line=line)
    assert line == {"step": 3, "list": [1.0]} and rewards == [1.0]


def test_what_several_hooks_ask_for_is_put_together() -> None:
    action = asked(
        lambda *_: {"log": {"a": torch.tensor(1.5), "b/c": np.float32(2)}, "temperature": 0.5},
        lambda *_: None,
        lambda *_: {"log": {"a": 2, "d": 3}, "temperature": 0.7, "stop": "enough"},
    )
    assert action == Action(log={"a": 2.0, "b/c": 2.0, "d": 3.0}, temperature=0.7, stop="hook hook_2: enough")


def raises(*_: Any) -> None:
    raise ValueError("no luck")


def leaves(*_: Any) -> None:
    raise SystemExit


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (raises, rf"hook hook_0: raises ValueError: no luck, at .*{Path(__file__).name}:\d+\n  fix: correct it"),
        (leaves, 'raises SystemExit.*\n  fix: return {"stop": "why"}'),
        (
            lambda *_: 3,
            r"returns no mapping: .*, not 3\n  fix: return None or a dictionary with any of the keys log, stop, ",
        ),
        (lambda *_: {"stopp": "x"}, "returns stopp: Extra inputs are not permitted"),
        (lambda *_: {"stop": True}, "returns stop: should be a valid string, not True"),
        (lambda *_: {"temperature": 0}, "returns temperature: should be greater than or equal to"),
        (lambda *_: {"learning_rate_factor": 0}, "returns learning_rate_factor: should be greater than 0, not 0"),
        (lambda *_: {"learning_rate_factor": 10.5}, "should be less than or equal to 10, not 10.5"),
        (lambda *_: {"learning_rate_factor": float("nan")}, "returns learning_rate_factor"),
        (lambda *_: {"log": {"a b": 1}}, "returns log.a b"),
        (lambda *_: {"log": {"a": "x"}}, "returns log.a: should be a valid number"),
    ],
)
def test_what_is_wrong_with_a_hook_is_said_with_what_to_do(hook: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        asked(hook)


@pytest.mark.parametrize("given", [3, lambda step, metrics: None])
def test_what_cannot_be_called_as_a_hook_is_refused_before_anything_is_loaded(given: Any) -> None:
    with pytest.raises(UserError, match=r"on_step cannot be called with step, metrics and samples(.|\n)*def hook"):
        load_hooks((), given)


def test_an_async_hook_is_refused_before_anything_is_loaded() -> None:
    async def hook(step: int, metrics: Any, samples: Any) -> None: ...

    with pytest.raises(UserError, match="on_step is async"):
        load_hooks((), hook)  # type: ignore[arg-type]


def steer(step: int, metrics: Any, samples: Any) -> Any:
    """Other numbers after each step, which follow from its own."""
    factor, temperature = metrics["policy/learning_rate_factor"] / 2, 1 + metrics["reward/mean"] / 4
    return {"log": {"best": max(s["reward"] for s in samples)}, "learning_rate_factor": factor} | (
        {"temperature": temperature} if step == 1 else {}
    )


def test_what_a_hook_sets_holds_from_the_next_step_on() -> None:
    lines = train(recipe_of("steered", *FAST), on_step=steer).metrics
    assert [line["policy/learning_rate"] for line in lines] == [1e-3, 5e-4, 2.5e-4]
    assert [line["policy/learning_rate_factor"] for line in lines] == [1, 0.5, 0.25]
    temperature = 1 + lines[0]["reward/mean"] / 4
    assert [line["policy/temperature"] for line in lines] == [1, temperature, temperature]
    assert all(line["hook/best"] >= line["reward/mean"] for line in lines)


def test_a_temperature_that_was_changed_is_that_of_sampling_and_of_every_likelihood() -> None:
    """Where the first step changes no weight, the second is that of a recipe with the temperature."""
    still = ("steps=2", "actor.optimizer.lr=1e-30", "actor.kl.coefficient=0.1", *FAST)
    train(recipe_of("changed", *still), on_step=lambda *_: {"temperature": 0.5})
    train(recipe_of("fixed", "rollout.temperature=0.5", *still))
    changed, fixed = (logged(Path("runs", name, "metrics.jsonl"))[1] for name in ("changed", "fixed"))
    assert changed["policy/temperature"] == 0.5
    assert {name: changed[name] for name in fixed} == fixed
    files = [Path("runs", name, "rollouts/step_000002.jsonl").read_text() for name in ("changed", "fixed")]
    assert files[0] == files[1]


def test_a_run_that_a_hook_steers_is_the_same_wherever_it_is_broken_off(broken_off: Callable[..., Any]) -> None:
    train(recipe_of("unbroken", *FAST), on_step=steer)
    broken = recipe_of("broken", *FAST)
    broken_off(broken, SAMPLING, 8, on_step=steer)  # in step 2, of six draws: killed right after the change
    broken_off(broken, GRADIENT, 2, on_step=steer, resume=True)
    train(broken, on_step=steer, resume=True)
    assert differing(result("broken"), result("unbroken")) == []


def test_a_hook_ends_a_run_cleanly_and_more_steps_go_on_from_there() -> None:
    recipe = recipe_of("ended", "steps=3", "rollout.queries_per_step=4", "rollout.max_new_tokens=6")
    outcome = train(recipe, on_step=lambda step, *_: {"stop": "good enough"} if step == 1 else None)
    assert outcome.reason == "hook on_step: good enough" and outcome.signal is None
    assert outcome.model == Path("runs/ended/model") and (outcome.model / "model.safetensors").is_file()
    assert [line["step"] for line in outcome.metrics] == [0, 1]
    assert "evaluation/held_out/pass_at_1" in outcome.metrics[-1]  # evaluated as at the end of any run
    last = json.loads(Path("runs/ended/history.jsonl").read_text().splitlines()[-1])
    assert (last["how"], last["reason"], last["step"]) == ("finished", outcome.reason, 1)
    again = printed(recipe, resume=True)
    assert "ended after step 1: hook on_step: good enough; more are made with another steps=…" in again
    assert len(logged(Path("runs/ended/metrics.jsonl"))) == 2
    further = train(recipe.model_copy(update={"steps": 2}), resume=True)
    assert further.reason is None and [line["step"] for line in further.metrics] == [0, 1, 2]
    train(recipe_of("at_once", "steps=2", "rollout.queries_per_step=4", "rollout.max_new_tokens=6"))
    weights = [Path("runs", name, "model/model.safetensors").read_bytes() for name in ("ended", "at_once")]
    assert weights[0] == weights[1]


HOOKS = """
def fails(step, metrics, samples):
    raise ValueError("no luck")
"""


def test_a_hook_that_fails_ends_the_run_saved_and_once_it_is_correct_the_run_is_the_unbroken_one() -> None:
    Path("hooks.py").write_text(HOOKS)
    recipe = recipe_of("failed", "hooks=[hooks.py:fails]", "steps=2", *FAST)
    with pytest.raises(UserError, match=r"hooks\.py:fails: raises ValueError: no luck, at .*hooks\.py:3"):
        train(recipe)
    Path("hooks.py").write_text("def fails(step, metrics, samples):\n    return {'log': {'step': step}}\n")
    text = printed(recipe, resume=True)
    assert "NOT an exact resume: code of hook hooks.py:fails was" in text
    train(recipe.model_copy(update={"name": "unbroken"}))
    assert differing(result("failed"), result("unbroken")) == []
    assert [line["hook/step"] for line in logged(Path("runs/failed/metrics.jsonl"))] == [1, 2]


def test_a_hook_that_fails_is_masked_where_the_recipe_says_so_and_named_once() -> None:
    Path("hooks.py").write_text(HOOKS)
    recipe = recipe_of("masked", "hooks=[hooks.py:fails]", "hook_errors=warn", "steps=2", *FAST)
    text = printed(recipe, on_step=lambda step, *_: {"log": {"step": step}})
    assert text.count("warning: hook hooks.py:fails raises ValueError: no luck, at ") == 1
    assert [line["hook/step"] for line in logged(Path("runs/masked/metrics.jsonl"))] == [1, 2]
    train(recipe_of("without", "steps=2", *FAST))
    for line, other in zip(
        *(logged(Path("runs", name, "metrics.jsonl")) for name in ("masked", "without")), strict=True
    ):
        assert {**line, **other} == line


def test_a_second_ctrl_c_ends_a_hook_that_hangs_and_saves_the_run() -> None:
    def hang(step: int, metrics: Any, samples: Any) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError

    recipe = recipe_of("hangs", "steps=2", *FAST)
    text = printed(recipe, on_step=hang)
    assert "ended" not in text and "to go on: gspo.train(recipe, on_step=…, resume=True)" in text
    assert logged(Path("runs/hangs/history.jsonl"))[-1]["reason"] == "SIGINT"
    assert train(recipe, on_step=lambda *_: None, resume=True).metrics[-1]["step"] == 2


def test_a_hook_from_python_that_is_not_given_again_is_missed() -> None:
    recipe = recipe_of("missed", "steps=1", *FAST)
    train(recipe, on_step=steer)
    text = printed(recipe, resume=True)
    assert "NOT an exact resume: code of hook on_step was" in text
    assert "is None; it is not called: from Python, give on_step= again" in text


def test_check_names_the_hooks(capsys: pytest.CaptureFixture[str]) -> None:
    from gspo.check import check

    Path("hooks.py").write_text(HOOKS)
    assert "hooks       hooks.py:fails" in list(check(recipe_of("checked", "hooks=[hooks.py:fails]")))
    with pytest.raises(UserError, match=r"hooks: hooks\.py has no function 'fail'\n  fix: did you mean fails"):
        list(check(recipe_of("checked", "hooks=[hooks.py:fail]")))
