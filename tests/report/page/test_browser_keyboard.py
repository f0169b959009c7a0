"""Without a mouse, and for whoever does not see the page: everything is reached, has a name, and shows the focus."""

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from tests.report.page.browser import Tab
from tests.report.page.shown_samples import choose, start_again

INTERACTIVE = """
return [...document.querySelectorAll("a[href], button, select, input, summary, [tabindex], .modebar-btn")]
  .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.disabled)
  .map((one, number) => { one.dataset.number = number; return number; })"""
FOCUSED = """
const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
return [one.dataset.number === undefined ? null : Number(one.dataset.number),
  style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
  one.checkVisibility({ opacityProperty: true }) && box.width > 0 && box.bottom > 0 && box.top < innerHeight,
  one.outerHTML.slice(0, 80)]"""
NAMED_ROLES = {"button", "link", "combobox", "textbox", "searchbox", "spinbutton", "DisclosureTriangle", "listbox"}


@pytest.fixture
def shown(tab: Tab, run: Path) -> Tab:
    tab.show(run)
    start_again(tab)
    choose(tab, step=2, query="sum:1")
    tab.run("document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0)")
    return tab


def test_everything_is_reached_by_tab_and_seen_when_it_is(tab: Tab, run: Path) -> None:
    tab.open(run)
    expected = tab.run(INTERACTIVE)
    assert len(expected) > 80
    found = []
    for _ in range(len(expected) + 5):
        tab.press(Keys.TAB)
        found.append(tab.run(FOCUSED))
        if found[-1][0] == expected[-1]:
            break
    assert [one[0] for one in found if one[0] is not None] == expected  # in the order in which they are read
    assert [one for one in found if not one[1] or not one[2]] == []


def test_everything_that_is_operated_has_a_name(shown: Tab) -> None:
    shown.driver.execute_cdp_cmd("Accessibility.enable", {})
    nodes: list[dict[str, Any]] = shown.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    shown.driver.execute_cdp_cmd("Accessibility.disable", {})
    roles = [
        (one.get("role", {}).get("value"), one.get("name", {}).get("value", "").strip())
        for one in nodes
        if not one["ignored"]
    ]
    operated = [one for one in roles if one[0] in NAMED_ROLES]
    assert len(operated) > 60
    assert {role for role, _ in operated} >= {
        "button",
        "link",
        "combobox",
        "searchbox",
        "spinbutton",
        "DisclosureTriangle",
    }
    assert [one for one in operated if not one[1]] == []
    pictures = [name for role, name in roles if role in ("image", "img", "group") and name]
    assert any("reward/mean: 0.21 → 0.26" in name for name in pictures)
    assert {"step before", "step after"} <= {name for role, name in operated}


def test_the_first_key_skips_to_the_samples(tab: Tab, run: Path) -> None:
    tab.open(run)
    tab.press(Keys.TAB)
    link = tab.find(".skip")
    assert link == tab.driver.switch_to.active_element
    assert link.rect["x"] >= 0  # it is seen only now
    tab.press(Keys.ENTER)
    tab.wait("const top = document.getElementById('samples').getBoundingClientRect().top; return Math.abs(top) < 60")
    tab.press(Keys.TAB)
    assert tab.run("return Boolean(document.activeElement.closest('#samples'))")


def test_samples_are_walked_through_with_keys(shown: Tab) -> None:
    shown.find("#samples-form [name=step]").click()
    shown.press(Keys.ESCAPE)
    shown.run("document.querySelector('#samples-form [name=step]').focus()")
    shown.press(Keys.ARROW_DOWN)
    shown.wait("return document.querySelector('#cards h3')?.textContent.startsWith('step 3,')")
    shown.run("document.querySelector('#samples-form [name=after]').focus()")
    shown.press(Keys.ENTER)
    shown.wait("return document.querySelector('#cards h3')?.textContent.startsWith('step 4,')")
    assert shown.run("return document.activeElement.name") == "after"  # for the next step


def test_a_query_is_followed_with_keys(shown: Tab) -> None:
    shown.run("document.querySelector('#elsewhere button:not([aria-current])').focus()")
    shown.press(Keys.ENTER)
    shown.wait("return document.querySelector('#cards h3')?.textContent.startsWith('step 1,')")
    shown.settle()
    assert shown.run("return document.activeElement.textContent") == "1"  # of the steps that the query is in


def test_the_number_found_is_told(shown: Tab) -> None:
    assert shown.find("#found").get_dom_attribute("role") == "status"
    assert shown.run("return document.documentElement.lang") == "en"
    assert shown.run("return [...document.querySelectorAll('h1')].length") == 1
