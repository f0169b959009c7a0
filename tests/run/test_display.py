"""What the person sees: live in a terminal, plain lines elsewhere, nothing when quiet."""

from io import StringIO
from typing import Any

from rich.console import Console

from gspo.run.console import Display

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
    "throughput/generated_tokens_per_second": 12345.6,
}
SHOWN = ["0.457", "15.3%", "25%", "123.4", "10%", "0.9987…1.0012", "1.50+0.25+2.50", "12,346"]


def plain() -> tuple[Display, StringIO]:
    text = StringIO()
    return Display(Console(file=text, width=200)), text


def terminal() -> tuple[Display, StringIO]:
    text = StringIO()
    return Display(Console(file=text, force_terminal=True, width=140, height=40, highlight=False)), text


def test_what_a_note_quotes_is_no_command_to_the_terminal() -> None:
    for display, text in (plain(), terminal()):
        display.note("f raised: \x1b[2J\x9b\ud800 [bold]\n  fix: it")
        assert "f raised: ␛[2J\\x9b\\ud800 [bold]\n  fix: it\n" in text.getvalue()


def test_a_plain_step_is_one_line_with_every_number_and_no_control_characters() -> None:
    display, text = plain()
    display.start("GSPO", 3)
    display.step(1, LINE)
    (line,) = text.getvalue().splitlines()
    assert line.startswith("step 1/3") and "left " in line
    assert [number for number in SHOWN if number not in line] == []
    assert "\x1b" not in line


def test_a_terminal_shows_a_table_and_a_bar_that_end_with_the_phase() -> None:
    display, text = terminal()
    display.start("GSPO", 2)
    for step in (1, 2):
        display.step(step, {**LINE, "reward/mean": step / 10})
    display.stop()
    shown = text.getvalue()
    assert "\x1b" in shown and "2/2" in shown
    assert [number for number in [*SHOWN[1:], "0.100", "0.200"] if number not in shown] == []
    display.note("afterwards")
    assert text.getvalue().rstrip().endswith("afterwards")


def test_a_narrow_terminal_shows_fewer_columns_and_each_of_them_whole() -> None:
    text = StringIO()
    display = Display(Console(file=text, force_terminal=True, width=60, height=40, highlight=False))
    display.start("GSPO", 2)
    display.step(1, LINE)
    display.stop()
    shown = text.getvalue()
    assert [number in shown for number in SHOWN] == [True] * 5 + [False] * 3
    assert "0.9987" not in shown and "1.50" not in shown


def test_a_note_during_a_live_phase_stays_readable() -> None:
    display, text = terminal()
    display.start("GSPO", 2)
    display.note("diagnosis: [75%] of groups", style="yellow")
    display.stop()
    assert "diagnosis: [75%] of groups" in text.getvalue()


def test_the_cold_start_is_shown_in_both_kinds_of_console() -> None:
    for display, text in (plain(), terminal()):
        display.start("cold start", 2)
        display.cold_step(1, 2.5)
        display.cold_step(2, 1.25)
        display.stop()
        assert "cold start" in text.getvalue() and "1.250" in text.getvalue()


def test_a_long_phase_prints_few_plain_lines_with_the_first_and_the_last_among_them() -> None:
    for total in (39, 79, 119, 1400):
        display, text = plain()
        display.start("cold start", total)
        for step in range(1, total + 1):
            display.cold_step(step, 1.0)
        lines = text.getvalue().splitlines()
        assert len(lines) <= 42, (total, len(lines))
        assert f" 1/{total} " in lines[0] and f" {total}/{total} " in lines[-1]


def test_a_phase_taken_up_shows_its_first_step_and_reckons_with_its_own_time_alone(monkeypatch: Any) -> None:
    clock = [100.0]
    monkeypatch.setattr("gspo.run.console.time.monotonic", lambda: clock[0])
    display, text = plain()
    display.start("cold start", 1000, done=601)
    clock[0] += 3.0
    for step in range(602, 605):  # a second each, 396 left; the second and third are not due
        display.cold_step(step, 1.0)
    (line,) = text.getvalue().splitlines()
    assert "602/1000" in line and "left 19:54" in line  # 3 s for the one step that has been shown
    display, text = terminal()
    display.start("GSPO", 9, done=4)
    display.stop()
    assert "4/9" in text.getvalue()


def test_text_in_brackets_is_not_taken_for_markup() -> None:
    display, text = plain()
    display.note("the key [bold] and [/bold]")
    assert text.getvalue() == "the key [bold] and [/bold]\n"


def test_a_number_that_is_not_finite_can_be_shown() -> None:
    display, text = plain()
    display.start("GSPO", 1)
    display.step(1, {**LINE, "ratio/sequence_max": float("nan")})
    assert "nan" in text.getvalue()


def test_a_quiet_display_prints_nothing(capsys: Any) -> None:
    display = Display(quiet=True)
    display.start("GSPO", 1)
    display.step(1, LINE)
    display.note("anything")
    display.stop()
    assert capsys.readouterr() == ("", "")
