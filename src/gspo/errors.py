"""The one exception that means: the user's input is wrong, and here is how to mend it."""


class UserError(Exception):
    """The input cannot be used; the message says what, where, why and how to mend it (exit code 2, no traceback)."""

    def __init__(self, what: str, *, where: str | None = None, mend: str | None = None) -> None:
        self.what = what
        self.where = where
        self.mend = mend
        lines = [f"{where}: {what}" if where else what]
        if mend:
            lines.append(f"  mend: {mend}")
        super().__init__("\n".join(lines))


class RunError(Exception):
    """The run cannot go on though the input was right; the message says why and what was saved (exit code 1)."""


class DivergedError(RunError):
    """The run's numbers are no longer numbers: its state is not worth saving, an earlier one is."""
