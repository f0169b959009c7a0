"""What the person sees: lines, below them a bar in a terminal, nothing when quiet."""

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gspo.recipe.load import load_recipe
from gspo.run import console as module
from gspo.run.console import Activity, Display
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
SHOWN = [
    "0.457",
    "123.4",
    "clipped tokens 15.3%",
    "equal-reward groups 25%",
    "cut off 10%",
    "sequence ratio 0.9987…1.0012",
]


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


def test_what_a_note_quotes_is_no_command_to_the_terminal() -> None:
    for display, text in (plain(), terminal()):
        display.note("f raised: \x1b[2J\x9b\ud800 [bold]\n  fix: it")
        assert "f raised: ␛[2J\\x9b\\ud800 [bold]\n  fix: it\n" in text.getvalue()


def test_a_plain_step_is_one_line_with_every_number_and_no_control_characters() -> None:
    display, text = plain()
    display.start("GSPO", 3)
    display.step(1, LINE)
    (line,) = text.getvalue().splitlines()
    assert line.startswith("step 1/3  reward 0.457  response tokens 123.4  ") and "left " in line
    assert [number for number in SHOWN if number not in line] == []
    assert "5.00 s a step (sampling 30%, rewards 5%, likelihoods 10%, update 40%, other 15%)" in line
    assert "\x1b" not in line


def test_in_a_terminal_each_step_has_a_line_above_one_bar(clock: list[float]) -> None:
    display, text = terminal()
    display.start("GSPO", 400)
    for step in range(1, 201):
        clock[0] += 2.0
        display.step(step, LINE)
    bar = frame(display)
    assert bar.startswith("GSPO ━━━━") and " 200/400 0:06:40 0:06:40 " in bar
    assert re.findall(r"step (\d+)/400  reward 0\.457 ", text.getvalue()) == [str(step) for step in range(1, 201)]
    display.stop()
    assert "200/400" in text.getvalue() and "\x1b" in text.getvalue()
    display.note("afterwards")
    assert text.getvalue().rstrip().endswith("afterwards")


@pytest.mark.parametrize("width", [1, 10, 40, 60, 300])
def test_the_bar_is_one_line_of_any_width_and_a_step_keeps_each_number_whole(width: int, clock: list[float]) -> None:
    display, text = terminal(width)
    display.start("GSPO", 2000)
    with display.stage("evaluation"):
        clock[0] += 3.0
        display.progress(128, 512, "responses, 12,345 tokens (1,234 a second)")
        display.step(1, LINE)
        assert len(frame(display)) <= width
        assert width < 40 or "1/2000" in frame(display)
    display.stop()
    assert [number for number in SHOWN if number not in text.getvalue()] == []


def test_a_terminal_that_is_resized_is_filled_from_the_next_frame_on(monkeypatch: pytest.MonkeyPatch) -> None:
    display, _ = terminal()
    display.start("GSPO", 2)
    display.step(1, LINE)
    wide = len(frame(display))
    display.console.width = 50
    assert len(frame(display)) <= 50 < wide
    display.stop()


def test_a_number_that_is_not_finite_can_be_shown() -> None:
    numbers = (math.nan, math.inf, -math.inf, 1e308, 1e308, -1e308, 0.5)
    for display, text in (plain(), terminal()):
        display.start("GSPO", len(numbers))
        for step, number in enumerate(numbers, start=1):
            changed = {"reward/mean": number, "response/mean_tokens": number, "ratio/sequence_max": number}
            display.step(step, {**LINE, **changed})
        display.stop()
        assert "0.500" in text.getvalue()


def test_a_step_that_has_trained_nothing_says_so_in_words() -> None:
    display, text = plain()
    display.start("GSPO", 1)
    display.step(1, {**LINE, "ratio/sequence_min": math.nan, "ratio/sequence_max": math.nan})
    assert "sequence ratio – (nothing to train on)" in text.getvalue()


def test_a_note_during_a_live_phase_stays_readable() -> None:
    display, text = terminal()
    display.start("GSPO", 2)
    display.note("note: [75%] of groups", style="yellow")
    display.stop()
    assert "note: [75%] of groups" in text.getvalue()


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
        display.step(1, LINE)
        display.stop()
    assert "printed\n" in text.getvalue() and "␛[2J by a \ufffd process\n" in text.getvalue()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    with plain()[0].output_of_processes() as descriptor:
        assert descriptor == 2
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)  # standard error goes to a file
    with display.output_of_processes() as descriptor:
        assert descriptor == 2


def test_only_new_diagnoses_are_lines() -> None:
    for display, text in (plain(), terminal()):
        display.start("GSPO", 2)
        display.diagnoses({"a": "first", "b": "second"}, new=["b"])
        display.diagnoses({"b": "second"}, new=[])
        display.stop()
        assert re.findall(r"diagnosis: \w+", text.getvalue()) == ["diagnosis: second"]


def test_the_cold_start_is_shown_in_both_kinds_of_console() -> None:
    for display, text in (plain(), terminal()):
        display.start("cold start", 2)
        display.cold_step(1, 2.5)
        display.cold_step(2, 1.25)
        display.stop()
        assert "cold start" in text.getvalue() and "1.250" in text.getvalue()


def test_quick_steps_of_a_cold_start_do_not_flood_a_terminal_either() -> None:
    display, text = terminal()
    display.start("cold start", 1400)
    for step in range(1, 1401):
        display.cold_step(step, 1.0)
    display.stop()
    assert len(re.findall(r"cold start \d+/1400  loss", text.getvalue())) == 41


def test_a_long_phase_prints_few_plain_lines_with_the_first_and_the_last_among_them_and_says_the_rule() -> None:
    for total, every in ((39, 1), (79, 2), (119, 3), (1400, 35)):
        display, text = plain()
        display.start("cold start", total)
        for step in range(1, total + 1):
            display.cold_step(step, 1.0)
        lines = text.getvalue().splitlines()
        rule = [f"cold start: a line every {every} steps, and at least once a minute; cold_start.jsonl has every step"]
        assert [line for line in lines if "every" in line] == (rule if every > 1 else [])
        lines = [line for line in lines if "every" not in line]
        assert len(lines) <= 42, (total, len(lines))
        assert f" 1/{total} " in lines[0] and f" {total}/{total} " in lines[-1]


def test_slow_steps_have_a_plain_line_once_a_minute(clock: list[float]) -> None:
    display, text = plain()
    display.start("GSPO", 400)  # a line every 10 steps
    for step in range(1, 8):
        clock[0] += 25.0
        display.step(step, LINE)
    assert re.findall(r"step (\d+)/", text.getvalue()) == ["1", "4", "7"]


def test_a_phase_taken_up_shows_its_first_step_and_reckons_with_its_own_time_alone(clock: list[float]) -> None:
    display, text = plain()
    display.start("cold start", 1000, done=601)
    clock[0] += 3.0
    for step in range(602, 605):  # the second and third are not due
        display.cold_step(step, 1.0)
    _, line = text.getvalue().splitlines()
    assert "602/1000" in line and "left 19:54" in line  # 3 s for the step that has been shown, 398 to go
    display, _ = terminal()
    display.start("GSPO", 9, done=4)
    assert " 4/9 0:00:00 -:--:-- " in frame(display)
    clock[0] += 6.0
    display.step(5, LINE)
    clock[0] += 2.0
    assert " 5/9 0:00:08 0:00:24 " in frame(display)  # 4 steps of 6 s
    display.stop()


def test_an_activity_of_seconds_is_named_in_a_terminal_and_is_gone_when_it_ends(timers: list[Any]) -> None:
    display, text = terminal()
    with display.waiting("loading the data") as say:
        say("loading the model")
        (timer,) = timers
        assert timer.interval == 2.0 and text.getvalue() == ""
        timer.fire()
        assert "loading the model" in text.getvalue()
        display.progress(3, 12, "files")
        assert frame(display).rstrip() == "loading the model: 0 s so far, 3 of 12 files"
    assert timers == [] and text.getvalue().endswith("\n\x1b[?25h\r\x1b[1A\x1b[2K")  # the line is erased


def test_without_a_terminal_an_activity_of_ten_seconds_has_one_line_a_phase(
    timers: list[Any], clock: list[float]
) -> None:
    display, text = plain()
    display.start("GSPO", 3)
    for step in range(1, 3):
        with display.stage("rollout"):
            display.progress(5, 512, "responses")
            clock[0] += 10.0
            for timer in list(timers):
                assert timer.interval == 10.0
                timer.fire()
        display.step(step, LINE)
    lines = text.getvalue().splitlines()
    assert lines[0] == "sampling responses: 10 s so far, 5 of 512 responses"
    assert [line.partition("  ")[0] for line in lines[1:]] == ["step 1/3", "step 2/3"]


def test_without_a_terminal_what_takes_minutes_has_a_line_a_minute_with_the_time_left(
    timers: list[Any], clock: list[float]
) -> None:
    display, text = plain()
    with display.waiting("gsm8k: sampling"):
        for done, seconds in ((0, 10.0), (5, 60.0), (20, 60.0)):
            display.progress(done, 50, f"responses, {done * 100:,} tokens (20 a second)")
            clock[0] += seconds
            timer = timers[-1]
            assert timer.interval == seconds
            timer.fire()
    assert text.getvalue().splitlines() == [
        "gsm8k: sampling: 10 s so far, 0 of 50 responses, 0 tokens (20 a second)",
        "gsm8k: sampling: 70 s so far, 5 of 50 responses, 500 tokens (20 a second), about 10:30 left",
        "gsm8k: sampling: 130 s so far, 20 of 50 responses, 2,000 tokens (20 a second), about 3:15 left",
    ]


def test_in_a_phase_an_activity_is_beside_the_bar_once_it_takes_seconds(timers: list[Any], clock: list[float]) -> None:
    display, _ = terminal()
    display.start("GSPO", 3)
    display.step(1, LINE)
    with display.stage("evaluation"):
        display.progress(128, 512, "responses")
        assert "evaluating" not in frame(display)
        clock[0] += 2.0
        assert frame(display).rstrip().endswith(" evaluating: 2 s so far, 128 of 512 responses")
        with display.waiting("saving [red] {a} \x1b[2J checkpoint"):
            clock[0] += 2.0
            assert frame(display).rstrip().endswith(" saving [red] {a} ␛[2J checkpoint: 2 s so far")
        assert "evaluating: 4 s so far" in frame(display)
    assert "so far" not in frame(display) and timers == []  # the bar is drawn again and again in any case
    display.stop()


def test_a_stage_that_takes_no_time_has_no_name(timers: list[Any]) -> None:
    display, _ = plain()
    with display.stage("total"), display.stage("advantage"):
        assert timers == []


def test_a_timer_that_fires_as_its_activity_ends_shows_nothing(timers: list[Any]) -> None:
    for display, text in (plain(), terminal()):
        with display.waiting("loading"):
            (timer,) = timers
        timer.fire()
        assert text.getvalue() == ""


def test_a_timer_that_fires_as_a_phase_begins_draws_no_second_bar(timers: list[Any]) -> None:
    display, _ = terminal()
    with display.waiting("loading"):
        (timer,) = timers
        display.start("GSPO", 2)
        timer.fire()
        assert frame(display).startswith("GSPO ")
        display.stop()


def test_an_alert_is_on_standard_error_at_once(capfd: Any) -> None:
    for display, _ in (plain(), terminal()):
        display.start("GSPO", 2)
        display.alert("ending, and saving what is done")
        assert capfd.readouterr().err == "\nending, and saving what is done\n"
        display.stop()


def test_a_dumb_terminal_and_one_without_colour_get_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "TERM": "dumb"}
    display, text = terminal(_environ=environment)
    display.start("GSPO", 1)
    display.step(1, LINE)
    assert text.getvalue().startswith("step 1/1") and "\x1b[2K" not in text.getvalue()
    display, text = terminal(_environ={**os.environ, "NO_COLOR": "1", "TERM": "xterm"})
    display.start("GSPO", 1)
    display.step(1, LINE)
    display.stop()
    assert "\x1b[3" not in text.getvalue() and "1/1" in text.getvalue()


@contextmanager
def standard_output(stream: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield stream


def test_a_file_is_no_terminal_even_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with standard_output(StringIO(), monkeypatch) as text:
        display = Display()
        display.start("GSPO", 1)
        display.step(1, LINE)
        display.stop()
    assert text.getvalue().startswith("step 1/1") and "\x1b[2K" not in text.getvalue()


def test_a_terminal_of_another_encoding_gets_question_marks_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = BytesIO()
    with standard_output(TextIOWrapper(buffer, encoding="ascii"), monkeypatch) as text:
        display = Display()
        display.note("0.5 ± 0.1 → 0.7")
        text.flush()
        assert buffer.getvalue() == b"0.5 ? 0.1 ? 0.7\n"


def test_text_in_brackets_is_not_taken_for_markup() -> None:
    display, text = plain()
    display.note("the key [bold] and [/bold]")
    assert text.getvalue() == "the key [bold] and [/bold]\n"


def test_a_quiet_display_prints_nothing(capsys: Any, timers: list[Any]) -> None:
    display = Display(quiet=True)
    display.start("GSPO", 1)
    with display.stage("rollout"):
        assert timers == []
    display.step(1, LINE)
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
        *(
            "sampling responses",
            "sampling responses: responses",
            "waiting for rewards",
            f"waiting for rewards: {calls}",
        ),
        *("updating the weights", "saving a checkpoint", "writing the last checkpoint", "saving the model", ""),
    }


@pytest.mark.parametrize(("engine", "expected"), [(0.125, "idle trainer 3%, engine 12%"), (math.nan, "engine –")])
def test_who_waits_is_shown_where_groups_are_sampled_ahead(engine: float, expected: str) -> None:
    display, text = plain()
    beside = {
        "staleness/mean": 0.75,
        "staleness/tokens_by_age": [10.0, 0.0, 30.0],
        "staleness/dropped_groups": 3.0,
        "source/waiting": 4.0,
        "source/in_flight": 2.0,
        "source/trainer_idle_fraction": 0.03,
        "source/engine_idle_fraction": engine,
    }
    display.start("GSPO", 2)
    display.step(1, LINE | beside)
    shown = ("tokens' age 0.8 steps (0: 25%, 2: 75%)", "ahead 4 sampled, 2 in flight", "too old 3 groups", expected)
    assert all(part in text.getvalue() for part in shown)
