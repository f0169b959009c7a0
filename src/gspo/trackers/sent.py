"""How far a tracker has come with a run: RUN_DIR/trackers/NAME.json."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gspo.errors import UserError
from gspo.run.plain_files import read_plain, replace_text


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a tracker was given."""

    run: str | None = None  # the tracker's own number for the run
    step: int = -1  # the last one given
    closed: bool = True  # False: given, but whether all of it has arrived is not known


def read_sent(path: Path) -> Sent:
    """What the file says, nothing where there is none; UserError where it says something else."""
    try:
        return _checked(Sent(**json.loads(read_plain(path))))
    except FileNotFoundError:
        return Sent()
    except (OSError, ValueError, RecursionError, TypeError) as error:
        fix = "remove it, and the run is sent as a new one"
        raise UserError(f"cannot be read: {error}", where=str(path), fix=fix) from None


def write_sent(path: Path, sent: Sent) -> None:
    """Replace the file: at any instant there is the one or the other."""
    replace_text(path, json.dumps(asdict(sent)))


def _checked(sent: Sent) -> Sent:
    if isinstance(sent.run, str | None) and isinstance(sent.step, int) and isinstance(sent.closed, bool):
        return sent
    raise TypeError("run, step and closed are not a text, a number and true or false")
