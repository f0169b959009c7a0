"""Errors that a user reads, and text that others have written made safe to print and to write."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any, Literal

MAX_BYTES = 2048  # of a message: it may quote input of any size
_MAX_WHERE_BYTES = 400
_MAX_FIX_BYTES = 800
_ELLIPSIS = " … ".encode()

_ESCAPED = [*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_ESCAPED += range(0xD800, 0xE000)  # control, direction and end of line; halves of characters, which have no encoding
_FORMS = {code: chr(code).encode("unicode_escape").decode() for code in _ESCAPED}
_FORMS |= {code: chr(0x2400 + code) for code in range(0x20)} | {0x0A: "␊\n", 0x7F: "␡"}

_WITHIN_LINES = {code: form for code, form in _FORMS.items() if code not in (0x09, 0x0A)}


class UserError(Exception):
    """The input cannot be used; the message says what, where, why and how to fix it (exit code 2, no traceback).

    A message is at most 2 KB of text that can be printed: what is longer is cut in its middle.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.where = where and _bounded(where, _MAX_WHERE_BYTES)
        self.fix = fix and _bounded(fix, _MAX_FIX_BYTES)
        place, advice = f"{self.where}: " if self.where else "", f"\n  fix: {self.fix}" if self.fix else ""
        self.what = _bounded(what, MAX_BYTES - len(f"{place}{advice}".encode()))
        super().__init__(f"{place}{self.what}{advice}")


@contextmanager
def writing(path: Path, fix: str) -> Iterator[None]:
    """A block that writes there: UserError where the system refuses."""
    try:
        yield
    except OSError as error:
        is_above = error.filename is not None and path.is_relative_to(str(error.filename))
        where = str(error.filename) if is_above else str(path)
        raise UserError(f"cannot be written: {error.strerror}", where=where, fix=fix) from None


FailureKind = Literal["raised", "crashed", "timed_out", "invalid"]  # how a reward function fails


class RunError(Exception):
    """The run cannot go on though its input was right; the message says why and what was saved (exit code 1)."""


class LostRankError(RunError):
    """The loss of one of the processes that train together: what they share can no longer be saved."""


SILENT = 75  # the exit code of a rank that leaves it to another process to say why the run has ended
# Of the environment of a rank: it was started by gspo, and ends when its input does.
HAS_LAUNCHER = "GSPO_HAS_LAUNCHER"
RENDEZVOUS = "GSPO_RENDEZVOUS"  # of the environment of a rank: where it finds the others, if not as torchrun has it


class OtherRankError(RunError):
    """The run cannot go on, and another process that takes part in it says why: this one is silent."""


class Stopped(KeyboardInterrupt):
    """A signal, its argument, has asked the run to end; no `except Exception` on the way holds it up."""


class DivergedError(RunError):
    """The run's numbers are not finite, or not the policy's: its state is not saved, only earlier ones are of use."""


def _bounded(text: str, max_bytes: int) -> str:
    """The text, or its beginning and a shorter end, in at most so many bytes of UTF-8."""
    encoded = encodable(text).encode()
    if len(encoded) <= max_bytes:
        return encoded.decode()
    end = (max_bytes - len(_ELLIPSIS)) // 4
    start = max_bytes - len(_ELLIPSIS) - end
    return (encoded[:start] + _ELLIPSIS + encoded[-end:]).decode(errors="ignore")


def encodable(text: str) -> str:
    r"""The text with each half of a surrogate pair, which UTF-8 has no bytes for, spelled out as \udXXX."""
    return text.encode("utf-8", "backslashreplace").decode()


def writable(value: Any) -> Any:
    """The value with None for each number that is not finite and with encodable text, however deep they lie.

    JSON and UTF-8 can hold it. What needs no change is returned itself, and not copied: rows of data take much memory.
    Anything but text, numbers, mappings, lists and tuples is returned as it is.
    """
    changed = value
    if isinstance(value, str):
        changed = encodable(value)
    elif isinstance(value, Mapping):
        changed = {writable(key): writable(inner) for key, inner in value.items()}
    elif type(value) in (list, tuple):
        changed = type(value)(map(writable, value))
    if changed is not value:
        return value if type(changed) is type(value) and changed == value else changed
    # No integer is made a float, which it may be too large for.
    is_infinite = isinstance(value, Real) and not isinstance(value, int) and not math.isfinite(value)
    return None if is_infinite else value


def visible(text: str) -> str:
    """The text with its control characters as signs that a terminal shows: ␛ for an escape, ␊ before a line's end."""
    return text.translate(_FORMS)


def printable(text: str) -> str:
    """The text as `visible` returns it, but with tabs and ends of lines kept: for messages, whatever they quote."""
    return text.translate(_WITHIN_LINES)


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names separated by commas, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(name: str, names: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return how to fix a name: by those that are near it, at most so many, or `otherwise`."""
    near = difflib.get_close_matches(name, list(names), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def files_beside(path: Path, *suffixes: str) -> str:
    """Return how to fix the name of a file that is not there: by those in its folder that end so."""
    near = sorted(str(near) for suffix in suffixes for near in path.parent.glob(f"[!.]*{suffix}"))
    return f"there are: {listed(near)}" if near else f"the path is relative to the working directory, {Path.cwd()}"
