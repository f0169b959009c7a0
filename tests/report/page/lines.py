"""Runs in memory, as they are read from the disk, and pages taken apart again."""

import base64
import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

from tests.report.page.made_runs import Line, metrics_line, recipe

from gspo.metrics.numbers import numbers
from gspo.report.page.arms import Arm, arms_of
from gspo.report.page.sample_data import SampleData
from gspo.report.run_files import RunFiles, State

_WITHOUT_END = {"meta", "link", "input", "br", "img", "hr"}


def run_of(
    lines: Iterable[Line] = (),
    *,
    name: str = "made",
    settings: Mapping[str, Any] | None = None,
    history: Sequence[Line] = (),
    cold_start: Sequence[Line] = (),
    state: str = "finished",
    path: Path | None = None,
) -> RunFiles:
    """A run of these lines, null read as NaN."""
    return RunFiles(
        path=path or Path("runs", name),
        recipe={**recipe(name), **(settings or {})},
        lines=[numbers(line) for line in lines],
        cold_start=cold_start,
        history=history,
        state=cast(State, state),
        notes=[],
    )


def seeds_of(*runs: Sequence[Line]) -> Arm:
    """An arm of a run for each of these logs."""
    found = [run_of(lines, name=f"made-{number}", settings={"seed": number}) for number, lines in enumerate(runs)]
    (arm,) = arms_of(found)
    return arm


def steps_of(name: str, values: Sequence[Any], first: int = 1) -> list[Line]:
    """A line a step of one metric; a value `...` is of a step without it."""
    return [{"step": step, **({} if value is ... else {name: value})} for step, value in enumerate(values, start=first)]


def arms_with(**changes: Any) -> list[Arm]:
    """Two arms of two seeds each, of all metrics; changes are of the second one's recipe."""
    made = []
    for name, keys in (("base", {}), ("other", changes)):
        for seed in (0, 1):
            log = [metrics_line(step, seed) for step in range(7)]
            made.append(run_of(log, name=f"{name}-{seed}", settings={"seed": seed, **keys}))
    return arms_of(made)


def groups_in(data: SampleData) -> dict[int, list[dict[str, Any]]]:
    """What the page has of each step."""
    return {one.step: json.loads(gzip.decompress(one.content)) for one in data.steps}


def size_of(data: SampleData) -> int:
    """What the samples take of the page."""
    return sum(len(one.content) for one in data.steps)


def unpacked(letters: str) -> Any:
    """What a script of the page has packed."""
    return json.loads(gzip.decompress(base64.b64decode(letters)))


@dataclass
class Element:
    """A tag with its attributes and the text right in it and below."""

    tag: str
    attributes: dict[str, str | None]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """All elements of a page, in their order."""

    html: str
    elements: list[Element] = field(default_factory=list)
    _open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))
        if tag not in _WITHOUT_END:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1].tag == tag, f"</{tag}> ends {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        """The elements of a tag."""
        return [element for element in self.elements if element.tag == tag]

    def by_id(self, name: str) -> Element:
        """The one element of this id."""
        (found,) = [element for element in self.elements if element.attributes.get("id") == name]
        return found

    @property
    def figures(self) -> dict[str, Any]:
        """What the charts are drawn of."""
        found = unpacked(self.by_id("figures-data").text)
        assert isinstance(found, dict)
        return found

    @property
    def samples(self) -> dict[str, list[dict[str, Any]]]:
        """By run, the steps with their groups."""
        found = {}
        for element in self.elements:
            if element.attributes.get("class") == "samples-data":
                index, *steps = element.text.split("\n")
                rows = zip(unpacked(index), steps, strict=True)
                found[str(element.attributes["data-run"])] = [{**one, "groups": unpacked(step)} for one, step in rows]
        return found


def words(text: str) -> str:
    """With single spaces."""
    return re.sub(r"\s+", " ", text).strip()
