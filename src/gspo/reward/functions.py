"""The reward functions of a recipe or from Python, checked before anything is sampled, and tried on two completions."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import product
from typing import Any

import torch
from pydantic import ValidationError

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.recipe.faults import described
from gspo.recipe.rules import refusals
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import Per, RewardConfig
from gspo.reward.arguments import GIVEN, arguments_of, signature_of
from gspo.reward.builtin import ALONE, BUILT_IN, EVALUATING_TASKS, OPTIONS, VERIFIERS, find_function, own_response
from gspo.reward.calls import NAMED, Function, Processes, RewardFunction, Threads, parameters_of
from gspo.reward.code_tests import read_tests
from gspo.reward.marks import THINKING, gold_answer, opens_thoughts
from gspo.reward.reply import TrainerState, is_async
from gspo.reward.score import judging, score
from gspo.rollout.segments import split_segments
from gspo.sandbox.sandbox import check_available
from gspo.types import Group, Query, Sample, Score

JUNK = "I do not know."
MAX_TRIED = 200  # rows whose own answers are tried


@dataclass(frozen=True)
class Reward:
    """A reward function from Python, with what a recipe says beside a function's name.

    Example: gspo.train(recipe, reward=[right, gspo.Reward(polite, weight=0.1, time_limit_seconds=5)])
    """

    function: Function
    _: KW_ONLY
    weight: float = 1.0
    time_limit_seconds: float = RewardConfig.model_fields["time_limit_seconds"].default
    per: Per = "response"
    options: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[str] = ()


Given = Function | Reward


def load_functions(
    rewards: Sequence[RewardConfig],
    given: Given | Sequence[Given] | None = None,
    *,
    segment_separator: str | None = None,
    output: int = 2,
) -> tuple[RewardFunction, ...]:
    """Load the functions of `recipe.reward`, in processes of their own, or those `given` from Python instead.

    One per segment needs the `segment_separator` of the rollouts. What a process prints goes to the file descriptor
    `output`. Raises UserError where there is no function, a name leads nowhere, or a function lacks an option.
    """
    if given is not None:
        listed = given if isinstance(given, list | tuple) else [given]
        functions = [_given_function(reward, segment_separator) for reward in listed]
    else:
        functions = [
            _made(reward, find_function(reward.function), segment_separator, in_processes=True, output=output)
            for reward in rewards
        ]
    if not functions:
        fix = f"set reward: [{{function: ...}}] to one of {', '.join(BUILT_IN)}, module:name or file.py:name"
        raise UserError("the recipe has no reward", where="reward", fix=fix)
    names = [function.name for function in functions]
    for place, name in enumerate(names):
        if count := names[:place].count(name):  # equal names: format, format_2
            functions[place] = replace(functions[place], name=f"{name}_{count + 1}")
    return tuple(functions)


def close_functions(functions: Sequence[RewardFunction]) -> None:
    """End the functions' processes; a further call starts them anew."""
    for function in functions:
        function.host.close()


def _given_function(given: Any, segment_separator: str | None) -> RewardFunction:
    reward = given if isinstance(given, Reward) else Reward(given)
    function = reward.function
    if not callable(function):
        fix = "give a function or gspo.Reward(function, weight=…), or name one in the recipe: reward: file.py:function"
        raise UserError(f"a reward is a function, not {function!r}", where="reward", fix=fix)
    name = getattr(function, "__name__", type(function).__name__).replace("<lambda>", "reward")
    built_in = next((key for key, value in BUILT_IN.items() if value is function), None)
    changed = {key: value for key, value in vars(reward).items() if value != vars(Reward(function))[key]}
    try:
        checked = RewardConfig(function=built_in or f"gspo.Reward({name})", **changed)
    except ValidationError as error:
        raise described(error, where=f"gspo.Reward({name})") from None
    made = _made(checked, function, segment_separator, in_processes=built_in in VERIFIERS)
    return replace(made, name=name, settings="".join(f", {key} {value}" for key, value in changed.items()))


def _made(
    reward: RewardConfig, call: Function, segment_separator: str | None, *, in_processes: bool, output: int = 2
) -> RewardFunction:
    """The function with the recipe's settings, once it takes its options."""
    parameters, name = parameters_of(call), reward.function
    named = [parameter.name for parameter in parameters if parameter.kind in NAMED]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = [own for own in named if own not in GIVEN[signature_of(parameters)]]
    if name in BUILT_IN:  # its **columns would take an unknown option and ignore it in silence
        takes_any, accepted = False, list(OPTIONS[name])
    for option in reward.options:
        if option not in accepted and not (takes_any and option not in named):
            fix = f"it takes: {', '.join(accepted) or 'none'}"
            raise UserError(f"reward function {name} has no option {option!r}", where="reward.options", fix=fix)
    host: Threads | Processes = Threads()
    if in_processes:
        num_calls = reward.concurrent_calls or (1 if name in ALONE else None)
        of_call: dict[str, Any] = {"is_async": is_async(call), "is_verifier": name in VERIFIERS}
        host = Processes(name, concurrent_calls=num_calls, output=output, **of_call)
    return RewardFunction(
        name=name.rpartition(":")[2],
        call=call,
        only_options=OPTIONS.get(name, ()),
        host=host,
        segment_separator=segment_separator,
        **reward.model_dump(include={"weight", "time_limit_seconds", "options", "per", "sources"}),
    )


def load_rewards(
    recipe: Recipe, given: Given | Sequence[Given] | None, *, output: int = 2
) -> tuple[Recipe, tuple[RewardFunction, ...]]:
    """Load a recipe's functions, as `load_functions` does; return also the recipe with those from Python.

    Raises UserError where the rules of recipes refuse these.
    """
    separator = recipe.rollout.segment_separator
    functions = load_functions(recipe.reward, given, segment_separator=separator, output=output)
    if given is not None:
        rewards = tuple(
            RewardConfig(function=f.name, weight=f.weight, per=f.per, sources=tuple(f.sources)) for f in functions
        )
        recipe = recipe.model_copy(update={"reward": rewards})
        if sentences := refusals(recipe):
            raise UserError("\n  ".join(sentences), where="reward, from Python")
    return recipe, functions


def fit_to_rows(functions: Sequence[RewardFunction], rows: Sequence[Row]) -> tuple[RewardFunction, ...]:
    """Check that the functions can judge the rows, without a call; return them, in the sandbox where needed.

    It is needed where the data names a task whose verifier evaluates text, which is the data's. Raises
    UserError where this machine has no sandbox for it, and for a row with malformed tests of programs.
    """
    fitted = []
    for function in functions:
        where = f"reward function {function.name}, row "
        judged_rows = [row for row in rows if judging([function], row)]
        evaluating = next((r for r in judged_rows if not r.is_procedural and _task(r) in EVALUATING_TASKS), None)
        if function.call is BUILT_IN["code"]:
            for row in judged_rows:
                read_tests(row.columns, column=function.options.get("tests_column"), where=f"{where}{row.id}")
        if function.call is BUILT_IN["reasoning_gym"] and evaluating is not None:
            try:
                check_available()
            except UserError as error:
                what = (
                    f"task {_task(evaluating)}: reasoning-gym's verifier of it evaluates text as Python or "
                    f"sympy, in data that text could be any program, and it cannot run in the sandbox: {error.what}"
                )
                fix = "or give queries.procedural.task instead of data, or a task whose verifier only reads"
                raise UserError(what, where=f"{where}{evaluating.id}", fix=f"{error.fix}; {fix}") from None
            function = replace(function, options={**function.options, "in_sandbox": True})
        fitted.append(function)
    return tuple(fitted)


def _task(row: Row) -> str:
    """The task of reasoning-gym that the row names, if any."""
    return str(row.columns.get("task"))


def probe(
    train: Sequence[Query],
    held_out: Sequence[Query],
    functions: Sequence[RewardFunction],
    tokenizer: Any,
    *,
    segment_separator: str | None,
    state: TrainerState | None = None,
) -> list[tuple[str, Score]]:
    """Score a gold and a junk answer; the gold is the first row's `answer`, or its `answer_column`.

    Raises UserError for a function that needs a column which is not there, raises, crashes,
    runs over its time limit, or returns what is no score.
    """
    for query, function in product([*train[:1], *held_out[:1]], functions):
        arguments_of(query, (), function)
    named = [str(f.options["answer_column"]) for f in functions if "answer_column" in f.options]
    answer = train[0].columns.get((*named, "answer")[0])
    answer = answer[0] if isinstance(answer, list | tuple) and answer else answer
    readers = [function for function in functions if "thinking" in function.only_options]
    is_text = isinstance(answer, str | int | float)  # what else there is no model could write
    text = str(answer) if is_text else JUNK
    if readers and is_text:
        text = _behind_thoughts(gold_answer(text), train[0], readers[0])
    texts = [text, JUNK]  # two at least: a wrong count must show
    group = Group(samples=tuple(_sample(train[0], text, tokenizer, segment_separator) for text in texts))
    samples = score([group], functions, state, strict=True).samples
    return [(sample.text, sample.score) for sample in samples if sample.score is not None]


def own_answer_notes(
    queries: Sequence[Query], functions: Sequence[RewardFunction], tokenizer: Any, *, segment_separator: str | None
) -> list[str]:
    """Describe the rows whose own answer a built-in function gives less than 1: no response can get 1 there.

    Raises UserError where these are all rows. Of many rows it tries MAX_TRIED, evenly drawn.
    """
    tried, notes = queries[:: -(-len(queries) // MAX_TRIED) or 1], list[str]()
    drawn = f", evenly drawn from {len(queries):,}" * (len(tried) < len(queries))
    for function in functions:
        groups = []
        for query in tried:
            text = own_response(function.call, query.columns, function.options)
            if text is not None and judging([function], query):
                sample = _sample(query, _behind_thoughts(text, query, function), tokenizer, segment_separator)
                groups.append(Group(samples=(sample,)))
        scored = score(groups, [function], max_masked_fraction=1.0).samples
        parts = [(sample, sample.score.parts[function.name]) for sample in scored if sample.score is not None]
        applying = [(sample, part) for sample, part in parts if part is not None]
        less = [(sample, part) for sample, part in applying if part < 1]
        if not less:
            continue
        sample, part = less[0]
        what = f"no response can get 1 on {len(less):,} of {len(applying):,} rows{drawn}, "
        what += f"such as {sample.query.id}: {function.name} gives its own answer {part:g}: "
        what += repr(sample.text[:100])
        if len(less) == len(applying) and "answer_column" in function.only_options:
            fix = "name the column with the right answers: options: {answer_column: …}, or take another function"
            raise UserError(what, where=f"reward function {function.name}", fix=fix)
        notes.append(what)
    return notes


def _behind_thoughts(text: str, query: Query, function: RewardFunction) -> str:
    """Put the tag that ends the thoughts before the text where the prompt opens them."""
    thinking = function.options.get("thinking", THINKING) if "thinking" in function.only_options else None
    is_begun = thinking and any(opens_thoughts(prompt, thinking) for prompt in (query.prompt, query.text))
    return f"{thinking[1]}{text}" if thinking and is_begun else text


def _sample(query: Query, text: str, tokenizer: Any, separator: str | None) -> Sample:
    """Build a sample of the text: each segment's tokens by itself, and an end token in the last."""
    segments = [text] if separator is None else split_segments(text, separator)
    ids = [list(tokenizer(segment, add_special_tokens=False).input_ids) for segment in segments]
    ids[-1].append(tokenizer.eos_token_id or 0)  # any will do where the tokenizer names none
    num_tokens = sum(map(len, ids))
    return Sample(
        query=query,
        token_ids=torch.tensor([token for segment in ids for token in segment]),
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        text=text,
        finish_reason="stop",
        sampler_logprobs=torch.zeros(num_tokens),
        versions=((0, num_tokens),),
        segments=() if separator is None else tuple(map(len, ids)),
        environment_reward=0.0,  # of one that has not been played
    )
