"""The processes of the built-in verifiers: what they cannot see, what an answer cannot outlast, and what it costs."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.samples import scores_of

from gspo.recipe.sections import RewardConfig
from gspo.reward.builtin import exact_match, math
from gspo.reward.calls import Processes, RewardFunction
from gspo.reward.functions import close_functions, load_functions
from gspo.reward.limits import MARK, within_cpu_limit
from gspo.reward.score import score
from gspo.sandbox.isolation import LOADER_VARIABLES


def rewards(scored: Any) -> list[float | None]:
    return [one.reward for one in scores_of(scored)]


@pytest.fixture
def verifier(tmp_path: Path) -> Iterator[Callable[..., RewardFunction]]:
    """A verifier whose process judges each answer, in 0.3 s of CPU time, by `judge(answer)` of a source text."""
    made: list[RewardFunction] = []

    def build(judge: str) -> RewardFunction:
        source = """
            import ctypes, os, signal, time
            from gspo.reward.limits import within_cpu_limit
            def f(completions):
                return [within_cpu_limit(0.3, judge, text) for text in completions]
        """
        (tmp_path / "verifier.py").write_text(textwrap.dedent(source) + textwrap.dedent(judge))
        host = Processes(f"{tmp_path}/verifier.py:f", concurrent_calls=1, is_verifier=True)
        made.append(RewardFunction(name="f", call=lambda completions: [], host=host))
        return made[-1]

    yield build
    close_functions(made)


def test_it_sees_nothing_of_the_environment(verifier: Any, groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HOME", "/home/secret")
    for name in LOADER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # /proc/self/environ is what it was started with, whatever it has set since.
    function = verifier(f"""
        def judge(answer):
            if os.path.exists("/proc/self/environ"):
                assert open("/proc/self/environ").read().startswith("{MARK}=")
                assert open("/proc/self/environ").read().count("=") == 1
            return float(any("secret" in value for value in os.environ.values()) or os.getcwd() != "/")
    """)
    assert rewards(score(groups(["a"]), [function])) == [0.0]


@pytest.mark.parametrize(
    "fault",
    ["while True: pass", "sum(iter(int, 1))", "ctypes.string_at(0)", "bytearray(2**40)", "9**9**9", "os.abort()"],
)
def test_an_answer_that_does_not_end_or_crashes_is_wrong_and_the_others_are_not(
    fault: str, verifier: Any, groups: Any
) -> None:
    function = verifier(f"""
        def judge(answer):
            if answer == "bad":
                {fault}
            return 1.0
    """)
    again = "bad" if "iter(int" not in fault else "d"  # which takes as long as an answer may, and then the grace
    scored = score(groups(["a", "bad", "b", again, "c"]), [function])
    assert rewards(scored) == [1.0, 0.0, 1.0, float(again != "bad"), 1.0]


def test_the_time_that_other_processes_take_is_not_the_answers(verifier: Any, groups: Any) -> None:
    function = verifier("def judge(answer):\n    time.sleep(0.5)\n    return 1.0\n")
    assert rewards(score(groups(["a"]), [function])) == [1.0]


def test_responses_that_each_take_their_limit_do_not_reach_that_of_a_call(verifier: Any, groups: Any) -> None:
    """The limit of time is one response's, as theirs of CPU time is: 8 × 0.3 s are more than 1.5 s."""
    function = verifier("def judge(answer):\n    while answer == 'bad':\n        pass\n    return 1.0\n")
    scored = score(groups(["bad"] * 8 + ["a"]), [replace(function, time_limit_seconds=1.5)])
    assert rewards(scored) == [0.0] * 8 + [1.0]


def test_a_busy_machine_changes_no_verdict(verifier: Any, groups: Any) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        function = verifier("""
            def judge(answer):
                end = time.process_time() + 0.2
                while answer == "bad" or (answer == "long" and time.process_time() < end):
                    pass
                return 1.0
        """)
        found = rewards(score(groups(["bad", "long", "bad", "a"]), [function]))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert found == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "crashed"), ("os._exit(3)", "crashed"), ("raise KeyError(0)", "raised")],
)
def test_what_is_no_fault_of_the_answer_masks_it(fault: str, kind: str, verifier: Any, groups: Any) -> None:
    function = verifier(f"""
        def judge(answer):
            if answer == "bad":
                {fault}
            return 1.0
    """)
    scored = score(groups(["a", "bad", "b", "c", "d"]), [function])
    assert rewards(scored) == [1.0, None, 1.0, 1.0, 1.0]
    failure = scores_of(scored)[1].failure
    assert failure is not None and failure.kind == kind


def test_a_computation_in_c_without_end_is_wrong_in_a_process_and_one_in_python_anywhere(groups: Any) -> None:
    hostile = "<answer>((9^{999})^{999})^{99}</answer>"
    (function,) = load_functions([RewardConfig(function="math", options={"seconds_per_answer": 0.5})])
    scored = score(groups(["\\boxed{7}", hostile, "\\boxed{7}"], answer=["7"]), [function])
    close_functions([function])
    assert rewards(scored) == [1.0, 0.0, 1.0]


def test_the_limit_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGPROF)
    math(["q"], ["\\boxed{7}"], answer=["7"])  # it imports
    assert math(["q"], ["\\boxed{7}"], answer=["7"], seconds_per_answer=0.05) == [1.0]
    deadline = time.process_time() + 0.2
    while time.process_time() < deadline:
        pass
    assert signal.getsignal(signal.SIGPROF) == before and signal.getitimer(signal.ITIMER_PROF)[0] == 0


def test_a_verifier_given_from_python_runs_in_processes_too() -> None:
    functions = load_functions((), [math, exact_match])
    assert [type(function.host).__name__ for function in functions] == ["Processes", "Threads"]
    assert [function.name for function in functions] == ["math", "exact_match"]
    close_functions(functions)


def test_neither_verifier_inherits_what_the_trainer_has_imported(groups: Any) -> None:
    (function,) = load_functions([RewardConfig(function="math")])
    score(groups(["7"], answer=["7"]), [function])
    workers = [child for child in psutil.Process().children() if "gspo.reward.worker" in " ".join(child.cmdline())]
    assert workers and all(worker.pid != os.getpid() for worker in workers)
    if os.path.exists("/proc/self/maps"):  # noqa: PTH110
        assert all("libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text() for worker in workers)
    close_functions([function])


def test_limits_hold_while_an_answer_is_judged_and_not_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[Any, ...]:
        return resource.getrlimit(resource.RLIMIT_CPU), signal.getsignal(signal.SIGPROF)

    def judge() -> float:
        return float(all(now != then for now, then in zip(found(), before, strict=True)))

    monkeypatch.setenv(MARK, "a worker's")
    before = found()
    try:
        assert within_cpu_limit(60.0, judge) == 1.0 and found() == before
        assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before[0])
