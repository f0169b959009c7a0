"""What the numbers mean: every metric of the documentation, found by its name, and in the package as it is built."""

import base64
import gzip
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.report.page.lines import Page, arms_with, seeds_of
from tests.report.page.made_runs import metrics_line

import gspo.report.page
from gspo.report.page import html
from gspo.report.page.charts import charts_of, every_metric
from gspo.report.page.glossary import anchor, general_name, glossary

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "metrics.md"
ASSETS = Path(gspo.report.page.__file__).with_name("assets")
PLOTLY = "plotly-cartesian-4.1.1.min.js.gz"
PLOTLY_SHA256 = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"


def documented() -> dict[str, str]:
    """The first table's rows by name."""
    table = DOCUMENT.read_text(encoding="utf-8").split("| name | definition | healthy |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == len(table.strip().splitlines()) - 1
    return dict(rows)


def test_every_metric_of_the_documentation_is_found_and_nothing_else() -> None:
    assert list(glossary()) == list(documented())
    assert len(glossary()) > 80


def test_an_entry_is_the_documentations_own_words() -> None:
    for name, row in documented().items():
        entry = glossary()[name]
        escaped = [text.replace("\\", "\\\\").replace("|", "\\|") for text in (entry.definition, entry.healthy)]
        assert [escaped[0], escaped[1]] == [cell.strip() for cell in re.split(r"(?<!\\)\|", row)], name
    assert "1/|y_i| Σ_t" in glossary()["ratio/sequence_mean"].definition
    assert "|experts now \\ experts of π_old|" in glossary()["moe/expert_change_fraction"].definition
    assert glossary()["reward/mean"].healthy == "rises"


def test_the_package_has_the_documentation_itself() -> None:
    assert (ASSETS / "metrics.md").read_bytes() == DOCUMENT.read_bytes()


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("evaluation/held_out/pass_at_1", "evaluation/<set>/pass_at_1"),
        ("evaluation/pass_at_1/standard_error", "evaluation/<set>/standard_error"),
        ("evaluation/a b.c-é/mean_tokens", "evaluation/<set>/mean_tokens"),
        ("evaluation/x/y_z", "evaluation/<set>/y_z"),
        ("evaluation/x/my_fn/mean", "evaluation/<set>/<function>/mean"),
        ("reward/my_fn/mean", "reward/<function>/mean"),
        ("reward/a.b:c d/seconds", "reward/<function>/seconds"),
        ("reward/mean/mean", "reward/<function>/mean"),
        ("reward/rewards/x.py:f/mean", "reward/<function>/mean"),
        ("reward/mean", "reward/mean"),
        ("reward/std", "reward/std"),
        ("time/reward_seconds", "time/reward_seconds"),
        ("policy/entropy", "policy/entropy"),
    ],
)
def test_a_set_and_a_function_are_any(metric: str, name: str) -> None:
    assert general_name(metric) == name
    assert anchor(metric) == anchor(name)


def test_the_general_names_are_those_of_the_glossary() -> None:
    assert [name for name in glossary() if general_name(name) != name] == []


def test_anchors_are_unique_and_can_be_linked_to() -> None:
    anchors = [anchor(name) for name in glossary()]
    assert len(set(anchors)) == len(anchors)
    assert all(re.fullmatch(r"metric-[a-z0-9_-]+", one) for one in anchors)


def test_every_metric_that_a_chart_names_is_defined_on_the_page() -> None:
    defined = {element.attributes["id"] for element in Page(html.glossary_part()).all("dt")}
    assert defined == {anchor(name) for name in glossary()}
    log = [metrics_line(step) for step in range(7)]
    log[1] |= {name: 0.5 for name in documented() if "<" not in name and name != "step" and name not in log[1]}
    log[1] |= {"reward/f/mean": 0.5, "reward/f/seconds": 0.5}
    for arms in ([seeds_of(log)], arms_with(steps=7)):
        for chart in [*charts_of(arms), *every_metric(arms).values()]:
            assert all(anchor(metric) in defined for metric in chart.metrics), chart.metrics
            assert html.figure_of(chart)["definition"] == anchor(chart.metrics[0])
            links = Page(html.chart_part(0, chart)).all("a")
            assert {link.attributes["href"] for link in links} == {f"#{anchor(name)}" for name in chart.metrics}


def test_a_metric_of_another_version_has_no_definition_to_lead_to() -> None:
    (chart,) = every_metric([seeds_of([{"step": 1, "flux/capacity": 3.0}])]).values()
    assert html.figure_of(chart)["definition"] is None


def test_the_page_shows_code_as_such_and_the_rest_as_text() -> None:
    page = Page(html.glossary_part())
    texts = [element.text for element in page.all("dd")]
    assert len(texts) == len(page.all("dt")) == len(glossary())
    assert not any("`" in text for text in texts)
    assert [element.text for element in page.all("dt")] == list(glossary())
    assert "`" in glossary()["reward/unscored_fraction"].definition
    assert "None from all" in next(text for text in texts if "without a reward" in text)


def test_plotly_is_the_release_that_was_checked_with_its_licence() -> None:
    script = gzip.decompress(html.asset(PLOTLY))
    assert hashlib.sha256(script).hexdigest() == PLOTLY_SHA256
    head = script[:500].decode()
    assert "plotly.js" in head and "4.1.1" in head and "Copyright" in head and "MIT" in head
    embedded = Page(html.page(dict.fromkeys(html_parts(), ""))).by_id("plotly-data").text
    assert gzip.decompress(base64.b64decode(embedded)) == script


def html_parts() -> set[str]:
    """The places of the template that are not fixed."""
    return set(re.findall(r"\{\{(\w+)\}\}", html.asset("page.html").decode())) - {"style", "script", "plotly"}


def test_the_built_package_has_the_assets_and_none_is_a_link(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="a wheel is built with what is installed")
    for name in ("src", "docs"):
        leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=leave_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path / "built"], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "built").glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        for path in ASSETS.iterdir():
            assert content.read(f"gspo/report/page/assets/{path.name}") == path.read_bytes(), path.name
        assert not any(info.external_attr >> 28 == 0o12 for info in content.infolist())
