"""A run whose numbers stop being numbers: steps are skipped and counted, and then it ends and says so."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.samples import advantaged, learner_of, updates, with_old
from tests.sampling import sample_groups

from gspo import cli
from gspo.errors import RunError
from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.optimizer import MAX_SKIPPED_IN_A_ROW, Optimizer, StepReport
from gspo.learner.trainer import Trainer
from gspo.learner.update import MiniBatchReport
from gspo.model.policy import Policy
from gspo.recipe.load import load_recipe
from gspo.run.console import Display
from gspo.run.directory import RunDirectory
from gspo.run.prepare import NOTHING, Inputs, prepare
from gspo.run.recorder import Recorder, rollout_lines
from gspo.run.run import open_run
from gspo.types import Batch, Score

pytestmark = pytest.mark.usefixtures("own_directory", "format_in_process")

TINY = Path(__file__).with_name("tiny.yaml")


def varied_batch(policy: Policy, parts: Inputs, recipe: Any) -> Batch:
    queries = parts.queries.train[:8]
    groups = sample_groups(policy, queries, recipe.rollout, group_size=4, seed=0, policy_version=0)
    scores = [Score(reward=float(index % 2), parts={"f": float(index % 2)}) for index in range(32)]
    return advantaged(groups, scores)


def poison(policy: Policy) -> None:
    with torch.no_grad():
        next(policy.model.parameters()).fill_(math.nan)


def strict_json(path: Path) -> list[Any]:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_update_with_a_gradient_that_is_not_finite_leaves_the_weights_alone() -> None:
    recipe, trainer = load_recipe(TINY), Trainer()
    parts = prepare(recipe, trainer)
    policy = trainer.policy
    batch = varied_batch(policy, parts, recipe)
    engines = recipe.actor.model_copy(update={"old_logprobs": "engine"})  # given for all mini-batches
    batch = compute_old_logprobs(batch, learner_of(policy, engines))
    # Every ratio is infinite.
    old = {index: torch.full_like(s.sampler_logprobs, -math.inf) for index, s in enumerate(batch.samples)}
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    optimizer = Optimizer(policy.model, recipe.actor.optimizer, total_steps=4)
    steps = updates(policy, optimizer, with_old(batch, old), recipe.actor)
    assert [step.report.step.applied for step in steps] == [False] * 4
    assert all(torch.equal(one, two) for one, two in zip(before, policy.model.parameters(), strict=True))


@pytest.fixture
def broken_run() -> Iterator[tuple[Recorder, Callable[..., None]]]:
    """A recorder, and a step in which all four updates are skipped: the weights turn to NaN after sampling."""
    recipe = load_recipe(TINY, ["steps=10", "evaluation.num_queries=0"])
    with open_run(recipe, Trainer(), NOTHING, display=Display(quiet=True), resume=False) as run:
        policy, recorder = run.trainer.policy, Recorder(run)
        run.display.start("GSPO", recipe.steps)
        optimizer = Optimizer(policy.model, recipe.actor.optimizer, total_steps=8)
        batch = varied_batch(policy, run.parts, recipe)
        poison(policy)

        def take_step(*, idle_first: bool = False) -> None:
            run.clock.seconds = dict.fromkeys(("rollout", "reward", "likelihood", "update", "total"), 1.0)
            known = compute_old_logprobs(batch, learner_of(policy, recipe.actor))
            steps = list(updates(policy, optimizer, known, recipe.actor))
            reports = tuple(step.report for step in steps)
            if idle_first:  # an update in which nothing had an advantage
                reports = (MiniBatchReport(step=StepReport(applied=True)), *reports[1:])
            run.progress = recorder.step(run.recipe, replace(run.progress, batch=steps[-1].batch, reports=reports))

        yield recorder, take_step


def test_skipped_updates_are_counted_and_five_in_a_row_end_the_run_with_the_batch_saved(
    broken_run: tuple[Recorder, Callable[[], None]],
) -> None:
    recorder, take_step = broken_run
    take_step()
    assert recorder.lines[-1]["policy/skipped_updates"] == 4 == MAX_SKIPPED_IN_A_ROW - 1
    with pytest.raises(RunError, match=r"5 updates in a row(.|\n)*step_000002\.jsonl"):
        take_step()
    text = Path("runs/tiny/rollouts/step_000002.jsonl").read_text(encoding="utf-8")
    assert len(text.splitlines()) == 32


def test_an_update_without_any_advantage_is_no_sign_of_health(
    broken_run: tuple[Recorder, Callable[..., None]],
) -> None:
    _, take_step = broken_run
    take_step()
    with pytest.raises(RunError, match="5 updates in a row"):
        take_step(idle_first=True)


def test_the_batch_that_ended_a_run_is_saved_with_all_that_is_known_of_it(
    broken_run: tuple[Recorder, Callable[[], None]],
) -> None:
    _, take_step = broken_run
    take_step()
    with pytest.raises(RunError):
        take_step()
    text = Path("runs/tiny/rollouts/step_000002.jsonl").read_text(encoding="utf-8")
    assert all(json.loads(line)["clipped"] is not None for line in text.splitlines())


def test_rollouts_with_ratios_that_are_not_finite_are_still_written_as_json() -> None:
    recipe, trainer = load_recipe(TINY), Trainer()
    parts = prepare(recipe, trainer)
    policy = trainer.policy
    batch = varied_batch(policy, parts, recipe)
    poison(policy)
    batch = compute_old_logprobs(batch, learner_of(policy, recipe.actor))
    optimizer = Optimizer(policy.model, recipe.actor.optimizer, total_steps=4)
    *_, last = updates(policy, optimizer, batch, recipe.actor)
    path = RunDirectory.create(recipe).write_rollouts(1, rollout_lines(last.batch.samples))
    assert all(line["sequence_ratio"] is None for line in strict_json(path))


@pytest.mark.parametrize("rate", ["actor.optimizer.lr=3e38", "cold_start.optimizer.lr=3e38"])
def test_a_learning_rate_that_wrecks_the_weights_ends_the_run_with_exit_code_1_and_saves_no_wreck(
    rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["train", str(TINY), rate, "steps=20", "cold_start.steps=8", "evaluation.num_queries=0"])
    said, error = capsys.readouterr()
    assert code == 1
    assert error.startswith("failed: ") and "Traceback" not in error
    assert rate.partition("=")[0] in error
    assert "to go on: gspo resume runs/tiny" in said
    assert not Path("runs/tiny/model").exists()
    assert not list(Path("runs/tiny").glob("*checkpoints/*"))
