"""The files that the page is made of: the library is the published one, the scripts share a scope, texts stay texts."""

import hashlib
import re
from importlib.resources import files

from gspo.metrics.definitions import definition_of
from gspo.report.page.write import asset

SCRIPTS = sorted(
    entry.name
    for entry in files("gspo.report.page").joinpath("assets").iterdir()
    if entry.name.endswith(".js") and not entry.name.startswith("uPlot")
)
SHA_256 = {  # of npm's uplot 1.6.32: dist/uPlot.iife.min.js, dist/uPlot.min.css, LICENSE
    "uPlot-1.6.32.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot-1.6.32.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot-LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def test_the_library_is_the_published_one_with_its_licence() -> None:
    shown = {name: hashlib.sha256(asset(name).encode()).hexdigest() for name in SHA_256}
    assert shown == SHA_256
    assert "The MIT License" in asset("uPlot-LICENSE.txt")


def test_no_name_of_the_one_scope_is_given_twice() -> None:
    names = [
        name
        for script in SCRIPTS
        for name in re.findall(r"^(?:async )?(?:function|const|let) (\w+)", asset(script), re.M)
    ]
    assert len(names) > 50 and len(set(names)) == len(names)


def test_nothing_of_a_run_can_become_html_and_nothing_is_fetched_but_from_the_own_server() -> None:
    for script in SCRIPTS:
        text = asset(script)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            script
        )
        assert "</script" not in text and "http" not in text, script
    fetched = [place for script in SCRIPTS for place in re.findall(r"fetch\(([^)]*)", asset(script))]
    assert fetched and all(not re.search("//", place) for place in fetched)
    page = "".join(map(asset, ("page.html", "style.css", "samples.css")))
    assert not re.search(r"""(src|href)=["'](?!#|data:)|url\(|@import""", page)


def test_the_list_of_charts_names_metrics_that_are_defined() -> None:
    named = re.findall(
        r'\["((?:reward|response|group|clip|ratio|policy|critic|gradient|reference|moe|time|throughput|memory)/\w+)"',
        asset("charts.js"),
    )
    assert len(named) > 15 and [name for name in named if definition_of(name) is None] == []


def test_texts_contrast_with_what_is_behind_them_in_both_themes() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    sheets = [re.findall(r":root[^{]*\{([^}]*)\}", asset(name)) for name in ("style.css", "samples.css")]
    for light_or_dark in zip(*sheets, strict=True):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", "".join(light_or_dark)))
        for text in ("ink", "quiet", "link", "warn", "right", "wrong"):
            for behind in ("paper", "soft"):
                low, high = sorted((luminance(colours[text]), luminance(colours[behind])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, behind, colours)
