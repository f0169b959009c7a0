"""The process that verifies answers: what it cannot see, cannot say, cannot outlast, and what each costs."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gspo.reward import verifier_process
from gspo.reward.verifier_process import Verifier, VerifierError

START = """
import sys
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
sys.path[:], kind = link.recv()
"""


@pytest.fixture
def verifier_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Verifier]]:
    """A verifier whose process judges each answer by `judge(answer)` of a source text, or runs another `source`."""
    made: list[Verifier] = []

    def build(judge: str = "", *, source: str = "") -> Verifier:
        served = """
            import ctypes, gc, os, signal, time
            from gspo.reward import verifier
            verifier._load = lambda kind: lambda **subject: judge
            verifier.serve(link, kind)
        """
        code = START + textwrap.dedent(judge) + textwrap.dedent(source or served)
        monkeypatch.setattr(verifier_process, "_START", code)
        made.append(Verifier("math"))
        made[-1].start()
        return made[-1]

    yield build
    for verifier in made:
        verifier.end()


def asked(verifier: Verifier, *answers: str, seconds: float = 5.0) -> list[float]:
    return verifier.scores({}, answers, seconds=seconds)


def test_it_sees_nothing_of_the_environment(verifier_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HOME", "/home/secret")
    for name in verifier_process._LOADER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # /proc/self/environ is what it was started with, whatever it has set since.
    verifier = verifier_of("""
        def judge(answer):
            if os.path.exists("/proc/self/environ"):
                assert open("/proc/self/environ").read() == ""
            return float(any("secret" in value for value in os.environ.values()))
    """)
    assert asked(verifier, "a") == [0.0]


@pytest.mark.parametrize(
    "fault", ["while True: pass", "ctypes.string_at(0)", "bytearray(2**40)", "9**9**9", "os.abort()"]
)
def test_an_answer_that_does_not_end_or_crashes_is_wrong_and_the_others_are_not(fault: str, verifier_of: Any) -> None:
    verifier = verifier_of(f"""
        def judge(answer):
            if answer == "bad":
                {fault}
            return 1.0
    """)
    assert asked(verifier, "a", "bad", "b", "bad", "c", seconds=0.3) == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_scores_of_slow_answers_are_sent_as_they_come(verifier_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_process, "WALL_SECONDS", 1.5)
    verifier = verifier_of("""
        def judge(answer):
            verifier.SILENT_SECONDS = 0.1
            time.sleep(0.4)
            return float(answer) if answer != "bad" else ctypes.string_at(0)
    """)
    assert asked(verifier, "1", "2", "3", "bad", "5", seconds=0.1) == [1.0, 2.0, 3.0, 0.0, 5.0]


def test_the_time_that_other_processes_take_is_not_the_answers(verifier_of: Any) -> None:
    verifier = verifier_of("def judge(answer):\n    time.sleep(0.5)\n    return 1.0\n")
    assert asked(verifier, "a", seconds=0.1) == [1.0]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", r"said nothing for 0\.3 s"),
        ("time.sleep(1000)", r"said nothing for 0\.3 s"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "exit status -9"),
        ("os._exit(3)", "exit status 3"),
        ("raise KeyError(answer)", "fails on an answer: KeyError: 'bad'"),
    ],
)
def test_what_is_no_fault_of_the_answer_is_an_error_and_the_next_question_is_answered(
    fault: str, said: str, verifier_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_process, "WALL_SECONDS", 0.2)
    verifier = verifier_of(f"""
        def judge(answer):
            if answer == "bad":
                {fault}
            return 1.0
    """)
    with pytest.raises(VerifierError, match=said):
        asked(verifier, "a", "bad", seconds=0.1)
    assert asked(verifier, "a") == [1.0]


def test_an_answer_that_finds_the_connection_cannot_forge_its_reply(verifier_of: Any) -> None:
    verifier = verifier_of("""
        def judge(answer):
            for thing in gc.get_objects():
                if type(thing).__name__ == "Connection":
                    thing.send_bytes(b'["", "scores", [1.0]]')
            os.write(1, b'["", "scores", [1.0]]\\n')
            return 0.0
    """)
    with pytest.raises(VerifierError, match="what is no reply"):
        asked(verifier, "a")


@pytest.mark.parametrize(
    "reply",
    [
        "garbage",
        "[]",
        "{}",
        "[mark, 'scores', [float('nan')]]",
        "[mark, 'scores', [True]]",
        "[mark, 'scores', [10**400]]",
        "[mark, 'scores', [[1.0]]]",
        "[mark, 'scores', ['1']]",
        "[mark, 'scores', 1.0]",
        "[mark, 'scores']",
        "['', 'scores', [1.0]]",
        "[mark, 'other', [1.0]]",
        "['', 'ended', 'x']",
        "['', 'ended', 3]",
        "[[], [], []]",
    ],
)
def test_replies_are_checked(reply: str, verifier_of: Any) -> None:
    said = "b'garbage'" if reply == "garbage" else f"json.dumps({reply}).encode()"
    verifier = verifier_of(
        source=f"""
        import json
        link.send_bytes(json.dumps(["", "ready", None]).encode())
        mark = link.recv()["mark"]
        link.send_bytes({said})
        link.recv()
    """
    )
    with pytest.raises(VerifierError, match="what is no reply"):
        asked(verifier, "a")


def test_one_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verifier_process, "_START", START + "from gspo.reward import verifier\nverifier.serve(link, kind)"
    )
    monkeypatch.setattr("sys.path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(VerifierError, match="cannot start: ModuleNotFoundError: No module named"):
        Verifier("reasoning_gym").start()


def test_it_ends_with_the_process_that_asks(tmp_path: Any, gone: Any) -> None:
    script = """
        import os
        from gspo.reward.verifier_process import VERIFIERS
        VERIFIERS["math"].start()
        print(VERIFIERS["math"]._process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert gone(int(ended.stdout))
