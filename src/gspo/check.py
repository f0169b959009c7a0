"""`gspo check`: it tests everything about a recipe that does not need the weights."""

import json
from collections.abc import Iterator, Sequence

from gspo.errors import UserError
from gspo.evaluation.held_out import verdict
from gspo.evaluation.notes import evaluation_notes
from gspo.model.load import check_vocabulary, max_positions, named_stop_ids
from gspo.queries.order import check_enough_queries
from gspo.queries.source import RowSet, render_rows
from gspo.recipe.rules import ineffective_settings
from gspo.recipe.schema import Recipe
from gspo.reward.functions import RewardFunction
from gspo.reward.probe import JUNK, probe
from gspo.run.directory import check_absent
from gspo.run.prepare import load_inputs
from gspo.run.summary import arithmetic, objective
from gspo.trackers.tracker import check_trackers
from gspo.types import Score

NUM_ROWS = 8  # rendered


def check(recipe: Recipe) -> Iterator[str]:
    """Yield what a run of the recipe would be, line by line; UserError at the first fault."""
    check_trackers(recipe.report.trackers, where="report.trackers")
    actor, rollout, model = recipe.actor, recipe.rollout, recipe.model
    inputs = load_inputs(recipe)
    functions, rows, pairs = inputs.functions, inputs.rows, inputs.pairs
    config, tokenizer = inputs.config, inputs.tokenizer
    named_stop_ids(tokenizer, rollout.stop_tokens)
    if model.path is not None:
        check_vocabulary(tokenizer, config.get_text_config().vocab_size, where=model.path)
    first_rows = RowSet(train=rows.train[:NUM_ROWS], held_out=rows.held_out[:NUM_ROWS])
    rendered = render_rows(first_rows, tokenizer, recipe=recipe, max_positions=max_positions(config))
    query, separator = rendered.train[0], rollout.segment_separator
    probed = probe(rendered.train, rendered.held_out, functions, tokenizer, segment_separator=separator)
    check_enough_queries(len(rows.train), rollout.queries_per_step)
    yield f"recipe      {recipe.name}, into {recipe.run_dir}"
    yield f"model       {config.model_type}: {model.path or 'new, untrained'}"
    if actor.routing_replay != "none" or actor.router_aux_loss:
        yield f"experts     replay: {actor.routing_replay}"
        yield "            its routers prove at load that they can be watched and overruled (docs/experts.md)"
    yield f"tokenizer   {len(tokenizer):,} tokens"
    yield f"queries     {len(rows.train):,} to train on, {len(rows.held_out):,} held out"
    yield f"one prompt  {len(query.prompt_ids)} tokens: {json.dumps(query.text, ensure_ascii=False)}"
    yield f"columns     {', '.join(query.columns) or 'none'}"
    if pairs:
        yield f"cold start  {len(pairs):,} demonstrations, such as {json.dumps(pairs[0][1], ensure_ascii=False)}"
    yield from _reward_lines(probed, functions)
    yield f"objective   {objective(recipe)}"
    yield f"arithmetic  {arithmetic(rollout.queries_per_step, rollout.group_size, actor.mini_batches, recipe.steps)}"
    yield f"            {recipe.steps * rollout.queries_per_step / len(rows.train):.2f} epochs of the queries"
    for sentence in (*evaluation_notes(recipe, len(rows.held_out), probed), *ineffective_settings(recipe)):
        yield f"note        {sentence}"
    try:
        check_absent(recipe)
    except UserError as error:
        yield f"note        {error}"


def _reward_lines(probed: Sequence[tuple[str, Score]], functions: Sequence[RewardFunction]) -> Iterator[str]:
    """The scores that each function gives to the row's own answer, where there is one, and to junk."""
    has_gold, judging = probed[0][0] != JUNK, verdict(probed[0][1])
    for function in functions:
        values = {text: score.parts[function.name] for text, score in probed}
        shown = [f"{'junk' if text == JUNK else 'gold'} {json.dumps(text)} → {value}" for text, value in values.items()]
        unit = "" if function.per == "response" else f", a number per {function.per}, in all"
        yield f"reward      {function.name}{unit}: {', '.join(shown)}"
        if all(value is None for value in values.values()):
            yield f"note        {function.name} says that it does not apply to either"
        # Only the function that judges is a verifier; a format, say, has nothing to do with being right.
        elif has_gold and judging and function.name == judging.function and len(set(values.values())) == 1:
            yield f"note        {function.name} scores the bare answer like junk: it may ask for another form"
