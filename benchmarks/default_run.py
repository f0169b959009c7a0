"""A recipe's run for several seeds: score, time and memory in a table, curves in a picture, answers before and after.

python benchmarks/default_run.py --output docs/benchmarks/default_run   # the .md and .svg there, about 12 minutes
python benchmarks/default_run.py --recipe programs --output docs/benchmarks/programs
python benchmarks/default_run.py --recipe smollm2_sums --output docs/benchmarks/smollm2_sums   # after `make smollm2`
python benchmarks/default_run.py --quick                                # one short run, to show that it works
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gspo.metrics.words import measured, measures
from gspo.recipe.load import load_recipe

Lines = list[dict[str, Any]]
RECIPES = Path(__file__).parents[1] / "recipes"
TITLES = {
    "arithmetic": "The default run",
    "programs": "Programs, run in the sandbox",
    "smollm2_sums": "A real language model learns sums",
    "smollm2_instructions": "A real language model learns to follow instructions",
}
WORK = {"arithmetic": "=", "programs": "#"}  # what a response that shows its work holds, and a bare one does not
QUICK = ["steps=2", "cold_start.steps=4", "evaluation.num_queries=8", "rollout.queries_per_step=8"]
HEAD = """# {title}

`{command}`

Measured on 2 CPU cores with nothing else running.

- Wall time is that of the whole command, with imports and both evaluations.
- pass@1 is on the same {num_queries} held-out queries, {samples} each at temperature 1, with its standard error over
  questions.
- {more}

"""
STYLES = """First and last step: how many of the {num_responses} training responses show their work, and the mean reward
  of those and of bare answers."""
TRANSFER = "Transfer: questions in other words, about what training never asks, judged in the same way."
NUM_SHOWN = 3  # questions of each set whose answers are shown


def main() -> None:
    """Run the recipe for each seed, one after another, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=TITLES, default="arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", help="path of the .md and .svg, without its ending; default: print the table only")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.recipe == "programs":
        subprocess.run([sys.executable, str(RECIPES / "programs.py")], check=True)
    runs: dict[int, Lines] = {}
    names = ["seed", "wall time, s", "of it GSPO steps, s", "peak memory, MiB", "pass@1 before", "pass@1 after"]
    names += [
        "tokens, held-out",
        *(("first step", "last step") if options.recipe in WORK else ("transfer before", "after")),
    ]
    rows = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    answers = ""
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds[:1] if options.quick else options.seeds:
            directory = Path(folder) / f"seed_{seed}"
            seconds = _train(options.recipe, seed, directory, QUICK if options.quick else [])
            runs[seed] = _lines(directory / "metrics.jsonl")
            if work := WORK.get(options.recipe):
                rollouts = [_lines(path) for path in sorted((directory / "rollouts").iterdir())]
                more = "".join(_styles(own, work) for own in (rollouts[0], rollouts[-1]))
            else:
                more = "".join(f" {_measured(runs[seed][place], 'transfer')} |" for place in (0, -1))
                answers = answers or _answers(directory / "evaluation")
            rows.append(_row(seed, seconds, runs[seed]) + more)
            print("\n".join(rows), flush=True)
    if options.output:
        text = (
            _head(options.recipe, options.output)
            + "\n".join(rows)
            + "\n\n![curves]("
            + Path(options.output).name
            + ".svg)\n\n"
            + _course(runs)
            + answers
        )
        Path(options.output).with_suffix(".md").write_text(text, encoding="utf-8")
        _draw(runs, Path(options.output).with_suffix(".svg"))


def _head(recipe: str, output: str) -> str:
    """What was run, and what the table's columns are."""
    chosen = "" if recipe == "arithmetic" else f"--recipe {recipe} "
    command = f"python benchmarks/default_run.py {chosen}--output {output}"
    loaded = load_recipe(RECIPES / f"{recipe}.yaml")
    samples = "one sample" if loaded.evaluation.samples == 1 else f"{loaded.evaluation.samples} samples"
    num_responses = loaded.rollout.queries_per_step * loaded.rollout.group_size
    more = STYLES.format(num_responses=num_responses) if recipe in WORK else TRANSFER
    return HEAD.format(
        title=TITLES[recipe], command=command, num_queries=loaded.evaluation.num_queries, samples=samples, more=more
    )


def _train(recipe: str, seed: int, directory: Path, overrides: list[str]) -> float:
    started = time.monotonic()
    path = RECIPES / f"{recipe}.yaml"
    command = [sys.executable, "-m", "gspo.cli", "train", str(path), f"seed={seed}", f"output_dir={directory}"]
    subprocess.run([*command, *overrides], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def _lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _row(seed: int, seconds: float, lines: Lines) -> str:
    first, last = lines[0], lines[-1]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    in_loop = sum(line["time/total_seconds"] for line in lines[1:])
    cells: list[Any] = [seed, f"{seconds:.0f}", f"{in_loop:.0f}", f"{peak:.0f}"]
    cells += [_measured(line, "held_out") for line in (first, last)]
    length = "evaluation/held_out/mean_tokens"
    cells.append(f"{first[length]:.1f} → {last[length]:.1f}")
    return "| " + " | ".join(map(str, cells)) + " |"


def _measured(line: dict[str, Any], name: str) -> str:
    """pass@1 of an evaluated set."""
    return measured(line, next(own for own in measures([line]) if own.label == f"pass@1 ({name})"))


def _answers(evaluations: Path) -> str:
    """The first response to the first questions of each set, before and after training."""
    before, after = (_first_responses(path) for path in (min(evaluations.iterdir()), max(evaluations.iterdir())))
    text = "\nThe first answers to the first questions of each set, seed 0; in brackets the reward:\n\n"
    text += "| question | before | after |\n|---|---|---|\n"
    for name in dict.fromkeys(name for name, _ in before):
        for key in [key for key in before if key[0] == name][:NUM_SHOWN]:
            cells = [_cell(own[key]["completion"]) + f" ({own[key]['reward']:.0f})" for own in (before, after)]
            start, end = before[key]["prompt_words"]
            text += f"| {_cell(before[key]['prompt'][start:end])} | {' | '.join(cells)} |\n"
    return text


def _first_responses(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """By set and question."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in _lines(path):
        found.setdefault((line["set"], line["query"]), line)
    return found


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")


def _styles(rollouts: Lines, work: str) -> str:
    """How many of a step's responses show their work, and the mean reward of those that do and of those that do not."""
    worked = [line["reward"] for line in rollouts if work in line["completion"]]
    bare = [line["reward"] for line in rollouts if work not in line["completion"]]
    means = (f"{sum(rewards) / len(rewards):.2f}" if rewards else "–" for rewards in (worked, bare))
    return f" {len(worked) / len(rollouts):.0%} worked, reward {next(means)}; bare {next(means)} |"


def _course(runs: dict[int, Lines]) -> str:
    """Reward / response tokens / clipped tokens every tenth step, a column a seed."""
    seeds = sorted(runs)
    text = "Reward, response tokens and clipped tokens by step:\n\n"
    text += "| step | " + " | ".join(f"seed {seed}" for seed in seeds) + " |\n" + "|---" * (len(seeds) + 1) + "|\n"
    steps = [line["step"] for line in runs[seeds[0]] if line["step"] == 1 or line["step"] % 10 == 0 < line["step"]]
    for step in steps:
        cells = []
        for seed in seeds:
            line = next(line for line in runs[seed] if line["step"] == step)
            clipped = line["clip/token_fraction"]
            cells.append(f"{line['reward/mean']:.3f} / {line['response/mean_tokens']:.1f} / {clipped:.1%}")
        text += f"| {step} | " + " | ".join(cells) + " |\n"
    return text


def _draw(runs: dict[int, Lines], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    panels = {
        "reward/mean": "reward",
        "response/mean_tokens": "response tokens",
        "clip/token_fraction": "clipped tokens (fraction)",
        "group/zero_variance_fraction": "groups of equal reward (fraction)",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(16, 3.6), layout="constrained")
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for seed, lines in sorted(runs.items()):
            steps = [line for line in lines if line["step"] > 0]
            axis.plot(
                [line["step"] for line in steps], [line[key] for line in steps], label=f"seed {seed}", linewidth=1.2
            )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
