"""What a person sees of a run: its introduction, its steps (live in a terminal, plain lines elsewhere), its summary."""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from signal import Signals
from typing import IO, Any, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from gspo.errors import printable, visible
from gspo.evaluation.held_out import HeldOutScore
from gspo.metrics.numbers import Metrics
from gspo.metrics.words import measured, measures
from gspo.model.policy import Policy
from gspo.queries.source import QuerySet
from gspo.recipe.schema import Recipe
from gspo.reward.calls import RewardFunction

_PLAIN_LINES = 40  # that a phase prints at most where there is no terminal
_ROWS = 12  # of the newest steps in a live display


class _Output:
    """Standard output, for as long as somebody reads it: a terminal that is closed must not end a run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys.stdout, "rich_proxied_file", sys.stdout), name)  # not rich's own, while it is live

    def write(self, text: str) -> None:
        try:
            self.__getattr__("write")(text)
        except OSError:
            drop_output()

    def flush(self) -> None:
        try:
            self.__getattr__("flush")()
        except OSError:
            drop_output()


def drop_output() -> None:
    """Discard what standard output still gets; else the interpreter complains at its end that it cannot write it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """Shows phases of a run and its steps on a rich console."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(file=cast(IO[str], _Output()), quiet=quiet, highlight=False)
        self._live: Live | None = None

    def note(self, text: str, style: str = "") -> None:
        """Print a line; it stays."""
        self.console.print(printable(text), style=style, markup=False, soft_wrap=True)

    def alert(self, text: str) -> None:
        """Write to standard error at once; from a signal handler too, and where nobody reads it."""
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())  # not print: a handler may run in the middle of another one

    def start(self, phase: str, total: int, *, done: int = 0) -> None:
        """Begin a phase of `total` steps, or go on with it after `done` of them."""
        self.stop()
        self._phase, self._total, self._done, self._started = phase, total, done, time.monotonic()
        self._rows: list[Mapping[str, str]] = []
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn())
        self._task = self._progress.add_task(phase, total=total, completed=done)
        if self.console.is_terminal:
            self._live = Live(self._progress, console=self.console)
            self._live.start()

    def cold_step(self, step: int, loss: float) -> None:
        """Show one supervised step."""
        text = f"loss {loss:.3f}"
        self._progress.update(self._task, completed=step, description=f"{self._phase}, {text}")
        self._print_step(self._phase, step, text)

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        """Show one step of reinforcement learning."""
        row = _cells(step, line)
        self._rows = [*self._rows, row][-_ROWS:]
        self._progress.update(self._task, completed=step)
        if self._live is not None:
            self._live.update(Group(_table(self._rows, self.console.width), self._progress))
        self._print_step("step", step, "  ".join(f"{name} {cell}" for name, cell in row.items() if name != "step"))

    def stop(self) -> None:
        """End the phase; what it showed stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_step(self, label: str, step: int, text: str) -> None:
        """Print a line about the step where there is no live display, and not too many such lines in a phase."""
        every = max(1, -(-self._total // _PLAIN_LINES))
        if self._live is None and (step in (self._done + 1, self._total) or step % every == 0):
            seconds = (time.monotonic() - self._started) / (step - self._done) * (self._total - step)
            self.note(f"{label} {step}/{self._total}  {text}  left {int(seconds // 60)}:{int(seconds % 60):02d}")


def _cells(step: int, line: Mapping[str, Any]) -> Mapping[str, str]:
    """The text that each column shows of a step, the most important column first."""
    seconds = [line[f"time/{name}_seconds"] for name in ("rollout", "reward", "update")]
    seconds[2] += line["time/likelihood_seconds"]
    low, high = line["ratio/sequence_min"], line["ratio/sequence_max"]
    return {
        "step": str(step),
        "reward": f"{line['reward/mean']:.3f}",
        "clipped": f"{line['clip/token_fraction']:.1%}",
        "equal groups": f"{line['group/zero_variance_fraction']:.0%}",
        "tokens": f"{line['response/mean_tokens']:.1f}",
        "cut": f"{line['response/truncated_fraction']:.0%}",
        "s min…max": "none trained" if math.isnan(low) else f"{low:.4f}…{high:.4f}",
        "roll+reward+update s": "+".join(f"{value:.2f}" for value in seconds),
        "tok/s": f"{line['throughput/generated_tokens_per_second']:,.0f}",
    }


def _table(rows: Sequence[Mapping[str, str]], width: int) -> Table:
    """The rows with as many columns, the most important ones, as fit the width whole."""
    sizes = {name: max(len(text) for text in (name, *(row[name] for row in rows))) + 2 for name in rows[0]}
    fitting = [name for name, end in zip(sizes, accumulate(sizes.values()), strict=True) if end - 2 <= width]
    columns = [Column(name, justify="right", no_wrap=True) for name in fitting]
    table = Table(*columns, box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(row[name] for name in fitting))
    return table


def evaluation_summary(score: HeldOutScore, metrics: Metrics) -> str:
    """Such as `0.514 ± 0.022 on 512 held-out queries`, the reward where it is another number, the judges of several."""
    pass_at_1, *rewards = measures([metrics])
    size, judges = score.pass_at_1.num_questions, score.num_judged_by
    words = f"{measured(metrics, pass_at_1)} on {size} held-out {'query' if size == 1 else 'queries'}"
    words += "".join(f", reward {measured(metrics, reward)}" for reward in rewards)
    if len(judges) > 1:  # some of them may not be verifiers at all
        words += f"; judged by {', '.join(f'{name}: {number}' for name, number in judges.items())}"
    if score.num_unjudged:
        words += f"; no reward function applies to {score.num_unjudged} of {score.num_responses} responses: left out"
    return words


def failure_summary(score: HeldOutScore) -> str:
    """What reward functions that failed have done to the scores, and how the first failed; empty where none has."""
    if not score.first_failure:
        return ""
    return (
        f"reward functions failed on some of {score.num_responses} held-out responses: {score.num_failed} count as not "
        f"passed, {score.num_masked} have no reward; the first: {visible(score.first_failure)}"
    )


def introduction(recipe: Recipe, policy: Policy, queries: QuerySet, functions: Sequence[RewardFunction]) -> str:
    """Model, data and the derived arithmetic of a run, in four lines."""
    model = policy.model
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    about = f"{type(model).__name__}, {policy.num_parameters:,} parameters, {dtype} on {policy.device}"
    if not policy.supports_packing:
        about += "; trained padded, for its attention takes no packed sequences: slower"
    if (routing := policy.routing) is not None:
        about += f"; {routing.top_k} of {routing.num_experts} experts a token in {routing.num_layers} layer(s)"
        about += f", replay: {recipe.actor.routing_replay}"
    if policy.unknown_routers is not None:
        about += f"; its experts are not measured ({policy.unknown_routers})"
    names = ", ".join(function.name for function in functions)
    sources = f"{len(queries.train):,} queries to train on, {len(queries.held_out):,} held out; reward: {names}"
    return f"{recipe.name}: {about}\n{sources}\nobjective: {objective(recipe)}\n{arithmetic(recipe)}"


def objective(recipe: Recipe) -> str:
    """The objective in a line: its ratio, its range, its advantages and its further terms."""
    actor, rollout, kl = recipe.actor, recipe.rollout, recipe.actor.kl
    ratio = "none" if actor.surrogate == "reinforce" else actor.importance_sampling_level
    scaled = "" if actor.clip_fraction is None else f" scaled to clip {actor.clip_fraction:.0%}"
    parts = {
        f"clip {actor.clip_low:g}/{actor.clip_high:g}{scaled}": actor.surrogate not in ("sapo", "reinforce"),
        f"{kl.coefficient:g} · {kl.estimator} of the KL in the {kl.place}": kl.coefficient,
        f"entropy bonus {actor.entropy_bonus:g}": actor.entropy_bonus,
        f"correction {actor.correction}": actor.correction != "none",
        f"OPSM above {actor.opsm_delta or 0:g}": actor.opsm_delta is not None,
        f"value model: {recipe.critic.trunk} trunk": actor.advantage == "gae",
        f"dynamic sampling, at most {rollout.max_rounds} rounds": rollout.dynamic_sampling,
        f"overlong responses: {rollout.overlong}": rollout.overlong != "keep",
    }
    name = f"{actor.title} (ratio: {ratio}, advantage: {actor.advantage}, length norm: {actor.length_norm})"
    return ", ".join([name, *(text for text, applies in parts.items() if applies)])


def arithmetic(recipe: Recipe) -> str:
    """A sentence with the numbers of sequences and updates that follow from those of a recipe."""
    rollout, mini_batches = recipe.rollout, recipe.actor.mini_batches
    sequences = rollout.queries_per_step * rollout.group_size
    return (
        f"{rollout.queries_per_step} queries × {rollout.group_size} responses = {sequences} sequences a step, "
        f"in {mini_batches} mini-batch(es) of {sequences // mini_batches}; "
        f"{recipe.steps} steps = {recipe.steps * mini_batches} optimiser steps"
    )


def summary(
    lines: Sequence[Mapping[str, Any]],
    diagnoses: Mapping[str, str],
    model: Path,
    seconds: float,
    *,
    signal: int | None = None,
    report: Path | None = None,
) -> str:
    """The short table at the end: scores before and after, the place of the model and how to load it."""
    rows = [*_scores(lines), ("time", f"{int(seconds // 60)} min {seconds % 60:.0f} s")]
    rows += [("diagnosis", sentence) for sentence in diagnoses.values()]
    rows += [("model", str(model)), ("load it", f'AutoModelForCausalLM.from_pretrained("{model}")')]
    run = model.parent
    if signal is not None:
        run, num_steps = model.parents[2], max((line["step"] for line in lines), default=0)
        rows.insert(0, ("ended early", f"by {Signals(signal).name} after {num_steps} steps"))
    if lines:
        rows.append(("metrics", str(run / "metrics.jsonl")))
    if report is not None:
        rows.append(("report", str(report)))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _scores(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    evaluated = [line for line in lines if any(key.startswith("evaluation/") for key in line)]
    for measure in measures(evaluated) if len(evaluated) > 1 else ():
        before, after = measured(evaluated[0], measure), measured(evaluated[-1], measure)
        yield measure.label, f"{before} before → {after} after"
    if steps := [line for line in lines if line["step"] > 0]:
        first, last = steps[0], steps[-1]
        yield "reward", f"{first['reward/mean']:.3f} → {last['reward/mean']:.3f} in {last['step']} steps"
        yield "response tokens", f"{first['response/mean_tokens']:.1f} → {last['response/mean_tokens']:.1f}"
