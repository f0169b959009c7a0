"""The draft of a recipe from another library's keys: its lines, and a word on each key that gives none."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gspo.errors import visible

WHERE, UNKNOWN = "where it runs", "not known"
CATEGORIES = ("translated", "implied", "different on purpose", "not here", WHERE, UNKNOWN)
FILL_IN = "FILL IN"
_ROWS = {"gsm8k": (7473, 1319), "math": (7500, 5000), "math-lighteval": (7500, 5000), "tldr": (116_722, None)}
_SECRET = re.compile(r"api_?key|token$|secret|password", re.IGNORECASE)
_CONDITION = re.compile(r"(?P<sign>[~!]?)(?P<key>[\w.*]+)(?:(?P<equals>!?=)(?P<values>.*))?")


class Computed(str):
    """The source of a value that only the program or the shell can work out."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Line:
    """A value of the recipe, the keys of theirs that it comes from, and what a person should know about it.

    Example: `Line(key="rollout.group_size", value=4, origins=("gconfig.n_samples",))`.
    """

    key: str
    value: Any
    origins: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The lines of a recipe, what is said of keys that give none, and what the original cannot do.

    Example: `Draft(lines=(line,), said={"gconfig.greedy": "not here: …"}, notes=("the ratio is 1 …",))`.
    """

    lines: tuple[Line, ...] = ()
    said: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """A file of another library: its dotted keys with their values, and that library's defaults.

    Example: `Theirs(path=Path("a.yaml"), given={"seed": 2}, defaults={"seed": 1}).value("seed")` is 2.
    """

    path: Path
    beside: str = ""  # the same path as the recipe has it
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def value(self, key: str) -> Any:
        """Return the value of a key: their default where the file leaves it out or computes it."""
        value = self.given.get(key)
        return self.defaults.get(key) if value is None or isinstance(value, Computed) else value

    def first(self, *keys: str) -> str:
        """Return the first of the keys that has a value, or the last one: they are names of the same thing."""
        return next((key for key in keys if self.value(key) is not None), keys[-1])

    def origin(self, line: Line) -> str:
        """Return the comment of a line: the keys and values that it comes from, and its note."""
        keys = [key for key in line.origins if self.value(key) is not None]
        parts = [f"{key}: {short(self.value(key))}{self._by_default(key)}" for key in keys]
        return visible("; ".join([*parts, *[line.note] * bool(line.note)])).replace("\n", " ")

    def _by_default(self, key: str) -> str:
        if isinstance(self.given.get(key), Computed):
            return " (their default: the program computes it)"
        return "" if self.given.get(key) is not None else " (their default)"


def line(key: str, value: Any, *origins: str, note: str = "") -> Line:
    """A line of the recipe."""
    return Line(key=key, value=value, origins=origins, note=note)


def shown(key: str, value: Any) -> str:
    """A value in at most 70 characters; of a key that names a secret, nothing of it."""
    return "…" if _SECRET.search(key.rpartition(".")[2]) else short(value)


def short(value: Any) -> str:
    """A value in at most 70 characters of one line."""
    text = str(value) if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return " ".join(text[:70].split()) + ("…" if len(text) > 70 else "")


def same(theirs: Theirs, table: Mapping[str, str]) -> list[Line]:
    """A line for each key that means the same here, where it has a value: ours, and the names of theirs."""
    keys = [(ours, theirs.first(*names.split())) for ours, names in table.items()]
    return [line(ours, theirs.value(key), key) for ours, key in keys if theirs.value(key) is not None]


def ruled(theirs: Theirs, rules: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The lines of the rules of a table whose conditions hold."""
    lines = list[Line]()
    for rule in rules:
        conditions = [_CONDITION.fullmatch(words) for words in rule.get("if", "").split()]
        if all(part is not None and _holds(theirs, part) for part in conditions):
            asked = [part["key"] for part in conditions if part and part["sign"] != "~"]
            for ours, value in rule["set"].items():
                names = [name for name in re.findall(r"\$([\w.]+)", str(value)) if theirs.value(name) is not None]
                origins = dict.fromkeys([*asked, *names])
                lines.append(line(ours, _filled(theirs, value), *origins, note=rule.get("note", "")))
    return lines


def _holds(theirs: Theirs, condition: re.Match[str]) -> bool:
    key, equals, values = condition["key"], condition["equals"], str(condition["values"]).split("|")
    if key.endswith(".*"):
        return any(name.startswith(key[:-1]) for name in theirs.given)
    value = theirs.value(key)
    if equals:
        return (str(value) in values) == (equals == "=") and (value is not None or equals == "!=")
    return bool(value) != (condition["sign"] == "!")


def _filled(theirs: Theirs, value: Any) -> Any:
    """A value of a rule with theirs for each `$key`; two of them may be divided, and a number taken off."""
    if isinstance(value, dict):
        return {name: _filled(theirs, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled(theirs, inner) for inner in value]
    if not isinstance(value, str) or not value.startswith("$"):
        return value
    first, *rest = value.split()
    number = theirs.value(first[1:])
    return number / theirs.value(rest[1][1:]) if rest[:1] == ["/"] else number - float(rest[1]) if rest else number


def model_line(theirs: Theirs, *names: str) -> Line:
    """The line of `model.path`, to be filled in where the program names the model."""
    key, found = theirs.first(*names), [theirs.given[name] for name in names if name in theirs.given]
    path = theirs.value(key)
    if isinstance(path, str):
        return line("model.path", path, key)
    return line("model.path", "path/to/model", note=f"{FILL_IN}: {short(found[0]) if found else 'the model'}")


def rows_of(path: Any) -> tuple[int | None, int | None]:
    """Return how many rows the training and the test set of a well-known data set have; None where nobody can know."""
    words = str(path or "").lower().removesuffix(".parquet").split("/")
    return next((_ROWS[word] for word in reversed(words) if word in _ROWS), (None, None))


def steps_line(*, most: int | None, epochs: Any, rows: int | None, queries: int, origins: Sequence[str]) -> Line:
    """The line of `steps`: whole batches in all epochs, `most` where that is less, or a line to fill in."""
    by_epochs = int(epochs * (rows // queries)) if rows and epochs else None
    known = [steps for steps in (most, by_epochs) if steps]
    if known:
        note = f"epochs × ({rows:,} rows // {queries})" if by_epochs and min(known) == by_epochs else ""
        return line("steps", max(min(known), 1), *origins, note=note)
    note = f"{FILL_IN}: epochs × rows ÷ rollout.queries_per_step; 1000 is a proposal"
    return line("steps", 1000, *origins, note=note)


def mini_batches(wanted: int, queries: int, origins: Sequence[str]) -> Line:
    """The line of `actor.mini_batches`: their number, or the nearest below that divides the queries."""
    if wanted < 1:
        raise ValueError(f"{wanted} mini-batches")
    fit = math.gcd(wanted, queries)
    note = (
        "" if fit == wanted else f"theirs are {wanted}, which does not divide {queries} queries: groups stay whole here"
    )
    return line("actor.mini_batches", fit, *origins, note=note)


def ratio_notes(level: str, updates: int, queries: int) -> list[str]:
    """Say that a single update has no ratio to clip, and what to set instead."""
    clip = " actor.clip_low=3e-4 actor.clip_high=4e-4" if level == "sequence" else ""
    what = "one mini-batch after π_old is computed: the ratio is 1 at every update, so nothing is ever clipped"
    than = " and the level of the ratio changes nothing" if level == "sequence" else ""
    more = "" if queries % 4 == 0 else "rollout.queries_per_step=32 "
    return [f"{what}{than}; propose: {more}actor.mini_batches=4{clip}"] if updates == 1 else []


def slug(*words: Any) -> str:
    """A name for the run of words in any spelling."""
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(str(word) for word in words if word)).strip("-._")
    return text[:100] or "imported"


def said_of(key: str, table: Mapping[str, str]) -> str:
    """Return what a table of sentences, each with the patterns of its keys, says of a key."""
    patterns = ((text, name) for text, names in table.items() for name in names.split())
    return next((text for text, name in patterns if fnmatchcase(key, name)), UNKNOWN)


def sorted_out(theirs: Theirs, draft: Draft, table: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, str]]:
    """The category of each key of the file, exactly one, with what is said of it."""
    to: dict[str, list[str]] = {}
    for line in draft.lines:
        for key in line.origins:
            to.setdefault(key, []).append(f"{line.key}: {short(line.value)}")
    found: dict[str, tuple[str, str]] = {}
    for key, value in theirs.given.items():
        text = draft.said.get(key) or said_of(key, {**table["said"], "implied": " ".join(table["same"].values())})
        if isinstance(value, Computed) and text != WHERE:
            found[key] = ("not here", "it is computed by the program")
        elif key in to and key not in draft.said:
            found[key] = ("translated", ", ".join(to[key]))
        elif not value and text not in (WHERE, UNKNOWN):
            found[key] = ("implied", "it is off")
        else:
            category, _, words = text.partition(": ")
            found[key] = (category, words)
    return found
