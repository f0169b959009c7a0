"""`gspo check`: it tests everything about a recipe that does not need the weights."""

import json
from collections.abc import Callable, Iterator

from gspo.errors import UserError
from gspo.evaluation.held_out import verdict
from gspo.model.load import check_vocabulary, named_stop_ids
from gspo.recipe.schema import Recipe
from gspo.reward.functions import JUNK
from gspo.run.directory import check_absent
from gspo.run.memory import memory_lines
from gspo.run.prepare import Inputs, load_inputs
from gspo.run.summary import arithmetic, objective
from gspo.trackers.tracker import check_trackers


def check(recipe: Recipe, say: Callable[[str], object] = lambda _: None) -> Iterator[str]:
    """Yield what a run of the recipe would be, line by line; UserError at the first fault.

    `say` is called with what is waited for next.
    """
    check_trackers(recipe.report.trackers, where="report.trackers")
    actor, rollout, model = recipe.actor, recipe.rollout, recipe.model
    inputs = load_inputs(recipe, say=say)
    rows, pairs, tokenizer, query = inputs.rows, inputs.pairs, inputs.tokenizer, inputs.queries.train[0]
    named_stop_ids(tokenizer, rollout.stop_tokens)
    if model.path is not None:
        check_vocabulary(tokenizer, inputs.config.get_text_config().vocab_size, where=model.path)
    yield f"recipe      {recipe.name}, into {recipe.run_dir}"
    yield f"model       {inputs.config.model_type}: {model.path or 'new, untrained'}"
    if actor.routing_replay != "none" or actor.router_aux_loss:
        yield f"experts     replay: {actor.routing_replay}"
        yield "            its routers prove at load that they can be watched and overruled (docs/concepts/experts.md)"
    yield f"tokenizer   {len(tokenizer):,} tokens"
    yield f"queries     {len(rows.train):,} to train on, {len(rows.held_out):,} held out"
    yield f"one prompt  {len(query.prompt_ids)} tokens: {json.dumps(query.text, ensure_ascii=False)}"
    yield f"columns     {', '.join(query.columns) or 'none'}"
    if pairs:
        yield f"cold start  {len(pairs):,} demonstrations, such as {json.dumps(pairs[0][1], ensure_ascii=False)}"
    yield from _reward_lines(inputs)
    yield f"objective   {objective(recipe)}"
    yield f"arithmetic  {arithmetic(recipe)}"
    yield f"            {recipe.steps * rollout.queries_per_step / len(rows.train):.2f} epochs of the queries"
    yield from memory_lines(recipe, inputs)
    for sentence in inputs.notes:
        yield f"note        {sentence}"
    try:
        check_absent(recipe)
    except UserError as error:
        yield f"note        {error}"


def _reward_lines(inputs: Inputs) -> Iterator[str]:
    """The scores that each function gives to the row's own answer, where there is one, and to junk."""
    answer, score = inputs.probed[0]
    judge, _ = verdict(score)
    for function in inputs.functions:
        name, values = function.name, {text: score.parts[function.name] for text, score in inputs.probed}
        shown = [f"{'junk' if text == JUNK else 'gold'} {json.dumps(text)} → {value}" for text, value in values.items()]
        unit = "" if function.per == "response" else f", a number per {function.per}, in all"
        yield f"reward      {name}{unit}: {', '.join(shown)}"
        if all(value is None for value in values.values()):
            yield f"note        {name} says that it does not apply to either"
        # Only the function that judges is a verifier; a format, say, has nothing to do with being right.
        elif answer != JUNK and name == judge and len(set(values.values())) == 1:
            yield f"note        {name} scores the bare answer like junk: it may ask for another form"
