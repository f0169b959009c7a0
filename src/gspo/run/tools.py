"""The prompts of a run with tools: rendered with their schemas and, for an environment, open at their end."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspo import loop
from gspo.errors import UserError
from gspo.evaluation.held_out import EvaluationSet
from gspo.evaluation.sets import SetRows
from gspo.queries.demonstrations import Demonstration
from gspo.queries.render import NO_TOOLS
from gspo.queries.row import Row
from gspo.queries.source import QuerySet, RowSet, render_rows
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import RolloutConfig
from gspo.reward.tools import load_tools
from gspo.rollout.tools import Tools
from gspo.types import Query

Pairs = Sequence[tuple[Row, Demonstration]]


def fit_tools(
    recipe: Recipe, rows: RowSet, sets: Sequence[SetRows], pairs: Pairs, tokenizer: Any, *, output: int = 2
) -> tuple[Recipe, Sequence[SetRows], Tools | None]:
    """The recipe and the sets to evaluate on with what shows the model the recipe's tools, and the tools, if any.

    UserError where prompts are rendered in several ways, or in demonstrations others speak than in a rollout.
    """
    if not recipe.rollout.has_turns:
        return recipe, sets, None
    _check_renderings(recipe, rows, sets)
    tools = load_tools(recipe.rollout, tokenizer, recipe.queries, output=output)
    _check_roles(pairs, tools.bridge.speaker)
    is_judge = any(reward.function == "environment" for reward in recipe.reward)
    own = tools.environment
    if is_judge and own is not None and not (own.has_reward or own.by_steps):
        what = f"{recipe.rollout.environment} has no method get_reward, which reward: environment asks for"
        raise UserError(
            what,
            where="rollout.environment",
            fix="write get_reward(self), or step(self, text) with reset(self, row); or name other rewards",
        )
    shown, changed = tools.bridge.shown, list[SetRows]()
    for each in sets:
        suite = each.suite and each.suite.model_copy(update={"queries": shown(each.suite.queries)})
        changed.append(replace(each, suite=suite))
    return recipe.model_copy(update={"queries": shown(recipe.queries)}), changed, tools


def _check_renderings(recipe: Recipe, rows: RowSet, sets: Sequence[SetRows]) -> None:
    """Raise UserError where prompts are not all rendered as results of tools are: by the recipe's queries."""
    own = {"chat", "chat_template_kwargs"}
    settings = recipe.queries.model_dump(include=own)
    for row in (*rows.train, *rows.held_out):
        if row.columns.get("chat_template_kwargs"):
            fix = "leave the column out, and write queries.chat_template_kwargs"
            raise UserError("with tools, a row has no variables of its own", where=f"row {row.id}", fix=fix)
    for suite in (each.suite for each in sets if each.suite is not None):
        if suite.queries.model_dump(include=own) != settings:
            what = f"with tools, suite {suite.name} needs the recipe's queries.chat and chat_template_kwargs"
            raise UserError(what, where="evaluation.suites", fix="write them alike, or leave out suite or tools")


def _check_roles(pairs: Pairs, speaker: str) -> None:
    """Raise UserError for a demonstration in which others than the speaker come between the assistant's messages."""
    for row, completion in pairs:
        if not isinstance(completion, str) and {message["role"] for message in completion} - {"assistant", speaker}:
            what = f"between the assistant's messages there are others than those of the role {speaker}"
            fix = "results of tools have the role tool, and what an environment's method step says the role user"
            raise UserError(what, where=f"cold start, row {row.id}", fix=fix)


def rendered(recipe: Recipe, tokenizer: Any, tools: Tools | None, limits: Mapping[str, Any], rows: RowSet) -> QuerySet:
    """Return both sets of rows as the model reads them within limits of `render_rows`; for tools with open ends."""
    made = render_rows(rows, tokenizer, recipe=recipe, **limits)
    return QuerySet(train=with_open_ends(made.train, tools), held_out=with_open_ends(made.held_out, tools))


def with_open_ends(queries: Sequence[Query], tools: Tools | None) -> tuple[Query, ...]:
    """The queries of an environment, whose prompts end within the last message: it may say more in it."""
    if tools is None or tools.environment is None or not (end := tuple(tools.bridge.opened)):
        return tuple(queries)
    for query in queries:
        if query.prompt_ids[-len(end) :] != end:
            what = "what the chat template writes behind the last message is encoded in another way there"
            raise UserError(what, where=f"rollout.environment, row {query.id}", fix="end prompts with a mark or a line")
    return tuple(replace(query, prompt_ids=query.prompt_ids[: -len(end)]) for query in queries)


def try_environment(tools: Tools | None, queries: Sequence[Query]) -> None:
    """Make an instance and reset it with the first row, if any: UserError where it cannot begin."""

    async def try_out(tools: Tools) -> None:
        try:
            await tools.begin("trial", queries[0])
        finally:
            await tools.end("trial")

    if queries and tools is not None and tools.environment is not None:
        loop.run(try_out(tools))


def positions_for_rows(rollout: RolloutConfig, max_positions: int | None) -> int | None:
    """The positions that a row's prompt and response must fit into: an agent's contexts have a limit of their own.

    UserError where that is above the model's positions.
    """
    if rollout.agent is None or max_positions is None:
        return max_positions
    if rollout.max_context > max_positions:
        what = f"rollout.max_context is {rollout.max_context}, and the model has {max_positions} positions"
        raise UserError(what, where="rollout.max_context", fix="lower it, or use a model with more positions")
    return None


def agent_notes(tools: Tools | None, tokenizer: Any) -> list[str]:
    """Say so where an agent's tools would not reach the model."""
    is_told = tools is None or tools.agent is None or "tools" in str(tokenizer.chat_template)
    return [] if is_told else [f"{NO_TOOLS}: an agent that has some must describe them in a message"]


def open_set(eval_set: EvaluationSet, tools: Tools | None) -> EvaluationSet:
    """The set with queries of `with_open_ends`."""
    return replace(eval_set, queries=with_open_ends(eval_set.queries, tools))
