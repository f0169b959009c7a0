"""The top of the page: what state a run is in, what it came to, how long it took, which diagnoses held when."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import run_of, steps_of
from tests.report.page.made_runs import begun, ended

from gspo.metrics.words import diagnoses
from gspo.report.page.overview import duration, named_diagnoses, overview, run_seconds, state_sentence
from gspo.report.run_files import RunFiles

NOW = 1_800_000_000.0
CUT, GAP = "response/truncated_fraction", "mismatch/logprob_gap_mean"


def at(seconds: float) -> str:
    return datetime.fromtimestamp(NOW + seconds, UTC).isoformat(timespec="seconds")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 min 0 s"),
        (59.4, "0 min 59 s"),
        (59.6, "1 min 0 s"),
        (191, "3 min 11 s"),
        (3599.9, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (360_000, "100 h 00 min"),
    ],
)
def test_a_duration_is_told_as_one_says_it(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def seconds_of(
    *history: dict[str, Any], state: str, log: list[dict[str, Any]] | None = None, path: Path | None = None
) -> float:
    return run_seconds(run_of(log or [], history=history, state=state, path=path))


def test_a_finished_run_took_what_its_last_end_says() -> None:
    history = [begun(time=at(-500)), ended(), begun(time=at(-300), event="resumed"), {**ended(), "seconds": 250.0}]
    assert seconds_of(*history, state="finished") == 250
    assert seconds_of(*history[:2], state="stopped") == 100


def test_without_a_history_a_run_took_what_its_last_line_says() -> None:
    assert seconds_of(state="unknown", log=steps_of("time/elapsed_seconds", [2.0, 3.5])) == 3.5
    assert seconds_of(state="unknown", log=steps_of("time/total_seconds", [2.0, 3.5])) == 0
    assert seconds_of(state="unknown") == 0


AGAIN = "it can be resumed: gspo resume {path}"
STATES = [
    ("finished", None, "finished: {done}"),
    ("running", None, "still running: {done}"),
    ("stopped", "SIGTERM", f"stopped by SIGTERM after {{done}}; {AGAIN}"),
    ("interrupted", None, f"interrupted at once after {{done}}; {AGAIN}"),
    ("failed", "the disk is full", f"failed after {{done}} ({AGAIN}): the disk is full"),
    ("killed", None, f"killed, or crashed, after {{done}}; {AGAIN}"),
    ("unknown", None, "{done}; nothing here says whether it still runs"),
]


def checkpoint(path: Path, name: str) -> None:
    folder = (
        path / ("cold_start_checkpoints" if name.startswith("cold/") else "checkpoints") / name.removeprefix("cold/")
    )
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


@pytest.mark.parametrize(("state", "reason", "told"), STATES)
def test_each_state_is_a_sentence(state: str, reason: str | None, told: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, "step_000018")
    history = [begun(), ended(state, reason)]
    run = run_of(steps_of("x", [1, 2, 3]), history=history, state=state, path=tmp_path)
    done = "3 of 6 steps so far" if state == "running" else "3 of 6 steps"
    assert state_sentence(run) == told.format(done=done, path=tmp_path)


@pytest.mark.parametrize(("state", "reason", "told"), [one for one in STATES if one[0] not in ("finished", "unknown")])
def test_where_no_step_is_done_it_is_told_how_far_the_cold_start_is(
    state: str, reason: str | None, told: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, "step_000018")
    given: dict[str, Any] = {"history": [begun(), ended(state, reason)], "state": state, "path": tmp_path}
    cold: list[dict[str, Any]] = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.23456}]

    def said(**more: Any) -> str:
        return state_sentence(run_of(more.pop("log", []), **given, **more))

    of_20 = {"cold_start": {"steps": 20}}
    done = "2 of 20 steps of the cold start, loss 1.235"
    assert said(cold_start=cold, settings=of_20) == told.format(done=done, path=tmp_path)
    without = said(cold_start=[*cold, {"step": 3, "loss": None}], settings=of_20)
    assert without == told.format(done="3 of 20 steps of the cold start", path=tmp_path)
    odd = said(cold_start=cold, settings={"cold_start": None})  # a recipe of another version
    assert odd == told.format(done=done.replace("20", "None"), path=tmp_path)
    beyond = said(cold_start=cold, settings=of_20, log=steps_of("x", [1]))
    assert "1 of 6 steps" in beyond and "cold start" not in beyond


def test_the_runs_own_words_introduce_it_the_last_ones() -> None:
    history = [begun(introduction="first"), ended(), begun(introduction="a\nb", event="resumed"), ended()]
    assert overview(run_of(history=history))["introduction"] == ["a", "b"]


def with_cuts(*cuts: float, **more: Any) -> RunFiles:
    """A run with this fraction of its responses cut off at each step, from step 3."""
    return run_of([{**line, **more} for line in steps_of(CUT, list(cuts), first=3)])


def test_a_diagnosis_is_told_with_the_steps_at_which_it_held() -> None:
    run = with_cuts(*[0.0] * 5, *[0.6] * 10, *[0.0] * 15)
    # The mean of ten is at least a quarter from the fifth of 0.6, at the tenth step, to the sixth 0 after the last.
    assert named_diagnoses(run) == ["30% of responses cut off at rollout.max_new_tokens: raise it (step 12 to 22)"]


def test_a_diagnosis_is_the_windows_last_word() -> None:
    cuts = [0.0, 0.1, 0.9, 0.4, 0.5, 0.0, 0.3, 0.9, 0.9, 0.9, 0.2, 0.9, 0.0, 0.1, 0.9]
    run, held = with_cuts(*cuts), {}
    for number_of_lines in range(10, len(cuts) + 1):
        if found := diagnoses(run.steps[:number_of_lines]):
            held[run.steps[number_of_lines - 1]["step"]] = found["truncated"]
    assert len(held) == 6
    told = f"{held[max(held)]} (step {min(held)} to {max(held)}, and still at the end)"
    assert named_diagnoses(run) == [told]


def test_a_diagnosis_of_one_step_has_one() -> None:
    run = with_cuts(*[0.0] * 9, 1.0, *[0.3] * 9)
    sentences = [sentence for sentence in named_diagnoses(run) if "(step" in sentence]
    assert sentences == [
        "37% of responses cut off at rollout.max_new_tokens: raise it (step 17 to 21, and still at the end)"
    ]
    one = with_cuts(*[0.25] * 10, 0.0)
    assert named_diagnoses(one) == ["25% of responses cut off at rollout.max_new_tokens: raise it (step 12)"]


def test_a_short_run_is_judged_once_by_what_there_is() -> None:
    assert named_diagnoses(with_cuts(0.0, 0.9)) == [
        "45% of responses cut off at rollout.max_new_tokens: raise it (step 4, and still at the end)"
    ]
    assert named_diagnoses(run_of()) == named_diagnoses(run_of([{"step": 0, CUT: 1.0}])) == []


def test_several_diagnoses_are_told_each_with_its_own_steps() -> None:
    run = with_cuts(*[0.5] * 10, *[0.0] * 10)
    for place, line in enumerate(run.steps):
        assert isinstance(line, dict)
        line[GAP] = 1.0 if place >= 15 else 0.0
    sentences = named_diagnoses(run)
    assert [sentence.split(" (step")[1] for sentence in sentences] == [" 12 to 17)", " 18 to 22, and still at the end)"]


def test_the_recipes_actor_decides_and_one_of_another_version_is_read_as_the_default() -> None:
    unclipped = [0.0] * 12
    log = steps_of("clip/token_fraction", unclipped)
    inert = named_diagnoses(run_of(log))
    assert len(inert) == 1 and "narrow them" in inert[0] and inert[0].endswith("(step 10 to 12, and still at the end)")
    assert named_diagnoses(run_of(log, settings={"actor": {"mini_batches": 1}})) == []
    odd: list[Any] = [{"mini_batches": 1, "flux": 3}, None, "gspo", []]
    for actor in odd:
        assert named_diagnoses(run_of(log, settings={"actor": actor})) == inert


def test_an_overview_has_the_time_and_what_could_not_be_read() -> None:
    made = overview(replace(run_of(history=[begun(), ended()]), notes=["2 line(s) of metrics.jsonl could not be read"]))
    assert made["notes"] == ["2 line(s) of metrics.jsonl could not be read"] and made["diagnoses"] == []
    assert made["time"] == "1 min 40 s"
