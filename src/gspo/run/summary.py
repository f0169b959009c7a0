"""A run in words: what it is about to do, what a step and an evaluation say, and what it came to."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from gspo.errors import listed, visible
from gspo.evaluation.compare import compare
from gspo.evaluation.held_out import HELD_OUT, Numbers
from gspo.metrics.numbers import Metrics
from gspo.metrics.words import first_and_last, measured, measures
from gspo.model.lora import CONFIG
from gspo.model.policy import Policy
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import PhaseConfig
from gspo.run.console import duration
from gspo.run.prepare import Inputs

_STAGES = {  # in the line of a step: which stages of its clock
    "new weights": ("publish",),
    "sampling": ("rollout",),
    "rewards": ("reward",),
    "likelihoods": ("appraisal", "likelihood"),
    "update": ("update",),
}


def evaluation_summary(numbers: Numbers, metrics: Metrics, name: str = HELD_OUT) -> str:
    """Write such as `0.514 ± 0.022 on 512 held-out queries`, another number of reward, the judges of several."""
    pass_at_1, *rewards = measures([metrics])
    size, judges = numbers["num_questions"], numbers["num_judged_by"]
    queries = "query" if size == 1 else "queries"
    queries = f"held-out {queries}" if name == HELD_OUT else f"{queries} of {name}"
    words = f"{measured(metrics, pass_at_1)} on {size} {queries}"
    words += "".join(f", reward {measured(metrics, reward)}" for reward in rewards)
    if len(judges) > 1:  # some of them may not be verifiers at all
        words += f"; judged by {', '.join(f'{name}: {number}' for name, number in judges.items())}"
    if num_unjudged := numbers["num_unjudged"]:
        words += f"; no reward function applies to {num_unjudged} of {numbers['num_responses']} responses: left out"
    return words


def failure_summary(numbers: Numbers, name: str = HELD_OUT) -> str:
    """Say what reward functions that failed have done to the scores, and how the first failed; empty where none has."""
    if not numbers["first_failure"]:
        return ""
    responses = "held-out responses" if name == HELD_OUT else f"responses of {name}"
    return (
        f"reward functions failed on some of {numbers['num_responses']} {responses}: "
        f"{numbers['num_failed']} count as not passed, {numbers['num_masked']} have no reward; "
        f"the first: {visible(numbers['first_failure'])}"
    )


def introduction(recipe: Recipe, policy: Policy, parts: Inputs) -> str:
    """Model, data and the derived arithmetic of a run, in four lines."""
    queries = parts.queries
    model = policy.model
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    num_frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    about = f"{policy.architecture}, {policy.num_parameters:,} parameters, {dtype} on {policy.device}"
    about += f"; {num_frozen:,} of the parameters are frozen" if num_frozen else ""
    if not policy.supports_packing:
        about += "; trained padded, for its attention takes no packed sequences: slower"
    if (routing := policy.routing) is not None:
        about += f"; {routing.top_k} of {routing.num_experts} experts a token in {routing.num_layers} layer(s)"
        about += f", replay: {recipe.actor.routing_replay}"
    if policy.unknown_routers is not None:
        about += f"; its experts are not measured ({policy.unknown_routers})"
    about += f"; a response ends with {shown_tokens(policy.tokenizer, policy.stop_ids)}"
    sources = f"{len(queries.train):,} queries to train on, {len(queries.held_out):,} held out"
    sources += "".join(f", {share:.0%} from {name}" for name, share in recipe.queries.shares.items())
    for eval_set in parts.evaluation_sets:
        if eval_set.queries is not queries.held_out:
            sources += f", {len(eval_set.queries):,} of {eval_set.name}"
    sources += f"; reward: {', '.join(function.name for function in parts.functions)}"
    return f"{recipe.name}: {about}\n{sources}\nobjective: {objective(recipe)}\n{arithmetic(recipe)}"


def shown_tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return such as `"<|im_end|>" (2)`: the texts of tokens and their ids."""
    return ", ".join(f"{json.dumps(tokenizer.decode([index]), ensure_ascii=False)} ({index})" for index in ids)


def objective(recipe: Recipe) -> str:
    """The objective in a line: its ratio, its range, its advantages and its further terms."""
    actor, rollout, kl, teacher = recipe.actor, recipe.rollout, recipe.actor.kl, recipe.teacher
    ratio = "none" if actor.surrogate == "reinforce" else actor.importance_sampling_level
    taught_by = teacher.path or teacher.url or "the policy"
    scaled = "" if actor.clip_fraction is None else f" scaled to clip {actor.clip_fraction:.0%}"
    parts = {
        f"clip {actor.clip_low:g}/{actor.clip_high:g}{scaled}": actor.surrogate not in ("sapo", "reinforce"),
        "each reward normalised in its group, then summed": actor.reward_aggregation == "normalize_then_sum",
        f"{kl.coefficient:g} · {kl.estimator} of the KL in the {kl.place}": kl.coefficient,
        f"reference refreshed every {kl.refresh_steps} step(s)": kl.coefficient and kl.refresh_steps,
        f"entropy bonus {actor.entropy_bonus:g}": actor.entropy_bonus,
        f"{actor.observation_loss:g} · cross-entropy of observations": actor.observation_loss,
        f"correction {actor.correction}": actor.correction != "none",
        "credit by turn": actor.turn_credit == "return_to_go",
        f"OPSM above {actor.opsm_delta or 0:g}": actor.opsm_delta is not None,
        f"value model: {recipe.critic.trunk} trunk": actor.advantage == "gae",
        f"teacher: {taught_by}{' with its own prompt' if teacher.prompt else ''}": teacher.is_on,
        f"dynamic sampling, at most {rollout.max_rounds} rounds": rollout.dynamic_sampling,
        f"overlong responses: {rollout.overlong}": rollout.overlong != "keep",
        f"optimiser: {actor.optimizer.name}": actor.optimizer.name != "adamw",
    }
    name = f"{actor.title} (ratio: {ratio}, advantage: {actor.advantage}, length norm: {actor.length_norm})"
    return ", ".join([name, *(text for text, applies in parts.items() if applies)])


def changes_of(phase: PhaseConfig) -> str:
    """Return such as `rollout.max_new_tokens 64, actor.optimizer.lr 1e-06`."""
    return ", ".join(f"{name} {value:g}" for name, value in phase.changed.items())


def arithmetic(recipe: Recipe) -> str:
    """A sentence with the numbers of sequences and updates that follow from those of a recipe."""
    rollout, actor, mini_batches = recipe.rollout, recipe.actor, recipe.actor.mini_batches
    passes = f", {actor.epochs} passes over them" if actor.epochs > 1 else ""
    sequences = rollout.queries_per_step * rollout.group_size
    return (
        f"{rollout.queries_per_step} queries × {rollout.group_size} responses = {sequences} sequences a step, "
        f"in {mini_batches} mini-batch(es) of {sequences // mini_batches}{passes}; "
        f"{recipe.steps} steps = {recipe.steps * actor.updates_per_step} optimiser steps"
    )


def step_line(line: Mapping[str, Any]) -> str:
    """The numbers of a step of reinforcement learning, from its line of metrics."""
    low, high = line["ratio/sequence_min"], line["ratio/sequence_max"]
    facts = {
        "reward": f"{line['reward/mean']:.3f}",
        "response tokens": f"{line['response/mean_tokens']:.1f}",
        "clipped tokens": f"{line['clip/token_fraction']:.1%}",
        "equal-reward groups": f"{line['group/zero_variance_fraction']:.0%}",
        "cut off": f"{line['response/truncated_fraction']:.0%}",
        "sequence ratio": "– (nothing to train on)" if math.isnan(low) else f"{low:.4f}…{high:.4f}",
        "tokens/s": f"{line['throughput/generated_tokens_per_second']:,.0f}",
        **_ahead(line),
    }
    return "  ".join([*(f"{name} {fact}" for name, fact in facts.items()), _time(line)])


def _ahead(line: Mapping[str, Any]) -> Mapping[str, str]:
    """Say of a step sampled ahead its tokens' age, what is ahead, and who had nothing to do."""
    if "staleness/mean" not in line:
        return {}
    idle = [f"{who} {line[f'source/{who}_idle_fraction']:.0%}" for who in ("trainer", "engine")]
    tokens = line["staleness/tokens_by_age"]
    ages = [f"{age}: {number / max(1.0, sum(tokens)):.0%}" for age, number in enumerate(tokens) if number]
    dropped = line["staleness/dropped_groups"]
    return {
        "tokens' age": f"{line['staleness/mean']:.1f} steps ({', '.join(ages)})",
        "ahead": f"{line['source/waiting']:.0f} sampled, {line['source/in_flight']:.0f} in flight",
        **({"too old": f"{dropped:.0f} groups"} if dropped else {}),
        "idle": ", ".join(idle).replace("nan%", "–"),  # a step that was begun by another process
    }


def _time(line: Mapping[str, Any]) -> str:
    """Return such as `2.05 s a step (sampling 48%, …)`: the time, then each stage of at least a hundredth of it."""
    stages = {name: sum(line.get(f"time/{part}_seconds", 0.0) for part in parts) for name, parts in _STAGES.items()}
    stages["other"] = max(0.0, line.get("time/total_seconds", 0.0) - sum(stages.values()))
    total = sum(stages.values())
    shares = [f"{name} {seconds / total:.0%}" for name, seconds in stages.items() if total and seconds / total >= 0.01]
    return f"{total:.2f} s a step ({', '.join(shares)})"


def summary(
    lines: Sequence[Mapping[str, Any]],
    diagnoses: Mapping[str, str],
    model: Path,
    seconds: float,
    *,
    signal: int | None = None,
    reason: str | None = None,
    report: Path | None = None,
) -> str:
    """The short table at the end: scores before and after, the place of the model and how to load it."""
    rows = [*_scores(lines), ("time", duration(round(seconds)))]
    rows += [("diagnosis", sentence) for sentence in diagnoses.values()]
    run = model.parent if signal is None else model.parents[2]
    loaded = f'AutoModelForCausalLM.from_pretrained("{model}")'
    if (model / CONFIG).is_file():
        loaded = f"it is an adapter; gspo merge {shlex.quote(str(run))} writes a whole model"
    rows += [("model", str(model)), ("load it", loaded)]
    if signal is not None:
        num_steps = max((line["step"] for line in lines), default=0)
        rows.insert(0, ("ended early", f"by {Signals(signal).name} after {num_steps} steps"))
    if reason is not None:
        rows.insert(0, ("ended early", reason))
    if lines:
        rows.append(("metrics", str(run / "metrics.jsonl")))
    if report is not None:
        rows.append(("report", str(report)))
    if signal is None and reason is None and lines and (done := lines[-1]["step"]):
        rows.append(("train longer", f"gspo resume {shlex.quote(str(run))} steps={2 * done}"))
    return "\n".join(_aligned(rows))


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _scores(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    evaluated = [line for line in lines if any(key.startswith("evaluation/") for key in line)]
    for measure in measures(evaluated) if len(evaluated) > 1 else ():
        # An evaluation in which every response has failed says nothing of the model.
        failed = f"{measure.name.rpartition('/')[0]}/failed_fraction"
        own = [line for line in evaluated if line.get(failed) != 1] or evaluated
        before, after = measured(own[0], measure), measured(own[-1], measure)
        yield measure.label, f"{before} before → {after} after"
    num_steps = sum(line["step"] > 0 for line in lines)
    few, means = first_and_last(lines)
    which = "first and last" if few == 1 else f"means of the first and the last {few}"
    for label, (first, last) in means.items() if num_steps else ():
        digits = 3 if label == "reward" else 1
        yield label, f"{first:.{digits}f} → {last:.{digits}f} ({which} of {num_steps} steps)"


def evaluation_lines(tree: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """The table of an evaluation.json: a line for each of the suites, with ± over questions and over samples."""
    suites = {name: tree["suites"][name] for name in names}
    heads = ("suite", "pass@1", "± questions", "± samples", "pass@k", "questions", "samples", "tokens", "cut off")
    rows: list[tuple[str, ...]] = [heads]
    for name, suite in suites.items():
        numbers, settings = suite["numbers"], suite["settings"]
        most = max(numbers["pass_at_k"], key=int)
        at_k = f"{numbers['pass_at_k'][most]:.3f} (k={most})" if int(most) > 1 else "–"
        errors = [numbers["error_over_questions"], numbers["error_over_samples"]]
        shares = [_three(value) for value in (numbers["pass_at_1"], *errors)]
        counts = [str(numbers["num_questions"]), str(settings["samples"])]
        ends = [f"{numbers['mean_response_tokens']:.1f}", f"{numbers['truncated_fraction']:.1%}"]
        rows.append((name, *shares, at_k, *counts, *ends))
    yield f"{tree['model']['path']} (weights {tree['model']['sha256'][:12]})"
    yield from _aligned(rows)
    for name, suite in suites.items():
        numbers = suite["numbers"]
        if rating := numbers.get("rating"):
            low, high = ("–" if end is None else f"{end:.0f}" for end in (rating["low"], rating["high"]))
            number = "none" if rating["rating"] is None else f"{rating['rating']:.0f}"
            places = len({contest["id"] for contest in rating["contests"]})
            yield f"{name}: rating {number}, {rating['confidence']:.0%} interval {low} to {high}, {places} contest(s)"
            if rating["note"]:
                yield f"note: {name}: {rating['note']}"
        if numbers["num_unjudged"]:
            yield f"note: {name}: no function applies to {numbers['num_unjudged']} responses: left out of pass@1"
        if numbers["num_failed"]:
            failed = f"on {numbers['num_failed']} responses the verifier failed: not passed"
            yield f"warning: {name}: {failed}; the first: {visible(numbers['first_failure'])}"


def comparison_line(first: Mapping[str, Any], second: Mapping[str, Any], suite: str) -> str:
    """The paired difference of two evaluations on a suite, and how many questions changed."""
    paired, names = compare(first, second, suite), [tree["model"]["name"] for tree in (second, first)]
    errors = [_three(paired[error]) for error in ("error_over_questions", "error_over_samples")]
    both = {word: paired[key] for word, key in (("better", "won"), ("worse", "lost"))}
    parts = [f"{len(ids)} {word}{f' ({listed(ids, 3)})' if ids else ''}" for word, ids in both.items()]
    return (
        f"{suite}: {names[0]} − {names[1]}: {paired['mean']:+.3f}, "
        f"± {errors[0]} over questions, ± {errors[1]} over samples; "
        f"of {paired['num_questions']} questions {' and '.join(parts)} (sign test: p = {paired['sign_test']:.2g})"
    )


def _three(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"
