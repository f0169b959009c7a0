"""What the person sees: lines, below them a bar in a terminal, nothing when quiet."""

import math
import os
import re
import sys
import time
from collections.abc import Callable
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gspo.recipe.load import load_recipe
from gspo.run import console as module
from gspo.run.console import Activity, Display
from gspo.run.summary import step_line
from gspo.train import train

TINY = Path(__file__).parents[1] / "tiny.yaml"

LINE: dict[str, Any] = {
    "reward/mean": 0.4567,
    "clip/token_fraction": 0.153,
    "group/zero_variance_fraction": 0.25,
    "response/mean_tokens": 123.4,
    "response/truncated_fraction": 0.1,
    "ratio/sequence_min": 0.9987,
    "ratio/sequence_max": 1.0012,
    "time/rollout_seconds": 1.5,
    "time/reward_seconds": 0.25,
    "time/likelihood_seconds": 0.5,
    "time/update_seconds": 2.0,
    "time/total_seconds": 5.0,
    "throughput/generated_tokens_per_second": 12345.6,
}
NUMBERS = (
    "reward 0.457  response tokens 123.4  clipped tokens 15.3%  equal-reward groups 25%  cut off 10%  "
    "sequence ratio 0.9987…1.0012  tokens/s 12,346  "
    "5.00 s a step (sampling 30%, rewards 5%, likelihoods 10%, update 40%, other 15%)"
)


def now() -> float:
    """The time in seconds, which a test may replace after rich is imported."""
    return time.monotonic()


def plain() -> tuple[Display, StringIO]:
    text = StringIO()
    return Display(Console(file=text, width=200, get_time=now)), text


def terminal(width: int = 140, **options: Any) -> tuple[Display, StringIO]:
    text = StringIO()
    options = {"force_terminal": True, "width": width, "height": 40, "highlight": False, **options}
    return Display(Console(file=text, get_time=now, **options)), text


def frame(display: Display) -> str:
    """The bar as it would be drawn now: one line."""
    assert display._bar is not None
    console = Console(file=StringIO(), width=display.console.width, height=40)
    console.print(display._bar)
    (line,) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return str(line)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test moves."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The timers that wait, for a test to fire: each has its seconds as `interval`."""
    waiting: list[Any] = []

    class Timer:
        def __init__(self, interval: float, function: Callable[..., Any], arguments: list[Any]) -> None:
            self.interval, self.fire = interval, lambda: function(*arguments)

        def start(self) -> None:
            waiting.append(self)

        def cancel(self) -> None:
            waiting.remove(self)

    monkeypatch.setattr(module.threading, "Timer", Timer)
    return waiting


def test_what_a_note_quotes_is_no_command_to_the_terminal_and_no_markup() -> None:
    for display, text in (plain(), terminal()):
        display.note("f raised: \x1b[2J\x9b\ud800 [bold] [/bold]\n  fix: it")
        assert "f raised: ␛[2J\\x9b\\ud800 [bold] [/bold]\n  fix: it\n" in text.getvalue()


def test_the_line_of_a_step_has_every_number() -> None:
    assert step_line(LINE) == NUMBERS
    nothing = step_line({**LINE, "ratio/sequence_min": math.nan, "ratio/sequence_max": math.nan})
    assert "sequence ratio – (nothing to train on)  " in nothing
    for number in (math.nan, math.inf, 1e308):
        step_line({**LINE, "reward/mean": number, "response/mean_tokens": number, "ratio/sequence_max": number})


@pytest.mark.parametrize(("engine", "expected"), [(0.125, "idle trainer 3%, engine 12%"), (math.nan, "engine –")])
def test_who_waits_is_shown_where_groups_are_sampled_ahead(engine: float, expected: str) -> None:
    beside = {
        "staleness/mean": 0.75,
        "staleness/tokens_by_age": [10.0, 0.0, 30.0],
        "staleness/dropped_groups": 3.0,
        "source/waiting": 4.0,
        "source/in_flight": 2.0,
        "source/trainer_idle_fraction": 0.03,
        "source/engine_idle_fraction": engine,
    }
    shown = ("tokens' age 0.8 steps (0: 25%, 2: 75%)", "ahead 4 sampled, 2 in flight", "too old 3 groups", expected)
    assert all(part in step_line(LINE | beside) for part in shown)


def test_without_a_terminal_each_step_is_a_line_without_control_characters(clock: list[float]) -> None:
    display, text = plain()
    display.start("GSPO", 400, done=4)
    for step in (5, 6, 7):
        clock[0] += 25.0
        display.step(step, step_line(LINE))
    display.stop()
    lines = [f"step {step}/400  {NUMBERS}  left {left}\n" for step, left in ((5, "2:44:35"), (6, "2:44:10"))]
    assert text.getvalue().startswith("".join(lines)) and text.getvalue().count("\n") == 3
    assert "\x1b" not in text.getvalue()


def test_in_a_terminal_each_step_has_a_line_above_one_bar(clock: list[float]) -> None:
    display, text = terminal()
    display.start("GSPO", 400)
    for step in range(1, 201):
        clock[0] += 2.0
        display.step(step, step_line(LINE))
    bar = frame(display)
    assert bar.startswith("GSPO ━━━━") and " 200/400 0:06:40 0:06:40 " in bar
    assert re.findall(r"step (\d+)/400  reward 0\.457 ", text.getvalue()) == [str(step) for step in range(1, 201)]
    display.note("note: [75%] of groups", style="yellow")
    display.stop()
    assert "200/400" in text.getvalue() and "note: [75%] of groups" in text.getvalue()
    display.note("afterwards")
    assert text.getvalue().rstrip().endswith("afterwards")


@pytest.mark.parametrize("width", [1, 10, 40, 60, 300])
def test_the_bar_is_one_line_of_any_width_and_a_step_keeps_each_number_whole(width: int) -> None:
    display, text = terminal()
    display.start("GSPO", 2000)
    display.console.width = width  # the window was resized: from the next frame on
    with display.stage("evaluation"):
        display.progress(128, 512, "responses, 12,345 tokens (1,234 a second)")
        display.step(1, step_line(LINE))
        assert len(frame(display)) <= width
        assert width < 40 or "1/2000" in frame(display)
    display.stop()
    assert NUMBERS in text.getvalue()


def test_the_quick_steps_of_a_cold_start_have_about_40_lines_the_first_and_the_last_among_them() -> None:
    for display, text in (plain(), terminal()):
        display.start("cold start", 1400, done=601)
        for step in range(602, 1401):
            display.step(step, "loss 1.000")
        display.stop()
        steps = [int(step) for step in re.findall(r"cold start (\d+)/1400  loss", text.getvalue())]
        assert steps == [602, *range(630, 1401, 35)]


def test_what_a_reward_function_prints_stays_readable_above_the_bar(capsys: Any) -> None:
    display = Display(Console(file=None, force_terminal=True, width=80, height=40))
    display.start("GSPO", 2)
    print("printed by a reward")
    display.stop()
    assert "printed by a reward\n" in capsys.readouterr().out
    assert sys.stdout.write is not None and not hasattr(sys.stdout, "rich_proxied_file")


def test_what_processes_print_is_shown_above_the_bar_and_else_on_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 2)
    display, text = terminal()
    with display.output_of_processes() as descriptor:
        display.start("GSPO", 2)
        os.write(descriptor, b"printed\n\x1b[2J by a \xff process")
        display.step(1, step_line(LINE))
        display.stop()
    assert "printed\n" in text.getvalue() and "␛[2J by a \ufffd process\n" in text.getvalue()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    with plain()[0].output_of_processes() as descriptor:
        assert descriptor == 2
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)  # standard error goes to a file
    with display.output_of_processes() as descriptor:
        assert descriptor == 2


def test_in_a_terminal_what_is_waited_for_is_named_and_is_gone_when_it_ends() -> None:
    display, text = terminal()
    with display.waiting("loading the data") as say:
        say("loading the model")
        display.progress(3, 12, "files")
        assert frame(display).rstrip() == "loading the model: 0 s so far, 3 of 12 files"
    assert text.getvalue().endswith("\r\x1b[1A\x1b[2K")  # the line is erased


def test_in_a_phase_what_is_waited_for_is_beside_the_bar(clock: list[float]) -> None:
    display, _ = terminal()
    with display.waiting("loading"):
        display.start("GSPO", 3)
    with display.stage("evaluation"):
        display.progress(128, 512, "responses")
        clock[0] += 2.0
        assert frame(display).rstrip().endswith(" evaluating: 2 s so far, 128 of 512 responses")
        with display.waiting("saving [red] {a} \x1b[2J checkpoint"):
            clock[0] += 2.0
            assert frame(display).rstrip().endswith(" saving [red] {a} ␛[2J checkpoint: 2 s so far")
        assert "evaluating: 4 s so far" in frame(display)
    with display.stage("advantage"):  # which takes no time
        assert "so far" not in frame(display)
    assert frame(display).startswith("GSPO ")
    display.stop()


def test_without_a_terminal_what_takes_minutes_has_a_line_a_minute_with_the_time_left(
    timers: list[Any], clock: list[float]
) -> None:
    display, text = plain()
    with display.waiting("gsm8k: sampling"):
        for done in (0, 5, 20):
            display.progress(done, 50, f"responses, {done * 100:,} tokens (20 a second)")
            clock[0] += 60.0
            timer = timers[-1]
            assert timer.interval == 60.0
            timer.fire()
    timers[0].fire()  # as what it waited for has just ended
    assert text.getvalue().splitlines() == [
        "gsm8k: sampling: 60 s so far, 0 of 50 responses, 0 tokens (20 a second)",
        "gsm8k: sampling: 120 s so far, 5 of 50 responses, 500 tokens (20 a second), about 18:00 left",
        "gsm8k: sampling: 180 s so far, 20 of 50 responses, 2,000 tokens (20 a second), about 4:30 left",
    ]


def test_an_alert_is_on_standard_error_at_once(capfd: Any) -> None:
    for display, _ in (plain(), terminal()):
        display.start("GSPO", 2)
        display.alert("ending, and saving what is done")
        assert capfd.readouterr().err == "\nending, and saving what is done\n"
        display.stop()


def test_a_dumb_terminal_gets_no_bar_and_one_without_colour_no_colour() -> None:
    for environment, bar in (({"TERM": "dumb"}, False), ({"NO_COLOR": "1", "TERM": "xterm"}, True)):
        display, text = terminal(_environ={**os.environ, **environment})
        display.start("GSPO", 1)
        display.step(1, step_line(LINE))
        display.stop()
        assert f"step 1/1  {NUMBERS}" in text.getvalue() and ("\x1b[2K" in text.getvalue()) == bar
        assert "\x1b[3" not in text.getvalue()


def test_a_file_is_no_terminal_even_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", text)
        display = Display()
        display.start("GSPO", 1)
        display.step(1, step_line(LINE))
        display.stop()
    assert text.getvalue().startswith("step 1/1") and "\x1b[2K" not in text.getvalue()


def test_a_terminal_of_another_encoding_gets_question_marks_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", TextIOWrapper(buffer, encoding="ascii"))
        Display().note("0.5 ± 0.1 → 0.7")
        sys.stdout.flush()
        assert buffer.getvalue() == b"0.5 ? 0.1 ? 0.7\n"


def test_a_quiet_display_prints_nothing(capsys: Any, timers: list[Any]) -> None:
    display = Display(quiet=True)
    display.start("GSPO", 1)
    with display.stage("rollout"):
        assert timers == []
    display.step(1, step_line(LINE))
    display.note("anything")
    display.stop()
    assert capsys.readouterr() == ("", "")


def test_a_run_names_all_that_it_waits_for_and_counts_what_can_be_counted() -> None:
    seen: set[str] = set()

    class Watched(Display):
        def _set(self, activity: Activity | None) -> None:
            seen.add("" if activity is None else activity.name)
            super()._set(activity)

        def progress(self, done: int, total: int, unit: str) -> None:
            assert self._activity is not None
            seen.add(f"{self._activity.name}: {unit.partition(',')[0]}")  # without the tokens so far

    train(load_recipe(TINY, ["steps=1", "checkpoint.every=1", "evaluation.num_queries=2"]), display=Watched(quiet=True))
    calls = "calls of reward functions"
    assert seen >= {
        "reading the queries",
        "loading the tokenizer of a new model, and reading the queries with it",
        "starting and trying the reward functions",
        "loading a new model",
        *("evaluating", "evaluating: responses", f"evaluating: {calls}"),
        *("sampling responses", "sampling responses: responses"),
        *("waiting for rewards", f"waiting for rewards: {calls}"),
        *("updating the weights", "saving a checkpoint", "writing the last checkpoint", "saving the model", ""),
    }
