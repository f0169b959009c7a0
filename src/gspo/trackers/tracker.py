"""The trackers that there are, each a function that opens a run there: TensorBoard, trackio, Weights & Biases."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import indent
from typing import Any

import yaml

from gspo.errors import UserError
from gspo.report.run_files import RunFiles, Table


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """A run at a tracker, open to be logged; what opens it and both verbs may raise, wait or hang."""

    run_id: str
    last_step: int | None  # that has arrived; None: the tracker cannot tell
    log: Callable[[int, Mapping[str, float], Table], object]  # a step, later than those before
    finish: Callable[[], object]  # returns when everything has arrived


def open_tensorboard(run: RunFiles, run_id: str | None, seconds: float) -> Tracker:
    """Event files in the run's directory, whose name TensorBoard shows; made without torch and TensorFlow."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = run.path / f"events.out.tfevents.{time.time():.6f}"  # the files of a directory are read as one run
    records = RecordWriter(path.open("xb"))

    def write(**content: Any) -> None:
        records.write(Event(wall_time=time.time(), **content).SerializeToString())
        records.flush()

    def as_code(content: Any) -> str:  # Markdown shows it as it is, whatever a model has written
        return indent(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "    ")

    def log(step: int, metrics: Mapping[str, float], samples: Table) -> None:
        summary = text_pb("samples", as_code(samples)) if samples else Summary()
        summary.value.extend(Summary.Value(tag=name, simple_value=value) for name, value in metrics.items())
        write(step=step, summary=summary)

    write(file_version="brain.Event:2")
    if run_id is None:
        write(summary=text_pb("recipe", as_code(dict(run.recipe))))
    return Tracker(run_id=run.path.name, last_step=None, log=log, finish=records.close)


def open_trackio(run: RunFiles, run_id: str | None, seconds: float) -> Tracker:
    """A database on this machine, or the Space or server that trackio's environment variables name."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    extras = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    about = {"name": run.name, "config": dict(run.recipe), "resume": "allow" if run_id else "never"}
    opened = trackio.init(run.project, **about, **extras)
    opened.id = run_id or opened.id  # trackio continues the newest run of the name, which may be another
    last_step = None if opened.url else SQLiteStorage.get_max_step_for_run(opened.project, run_id=opened.id)

    def log(step: int, metrics: Mapping[str, float], samples: Table) -> None:
        table = {"samples": trackio.Table(data=[dict(row) for row in samples])} if samples else {}
        opened.log({**metrics, **table}, step=step)

    return Tracker(run_id=opened.id, last_step=last_step, log=log, finish=opened.finish)


def open_wandb(run: RunFiles, run_id: str | None, seconds: float) -> Tracker:
    """A run at W&B; offline, where WANDB_MODE says so, in files that `wandb sync` uploads."""
    import wandb

    extras = {"console": "off", "x_disable_stats": True, "disable_git": True, "save_code": False}
    settings = wandb.Settings(finish_timeout=seconds, finish_timeout_raises=True, **extras)  # for its exit hook, too
    about = {"name": run.name, "config": dict(run.recipe), "id": run_id, "resume": "allow"}
    opened = wandb.init(project=run.project, dir=run.path / "trackers", settings=settings, **about)

    def log(step: int, metrics: Mapping[str, float], samples: Table) -> None:
        rows = [list(row.values()) for row in samples]
        table = {"samples": wandb.Table(list(samples[0]), rows, allow_mixed_types=True)} if samples else {}
        opened.log({**metrics, **table}, step=step)

    last_step = opened.starting_step - 1 if opened.resumed and not opened.offline else None
    return Tracker(run_id=opened.id, last_step=last_step, log=log, finish=opened.finish)


# By the name of the package; each takes the run, the id that it gave it before, and how many seconds `finish` may take.
Opener = Callable[[RunFiles, str | None, float], Tracker]
OPENERS: dict[str, Opener] = {"tensorboard": open_tensorboard, "trackio": open_trackio, "wandb": open_wandb}


def check_trackers(names: Iterable[str], *, where: str) -> None:
    """Raise UserError for an unknown tracker, and for a tracker whose package is not installed; imports none."""
    for name in names:
        if name not in OPENERS:
            raise UserError(f"there is no tracker {name!r}", where=where, fix=f"there are: {', '.join(OPENERS)}")
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a mere directory of that name, as wandb itself makes
            what = f"the tracker {name} needs the package {name}, which is not installed"
            raise UserError(what, where=where, fix=f"pip install {name}")
