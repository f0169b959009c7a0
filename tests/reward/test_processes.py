"""Functions named in the recipe run in processes of their own, which are found, used, replaced and ended."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.samples import scores_of

from gspo.errors import Stopped, UserError
from gspo.interrupt import Interrupt
from gspo.recipe.sections import RewardConfig
from gspo.reward.functions import close_functions, load_functions, probe
from gspo.reward.score import score

PID = "import os\ndef f(completions, **columns):\n    return [float(os.getpid())] * len(completions)\n"


def rewards(scored: Any) -> list[float | None]:
    return [one.reward for one in scores_of(scored)]


OF_OTHER_FILES: set[int] = set()  # whose functions may still wait for the garbage collector


def workers() -> set[int]:
    """The worker processes that this process has started since the test began."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    mine = {child.pid for child in alive if any("gspo.reward.worker" in word for word in child.cmdline())}
    return mine - OF_OTHER_FILES


@pytest.fixture(autouse=True, scope="module")
def _only_this_file() -> None:
    OF_OTHER_FILES.update(workers())


ASLEEP = f"import os, time\ntime.sleep(600 * (os.getpid() != {os.getpid()}))  # in its own process\n"


@pytest.mark.parametrize("when", ["stopped as it starts", "asleep as it starts"])
def test_a_stop_is_heeded_while_a_process_starts(when: str, groups: Any, named: Any, fitted_tokenizer: Any) -> None:
    before, interrupt = workers(), Interrupt(lambda _: None)
    function = named(f"{ASLEEP if when.startswith('asleep') else ''}{PID}", concurrent_calls=1)
    if when.startswith("stopped"):
        while not (started := workers() - before):  # for a moment after exec, the kernel knows no command line
            time.sleep(0.001)
        for pid in started:
            os.kill(pid, signal.SIGSTOP)

    query = groups(["a"])[0].query
    with interrupt, pytest.raises(Stopped):
        threading.Timer(0.2, lambda: setattr(interrupt, "signal", signal.SIGTERM)).start()
        probe([query], [], [function], fitted_tokenizer, segment_separator=None)
    close_functions([function])
    assert workers() == before


def test_calls_are_made_in_another_process_which_is_kept(groups: Any, named: Any) -> None:
    function = named(PID, concurrent_calls=1)
    pids = {*rewards(score(groups(["a"], ["b"]), [function])), *rewards(score(groups(["c"]), [function]))}
    assert pids == workers() and len(pids) == 1 and os.getpid() not in pids


def test_calls_run_in_as_many_processes_as_are_allowed_and_needed(groups: Any, named: Any, tmp_path: Path) -> None:
    source = """
        import pathlib, time
        def f(completions, **columns):
            pathlib.Path(completions[0]).touch()
            while not pathlib.Path({"a": "b", "b": "a"}[completions[0]]).exists():
                time.sleep(0.01)
            return [1.0]
    """
    function = named(source, concurrent_calls=3, time_limit_seconds=60)
    assert rewards(score(groups(["a"], ["b"]), [function])) == [1.0, 1.0]  # each waits for the other
    assert len(workers()) == 2


def test_results_are_in_the_order_of_the_groups_whatever_the_order_of_finishing(groups: Any, named: Any) -> None:
    source = """
        import pathlib, time
        def f(completions, **columns):
            if completions[0] == "first":
                while not pathlib.Path("second").exists():
                    time.sleep(0.01)
            pathlib.Path(completions[0]).touch()
            return [float(len(text)) for text in completions]
    """
    function = named(source, concurrent_calls=2)
    assert rewards(score(groups(["first", "a"], ["second", "bc"]), [function])) == [5.0, 1.0, 6.0, 2.0]


def test_alarms_work(groups: Any, named: Any) -> None:
    source = """
        import signal, time
        def late(number, frame):
            raise TimeoutError
        def f(completions, **columns):
            signal.signal(signal.SIGALRM, late)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                time.sleep(1000)
            except TimeoutError:
                return [1.0] * len(completions)
    """
    assert rewards(score(groups(["a", "b"]), [named(source)])) == [1.0, 1.0]


def test_what_a_function_prints_is_seen_and_harms_nothing(groups: Any, named: Any, capfd: Any) -> None:
    source = """
        import os, sys
        print("while it is imported")
        def f(completions, **columns):
            print("during a call")
            os.write(1, b"past python\\n")
            assert sys.stdin.read() == ""
            return [1.0] * len(completions)
    """
    assert rewards(score(groups(["a"]), [named(source)])) == [1.0]
    out, error = capfd.readouterr()
    assert out == "while it is imported\n"  # in the trainer
    assert all(said in error for said in ("while it is imported", "during a call", "past python"))


def test_large_arguments_and_messages_pass(groups: Any, named: Any) -> None:
    source = """
        def f(completions, answer, **columns):
            assert completions[0] == answer[0], "x" * 2_000_000
            return [float(len(text)) for text in completions]
    """
    large = "é" * 1_000_000
    function = named(source)
    scored = score(groups([large, *["b"] * 4], ["b"] * 5, answer=[large, "b"]), [function])
    assert rewards(scored)[0] == 1e6
    with pytest.raises(UserError, match="AssertionError: x"):
        score(groups([large], answer=["b"]), [function])


def test_arguments_that_no_other_process_can_have_are_refused_with_the_way_out(groups: Any, named: Any) -> None:
    with pytest.raises(
        UserError, match=r"reward function mine_0\.py:f: its arguments cannot be handed(.|\n)*from Python"
    ):
        score(groups(["a"], answer=[lambda: 3]), [named(PID)])


def test_a_process_that_has_died_idle_is_replaced(groups: Any, named: Any, gone: Any) -> None:
    function = named(PID, concurrent_calls=1)
    (first,) = rewards(score(groups(["a"]), [function]))
    assert first is not None
    os.kill(int(first), signal.SIGKILL)
    assert gone(int(first))
    scored = score(groups(["a"]), [function])
    assert rewards(scored) != [first] and scores_of(scored)[0].failure is None
    assert workers() == {int(rewards(scored)[0] or 0)}


def test_closing_ends_the_processes_and_a_further_call_starts_one(groups: Any, named: Any, gone: Any) -> None:
    function = named(PID)
    (first,) = rewards(score(groups(["a"]), [function]))
    close_functions([function])
    close_functions([function])
    assert workers() == set() and gone(int(first or 0))
    assert rewards(score(groups(["a"]), [function])) != [first]


def test_a_later_process_begins_where_the_first_did(
    groups: Any, named: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook may go elsewhere meanwhile, and the function's own files stay where they are."""
    function = named("import os\ndef f(completions, **columns):\n    return [float(os.path.exists('here'))]\n")
    (tmp_path / "here").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    close_functions([function])
    assert rewards(score(groups(["a"]), [function])) == [1.0]


def test_functions_that_nobody_holds_leave_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PID)
    functions = load_functions(
        [RewardConfig(function="mine.py:f"), RewardConfig(function="format", options={"pattern": "a"})]
    )
    started, deadline = workers(), time.monotonic() + 10.0
    while len(started) < 2 and time.monotonic() < deadline:  # a process has its command line a moment after it begins
        started |= workers()
    assert len(started) == 2
    del functions
    assert workers() == set()


def test_a_function_that_the_process_cannot_import_is_refused_with_the_reason(groups: Any, named: Any) -> None:
    source = """
        import sys
        if any("gspo.reward.worker" in word for word in sys.orig_argv):
            raise RuntimeError("no licence")
        def f(completions, **columns):
            return [1.0]
    """
    with pytest.raises(
        UserError, match=r"reward function mine_0\.py:f: importing .*mine_0\.py, line 4 raises .*no licence"
    ):
        score(groups(["a"]), [named(source)])
    leaves = source.replace('raise RuntimeError("no licence")', "import os; os._exit(4)")
    with pytest.raises(UserError, match=r"mine_1\.py:f: its process ended with exit status 4 while it started"):
        score(groups(["a"]), [named(leaves)])
    dies = source.replace('raise RuntimeError("no licence")', "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match=r"its process was ended by signal 9 \(SIGKILL\) while it started"):
        score(groups(["a"]), [named(dies)])


def test_a_process_that_is_never_ready_is_refused(groups: Any, named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.reward.calls.START_SECONDS", 0.5)
    source = """
        import sys, time
        if any("gspo.reward.worker" in word for word in sys.orig_argv):
            time.sleep(1000)
        def f(completions, **columns):
            return [1.0]
    """
    with pytest.raises(UserError, match=r"f: its process is not ready after 0\.5 s"):
        score(groups(["a"]), [named(source)])
    assert workers() == set()


def test_the_time_it_takes_to_import_is_not_a_calls(groups: Any, named: Any) -> None:
    slow = "import time\ntime.sleep(0.5)\ndef f(completions, **columns):\n    return [1.0]\n"
    assert rewards(score(groups(["a"]), [named(slow, time_limit_seconds=0.3)])) == [1.0]


def test_functions_are_found_on_the_trainers_path_and_no_file_stands_in_for_a_standard_module(
    groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "only_here_mine.py").write_text(PID)
    for name in ("json", "queue", "asyncio", "pickle", "typing"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PYTHONPATH", "unchanged")
    environment = "import os, json\ndef f(**columns):\n    return [float(os.environ['PYTHONPATH'] == 'unchanged')]\n"
    (tmp_path / "mine.py").write_text(environment)
    functions = load_functions([RewardConfig(function="only_here_mine:f"), RewardConfig(function="mine.py:f")])
    (one,) = scores_of(score(groups(["a"]), functions))
    assert one.parts["f"] != os.getpid() and one.parts["f_2"] == 1.0
    close_functions(functions)


SCRIPT = """
import sys, torch
from gspo.recipe.sections import RewardConfig
from gspo.types import Group, Query, Sample
from gspo.reward.functions import load_functions
from gspo.reward.score import score

print("the script runs", flush=True)
query = Query(id="q:1", prompt="p", text="p", prompt_ids=(1,), columns={})
sample = Sample(
    query=query,
    token_ids=torch.zeros(1),
    loss_mask=torch.ones(1, dtype=torch.bool),
    text="a",
    finish_reason="stop",
    sampler_logprobs=torch.zeros(1),
    versions=((0, 1),),
)
scored = score([Group(samples=(sample,))], load_functions([RewardConfig(function=sys.argv[1])]))
print(scored.samples[0].reward, flush=True)
"""


def test_a_script_without_a_guard_around_its_main_part_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mine.py").write_text("def f(completions):\n    return [2.5]\n")
    command = [sys.executable, "script.py", "mine.py:f"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "the script runs\n2.5\n" and result.stderr == ""


def test_a_trainer_that_is_killed_leaves_neither_process_nor_grandchild(tmp_path: Path, gone: Any) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    source = """
        import os, subprocess, time
        def f(completions):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            with open("pids.txt", "w") as file:
                file.write(f"{os.getpid()} {child.pid}\\n")
            time.sleep(1000)
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(source))
    with subprocess.Popen([sys.executable, "script.py", "mine.py:f"], cwd=tmp_path) as trainer:
        pids = written_pids(tmp_path / "pids.txt", 2, gone)
        trainer.kill()
    assert [gone(pid) for pid in pids] == [True, True]


def written_pids(path: Path, number: int, gone: Any) -> list[int]:
    """The process numbers that a function writes to a file, once they are there."""
    import time

    for _ in range(1500):
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return [int(pid) for pid in text.split()][:number]
        time.sleep(0.02)
    raise AssertionError("no process has written its number")


def test_a_process_starts_without_the_libraries_that_take_seconds() -> None:
    program = (
        "import sys, gspo.reward.worker, gspo.reward.tool_functions; print({*sys.modules} & {'torch', 'transformers'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
