"""A log of JSON lines that others append to, read bit by bit."""

import os
from pathlib import Path
from typing import Any

from gspo.run.plain_files import for_reading, parsed


class GrowingLog:
    """Gives each line once; all of them again where the file was replaced, as that of a run that is taken up is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_number = -1
        self._num_bytes_read = 0

    def new(self) -> list[dict[str, Any]]:
        """The objects among the lines that have come to their end since the last call."""
        try:
            with open(self._path, "rb", opener=for_reading) as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._file_number or about.st_size < self._num_bytes_read:
                    self._file_number, self._num_bytes_read = about.st_ino, 0
                file.seek(self._num_bytes_read)
                *lines, _ = file.read().split(b"\n")
        except FileNotFoundError:
            return []
        self._num_bytes_read += sum(len(line) + 1 for line in lines)
        return [content for line in lines if (content := parsed(line)) is not None]
