"""`gspo eval`: judge models by suites. Every judged response is kept at once, so that a killed evaluation goes on."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo.engine.make import make_engine
from gspo.errors import RunError, UserError, did_you_mean, writable, writing
from gspo.evaluation.held_out import SAMPLING_KEY, EvaluationSet, judged_lines
from gspo.evaluation.journal import NO_ROOM, Journal
from gspo.evaluation.rating import collect_attempts, rate, read_contests
from gspo.interrupt import Interrupt, check_stop
from gspo.learner.state import digest_of
from gspo.model.load import named_stop_ids, turn_end
from gspo.model.policy import Policy, load_policy
from gspo.recipe.load import load_recipe, make_recipe, overridden
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import RolloutConfig, SuiteConfig
from gspo.recipe.suites import named_suites, suite_tree
from gspo.reward.builtin import BUILT_IN
from gspo.reward.functions import close_functions
from gspo.reward.score import score
from gspo.rollout.sampler import Sampler
from gspo.rollout.tools import Tools
from gspo.run.checkpoint.store import Store
from gspo.run.console import Display
from gspo.run.lock import Lock
from gspo.run.prepare import load_inputs, longest_sequence
from gspo.run.resume import code_of, contents_digest
from gspo.run.summary import shown_tokens

_SECTIONS = ("model", "rollout")  # of a recipe, whose keys an evaluation takes
_OF_TRAINING = {
    *("queries_per_step", "group_size", "dynamic_sampling", "max_rounds", "segment_separator", "overlong"),
    *("overlong_margin", "max_staleness", "too_old", "interrupt", "old_cache", "in_turn"),
}
_CHUNK = 2  # times rollout.max_rows responses are sampled and judged before they are written


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The outcome of a model's evaluation.

    Example: Evaluation(directory=Path("evaluations/my-run"), tree=tree).tree["suites"]["gsm8k"]["numbers"]["pass_at_1"]
    """

    directory: Path
    tree: Mapping[str, Any]  # evaluation.json


def evaluate(
    target: str | Path,
    suites: Sequence[str | Mapping[str, Any]],
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    display: Display | None = None,
) -> Evaluation:
    """Judge a model directory, a hub id or a run by suites, into `out`, by default evaluations/NAME.

    `overrides` are texts such as "samples=4" (of all suites), "gsm8k.samples=4" and "rollout.engine=vllm". What the
    directory has of an evaluation of the same model is not sampled or judged again. UserError for what cannot be used.
    """
    display = display or Display()
    recipe = evaluation_recipe(target, suites, overrides)
    directory = Path(out or evaluation_directories([target])[0])
    with ExitStack() as stack:
        stack.enter_context(Interrupt(display.alert, ending="ending; what is judged is kept"))
        with display.waiting("reading the suites") as say:
            inputs = load_inputs(recipe, trains=False, say=say)
            sets, tokenizer = inputs.evaluation_sets, inputs.tokenizer
            stack.callback(close_functions, [function for eval_set in sets for function in eval_set.functions])
            if inputs.tools is not None:
                stack.callback(inputs.tools.close)
            check_stop()
            say(f"loading {recipe.model.path}")
            policy, added = _loaded_policy(recipe, tokenizer)
            display.note(f"a response ends with {shown_tokens(tokenizer, policy.stop_ids)}")
            check_stop()
            model = {"path": str(target), "name": recipe.name, "sha256": digest_of(policy.weights())}
        with writing(directory, NO_ROOM):
            directory.mkdir(parents=True, exist_ok=True)
        stack.callback(Lock(directory).release)
        journal = Journal(directory, model)
        pending = []
        for eval_set, suite in zip(sets, recipe.evaluation.suites, strict=True):
            judged = journal.begin(eval_set.name, _about(eval_set, suite, recipe.rollout, inputs.tools, added))
            pending.append([query for query in eval_set.queries if query.id not in judged])
            if judged:
                display.note(f"{eval_set.name}: {len(judged)} of {len(eval_set.queries)} questions are judged already")
        description: Mapping[str, str] = {}
        if any(pending):
            with display.waiting("starting the engine") as say:
                longest = longest_sequence(recipe, inputs.queries, sets)
                engine = make_engine(recipe, policy, directory=directory, longest_sequence=longest, say=say)
                stack.enter_context(closing(engine))
                sampler = Sampler(engine, policy, inputs.tools)
                sampler.publish(0)
            description = engine.describe()
            for eval_set, queries in zip(sets, pending, strict=True):
                sampling = eval_set.sampling
                count = f"{len(queries)} questions, {sampling.group_size} sample{'s' * (sampling.group_size != 1)} each"
                display.note(f"{eval_set.name}: {count}, at most {sampling.max_new_tokens} tokens")
                size = max(1, _CHUNK * recipe.rollout.max_rows // sampling.group_size)
                for start in range(0, len(queries), size):
                    _judge(replace(eval_set, queries=queries[start : start + size]), sampler, journal, display)
        rated = [suite for suite in recipe.evaluation.suites if suite.layout == "codeforces"]
        ratings = {suite.name: _rating(suite, journal.suites[suite.name]["responses"]) for suite in rated}
        return Evaluation(directory=directory, tree=journal.finish(description, ratings))


def _loaded_policy(recipe: Recipe, tokenizer: Any) -> tuple[Policy, list[str]]:
    """The model, and the tokens that end its responses only because the suites' chat templates write them."""
    policy = load_policy(recipe.model, tokenizer, seed=0, stop_tokens=recipe.rollout.stop_tokens)
    ends = {end for suite in recipe.evaluation.suites for end in turn_end(tokenizer, suite.queries)}
    added = sorted(ends - {*tokenizer.convert_ids_to_tokens(policy.stop_ids)})
    return replace(policy, stop_ids=(*policy.stop_ids, *named_stop_ids(tokenizer, added))), added


def _judge(chunk: EvaluationSet, sampler: Sampler, journal: Journal, display: Display) -> None:
    """Sample and judge some questions of a set, and write what came of it."""
    num_rows, began = journal.suites[chunk.name]["data"]["num_rows"], time.monotonic()
    done = f"{len(journal.judged(chunk.name))} of {num_rows} questions done"
    try:
        with display.waiting(f"{chunk.name}: sampling, {done}"):
            groups = sampler.sample(chunk.queries, chunk.sampling, SAMPLING_KEY, show_progress=display.progress)
    except RunError as error:  # of an engine that cannot go on
        fix = "solve that, then run the same command again: what is judged is kept, and it goes on"
        raise UserError(str(error), where=f"{chunk.name}, {journal.path}", fix=fix) from None
    sampled = time.monotonic()
    with display.waiting(f"{chunk.name}: judging"):
        batch = score(groups, chunk.functions, max_masked_fraction=1.0, show_progress=display.progress)
    lines = [line for group in batch.groups for line in judged_lines(group.samples, chunk.pass_threshold)]
    journal.add(chunk.name, lines, (sampled - began, time.monotonic() - sampled))


def _rating(suite: SuiteConfig, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The CodeForces rating of the judged tries, as evaluation.json has it: null for what does not exist."""
    attempts = collect_attempts({**line["columns"], "passed": [bool(line["passed"])]} for line in lines)
    return dict(writable(rate(read_contests(Path(str(suite.queries.path))), attempts)))


def _about(
    eval_set: EvaluationSet, suite: SuiteConfig, rollout: RolloutConfig, tools: Tools | None, ends: Sequence[str]
) -> dict[str, Any]:
    """Return what decides a suite's numbers, beside the model: its settings, as they are in force, and its data."""
    settings = suite.model_dump(mode="json", exclude={"about": True, "queries": {"path"}})
    shaping = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias")
    sampling = eval_set.sampling.model_dump(mode="json", include={*shaping, "stop_strings", "stop_tokens"})
    sampling["stop_tokens"] += ends  # that the chat template alone declares
    rows = [[query.id, query.prompt, query.columns] for query in eval_set.queries]
    data = {"path": suite.queries.path, "num_rows": len(rows), "sha256": contents_digest(rows)}
    data["prompts_sha256"] = contents_digest([query.text for query in eval_set.queries])  # by the model's chat template
    others = [function for function in eval_set.functions if function.call not in BUILT_IN.values()]
    code = {function.name: code_of(function.call) for function in others}  # of gspo's own the version says enough
    if tools is not None:
        code |= {f"tool {function.__name__}": code_of(function) for function in tools.functions}
        own = {"tools", "mcp", "environment", "agent", "max_turns", "tool_seconds", "tool_characters"}
        own |= {"agent_seconds", "max_context", "history"}
        settings |= rollout.model_dump(mode="json", include=own)
    settings |= {**sampling, "samples": eval_set.sampling.group_size, "engine": rollout.engine, "code": code}
    return {"settings": settings, "data": data}


def evaluation_recipe(
    target: str | Path, suites: Sequence[str | Mapping[str, Any]], overrides: Sequence[str] = ()
) -> Recipe:
    """The model and the rollout of a target, a run's as it was trained, with the suites to evaluate on.

    UserError for a suite, a key or a value that cannot be used, and for a run without a model.
    """
    near = sorted(str(path.parent) for path in Path(target).parent.glob("*/recipe.yaml"))
    if near and "/" in str(target) and not Path(target).exists():  # else it is asked of the hub, which takes long
        raise UserError("there is no such run", where=str(target), fix=f"there are: {', '.join(near)}"[:300])
    tree: dict[str, Any] = {"name": _name(target), "steps": 1, "model": {"path": str(target)}}
    if (Path(target) / "recipe.yaml").is_file() and not (Path(target) / "config.json").is_file():
        tree |= sections_of_run(Path(target))
    trees = [dict(suite_tree(suite)) for suite in suites]
    if not trees:
        raise UserError("no suite is named", where="suite", fix=f"name some of: {', '.join(named_suites())}")
    names = [str(suite.get("name")) for suite in trees]
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        first, _, rest = key.partition(".")
        if first in names and rest:
            changed = overridden(trees[names.index(first)], f"{rest}={value}")
            trees = [changed if name == first else suite for name, suite in zip(names, trees, strict=True)]
        elif first in SuiteConfig.model_fields and first != "name":
            trees = [overridden(suite, override) for suite in trees]
        elif first in _SECTIONS and rest:
            tree = overridden(tree, override)
        else:
            known = [*SuiteConfig.model_fields, *_SECTIONS, *names]
            keys = f"keys are those of a suite ({', '.join(SuiteConfig.model_fields)}), model.… and rollout.…"
            raise UserError(f"unknown key {key}", where="command line", fix=did_you_mean(first, known, keys))
    return make_recipe({**tree, "evaluation": {"suites": trees}}, where="gspo eval")


def evaluation_directories(targets: Sequence[str | Path], out: str | Path | None = None) -> list[Path]:
    """Return where evaluations go: into `out` for one target, below it for several, below evaluations/ without it.

    Each is named like its model or run; where two have one name, like the path.
    """
    if out is not None and len(targets) == 1:
        return [Path(out)]
    names = [_name(target) for target in targets]
    pairs = zip(targets, names, strict=True)
    chosen = [name if names.count(name) == 1 else _safe(str(Path(target).absolute())) for target, name in pairs]
    return [Path(out or "evaluations") / name for name in chosen]


def _name(target: str | Path) -> str:
    name = Path(target).absolute().name if Path(target).exists() else str(target).strip("/").replace("/", "-")
    if name == "model" and Path(target).absolute().parent.name:  # of a run: its name says more
        name = Path(target).absolute().parent.name
    return _safe(name)


def _safe(name: str) -> str:
    return "".join(mark if mark.isalnum() or mark in "._-" else "-" for mark in name).lstrip("._-")[-200:] or "model"


def sections_of_run(run: Path) -> dict[str, Any]:
    """The sections of a run's recipe that an evaluation of its newest model needs."""
    recipe = load_recipe(run / "recipe.yaml", of_run=True).at_longest
    newest = None if (run / "model").is_dir() else Store(run / "checkpoints").newest()
    path = newest.path / "model" if newest else run / "model"
    if not path.is_dir():
        fix = "let it reach a checkpoint or its end, or name a model directory"
        raise UserError("this run has no model yet", where=str(run), fix=fix)
    kept = {"dtype", "device", "trust_remote_code", "attn_implementation"}
    if recipe.model.lora is not None:  # an adapter's directory has no configuration that had taken them in
        kept.add("kwargs")
    model = recipe.model.model_dump(mode="json", include=kept)
    rollout = recipe.rollout.model_dump(mode="json", exclude=_OF_TRAINING)
    del rollout["vllm"]["adapters"]  # of a model that was trained with one; here it is merged
    return {"model": {**model, "path": str(path)}, "rollout": rollout}
