"""The recipe's reward functions, found and checked before anything is sampled."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gspo.errors import UserError
from gspo.recipe.sections import Per, RewardConfig
from gspo.reward.calls import Host, Threads
from gspo.reward.named import BUILT_IN, VERIFIERS, built_in_options, find_function
from gspo.reward.processes import Processes

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A function in TRL's signature with what the recipe says about it."""

    name: str  # unique in the recipe: the key in Score.parts
    call: Function
    weight: float = 1.0
    time_limit_seconds: float = RewardConfig.model_fields["time_limit_seconds"].default
    options: Mapping[str, Any] = field(default_factory=dict)
    only_options: tuple[str, ...] = ()  # parameters that no column of the data sets
    host: Host = field(default_factory=Threads)  # where calls are made
    per: Per = "response"  # what it gives a number for
    segment_separator: str | None = None  # that the rollouts' segments end with, where it is called per segment

    @property
    def is_async(self) -> bool:
        """Whether a call gives a coroutine."""
        return _is_async(self.call)


def load_functions(
    rewards: Sequence[RewardConfig],
    given: Function | Sequence[Function] | None = None,
    *,
    segment_separator: str | None = None,
) -> tuple[RewardFunction, ...]:
    """The functions of `recipe.reward`, in processes of their own, or those `given` from Python in their stead.

    Those from Python are called per response; one per segment needs the `segment_separator` of the rollouts.
    Raises UserError where there is none, a name is not found, or a function does not take its options.
    """
    if given is not None:
        functions = [_given_function(function) for function in ([given] if callable(given) else given)]
    else:
        functions = [_named_function(reward, segment_separator) for reward in rewards]
    if not functions:
        fix = f"set reward: [{{function: ...}}] to one of {', '.join(BUILT_IN)}, module:name or file.py:name"
        raise UserError("the recipe has no reward", where="reward", fix=fix)
    for function in functions:
        function.host.open()
    names = _unique([function.name for function in functions])
    return tuple(replace(function, name=name) for name, function in zip(names, functions, strict=True))


def close_functions(functions: Sequence[RewardFunction]) -> None:
    """End the functions' processes; a further call starts them anew."""
    for function in functions:
        function.host.close()


def _given_function(function: Function) -> RewardFunction:
    if not callable(function):
        raise UserError(f"a reward is a function, not {function!r}", where="reward")
    name = getattr(function, "__name__", type(function).__name__)
    host = Processes(name, is_verifier=True) if function in [BUILT_IN[name] for name in VERIFIERS] else Threads()
    return RewardFunction(name="reward" if name == "<lambda>" else name, call=function, host=host)


def _named_function(reward: RewardConfig, segment_separator: str | None) -> RewardFunction:
    call = find_function(reward.function)
    _check_options(reward, call)
    return RewardFunction(
        name=reward.function.rpartition(":")[2],
        call=call,
        weight=reward.weight,
        time_limit_seconds=reward.time_limit_seconds,
        options=reward.options,
        only_options=built_in_options(reward.function),
        host=Processes(
            reward.function,
            is_async=_is_async(call),
            concurrent_calls=reward.concurrent_calls,
            is_verifier=reward.function in VERIFIERS,
        ),
        per=reward.per,
        segment_separator=segment_separator,
    )


def _is_async(call: Function) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )


def _check_options(reward: RewardConfig, call: Function) -> None:
    parameters = inspect.signature(call).parameters
    named = [name for name, parameter in parameters.items() if parameter.kind in NAMED]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    accepted = [name for name in named if name not in ("prompts", "completions")]
    if reward.function in BUILT_IN:  # its **columns would take an unknown option and ignore it in silence
        takes_any, accepted = False, list(built_in_options(reward.function))
    for option in reward.options:
        if option not in accepted and not (takes_any and option not in named):
            fix = f"it takes: {', '.join(accepted)}" if accepted else "it takes none"
            raise UserError(
                f"reward function {reward.function} has no option {option!r}", where="reward.options", fix=fix
            )


def _unique(names: Sequence[str]) -> list[str]:
    """The names, the second and later of equal ones numbered: format, format_2."""
    unique: list[str] = []
    for position, name in enumerate(names):
        count = names[: position + 1].count(name)
        unique.append(name if count == 1 else f"{name}_{count}")
    return unique


NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
