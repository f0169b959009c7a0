"""The top of the page: what state a run is in, what it came to, how long it took, which diagnoses held when."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import run_of, steps_of
from tests.report.page.made_runs import begun, ended

from gspo.metrics.words import diagnoses
from gspo.report.page.overview import named_diagnoses, overview, state_sentence
from gspo.report.run_files import RunFiles

NOW = 1_800_000_000.0
CUT, GAP = "response/truncated_fraction", "mismatch/logprob_gap_mean"


AGAIN = "it can be resumed: gspo resume {path}"
STATES = [
    ("finished", None, "finished: {done}"),
    ("finished", "hook watch: enough", "finished: {done}; ended by hook watch: enough"),
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


def test_an_overview_has_what_could_not_be_read() -> None:
    made = overview(replace(run_of(history=[begun(), ended()]), notes=["2 line(s) of metrics.jsonl could not be read"]))
    assert made["notes"] == ["2 line(s) of metrics.jsonl could not be read"] and made["diagnoses"] == []
