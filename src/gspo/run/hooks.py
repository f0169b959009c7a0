"""Hooks: the user's functions that are called after each step, in the trainer's process, and what they may ask for."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from gspo.errors import UserError
from gspo.recipe.callables import error_line, load_callable
from gspo.recipe.sections import Number, Temperature

Line = Mapping[str, Any]
Hook = Callable[[int, Line, Sequence[Line]], Mapping[str, Any] | None]
_Name = Annotated[str, StringConstraints(pattern=r"^[\w.-]+(/[\w.-]+)*$", max_length=100)]


class Action(BaseModel):
    """The mapping that a hook may return, with any of these keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    log: dict[_Name, Number] = Field({})
    stop: Annotated[str, Field(min_length=1)] | None = None  # why the run is to end
    learning_rate_factor: Annotated[Number, Field(gt=0, le=10)] | None = None
    temperature: Temperature | None = None


def load_hooks(names: Sequence[str], given: Hook | None = None) -> dict[str, Hook]:
    """Load the hooks of `recipe.hooks` by name, and the `given` one; UserError where one cannot be called."""
    hooks: dict[str, Hook] = {name: load_callable(name, where="hooks") for name in names}
    if given is not None:
        hooks["on_step"] = given
    for name, hook in hooks.items():
        try:
            inspect.signature(hook).bind(1, {}, ())
        except (TypeError, ValueError) as error:
            what = f"{name} cannot be called with step, metrics and samples: {error}"
            raise UserError(what, where="hooks", fix="write it as: def hook(step, metrics, samples): …") from None
        if inspect.iscoroutinefunction(hook):
            raise UserError(f"{name} is async, and nothing awaits it", where="hooks", fix="write def, not async def")
    return hooks


def call_hooks(
    hooks: Mapping[str, Hook], line: Line, samples: Callable[[], Sequence[Line]], failed: Callable[..., None]
) -> Action:
    """Return what all hooks ask for after a step; where several set the same, the last one's counts.

    Each has copies of its own to look at. `failed` is called with the name and the error of one that fails.
    """
    asked: dict[str, Any] = {}
    for name, hook in hooks.items():
        try:
            action = _action(hook(line["step"], copy.deepcopy(line), samples()))
        except BaseException as error:  # SystemExit too: an error of a hook never looks like success
            failed(name, error)
            continue
        asked |= action.model_dump(exclude_none=True) | {"log": {**asked.get("log", {}), **action.log}}
        if action.stop is not None:
            asked["stop"] = f"hook {name}: {action.stop}"
    return Action.model_validate(asked)


def fault_of(name: str, error: BaseException, hook: Hook) -> UserError:
    """Return what is to be said of a hook that has failed."""
    fix = "correct it, then resume; with hook_errors: warn a run goes on without what a failing hook asks for"
    if isinstance(error, SystemExit):
        fix = f'return {{"stop": "why"}} to end a run; {fix}'
    if isinstance(error, UserError):
        return UserError(error.what, where=f"hook {name}", fix=f"{error.fix}; {fix}")
    what = f"raises {type(error).__name__}: {error}{error_line(error, hook)}"
    return UserError(what, where=f"hook {name}", fix=fix)


def _action(returned: Any) -> Action:
    fix = f"return None or a dictionary with any of the keys {', '.join(Action.model_fields)}"
    try:
        return Action.model_validate(dict(returned) if isinstance(returned, Mapping) else returned or {})
    except ValidationError as error:
        first = error.errors()[0]
        what = f"returns {'.'.join(map(str, first['loc'])) or 'no mapping'}: {first['msg'].removeprefix('Input ')}"
        raise UserError(f"{what}, not {first['input']!r}", fix=fix) from None
