"""A run begun, or taken up where it ended: its parts, its directory, its state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gspo.recipe.schema import Recipe
from gspo.reward.functions import close_functions
from gspo.run.checkpoint.environment import differences, environment
from gspo.run.checkpoint.random_state import restore_random_state, seed_everything
from gspo.run.checkpoint.store import Store
from gspo.run.checkpoint.writer import Writer
from gspo.run.console import Display
from gspo.run.directory import RunDirectory, check_absent
from gspo.run.history import record_beginning, record_end
from gspo.run.interrupt import Interrupt
from gspo.run.prepare import Prepared, prepare
from gspo.run.progress import Progress
from gspo.run.resume import Saved, put_back, reopen, take_over, tokens_digest
from gspo.run.run import Run
from gspo.run.token_text import TokenText


@contextmanager
def begun(
    recipe: Recipe,
    *,
    queries: Iterable[Mapping[str, Any]] | None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
    display: Display,
    resume: bool,
) -> Iterator[Run]:
    """The run, ready for its next step; its directory and its reward functions' processes are let go of in the end."""
    taken_up = reopen(recipe, display.note) if resume else None
    directory, saved = taken_up or (None, None)
    if directory is None:
        check_absent(recipe)  # before anything takes time
    parts: Prepared | None = None
    try:
        parts = prepare(recipe, queries=queries, reward=reward, saved=saved)
        seed_everything(recipe.seed)
        with Interrupt(display.alert) as interrupt:
            directory = directory or RunDirectory.create(recipe)
            run = Run(
                recipe=recipe,
                parts=parts,
                directory=directory,
                display=display,
                interrupt=interrupt,
                writer=Writer(Store(directory.checkpoints), recipe.checkpoint),
                progress=Progress(num_cold_steps=recipe.cold_start.steps),
                about=_about(parts),
                token_text=_token_text(recipe, parts),
            )
            if taken_up is not None:
                _take_up(run, saved)
            record_beginning(run, resumed=saved is not None)
            yield run
    finally:
        display.stop()
        if parts is not None:
            close_functions(parts.functions)
            parts.engine.close()
        if directory is not None:
            directory.close()


@contextmanager
def end_recorded(run: Run) -> Iterator[None]:
    """Write into the run's history how it ends."""
    try:
        yield
    except BaseException as error:
        record_end(run, error)
        raise
    record_end(run)


def _token_text(recipe: Recipe, parts: Prepared) -> TokenText | None:
    if not recipe.report.tokens:
        return None
    return TokenText(partial(parts.policy.tokenizer.decode, skip_special_tokens=True))


def _about(parts: Prepared) -> dict[str, Any]:
    """What must be, or is wanted to be, as it was when the run is taken up."""
    return {
        "environment": environment(parts.policy, parts.functions, parts.engine.describe()),
        "rows_sha256": parts.rows_sha256,
        "tokens_sha256": tokens_digest(parts.queries),
        "working_directory": str(Path.cwd()),
    }


def _take_up(run: Run, saved: Saved | None) -> None:
    """Put everything but the optimiser, which is not made yet, back to where the checkpoint has it."""
    note = run.display.note
    if saved is None:
        take_over(run.directory, run.recipe, None, note)
        return
    run.progress = put_back(saved, run.recipe, run.parts.policy, run.parts.queries)
    take_over(run.directory, run.recipe, saved, note)
    run.seconds = dict(run.progress.in_hand.seconds)
    run.optimizer_state = saved.group("optimizer")
    run.critic_state = saved.group("critic")
    run.random = saved.group("random")
    restore_random_state(run.random)
    run.log_bytes = run.directory.log_bytes()
    run.lines = run.directory.metrics()
    for name in run.directory.damaged_rollouts(run.progress.rollout_files):
        note(f"rollouts/{name} is missing, or not as it was written; training does not need it")
    inexact = [*saved.inexact, *differences(saved.about["environment"], run.about["environment"])]
    for line in inexact:
        note(f"NOT an exact resume: {line}. The numbers may differ from here on, in their last bits at first")
    note(f"{'goes on' if inexact else 'resumed'} from {saved.path}: {run.progress.position}")
    if run.progress.steps == run.recipe.steps:
        note(f"all {run.recipe.steps} steps are done; more are made with steps=…")
