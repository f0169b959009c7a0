"""The page as one file: whatever a run contains is text on it, and nothing is loaded from anywhere."""

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import Page, run_of, steps_of, unpacked, words
from tests.report.page.made_runs import begun, ended, made_run, metrics_line, recipe, sample, write_run

from gspo.report.page import html
from gspo.report.page.arms import arms_of
from gspo.report.page.charts import charts_of
from gspo.report.page.overview import Overview
from gspo.report.page.write import document
from gspo.report.run_files import RunFiles, read_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg onload=alert(3)>&amp;{{style}}-->"
HARMLESS = "harmless"


def page_of(tmp_path: Path, text: str, *, runs: int = 1) -> Page:
    """A page of runs in which everything that may be any text is this one."""
    directories = []
    for place in range(runs):
        log = [{**metrics_line(step), f"evaluation/{text}/pass_at_1": 0.5, f"{text}/x": 1.0} for step in range(3)]
        log[1] |= {"response/truncated_fraction": 0.9, "evaluation/held_out/standard_error": 0.1}
        lines = [sample(text, text, words=[text], failure=text, finish_reason=text, rewards={text: 1.0})]
        told = {"introduction": text, "environment": {text: text}, "working_directory": text, "time": text}
        directories.append(
            write_run(
                tmp_path / f"{text.replace('/', '')}-{place}",
                settings={**recipe(f"{place} {text}"), text: text, "changed": f"{place}{text}"},
                lines=log,
                samples={1: lines},
                history=[begun(**told), ended("failed", text)],
            )
        )
    return Page(document([read_run(path) for path in directories]))


@pytest.mark.parametrize("runs", [1, 2])
def test_nothing_of_a_run_becomes_an_element(runs: int, tmp_path: Path) -> None:
    hostile, harmless = page_of(tmp_path, HOSTILE, runs=runs), page_of(tmp_path, HARMLESS, runs=runs)
    assert [element.tag for element in hostile.elements] == [element.tag for element in harmless.elements]
    assert [list(element.attributes) for element in hostile.elements] == [
        list(element.attributes) for element in harmless.elements
    ]
    names = {name for element in hostile.elements for name in element.attributes}
    assert not any(name.startswith("on") for name in names) and "src" not in names
    assert not {"img", "svg", "iframe", "object", "base"} & {element.tag for element in hostile.elements}
    for one, other in zip(hostile.all("script"), harmless.all("script"), strict=True):
        assert HOSTILE not in one.text and (one.text == other.text or "type" in one.attributes)


def test_whatever_a_run_contains_is_read_as_it_is(tmp_path: Path) -> None:
    page = page_of(tmp_path, HOSTILE)
    assert page.all("h1")[0].text == f"0 {HOSTILE}" and page.all("title")[0].text == f"0 {HOSTILE} – gspo"
    overview = page.by_id("overview").text
    directory = tmp_path / f"{HOSTILE.replace('/', '')}-0"
    again = f"it can be resumed, from the start, for it has no checkpoint: gspo resume {directory}"
    assert f"failed after 2 of 6 steps ({again}): {HOSTILE}" in overview
    assert overview.count(HOSTILE) >= 5  # an evaluated set, the introduction, the history
    (figure,) = [element for element in page.all("figure") if element.text.startswith("Reward")]
    assert f"evaluation/{HOSTILE}/pass_at_1: 0.5 → 0.5" in figure.text
    recipes = page.by_id("recipe").text
    assert (tmp_path / f"{HOSTILE.replace('/', '')}-0" / "recipe.yaml").read_text(encoding="utf-8") in recipes
    assert f"{HOSTILE}{HOSTILE}" in recipes  # the environment's row
    ((step,),) = page.samples.values()
    (group,) = step["groups"]
    assert group["query"] == group["prompt"] == group["samples"][0]["completion"] == HOSTILE
    assert list(page.samples) == [f"0 {HOSTILE}"] and step["queries"] == [HOSTILE]


def test_what_plotly_would_read_as_tags_is_escaped_in_its_names_only(tmp_path: Path) -> None:
    figures = page_of(tmp_path, HOSTILE).figures
    names = [trace["name"] for chart in figures["charts"] for trace in chart["traces"] if "name" in trace]
    assert any("&lt;svg" in name for name in names) and not any("<" in name for name in names)
    assert f"{HOSTILE}/x" in figures["others"]


def test_of_several_runs_the_tables_are_of_text(tmp_path: Path) -> None:
    page = page_of(tmp_path, HOSTILE, runs=2)
    overview = page.by_id("overview").text
    for place in (0, 1):
        assert f"{place} {HOSTILE}" in overview
        assert f'"{place}{HOSTILE}"' in page.by_id("differences").text.replace('\\"', '"')
    assert page.all("h1")[0].text == "2 runs"


def test_braces_in_a_run_are_left_as_they_are(tmp_path: Path) -> None:
    text = "{{title}} {{samples}} {{no_such_part}} \\1 \\g<0>"
    path = write_run(tmp_path / "a", settings=recipe(queries={"template": text}), history=[begun(introduction=text)])
    page = Page(document([read_run(path)]))
    assert text in page.by_id("overview").text
    assert f"template: '{text}'" in page.by_id("recipe").text


def test_no_part_of_the_template_is_left(tmp_path: Path) -> None:
    text = document([read_run(made_run(tmp_path / "a"))])
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_a_part_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError):
        html.page({"title": "x"})


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = Page(document([read_run(made_run(tmp_path / "a"))]))
    for element in page.elements:
        assert "src" not in element.attributes and "srcset" not in element.attributes
        target = element.attributes.get("href") or ""
        assert element.tag not in ("a", "link") or target == "data:," or not target or target.startswith("#")
    (policy,) = [element.attributes for element in page.all("meta") if "http-equiv" in element.attributes]
    assert policy["http-equiv"] == "Content-Security-Policy"
    sources = dict(part.strip().split(" ", 1) for part in str(policy["content"]).split(";"))
    assert sources["default-src"] == "'none'" and "connect-src" not in sources
    assert not any("http" in source or "*" in source for source in sources.values())
    style = page.all("style")[0].text
    assert "@import" not in style and "url(" not in style


def test_the_links_of_the_page_lead_somewhere_and_ids_are_unique(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, name=name, steps=3, seed=2) for name in ("a", "b")]
    for directories in (runs[:1], runs):
        page = Page(document([read_run(path) for path in directories]))
        ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
        assert len(set(ids)) == len(ids)
        targets = {str(element.attributes["href"])[1:] for element in page.all("a") if element.attributes.get("href")}
        assert targets <= set(ids)
        assert page.html.startswith("<!DOCTYPE html>") and not page._open


def test_the_figures_are_the_charts(tmp_path: Path) -> None:
    run = read_run(made_run(tmp_path / "a"))
    page, charts = Page(document([run])), charts_of(arms_of([run]))
    assert len(page.figures["charts"]) == len(charts) == len(page.all("figure")) - 1  # that of any other number
    for number, (chart, drawn) in enumerate(zip(charts, page.figures["charts"], strict=True)):
        shown = page.by_id(f"chart-{number}")
        assert [trace.get("y") for trace in drawn["traces"]] == [trace.get("y") for trace in chart.traces]
        assert drawn["axis"] == chart.axis and words(shown.text).startswith(words(chart.title))
        assert all(caption in shown.text for caption in chart.captions)
        (place,) = [one for one in page.all("div") if one.attributes.get("data-chart") == str(number)]
        assert place.attributes["aria-label"] == "; ".join(chart.captions)
    assert page.figures["reload_seconds"] is None


def test_packed_content_is_the_same_each_time_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    times = count(0, 3600)
    monkeypatch.setattr("time.time", lambda: next(times))
    content: Any = {"a": [1, None, "</script>é\ud83d"], "b": {}}
    assert unpacked(html.packed(content)) == content
    assert html.packed(content) == html.packed(content)
    assert not re.search(r"[^A-Za-z0-9+/=]", html.packed(content))


def made_overview(name: str = "a", **changes: Any) -> Overview:
    known: dict[str, Any] = {
        **{"name": name, "state": "finished", "introduction": ["i"], "scores": [("reward", "0 → 1")], "seconds": 61.0},
        **{"diagnoses": [], "history": [], "notes": []},
    }
    return Overview(**{**known, **changes})


def test_one_run_is_told_in_full() -> None:
    one = made_overview(diagnoses=["d1", "d2"], history=["h1"], notes=["n1"], introduction=["i1", "i2"])
    page = Page(html.overview_part([one]))
    assert [element.text for element in page.all("li")] == ["d1", "d2", "n1", "h1"]
    assert [element.text for element in page.all("dd")] == ["0 → 1", "1 min 1 s"]
    assert [element.text for element in page.all("p")] == ["finished", "i1", "i2"]
    bare = Page(html.overview_part([made_overview()]))
    assert [element.text for element in bare.all("h3")] == ["Diagnoses", "What was trained, on what"]
    assert "None." in [element.text for element in bare.all("p")]


def test_several_runs_are_rows_under_the_same_columns() -> None:
    two = [made_overview(), made_overview("b", scores=[("length", "3")], diagnoses=["d"], notes=["n"], state="killed")]
    page = Page(html.overview_part(two))
    assert [cell.text for cell in page.all("th")] == ["run", "state", "time", "reward", "length", "diagnoses"]
    cells = [cell.text for cell in page.all("td")]
    assert cells == ["a", "finished", "1 min 1 s", "0 → 1", "–", "–", "b", "killed", "1 min 1 s", "–", "3", "dn"]


def test_where_arms_differ_is_a_table_and_for_one_arm_nothing() -> None:
    runs = [run_of(name="a"), run_of(name="b", settings={"steps": 9})]
    page = Page(html.differences_part(arms_of(runs)))
    assert [cell.text for cell in page.all("th")] == ["key", "a", "b"]
    assert [cell.text for cell in page.all("td")] == ["steps", "6", "9"]
    assert html.differences_part(arms_of(runs[:1])) == ""


def seeds(name: str, *rewards: list[Any], start: int = 0, **more: Any) -> list[RunFiles]:
    logs = [[{"step": 0, "evaluation/a/pass_at_1": log[0]}, *steps_of("reward/mean", log)] for log in rewards]
    return [
        run_of(log, name=f"{name}-{seed}", settings={"seed": seed, **more})
        for seed, log in enumerate(logs, start=start)
    ]


def test_arms_with_seeds_are_told_by_their_mean_and_deviation() -> None:
    runs = [*seeds("a", [0.0, 0.5], [0.5, 0.5], [1.0, None], start=3), *seeds("b", [0.25, 0.75], steps=9)]
    page = Page(html.arms_part(arms_of(runs)))
    assert [cell.text for cell in page.all("th")] == [
        *("arm", "seeds", "evaluation/a/pass_at_1", "reward/mean", "response/mean_tokens")
    ]
    assert [cell.text for cell in page.all("td")] == [
        *("a (3 seeds)", "3, 4, 5", "0.5 ± 0.5", "0.5 ± 0.5 → 0.5 ± 0", "–"),
        *("b-0", "0", "0.25", "0.25 → 0.75", "–"),
    ]


def test_runs_that_are_each_an_arm_have_no_such_table(tmp_path: Path) -> None:
    one, two = seeds("a", [0.0, 1.0]), seeds("b", [0.25, 0.75], steps=9)
    assert html.arms_part(arms_of(one)) == html.arms_part(arms_of([*one, *two])) == ""
    paths = [made_run(tmp_path / f"s{seed}", name=f"m-{seed}", seed=seed) for seed in (1, 2)]
    runs = [read_run(path) for path in paths]
    assert "m (2 seeds)" in Page(document(runs)).by_id("overview").text
    assert "mean ± sd" not in Page(document(runs[:1])).by_id("overview").text


def test_nothing_of_the_seeds_becomes_an_element() -> None:
    log = steps_of(f"evaluation/{HOSTILE}/pass_at_1", [0.5])
    runs = [run_of(log, name=f"{HOSTILE} {seed}", settings={"seed": f"{seed}{HOSTILE}"}) for seed in (1, 2)]
    page = Page(html.arms_part(arms_of(runs)))
    assert {element.tag for element in page.elements} == {"h3", "div", "table", "thead", "tbody", "tr", "th", "td"}
    assert [HOSTILE in cell.text for cell in page.all("th")] == [False, False, True, False, False]
    assert page.all("td")[1].text == f"1{HOSTILE}, 2{HOSTILE}" and HOSTILE in page.all("td")[0].text


def test_a_number_that_no_chart_is_about_has_no_link() -> None:
    (chart,) = charts_of(arms_of([run_of(steps_of("reward/mean", [1.0, 2.0]))]))
    assert '<a href="#metric-reward-mean"><code>reward/mean</code></a>' in html.chart_part(0, chart)
    odd = html.chart_part(0, type(chart)(title="<b>", metrics=["<i>/x"], traces=[], captions=["<u>"]))
    assert "<code>&lt;i&gt;/x</code>" in odd and Page(odd).all("i") == Page(odd).all("u") == []
