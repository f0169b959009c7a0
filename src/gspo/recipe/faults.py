"""What is wrong with a recipe, in a person's words: which key, where it was written, and what was probably meant."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from reprlib import Repr
from typing import Any

import yaml
from pydantic import ValidationError

from gspo.errors import UserError, did_you_mean
from gspo.recipe.schema import recipe_keys

_COPIED = ("evaluation.suites.", "phases.")  # their keys have the names of others, which are more often meant
_MISSPELT = 0.85  # how much of two names is alike where one hardly means anything else
_SHORT = Repr()  # of a value in a message
_SHORT.maxstring = _SHORT.maxother = 100


def described(
    error: ValidationError, *, where: str, overridden: Sequence[str] = (), inside: Sequence[str | int] = ()
) -> UserError:
    """Every fault at once, each with where its key was written: there, or on the command line.

    Of a file that holds a part of a recipe, `inside` says which; the faults name its keys as the file does.
    """
    lines, prefix = list[tuple[str, str]](), "".join(f"{part}." for part in inside)
    for item in error.errors():
        for key, sentence in _faults({**item, "loc": (*inside, *item["loc"])}):
            place = "command line" if _is_of(overridden, key, sentence) else where
            lines.append((place, sentence.replace(prefix, "") if prefix else sentence))
    places = list(dict.fromkeys(place for place, _ in lines))
    shown = [line if len(places) == 1 else f"{place}: {line}" for place, line in lines]
    return UserError("\n  ".join(["cannot be used:", *shown] if shown[1:] else shown), where=" and ".join(places))


def hint(key: str) -> str | None:
    """Return what was meant by a key that there is not: by its name in another library, or in another section."""
    parts = key.split(".")
    if parts[:2] == ["queries", "sources"]:
        return f"a source has {', '.join(_keys_in('queries.sources'))}; how often it is taken stands in queries.weights"
    if parts[0] == "phases":
        own = (name.removeprefix("phases.") for name, _ in recipe_keys() if name.startswith("phases."))
        return f"a phase has {', '.join(name for name in own if not _keys_in(f'phases.{name}'))}"
    for end in (".".join(parts[first:]) for first in range(len(parts))):
        if end in _other_names():
            return _other_names()[end]
        keys = [name for name, _ in recipe_keys() if f".{name}".endswith(f".{end}") and not name.startswith(_COPIED)]
        # A last name that several sections have says less than the section of another library that it is in.
        if keys and not (keys[1:] and any(part in _other_names() for part in parts[:-1])):
            keys.sort(key=lambda name: name.startswith(("cold_start.", "critic.")))
            return f"did you mean {' or '.join(keys[:3])}?"
    ours = {name.rpartition(".")[0] for name, _ in recipe_keys()}
    theirs = [part for number, part in enumerate(parts[:-1], 1) if ".".join(parts[:number]) not in ours]
    return next((_other_names()[part] for part in theirs if part in _other_names()), None)


def shown(value: Any) -> str:
    """A value in short."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of thousands of digits"


def _is_of(overridden: Sequence[str], key: str, sentence: str) -> bool:
    """Tell whether a fault is of a key that was overridden; a rule between keys names them in its sentence."""
    if not key:
        return any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", sentence) for name in overridden)
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in overridden)


def _faults(item: Any) -> Iterator[tuple[str, str]]:
    """The key and a sentence for one of pydantic's errors: what is wrong, and the nearest key or value."""
    location = [part for part in item["loc"] if part not in ("tuple", "[key]")]
    kind, value = item["type"], item["input"]
    where, message = ".".join(map(str, location)), item["msg"].removeprefix("Input ").partition(", unable")[0]
    key = _without_places(where)
    if meant := isinstance(value, str) and _other_names().get(f"{key}={value}"):
        yield where, f"{where}: {value}: {meant}"
    elif kind == "refusal" and not where:  # a rule names its keys itself
        yield from (("", sentence) for sentence in message.split("\n  "))
    elif kind == "missing":
        yield where.rpartition(".")[0] or where, f"{where}: this key is needed and missing"  # of who wrote its section
    elif kind == "extra_forbidden":
        yield from _unknown(where, value)
    elif kind.startswith("model_"):
        keys = ", ".join(_keys_in(key)[:3])
        yield where, f"{where}: should be a section with keys such as {keys}, not {shown(value)}"
    else:
        yield where, f"{where}: {message if kind == 'refusal' else _of_value(message, key, value)}"


def _of_value(message: str, key: str, value: Any) -> str:
    message = message.replace("a valid tuple", "a list").replace("a valid dictionary", "a mapping")  # as YAML has them
    message = re.sub(r"^String should match pattern '.*'$", "Text of another form is expected", message)
    field = dict(recipe_keys()).get(key)
    meaning = (field and field.description) or "see docs/reference/recipe.md"
    meaning = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", meaning)  # without links
    advice = did_you_mean(shown(value), re.findall(r"'(\w+)'", message), meaning, cutoff=0.5)
    if message.endswith("a list") and isinstance(value, str):
        advice = f"write {[value]}"
    return f"{message}, not {shown(value)}: {advice}"


def _unknown(where: str, value: Any) -> Iterator[tuple[str, str]]:
    """The fault of an unknown key; of an unknown section, those of the keys in it."""
    parent, dot, last = where.rpartition(".")
    known = _keys_in(_without_places(parent))
    near = difflib.get_close_matches(last, known, n=1)
    inner = value if isinstance(value, dict) else {}
    if inner and (not near or _other_names().keys() & {last, *(f"{last}.{name}" for name in inner)}):
        for name in inner:
            yield from _unknown(f"{where}.{name}", inner[name])
    elif where in dict(recipe_keys()):
        yield where, f"unknown key {where}: write it as a section in a section"
    else:
        guess = f"known: {', '.join(known)}" if known else "there is no section of this name"
        guess = f"did you mean {parent}{dot}{near[0]}?" if near else guess
        is_misspelt = difflib.get_close_matches(last, known, n=1, cutoff=_MISSPELT)
        yield where, f"unknown key {where}: {guess if is_misspelt else hint(where) or guess}"


def _without_places(key: str) -> str:
    """The key without places in lists and names of sources."""
    return re.sub(r"\.\d+(?=\.|$)|(?<=^queries\.sources)\.[^.]+", "", key)


def _keys_in(section: str) -> list[str]:
    names = (name.rpartition(".") for name, _ in recipe_keys())
    return [last for parent, _, last in names if parent == section]


@cache
def _other_names() -> Mapping[str, str]:
    table = yaml.safe_load(files("gspo.recipe").joinpath("other_names.yaml").read_text(encoding="utf-8"))
    words = {meant: meant if meant.startswith("not here") else f"here it is {meant}" for meant in table}
    return {name: words[meant] for meant, names in table.items() for name in names.split()}
