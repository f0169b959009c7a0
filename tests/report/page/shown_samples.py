"""The samples' part of a page: choosing, and reading the cards that are shown then."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.report.page.browser import Tab

READ_CARDS = """
const text = (card, selector) => card.querySelector(selector)?.textContent ?? null;
return [...document.querySelectorAll("#cards article")].map((card) => ({
  facts: Object.fromEntries([...card.querySelectorAll(".facts div")].map((one) => [text(one, "dt"), text(one, "dd")])),
  text: text(card, ".completion"), where: text(card, ".where"), prompt: text(card, ".prompt"),
  failure: text(card, ".failure"), columns: text(card, ".columns"),
  clipped: card.classList.contains("clipped"),
}))"""
MARK = "document.getElementById('cards').append(Object.assign(document.createElement('i'), {id: 'old'}));"


def choose(tab: Tab, **fields: object) -> None:
    """Set fields of the form, those first that change others, and wait for the cards that they lead to."""
    ordered = sorted(fields, key=lambda name: ("run", "step", name).index(name))
    for name in ordered:
        value = str(fields[name])
        if name not in ("run", "step", ordered[-1]):
            tab.run("document.getElementById('samples-form').elements[arguments[0]].value = arguments[1]", name, value)
            continue
        tab.run(MARK)
        tab.set(f"#samples-form [name={name}]", value)
        tab.wait("return !document.getElementById('old')")


def click_through(tab: Tab, selector: str) -> None:
    """Click what changes the cards, and wait for them."""
    tab.run(MARK)
    tab.click(selector)
    tab.wait("return !document.getElementById('old')")


def start_again(tab: Tab) -> None:
    """As a page is at first: one group, no filter, coloured by the log ratio."""
    tab.run("document.getElementById('samples-form').elements.scope.value = 'group'")
    tab.run("document.getElementById('samples-form').elements.colour.value = 'ratio'")
    click_through(tab, "#samples-form [type=reset]")


def cards(tab: Tab) -> list[dict[str, Any]]:
    return list(tab.run(READ_CARDS))


def texts(tab: Tab) -> list[str]:
    """The shown responses, which are unique in a made run."""
    return [card["text"] for card in cards(tab)]


def value(tab: Tab, name: str) -> str:
    return str(tab.find(f"#samples-form [name={name}]").get_property("value"))


def options(tab: Tab, name: str) -> list[str]:
    script = "return [...document.querySelector(arguments[0]).options].map((one) => one.value)"
    return list(tab.run(script, f"#samples-form [name={name}]"))


def samples_of(run: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every line of the run's rollouts with its step, in order."""
    for file in sorted((run / "rollouts").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield int(file.stem.removeprefix("step_")), json.loads(line)
