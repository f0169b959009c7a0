"""A step's groups with their scores, sampled in one round, or in several where dynamic sampling asks for signal."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gspo import loop
from gspo.engine.engine import LostError
from gspo.errors import UserError
from gspo.learner.advantages import rewards_differ
from gspo.queries.order import drawn_indices, indices_of_source, query_indices, sources_of, weights_of
from gspo.recipe.rules import LOWEST_TEMPERATURE
from gspo.recipe.schema import Recipe
from gspo.reward.calls import RewardFunction
from gspo.reward.overlong import with_overlong_penalty
from gspo.reward.reply import TrainerState
from gspo.reward.score import Scoring, score_each, together
from gspo.rollout.source import Source
from gspo.run.progress import Progress
from gspo.run.run import Run
from gspo.types import Batch, Drawn, Group, Query


def collect(run: Run, now: Recipe, progress: Progress) -> Progress:
    """The progress with the next step's groups, sampled and scored as the recipe has it now."""
    source = _source(run, now, progress)
    with run.clock.stage("publish"), source.waiting.open():
        run.sampler.publish(source.version)
    batch = _collect(run, progress, source)
    source.handed_over.clear()  # the batch has them
    drawn, taken = source.batches_drawn, dict(source.num_taken)
    return replace(progress, batch=batch, batches_drawn=drawn, num_taken=taken, ahead=())  # the source has it


def _collect(run: Run, progress: Progress, source: Source) -> Batch:
    sampling, state = source.sampling, run.trainer_state(progress.steps)
    rounds: list[Batch] = []
    groups: list[Group] = []
    has_signal: list[bool] = []  # for each group; without dynamic sampling every group is taken
    num_missing = sampling.queries_per_step  # groups with something to learn from that the batch still lacks
    while not rounds or (sampling.dynamic_sampling and num_missing > 0 and len(rounds) < sampling.max_rounds):
        with run.clock.stage("rollout"):
            drawn = _next_groups(run, source, num_missing, groups)
        run.clock.move(source.seconds_for_scores, "rollout", "reward")
        with run.clock.stage("reward"), source.waiting.open():
            rounds.append(with_overlong_penalty(_scored(run, drawn, state), sampling))
        new = rounds[-1].groups
        groups += new
        differ = rewards_differ(new, sampling, run.recipe.actor)
        has_signal += differ if sampling.dynamic_sampling else [True] * len(new)
        num_missing = sampling.queries_per_step - sum(has_signal)
    # The first groups whose rewards differ and, where they are too few, the first of the others, in their order.
    order = sorted(range(len(groups)), key=lambda number: not has_signal[number])  # stable
    chosen = sorted(order[: sampling.queries_per_step])
    _check_judged(run, progress, groups)
    return replace(
        together(rounds, run.parts.functions),
        groups=tuple(groups[number] for number in chosen),
        dropped=tuple(group for number, group in enumerate(groups) if number not in chosen),
        version=source.version,
        num_too_old=source.num_too_old,
    )


def _check_judged(run: Run, progress: Progress, groups: Sequence[Group]) -> None:
    """Raise UserError where the first step has no reward at all: no later one would have any."""
    scores = [sample.score for group in groups for sample in group.samples if sample.score]
    is_judged = any(score.failure or score.reward is not None for score in scores)
    if progress.steps == 0 and not is_judged and not run.recipe.teacher.is_on:
        what = f"no reward function applies to any of the first step's {len(scores)} responses: each returned None"
        raise UserError(what, where="reward", fix="return a number for what it can judge; then resume")


def _next_groups(run: Run, source: Source, number: int, taken: Sequence[Group]) -> list[Drawn]:
    """Take so many groups; a server that has failed gets its weights again meanwhile."""

    def look() -> None:
        if source.ended is not None:
            run.display.progress(*source.ended.shown())

    while True:
        try:
            return loop.run(source.next_groups(number, taken), look)
        except LostError:
            run.sampler.publish()


def _scored(run: Run, drawn: Sequence[Drawn], state: TrainerState) -> Batch:
    """The groups with scores: those that have none yet of these functions, or a failed one, are scored now."""
    functions = _functions(run)
    weights = {function.name: function.weight for function in functions if function.weight}
    names = {function.name for function in functions}
    scored, missing = dict[Drawn, Batch](), dict[Drawn, Group]()
    for each in drawn:
        assert each.group is not None
        are_of_now = all(sample.score and sample.score.weights == weights for sample in each.group.samples)
        if each.is_scored and are_of_now and {*each.reward_seconds} == names:
            scored[each] = Batch(groups=(each.group,), reward_seconds=each.reward_seconds, logged=each.logged)
        else:
            missing[each] = each.group
    before = [sample for batch in scored.values() for sample in batch.samples]
    options: dict[str, Any] = {"warn": run.warn_once, "show_progress": run.display.progress}
    now = score_each([*missing.values()], functions, state, before=before, **options)
    scored |= zip(missing, now, strict=True)
    return together([scored[each] for each in drawn], functions)


def _functions(run: Run) -> Sequence[RewardFunction]:
    """The reward functions, with the weights of the step under way."""
    if not any(phase.reward_weights for phase in run.recipe.phases):
        return run.parts.functions
    rewards = run.recipe.at(run.progress.steps + 1, run.progress.phases_begun).reward
    given = zip(run.parts.functions, rewards, strict=True)
    return [replace(function, weight=reward.weight) for function, reward in given]


def _without_failures(drawn: Drawn) -> Drawn:
    """Return what is to be sampled again where a tool gave no answer: it may now."""
    failed = drawn.group is not None and any(sample.failure for sample in drawn.group.samples)
    return replace(drawn, group=None, reward_seconds={}, logged={}) if failed else drawn


def _without_void_scores(drawn: Drawn) -> Drawn:
    """Return what is to be scored again where no function has applied: one may have been mended."""
    scores = [sample.score for sample in drawn.group.samples] if drawn.group else []
    is_void = not any(score and (score.failure or score.reward is not None) for score in scores)
    return replace(drawn, reward_seconds={}) if is_void else drawn


def _num_drawn_from(run: Run, now: Recipe) -> int | None:
    """The number of queries that batches may have, where one may have those of a batch before; None: in an order."""
    train, shares = run.parts.queries.train, now.queries.shares
    if shares:
        return sum(shares[query.source] > 0 for query in train)
    return len(train) if now.queries.sampler == "difficulty" else None


def _source(run: Run, now: Recipe, progress: Progress) -> Source:
    """The run's source, set to the step under way."""
    sampling, is_vllm = progress.sampling(now.rollout), now.rollout.engine == "vllm"
    if is_vllm and sampling.temperature < LOWEST_TEMPERATURE:  # a rule looks at the recipe
        least = f"vLLM samples at {LOWEST_TEMPERATURE} or more"
        problem = f"a hook has set the temperature to {sampling.temperature:g}, and {least}"
        raise UserError(problem, where="hooks", fix=f"set {LOWEST_TEMPERATURE} or more")
    if run.source is None:
        run.source = Source(
            sampler=run.sampler,
            seed=run.recipe.seed,
            updates_per_step=run.recipe.actor.updates_per_step,
            queries_of=partial(_queries, run),
            batches_drawn=progress.batches_drawn,
            num_taken=dict(progress.num_taken),
            ahead=[_without_void_scores(_without_failures(drawn)) for drawn in progress.ahead],
            score=partial(_score_ahead, run),
            record_experts=run.recipe.actor.wants_engine_experts,
            sampling=sampling,
        )
    run.source.begin_step()
    run.source.num_drawn_from = _num_drawn_from(run, now)
    run.source.sampling, run.source.version = sampling, run.trainer.policy_version
    run.source.steps, run.source.steps_left = progress.steps, run.recipe.steps - progress.steps - 1
    return run.source


async def _score_ahead(run: Run, group: Group) -> Batch:
    """Score a group with the state of the step under way.

    What fails is no error here: it is scored again in its own step.
    """
    assert run.source is not None
    options: dict[str, Any] = {"max_masked_fraction": 1.0, "num_samples": len(group.samples), "warn": run.warn_once}
    scoring = Scoring(_functions(run), run.trainer_state(run.source.steps), **options)
    return await scoring.score(group)


def _queries(run: Run, number: int) -> list[Query]:
    """The batch of that number in the order of the queries, or as the sampler draws it now."""
    queries = run.parts.queries.train
    if run.recipe.queries.sampler == "difficulty":
        weights = weights_of(queries, run.progress.pass_rates, step=run.progress.steps)
        options: dict[str, int] = {"queries_per_step": run.recipe.rollout.queries_per_step, "seed": run.recipe.seed}
        return [queries[index] for index in drawn_indices(number, weights, **options)]
    shuffle = run.recipe.queries.shuffle and not run.parts.rows.num_streamed
    number -= run.progress.rows_since
    if run.recipe.queries.sources:
        return _queries_of_sources(run, number, shuffle=shuffle)
    sizes = {"num_queries": len(queries), "queries_per_step": run.recipe.rollout.queries_per_step}
    return [queries[index] for index in query_indices(number, **sizes, seed=run.recipe.seed, shuffle=shuffle)]


def _queries_of_sources(run: Run, number: int, *, shuffle: bool) -> list[Query]:
    """The batch of that number, of each source as much as its weight says at the step under way."""
    assert run.source is not None
    shares = run.recipe.at(run.progress.steps + 1, run.progress.phases_begun).queries.shares
    options: dict[str, int] = {"queries_per_step": run.recipe.rollout.queries_per_step, "seed": run.recipe.seed}
    names, taken = sources_of(number, shares, **options), run.source.num_taken
    found = dict[str, list[Query]]()
    for name, count in Counter(names).items():
        queries = [query for query in run.parts.queries.train if query.source == name]
        options["num_queries"] = len(queries)
        found[name] = [
            queries[index] for index in indices_of_source(name, taken.get(name, 0), count, **options, shuffle=shuffle)
        ]
        taken[name] = taken.get(name, 0) + count
    return [found[name].pop(0) for name in names]
