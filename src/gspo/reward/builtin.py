"""Built-in reward functions, and how a name in the recipe becomes a function, in the trainer and in its workers."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from gspo.errors import UserError, did_you_mean
from gspo.recipe.callables import load_callable
from gspo.reward.code import code
from gspo.reward.code_tests import is_blank
from gspo.reward.judge import judge
from gspo.reward.limits import within_cpu_limit
from gspo.reward.marks import TAGGED, gold_answer, judges_behind_thoughts, text_of
from gspo.sandbox.sandbox import Limits, Sandbox

SANDBOX_BYTES = 2 * 2**30
# By what their verifiers evaluate as Python: the answer, something in the entry, or whatever another task's does.
_EVALUATING = """binary_matrix bitwise_arithmetic composite countdown intermediate_integration n_queens number_sorting
    polynomial_multiplication puzzle24 simple_integration spiral_matrix string_insertion"""
EVALUATING_TASKS = frozenset(_EVALUATING.split())


@judges_behind_thoughts
def exact_match(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer_column: str = "answer", **columns: Any
) -> list[float | None]:
    """1.0 where the answer (last <answer> tag, else the completion) is the column's text, None where that is empty.

    Of a list in the column any entry is right, and of a worked solution its answer is, too; a whole number that is
    stored as 42.0 may be written 42 too.
    """
    golds = _golds(columns, answer_column, function="exact_match")
    return [
        float(_answer(completion) in right) if (right := _right_texts(gold)) else None
        for completion, gold in zip(completions, golds, strict=True)
    ]


def format_match(
    prompts: Sequence[Any], completions: Sequence[Any], *, pattern: str, full_match: bool = False, **columns: Any
) -> list[float]:
    """1.0 where the regular expression is found in the completion (or is all of it); `.` matches line ends too.

    Raises UserError for a pattern that is not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        what = f"not a regular expression: {error}: {pattern!r}"
        raise UserError(what, where="reward function format", fix="fix its option pattern") from None
    match = compiled.fullmatch if full_match else compiled.search
    return [float(match(text_of(completion)) is not None) for completion in completions]


@judges_behind_thoughts
def math(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    answer_column: str = "answer",
    seconds_per_answer: float = 2.0,
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion's last answer equals the column's, 0.0 where not or where it takes more CPU seconds.

    Of a list of texts, or of one entry, any is right; several numbers are one answer. None where the column is empty.
    """
    from gspo.reward.final_answer import score

    def best(gold: Any, text: str) -> float | None:
        right = _right_answers(gold)
        return max((within_cpu_limit(seconds_per_answer, score, entry, text) for entry in right), default=None)

    return [*map(best, _golds(columns, answer_column, function="math"), completions)]


@judges_behind_thoughts
def reasoning_gym(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    task: Sequence[str],
    entry: Sequence[dict[str, Any]],
    task_options: Sequence[dict[str, Any] | None] | None = None,
    seconds_per_answer: float = 10.0,
    in_sandbox: bool = False,
    **columns: Any,
) -> list[float]:
    """The score the task's own verifier gives the answer (last <answer> tag, else the completion), mostly 0.0 to 1.0.

    0.0 for one that takes more than the seconds of CPU time. Verifiers that evaluate text run in the sandbox if told.
    """
    from gspo.reward.gym import score

    options = [json.dumps(option or {}, sort_keys=True) for option in task_options or [None] * len(task)]
    rows = zip(task, options, entry, map(_answer, completions), strict=True)
    return [
        _score_in_sandbox(seconds_per_answer, row)
        if in_sandbox and row[0] in EVALUATING_TASKS
        else within_cpu_limit(seconds_per_answer, score, *row)
        for row in rows
    ]


@cache
def _sandbox() -> Sandbox:
    """The sandbox of this process, which has imported the verifiers before it is asked."""
    return Sandbox(packages=("*",), warm=("gspo.reward.gym",))


def _score_in_sandbox(seconds: float, row: Sequence[Any]) -> float:
    """Return what gym.score says of the row; RuntimeError where it is no fault of the answer that it says nothing."""
    limits = Limits(cpu_seconds=seconds, memory_bytes=SANDBOX_BYTES)
    ran = _sandbox().call("from gspo.reward.gym import score", "score", row, limits)
    if ran.ending in ("cpu_time", "memory", "output", "files"):
        return 0.0
    if ran.ending != "finished" or not isinstance(ran.value, float):
        raise RuntimeError(f"the verifier in the sandbox: {ran.ending}: {ran.error[-300:]}")
    return ran.value


def _answer(text: str) -> str:
    """The stripped text in the last <answer>…</answer>; the whole stripped text where there is no tag."""
    return (TAGGED.findall(text) or [text])[-1].strip()


def _golds(columns: Mapping[str, Any], name: str, *, function: str) -> list[Any]:
    """The column of right answers; UserError where there is none, or it holds what no response can be equal to."""
    if name not in columns:
        of_run = ("completion_ids", "trainer_state", "log_metric", "log_extra")
        there = ", ".join(column for column in columns if column not in of_run) or "none"
        what = f"it needs a column {name!r}; the columns there are: {there}"
        fix = "name the column: options: {answer_column: …}; in gspo eval: reward.0.options.answer_column=…"
        raise UserError(what, where=f"reward function {function}", fix=fix)
    for gold in columns[name]:
        for entry in gold if isinstance(gold, list | tuple) else [gold]:
            if isinstance(entry, Mapping):
                what = f"the column {name!r} holds {str(entry)[:80]}: a mapping, which no response is equal to"
                fix = "name another column: options: {answer_column: …}; or write a function that reads the mapping"
                raise UserError(what, where=f"reward function {function}", fix=fix)
    return list(columns[name])


def _right_answers(gold: Any) -> list[str]:
    """The texts that are right for math; several numbers are one answer."""
    is_any = isinstance(gold, list | tuple) and (len(gold) == 1 or all(isinstance(entry, str) for entry in gold))
    return [gold_answer(str(entry)) for entry in (gold if is_any else [gold]) if not is_blank(entry)]


def _right_texts(gold: Any) -> set[str]:
    if is_blank(gold):
        return set()
    if isinstance(gold, list | tuple):
        return {text for entry in gold for text in _right_texts(entry)}
    is_whole = isinstance(gold, float) and gold.is_integer()
    return {str(gold).strip(), str(int(gold)) if is_whole else gold_answer(str(gold)).strip()}


def own_response(function: Any, columns: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """A row's right answer as the plainest response that a built-in function must give 1; None where it has none."""
    gold, entry = columns.get(options.get("answer_column", "answer")), columns.get("entry")
    if function is math:
        return next((f"\\boxed{{{answer}}}" for answer in _right_answers(gold)), None)
    if function is exact_match:
        return min(_right_texts(gold), key=len, default=None)
    if function is reasoning_gym:
        answer = entry.get("answer") if isinstance(entry, Mapping) else None
        return answer if isinstance(answer, str) else None
    if function is code:
        programs = [columns[name] for name in ("canonical_solution", "solution", "code") if columns.get(name)]
        return f"```\n{programs[0]}\n```" if programs and isinstance(programs[0], str) else None
    return None


def environment(
    completions: Sequence[Any], environment_rewards: Sequence[float | None], **_: Any
) -> Sequence[float | None]:
    """Return what each response's environment or agent gave in the end; None where it gives nothing."""
    return environment_rewards


def reward_model(prompts: Sequence[Any], completions: Sequence[Any], *, path: str, **options: Any) -> list[float]:
    """Return a sequence classifier's scores of the prompt with each response: see reward_model.py."""
    from gspo.reward.reward_model import reward_model as score  # which imports torch

    return score(prompts, completions, path=path, **options)


BUILT_IN: Mapping[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "format": format_match,
    "math": math,
    "reasoning_gym": reasoning_gym,
    "code": code,
    "environment": environment,
    "agent": environment,
    "judge": judge,
    "reward_model": reward_model,
}
ALONE = ("reward_model",)  # one process, for each has a model of its own
VERIFIERS = ("math", "reasoning_gym", "code")  # they compute what others have written
# Keyword arguments that the recipe alone sets; what else they take is a column of the data.
OPTIONS: Mapping[str, Sequence[str]] = {
    "exact_match": ("answer_column", "thinking"),
    "format": ("pattern", "full_match"),
    "math": ("answer_column", "seconds_per_answer", "thinking"),
    "reasoning_gym": ("seconds_per_answer", "in_sandbox", "thinking"),
    "code": ("tests_column", "score", "seconds_per_test", "language", "max_tests", "thinking"),
    "environment": (),
    "agent": (),
    "judge": ("url", "model", "prompt", "system", "pattern", "low", "high", "key", "tries", "requests", "body"),
    "reward_model": ("path", "label", "batch_size", "device", "trust_remote_code"),
}


def find_function(name: str) -> Callable[..., Any]:
    """The function of a built-in's name, `module:name` or `file.py:name`; UserError where there is none."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return load_callable(name, where="reward.function")
    suggestion = did_you_mean(name, BUILT_IN, f"built in: {', '.join(BUILT_IN)}.")
    fix = f"{suggestion} A function of your own is module:name or file.py:name"
    if name.endswith(".py"):
        fix = f"name the function in the file: {name}:function"
    raise UserError(f"no built-in reward {name!r}", where="reward.function", fix=fix)
