"""TensorBoard: event files in the run's directory.

Written record by record with TensorBoard's own protocol buffers: what shows the files is what writes them. The writers
of tensorboardX and torch.utils.tensorboard import torch (220 MiB, 2 s of CPU; this: 41 MiB, 0.24 s), and TensorBoard's
own EventFileWriter imports TensorFlow wherever that is installed.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from gspo.run.plain_files import for_writing
from gspo.trackers.markdown import as_code, as_table
from gspo.trackers.tracker import SAMPLES, Opening


class EventFile:
    """One file of a run; TensorBoard reads those of a directory one after another, as one run."""

    def __init__(self, opening: Opening) -> None:
        self.run = opening.directory.name  # the directory is the run
        self.last_step: int | None = None
        opening.directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        file = open(opening.directory / name, "ab", opener=for_writing)  # noqa: SIM115 - until `close`
        self._records = RecordWriter(file)
        self._write(Event(file_version="brain.Event:2"))
        if opening.run is None:
            self._write(Event(summary=hparams_pb(dict(_leaves(opening.config)))))
            text = yaml.safe_dump(dict(opening.config), sort_keys=False, allow_unicode=True)
            self._write(Event(summary=Summary(value=[_text("recipe", as_code(text))])))

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """One record of the step's numbers, and the table as Markdown."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        if samples:
            values.append(_text(SAMPLES, as_table(samples)))
        self._write(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()


def open_run(opening: Opening) -> EventFile:
    """A new file, with the recipe in it where it is the run's first."""
    return EventFile(opening)


def _text(tag: str, markdown: str) -> Summary.Value:
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[markdown.encode()])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The recipe's dotted keys for TensorBoard's table of hyperparameters, which knows numbers and text."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, bool | int | float | str) else str(value)
