"""What a reward function gets, by the names of its parameters: lists as in TRL, one response as in verl and AReaL."""

from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any, Literal

from gspo.errors import UserError, did_you_mean
from gspo.reward.calls import NAMED, RewardFunction, parameters_of
from gspo.reward.reply import Arguments, TrainerState
from gspo.rollout.segments import split_segments
from gspo.types import Query, Sample

Signature = Literal["TRL", "verl", "AReaL"]
# The names that no column of the data gives; docs/guides/rewards.md says what each of them is.
GIVEN: Mapping[Signature, Sequence[str]] = {
    "TRL": (
        *("prompts", "prompt_texts", "completions", "completion_ids", "segments"),
        *("trainer_state", "log_metric", "log_extra", "environment_rewards"),
    ),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "AReaL": ("prompt", "completions", "prompt_ids", "completion_ids"),
}


def signature_of(parameters: Sequence[Parameter]) -> Signature:
    """Whose function it is; by names that the others' functions do not have together."""
    names = {parameter.name for parameter in parameters if parameter.kind in NAMED}
    if {"solution_str", "ground_truth"} <= names and "completions" not in names:
        return "verl"
    return "AReaL" if {"prompt", "completions", "prompt_ids"} <= names else "TRL"


def arguments_of(
    query: Query, samples: Sequence[Sample], function: RewardFunction, state: TrainerState | None = None
) -> Arguments:
    """Return what the function takes of the query's columns and of the run, by name.

    It is a mapping of lists in TRL's signature, else one mapping for each completion. UserError: something is missing.
    """
    parameters, size = parameters_of(function.call), len(samples)
    signature = signature_of(parameters)
    lists, whole = _lists(signature, query, samples, function), dict(function.options)
    if signature == "TRL":  # a call puts functions that log in the places of the two None
        whole |= {"trainer_state": state or TrainerState(), "log_metric": None, "log_extra": None}
    if signature != "verl":
        if reserved := [name for name in query.columns if name in GIVEN[signature] and name in {**lists, **whole}]:
            what = f"a column is named {reserved[0]}, which is what a reward function gets of the run"
            raise UserError(what, where=f"row {query.id}", fix="rename the column")
        names = query.columns.keys() - {*function.only_options, *function.options}
        lists |= {name: [value] * size for name, value in query.columns.items() if name in names}
    available = {**whole, **lists}
    missing = [p.name for p in parameters if p.kind in NAMED and p.default is p.empty and p.name not in available]
    if missing:
        what = f"it needs {', '.join(missing)}; the columns there are: {', '.join(query.columns) or 'none'}"
        fix = "rename the column or the parameter, or give it under the reward's options"
        fix = did_you_mean(missing[0], available, fix) if len(missing) == 1 else fix
        fix = "set them under the reward's options" if {*missing} <= {*function.only_options} else fix
        fix = "set per: segment beside the function, or rename the parameter" if "segments" in missing else fix
        raise UserError(what, where=f"reward function {function.name}, row {query.id}", fix=fix)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        available = {p.name: available[p.name] for p in parameters if p.name in available}
    if signature == "TRL":
        return available
    return [{name: value[i] if name in lists else value for name, value in available.items()} for i in range(size)]


def _lists(
    signature: Signature, query: Query, samples: Sequence[Sample], function: RewardFunction
) -> dict[str, list[Any]]:
    """An entry a completion, of what no column gives."""
    size, texts = len(samples), [sample.answer for sample in samples]
    if signature == "verl":
        return {name: [value] * size for name, value in _of_verls_row(query.columns).items()} | {"solution_str": texts}
    lists: dict[str, list[Any]] = {"completions": texts, "completion_ids": [s.token_ids.tolist() for s in samples]}
    if signature == "AReaL":
        return {**lists, "prompt": [query.text] * size, "prompt_ids": [list(query.prompt_ids)] * size}
    if not isinstance(query.prompt, str):
        lists["completions"] = [_messages(sample) for sample in samples]
    if function.per == "segment":
        assert function.segment_separator is not None
        lists["segments"] = [split_segments(text, function.segment_separator) for text in texts]
    if any(parameter.name == "environment_rewards" for parameter in parameters_of(function.call)):
        lists["environment_rewards"] = [sample.environment_reward for sample in samples]
    return {**lists, "prompts": [query.prompt] * size, "prompt_texts": [query.text] * size}


def _messages(sample: Sample) -> list[dict[str, str]]:
    if not sample.turns:
        return [{"role": "assistant", "content": sample.text}]
    turns = sample.turns[1:] if sample.turns[0].role == "user" else sample.turns  # an environment's, of the prompt
    return [{"role": turn.role, "content": turn.text} for turn in turns]


def _of_verls_row(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return what verl's reward manager reads of a row; the ground truth of another layout is its answer."""
    row = {"ground_truth": columns["answer"]} if "answer" in columns else {}
    row |= {"data_source": ""} | {name: columns[name] for name in ("data_source", "ground_truth") if name in columns}
    if isinstance(model := columns.get("reward_model"), Mapping):
        row |= {name: truth for name, truth in model.items() if name == "ground_truth"}
    return {**row, "extra_info": columns.get("extra_info") or {}}
