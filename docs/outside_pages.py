"""A hook of mkdocs: pages of the site that lie outside docs/, and links that work there as well as on GitHub."""

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "studies/gspo_vs_grpo/README.md",
    "studies/objectives/README.md",
    "studies/engine_likelihoods/README.md",
    "studies/staleness/README.md",
    "studies/turns/README.md",
    "studies/growth/README.md",
    "studies/sampler/README.md",
    "studies/baselines/README.md",
)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()#:\s]+)(#[^()\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of `OUTSIDE`, with the figures beside them, under their own paths."""
    from mkdocs.structure.files import File  # here, since the tests read this file where there is no mkdocs

    paths = [ROOT / path for path in OUTSIDE]
    figures = [figure for path in paths for figure in sorted((path.parent / "figures").glob("*.svg"))]
    for path in (*paths, *figures):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point each link to a page of the site; one to a source file keeps its text only."""
    place = page.file.src_uri
    here = (ROOT / place if place in OUTSIDE else ROOT / "docs" / place).parent

    def pointed(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups()
        path = Path(os.path.normpath(here / target))
        if not path.exists():
            return link[0]  # mkdocs names it
        name = path.relative_to(ROOT).as_posix().removeprefix("docs/")
        if files.get_file_from_path(name) is None:
            return text
        return f"{mark}[{text}]({os.path.relpath(name, Path(place).parent)}{anchor or ''})"

    return _LINK.sub(pointed, markdown)
