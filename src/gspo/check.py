"""`gspo check`: it tests everything about a recipe that does not need the weights."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from gspo.engine.make import engine_summary
from gspo.errors import UserError
from gspo.evaluation.held_out import verdict
from gspo.model.load import check_vocabulary, declared_ends, empty_model, find_stop_ids, turn_end
from gspo.model.policy import device_of, dtype_of, try_save
from gspo.recipe.load import as_recipe
from gspo.recipe.schema import Recipe
from gspo.reward.builtin import environment
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import JUNK
from gspo.rollout.tools import Tools
from gspo.run.memory import longest_prompt, memory_lines, sized
from gspo.run.minutes import measured_speed, time_line_of_inputs
from gspo.run.place import check_place
from gspo.run.plan import gpus_of, plan_lines
from gspo.run.prepare import Inputs, load_inputs
from gspo.run.summary import arithmetic, changes_of, objective, shown_tokens
from gspo.trackers.tracker import check_trackers
from gspo.types import Score


def check(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    say: Callable[[str], object] = lambda _: None,
    *,
    num_ranks: int = 1,
    on: str | None = None,
) -> Iterator[str]:
    """Yield what a run of the recipe, or of its mapping or file, would be, line by line; UserError at the first fault.

    `say` is called with what is waited for next. `num_ranks` processes of this machine would run it. `on` are GPUs
    such as 8xH100-80GB, which need not be here, on which it is planned as well.
    """
    gpus = None if on is None else gpus_of(on)
    recipe = as_recipe(recipe, where="check")
    check_trackers(recipe.report.trackers, where="report.trackers")
    inputs = load_inputs(recipe, say=say, num_ranks=num_ranks)
    yield from _model_lines(recipe, inputs)
    yield from _query_lines(recipe, inputs)
    if inputs.tools is not None:
        yield from _tool_lines(inputs.tools, recipe.rollout.history)
    for source, probed in inputs.probed.items():
        functions = [function for function in inputs.functions if function.name in probed[0][1].parts]
        yield from _reward_lines(functions, probed, f" of {source}" if source else "")
    for eval_set in inputs.evaluation_sets:
        if eval_set.probed:
            drawn = f"{eval_set.sampling.group_size} sampled at temperature {eval_set.sampling.temperature:g}"
            yield f"evaluation  {eval_set.name}: {len(eval_set.queries):,} questions, {drawn}"
            yield from _reward_lines(eval_set.functions, eval_set.probed)
    if inputs.hooks:
        yield f"hooks       {', '.join(inputs.hooks)}"
    yield f"objective   {objective(recipe)}"
    yield f"arithmetic  {arithmetic(recipe)}"
    num_asked = recipe.steps * recipe.rollout.queries_per_step
    times = num_asked / len(inputs.queries.train)
    yield f"            {num_asked:,} queries in all: the training data {times:.2f} times"
    for number, phase in enumerate(recipe.phases, 1):
        yield f"phase {number}     {phase.begins}: {changes_of(phase)}"
    if num_ranks > 1:
        yield from _rank_lines(recipe, num_ranks)
    yield from memory_lines(recipe.at_longest, inputs, num_ranks)
    device, dtype = device_of(recipe.model.device), dtype_of(recipe.model)
    line = time_line_of_inputs(recipe.at_longest, inputs, measured_speed(device, dtype), dtype.itemsize)
    if num_ranks == 1 and line is not None:
        yield f"time        {line}"
    if gpus is not None:
        yield from plan_lines(recipe, sized(recipe, inputs), gpus, longest_prompt(inputs))
    for sentence in inputs.notes:
        yield f"note        {sentence}"
    try:
        check_place(recipe)
    except UserError as error:
        yield f"note        {error}"


def _model_lines(recipe: Recipe, inputs: Inputs) -> Iterator[str]:
    """The model, once it fits its tokenizer, with what samples from it and what ends a response."""
    model, config, tokenizer = recipe.model, inputs.config, inputs.tokenizer
    end, num_embeddings = turn_end(tokenizer, recipe.queries), len(tokenizer)
    if model.path is not None:
        num_embeddings = config.get_text_config().vocab_size
        check_vocabulary(tokenizer, num_embeddings, where=model.path)
        try_save(empty_model(model, deepcopy(config)), tokenizer, where=model.path)
    declared = declared_ends(model, config, tokenizer)
    stop_ids = find_stop_ids(declared, tokenizer, (*recipe.rollout.stop_tokens, *end), num_embeddings)
    yield f"recipe      {recipe.name}, into {recipe.run_dir}"
    yield f"model       {config.model_type}: {model.path or 'new, untrained'}"
    yield f"engine      {engine_summary(recipe)}"
    if recipe.actor.routing_replay != "none" or recipe.actor.router_aux_loss:
        yield f"experts     replay: {recipe.actor.routing_replay}"
        yield "            its routers prove at load that they can be watched and overruled (docs/concepts/experts.md)"
    yield f"tokenizer   {len(tokenizer):,} tokens"
    of_template = f"; {end[0]} is what the chat template ends an answer with" if end else ""
    yield f"stop tokens {shown_tokens(tokenizer, stop_ids)}{of_template}"


def _query_lines(recipe: Recipe, inputs: Inputs) -> Iterator[str]:
    queries, pairs = inputs.queries, inputs.pairs
    yield f"queries     {len(queries.train):,} to train on, {len(queries.held_out):,} held out"
    counts, shares = Counter(own.source for own in queries.train), recipe.queries.shares
    if shares:
        yield f"sources     {', '.join(f'{name} {counts[name]:,} at {share:.0%}' for name, share in shares.items())}"
    is_default = recipe.queries.chat is None and getattr(inputs.tokenizer, "chat_template", None)
    firsts = {own.source: own for own in reversed(queries.train)}
    for query in (firsts[name] for name in shares or [""]):
        is_put, source = is_default and isinstance(query.prompt, str), f"of {query.source}, " if query.source else ""
        how = ", a text put through the chat template (queries.chat: false leaves it as it is)" if is_put else ""
        text = json.dumps(query.text, ensure_ascii=False)
        yield f"one prompt  {source}{len(query.prompt_ids)} tokens{how}: {text}"
        yield f"columns     {', '.join(query.columns) or 'none'}"
    if pairs:
        yield f"cold start  {len(pairs):,} demonstrations, such as {json.dumps(pairs[0][1], ensure_ascii=False)}"


_TRIED = {
    "the text": "GSPO",
    "a call": '<tool_call>{"name":"GSPO","arguments":{}}</tool_call>',
    "blanks at the ends": " GSPO\n",
    "thoughts": "<think>\nGSPO\n</think>\n\nGSPO",
}
_HISTORIES = {
    "branch": "the next has a context of its own (rollout.history: branch)",
    "append": "the next goes on behind what was sampled (rollout.history: append)",
    "refuse": "such a run ends (rollout.history: refuse)",
}


def _tool_lines(tools: Tools, history: str) -> Iterator[str]:
    """Each tool with its parameters, and what stands between two turns of the policy."""
    for name, tool in tools.by_name.items():
        parameters = ", ".join(tool.schema["function"]["parameters"].get("properties", {}))
        yield f"tool        {name}({parameters}): {tool.schema['function']['description'].splitlines()[0]}"
    by_steps = tools.bridge.speaker == "user"
    written = json.dumps("".join(tools.bridge.pieces(["ANSWER" if by_steps else "RESULT"])), ensure_ascii=False)
    role = f"as messages of the role {tools.bridge.role}" if tools.bridge.role else "as plain text"
    yield f"{'environment' if by_steps else 'results':<12}{role}, which are not trained on: {written}"
    rewritten = [name for name, text in _TRIED.items() if tools.bridge.rewrites(text)]
    if rewritten:
        parts = " and ".join(rewritten)
        yield f"history     the chat template writes {parts} of an earlier turn otherwise: {_HISTORIES[history]}"
    elif tools.bridge.role is not None:
        yield "history     the chat template writes earlier turns as they are sampled"


def _rank_lines(recipe: Recipe, num_ranks: int) -> Iterator[str]:
    """Yield how the work is divided."""
    sequences = recipe.rollout.queries_per_step * recipe.rollout.group_size // recipe.actor.mini_batches
    queries = recipe.rollout.queries_per_step
    each = f"{sequences / num_ranks:.3g} sequences of a mini-batch and {queries / num_ranks:.3g} queries for each"
    yield f"processes   {num_ranks}, sharding: {recipe.trainer.sharding}; {each}"
    if sequences < num_ranks:
        yield f"note        a mini-batch has {sequences} sequences: {num_ranks - sequences} processes train on none"
    gpus = torch.cuda.device_count()
    if device_of(recipe.model.device).type == "cuda" and num_ranks > gpus:
        yield f"note        a process needs a GPU of its own, and this machine has {gpus}: the others must be elsewhere"


def _reward_lines(
    functions: Sequence[RewardFunction], probed: Sequence[tuple[str, Score]], source: str = ""
) -> Iterator[str]:
    """The scores that each function gives to the row's own answer, where there is one, and to junk."""
    answer, score = probed[0]
    judge, _ = verdict(score)
    for function in functions:
        if function.call is environment:
            own = "what get_reward returns in the end, or step gives for the turns in all"
            what = own if function.name == "environment" else "what it returns"
            yield f"reward      {function.name}: {what}"
            continue
        name, values = function.name, {text: score.parts[function.name] for text, score in probed}
        shown = [f"{'junk' if text == JUNK else 'gold'} {json.dumps(text)} → {value}" for text, value in values.items()]
        unit = "" if function.per == "response" else f", a number per {function.per}, in all"
        yield f"reward      {name}{source}{unit}: {', '.join(shown)}"
        if all(value is None for value in values.values()):
            yield f"note        {name} returns None for both: it applies to other rows, or to none"
        # Only the function that judges is a verifier; a format, say, has nothing to do with being right.
        elif answer != JUNK and name == judge and len(set(values.values())) == 1:
            yield f"note        {name} scores the bare answer like junk: it may ask for another form"
