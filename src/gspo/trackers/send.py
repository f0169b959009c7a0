"""A run is sent from its files: metrics.jsonl is the queue, so training waits for no tracker and no step is dropped."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from gspo.errors import UserError
from gspo.interrupt import Interrupt
from gspo.loop import in_thread
from gspo.metrics.numbers import scalars
from gspo.report.run_files import LAST, lines_up_to, read_run, table_of
from gspo.run.lock import Lock
from gspo.run.plain_files import content_of, parsed, replace_text
from gspo.trackers.tracker import OPENERS

WAIT_SECONDS, STOPPED_SECONDS = 15.0, 2.0  # at a run's end, for all trackers together; once a signal has come
UNFINISHED: set[str] = set()  # trackers that have failed or hang, and may still hang when the process ends
Note = Callable[[str], object]


@contextmanager
def tracked(path: Path, names: Sequence[str], note: Note, interrupt: Interrupt) -> Iterator[Callable[[int], None]]:
    """A block that announces each step it has written; a thread for each tracker sends it, and failures are notes."""
    queues: dict[str, SimpleQueue[int]] = {name: SimpleQueue() for name in names}

    def announce(step: int) -> None:
        for queue in queues.values():
            queue.put(step)

    def follow(name: str) -> None:
        try:
            send(path, name, iter(queues[name].get, None), seconds=WAIT_SECONDS)
        except BaseException as error:
            why = f"has failed ({type(error).__name__}: {error}) and is off"
            note(f"tracker {name} {why}; to send what it lacks: gspo track {path} --to {name}")

    sent = dict[str, Future[None]]()
    for name in queues:
        with suppress(Exception, SystemExit):  # the thread meets it again, and reports it
            import_module(name)  # here, because two threads that import at once may see half a module
        sent[name] = in_thread(name, follow, name)  # as are the threads that it starts, a daemon
    try:
        yield announce
    finally:
        announce(LAST)
        start, limit = time.monotonic(), 0.0 if isinstance(sys.exception(), KeyboardInterrupt) else WAIT_SECONDS
        if limit and (names := [name for name, end in sent.items() if not end.done()]):
            note(f"sending what is left to {', '.join(names)} ({limit:g} s at most) …")
        while not all(end.done() for end in sent.values()):
            if time.monotonic() - start >= (min(limit, STOPPED_SECONDS) if interrupt.signal else limit):
                break
            time.sleep(0.005)
        for name in (name for name, end in sent.items() if not end.done()):
            note(f"tracker {name} is not done; to send what it lacks: gspo track {path} --to {name}")


def send(path: Path, name: str, announced: Iterable[int], *, seconds: float = 0.0) -> tuple[int, int]:
    """Send a tracker the steps that it lacks, up to each announced; how many, and the last that it has."""
    file, num_sent = path / "trackers" / f"{name}.json", 0
    file.with_suffix("").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(Lock(file.with_suffix("")).release)
        run, state = read_run(path), read_state(file)
        UNFINISHED.add(name)
        tracker = OPENERS[name](run, state["run"], seconds)
        if tracker.last_step is not None and not state["closed"]:
            state["step"] = tracker.last_step
        state |= {"run": tracker.run_id, "closed": False}
        replace_text(file, json.dumps(state))
        for line in lines_up_to(path, announced):
            if (step := line["step"]) > state["step"]:
                tracker.log(step, scalars(line), table_of(run, step))
                state["step"], num_sent = step, num_sent + 1
                replace_text(file, json.dumps(state))
        tracker.finish()
        UNFINISHED.discard(name)
        replace_text(file, json.dumps(state | {"closed": True}))
    return num_sent, state["step"]


def read_state(file: Path) -> dict[str, Any]:
    """The tracker's id of a run, the last step that it was given, and whether it has finished with all of them."""
    state = parsed(content) if (content := content_of(file)) else {"run": None, "step": -1, "closed": True}
    if state is None or not (isinstance(state.get("step"), int) and isinstance(state.get("closed"), bool)):
        raise UserError("cannot be read", where=str(file), fix="remove it, and the run is sent as a new one")
    return state
