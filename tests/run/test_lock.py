"""One run a directory: while one process has it no other gets it, and once that has ended, however, it is free."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gspo.errors import RunError, UserError
from gspo.run.lock import Lock

HOLD = """
import sys, time
from pathlib import Path
from gspo.run.lock import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that has locked the directory."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_and_told_who_has_the_directory(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    for _ in range(2):  # to ask changes nothing
        with pytest.raises(UserError) as caught:
            Lock(tmp_path)
        message = str(caught.value)
        assert f"process {holder.pid} on {socket.gethostname()} is writing to this directory" in message
        assert str(tmp_path) in message and "fix: " in message


def test_a_process_that_is_killed_lets_go_of_the_directory(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / "lock").read_text().startswith(f"process {holder.pid} ")  # what it left is no lock
    lock = Lock(tmp_path)
    assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    lock.release()


def test_one_process_gets_a_directory_once_until_it_lets_go(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        Lock(tmp_path)
    lock.release()
    Lock(tmp_path).release()


def test_a_program_that_was_started_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    child = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        lock.release()
        Lock(tmp_path).release()
    finally:
        child.kill()
        child.wait()


def test_a_process_that_was_forked_off_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b".")
        signal.pause()
    try:
        os.read(reading, 1)
        lock.release()
        Lock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_another_directory_is_another_lock(tmp_path: Path) -> None:
    locks = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        locks.append(Lock(tmp_path / name))
    for lock in locks:
        lock.release()


def test_a_link_in_its_place_is_refused_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(UserError, match="cannot be written: Too many levels of symbolic links"):
        Lock(tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("has_come", [False, True])
def test_once_it_was_removed_nothing_more_may_be_written(has_come: bool, tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    lock.check()
    (tmp_path / "lock").unlink()
    if has_come:  # what it has written is there all the same
        Lock(tmp_path).release()
    for _ in range(2):
        with pytest.raises(RunError, match=r"was moved, removed or replaced(.|\n)*fix: "):
            lock.check()
    lock.release()


def test_a_lock_that_is_removed_while_it_is_taken_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removing(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        (tmp_path / "lock").unlink()

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", removing)
    with pytest.raises(UserError, match="is writing to this directory"):
        Lock(tmp_path)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent: cannot be written: No such file"):
        Lock(tmp_path / "absent")
