"""Draw docs/pictures/terminal.svg, what a terminal shows of a run that has made STEP steps.

python docs/make_terminal_picture.py RUN_DIR STEP
"""

import io
import json
import re
import sys
import time
from pathlib import Path

from rich.console import Console

from gspo.metrics.words import diagnoses
from gspo.recipe.load import load_recipe
from gspo.run.live import Phase, view

WIDTH = 112
PICTURE = Path(__file__).parent / "pictures" / "terminal.svg"


def main(run: Path, step: int) -> None:
    """Show the run's steps up to this one, as `gspo train` did when it had made them."""
    recipe = load_recipe(run / "recipe.yaml")
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [
        {name: float("nan") if n is None else n for name, n in json.loads(line).items()} for line in text.splitlines()
    ]
    first, *steps = lines[: step + 1]
    phase = Phase(title=recipe.actor.title, total=recipe.steps, step=0)
    phase.started = time.monotonic() - (steps[-1]["time/elapsed_seconds"] - first["time/elapsed_seconds"])
    for line in steps:
        numbers = {"reward": line["reward/mean"], "response tokens": line["response/mean_tokens"]}
        phase.add(int(line["step"]), numbers, line)
    phase.diagnoses = tuple(diagnoses(steps, recipe.actor).values())
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(view(phase, None, "", WIDTH))
    svg = console.export_svg(title="gspo train recipes/arithmetic.yaml")
    svg = re.sub(r"\s*@font-face \{[^}]*\}", "", svg)  # a page that shows it fetches nothing
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
