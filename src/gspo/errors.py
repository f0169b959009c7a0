"""The one exception that means: the user's input is wrong, and here is how to mend it."""

from gspo.writable import encodable

MAX_BYTES = 2048  # of a message: it may quote input of any size
_MAX_WHERE_BYTES = 400
_MAX_MEND_BYTES = 800
_CUT = " … "


class UserError(Exception):
    """The input cannot be used; the message says what, where, why and how to mend it (exit code 2, no traceback).

    A message is at most 2 KB of text that can be printed: what is longer is cut in its middle.
    """

    def __init__(self, what: str, *, where: str | None = None, mend: str | None = None) -> None:
        self.where = where and _bounded(where, _MAX_WHERE_BYTES)
        self.mend = mend and _bounded(mend, _MAX_MEND_BYTES)
        place, advice = f"{self.where}: " if self.where else "", f"\n  mend: {self.mend}" if self.mend else ""
        self.what = _bounded(what, MAX_BYTES - len(f"{place}{advice}".encode()))
        super().__init__(f"{place}{self.what}{advice}")


class RunError(Exception):
    """The run cannot go on though the input was right; the message says why and what was saved (exit code 1)."""


class DivergedError(RunError):
    """The run's numbers are no longer numbers: its state is not worth saving, an earlier one is."""


def _bounded(text: str, max_bytes: int) -> str:
    """The text, or its beginning and a shorter end, in at most so many bytes of UTF-8."""
    encoded = encodable(text).encode()
    if len(encoded) <= max_bytes:
        return encoded.decode()
    rest = max_bytes - len(_CUT.encode())
    end = rest // 4
    return f"{encoded[: rest - end].decode(errors='ignore')}{_CUT}{encoded[-end:].decode(errors='ignore')}"
