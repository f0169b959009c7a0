"""The program inside the sandbox: process 1 of its namespace, from which each run is forked. Standard library only.

It trusts its client and nothing else. A run gets pipes of its own and no way to this process: process 1 of a namespace
cannot be killed from inside, and one that is not dumpable can be neither read nor written. Results are bytes that the
client checks: whatever a run does to its own interpreter changes what that run may say, and nothing more.
"""

import builtins
import gc
import importlib
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress

sys.path.append(os.path.dirname(__file__))  # an isolated interpreter looks for nothing there
import plain  # type: ignore[import-not-found]
from channel import Channel  # type: ignore[import-not-found]
from program import KEPT_ERROR_BYTES, PR_SET_DUMPABLE, READ_BYTES, Program, Spawner, libc  # type: ignore[import-not-found]

# Imported once, before the programs are forked, which use them often.
USUAL_MODULES = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "math"),
    *("operator", "random", "re", "statistics", "string", "typing"),
)
POLL_SECONDS = 0.02
MAX_FILES = 10_000
TEMPORARY = ("/tmp", "/dev/shm")


def main() -> None:
    """Import what programs use, say so, and run what the client sends until it has gone."""
    number, path, warm = json.loads(sys.argv[1])
    channel = Channel(socket.socket(fileno=number))
    sys.path.remove(os.path.dirname(__file__))
    sys.path += path
    os.environ.clear()  # libc's copy follows
    os.environ.update(PATH="/usr/bin:/bin", HOME="/tmp", LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    builtins.quit = builtins.exit = sys.exit  # type: ignore[assignment]  # as in an interpreter with `site`
    register, os.register_at_fork = os.register_at_fork, lambda **_: None
    import random  # it would seed itself in each fork, which doubles a fork's cost, and no verdict could be repeated

    os.register_at_fork = register
    random.seed(0)
    for name in (*USUAL_MODULES, *warm):
        importlib.import_module(name)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets no signal that it does not handle
    gc.collect()
    gc.freeze()
    spawner = Spawner()
    channel.send(ready=True)
    program: Program | None = None
    is_clean = True
    while is_clean:  # otherwise the client starts another sandbox, and the end of process 1 ends all that is here
        header, body = channel.receive()
        source, data = body[: header["program_bytes"]], memoryview(body)[header["program_bytes"] :]
        if program is None or (program.header, program.source) != (header, source):
            if program:
                program.link.close()
            program = Program(spawner, header, source)
        is_clean = Run(channel, program, data).go()


class Run:
    """One run of the program, watched until it ends, with all that it has started."""

    def __init__(self, channel: Channel, program: Program, data: memoryview) -> None:
        self.channel, self.program, self.header, self.input = channel, program, program.header, data
        self.limits = self.header["limits"]
        self.output, self.errors, self.line, self.requests = bytearray(), bytearray(), bytearray(), bytearray()
        self.num_error_bytes = 0
        self.num_replies_due = 1  # of a program with functions: that it is ready
        self.status: int | None = None
        self.cpu, self.is_clean = 0.0, True
        self.ending: str | None = None
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[int], None]] = {}

    def go(self) -> bool:
        """Run it and send what came of it; whether the next run will find nothing of it."""
        self._start()
        measured = started = time.monotonic()
        while self.ending is None and self.status is None:
            for number, _ in self.poll.poll(POLL_SECONDS * 1000):
                if number in self.handlers:
                    self.handlers[number](number)
            if (now := time.monotonic()) - measured >= POLL_SECONDS:
                measured = now
                self.ending = self.ending or self._exceeded(now - started)
        self._end_everything()
        ending = self.ending or self._ending()
        is_clean = self.is_clean and clean()
        error = self.errors[-KEPT_ERROR_BYTES:].decode(errors="replace")
        self.channel.send(bytes(self.output), ended=ending, cpu=self.cpu, error=error, is_clean=is_clean)
        return is_clean

    def _start(self) -> None:
        """Have the program's process fork the run, and watch its pipes."""
        has_functions = self.header["mode"] in ("functions", "tests")
        pipes = [os.pipe() for _ in range(5 if has_functions else 3)]
        theirs = [pair[number in (1, 2, 4)] for number, pair in enumerate(pipes)]
        ours = [pair[number not in (1, 2, 4)] for number, pair in enumerate(pipes)]
        self.program.start(theirs)
        self._watch(self.program.link.fileno(), select.POLLIN, self._hear_of_run)
        self._watch(self.channel.fileno(), select.POLLIN, self._hear)
        handlers = [self._feed, self._take_output, self._take_error, self._feed_request, self._take_line]
        for place, (number, handler) in enumerate(zip(ours, handlers, strict=False)):
            os.set_blocking(number, False)
            self._watch(number, select.POLLIN if place in (1, 2, 4) else select.POLLOUT, handler)
        if has_functions:
            self.request_pipe = ours[3]
            self.poll.modify(self.request_pipe, 0)

    def _watch(self, number: int, events: int, handler: Callable[[int], None]) -> None:
        self.poll.register(number, events)
        self.handlers[number] = handler

    def _close(self, number: int) -> None:
        self.poll.unregister(number)
        del self.handlers[number]
        os.close(number)

    def _feed(self, number: int) -> None:
        try:
            self.input = self.input[os.write(number, self.input[:READ_BYTES]) :] if self.input else self.input
        except BrokenPipeError:
            self.input = self.input[:0]
        if not self.input:
            self._close(number)

    def _feed_request(self, number: int) -> None:
        with suppress(BrokenPipeError):
            if not self.requests:  # the program has closed its end, which poll would report without end
                raise BrokenPipeError
            del self.requests[: os.write(number, self.requests[:READ_BYTES])]
            self.poll.modify(number, select.POLLOUT if self.requests else 0)
            return
        self._close(number)

    def _read(self, number: int) -> bytes:
        try:
            if data := os.read(number, READ_BYTES):
                return data
        except BlockingIOError:
            return b""
        self._close(number)
        return b""

    def _take_output(self, number: int) -> None:
        self.output += self._read(number)
        if len(self.output) > self.limits["output_bytes"]:
            del self.output[self.limits["output_bytes"] :]
            self.ending = self.ending or "output"

    def _take_error(self, number: int) -> None:
        data = self._read(number)
        self.num_error_bytes += len(data)
        self.errors += data
        del self.errors[:-KEPT_ERROR_BYTES]
        if self.num_error_bytes > self.limits["output_bytes"]:
            self.ending = self.ending or "output"

    def _take_line(self, number: int) -> None:
        """Pass what the program answers, or its tests ask, on to the client: one line for each that is due."""
        self.line += self._read(number)
        while (size := self.line.find(b"\n")) >= 0 and self.num_replies_due:
            self.channel.send(bytes(self.line[:size]), message=True)
            del self.line[: size + 1]
            self.num_replies_due -= 1
        if len(self.line) > 2 * plain.MAX_BYTES or (self.line and not self.num_replies_due):
            self.ending = self.ending or "failed"

    def _hear(self, _: int) -> None:
        header, body = self.channel.receive()
        if "stop" in header:
            self.ending = self.ending or "stopped"
            return
        if "message" not in header:  # a new run's, whose client has given up this one: its program must not have it
            raise SystemExit(1)
        self.num_replies_due += 1
        if self.request_pipe in self.handlers:
            self.requests += body + b"\n"
            self.poll.modify(self.request_pipe, select.POLLOUT)

    def _hear_of_run(self, _: int = 0) -> None:
        """Take the word of the program's process: that the run has started, or how it ended."""
        if word := self.program.hear():
            self.status, self.cpu, self.is_clean = word

    def _exceeded(self, seconds: float) -> str | None:
        """The limit that all processes of the run together exceed now."""
        cpu, memory = self.program.usage()
        stored = [os.statvfs(path) for path in TEMPORARY]
        memory += sum((place.f_blocks - place.f_bfree) * place.f_frsize for place in stored)
        if cpu > self.limits["cpu_seconds"]:
            return "cpu_time"
        if memory > self.limits["memory_bytes"]:
            return "memory"
        if sum(place.f_files - place.f_ffree for place in stored) > MAX_FILES:
            return "files"
        return "wall_time" if seconds > self.limits["wall_seconds"] else None

    def _end_everything(self) -> None:
        """End the run where it still goes on, and read what is left in the pipes."""
        if self.ending == "stopped" and self.status is None and self.program.kill_run():
            self._hear_of_run()
        if self.status is None:
            self.cpu, self.is_clean = self.program.usage()[0], False
        for number, handler in list(self.handlers.items()):
            if handler in (self._take_output, self._take_error):
                handler(number)  # reads all that a pipe can hold; what still lives may go on writing
            if number in self.handlers and number not in (self.channel.fileno(), self.program.link.fileno()):
                self._close(number)

    def _ending(self) -> str:
        code = os.waitstatus_to_exitcode(self.status or 0)
        if self.cpu > self.limits["cpu_seconds"]:
            return "cpu_time"
        return "crashed" if code < 0 else "failed" if code else "finished"


def clean() -> bool:
    """Remove the files of the run, and the times that it has set; whether no file is left."""
    left: list[str] = []
    for place in TEMPORARY:
        os.chmod(place, stat.S_IRWXU)
        for name in os.listdir(place):
            path = f"{place}/{name}"
            with suppress(OSError, RecursionError):
                if os.path.isdir(path) and not os.path.islink(path):
                    import shutil  # every library that is loaded makes a fork slower

                    shutil.rmtree(path)
                else:
                    os.unlink(path)
        left += os.listdir(place)
        os.utime(place, (0, 0))
    return not left


if __name__ == "__main__":
    main()
