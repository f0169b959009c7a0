"""Checks of an engine's settings before it is started; gspo check makes them, too."""

import subprocess
import sys
from collections.abc import Mapping

import torch

from gspo.errors import UserError
from gspo.recipe.sections import ServerConfig

_LOOK = "import importlib.util, sys; print('has it' * (importlib.util.find_spec(sys.argv[1]) is not None))"
_SECONDS = 60.0


def check_settings(name: str, settings: ServerConfig, refused: Mapping[str, str], *, longest: int) -> None:
    """Raise UserError where no server could be started with the settings, or one that computes something else.

    `refused` has the options that are not the user's, and why; `longest` is the longest sequence that a run may need.
    """
    where = f"rollout.{name}"
    for option in settings.options:  # a command line takes abbreviations, too
        for name_of_it in (each for each in refused if each.startswith(option)):
            what = f"this option is not yours to set: {refused[name_of_it]}"
            raise UserError(what, where=f"{where}.options.{option}")
    most = settings.options.get("max_model_len", settings.options.get("context_length", longest))
    if not isinstance(most, int) or most < longest:
        fix = f"leave it out, or set {longest} or more"
        raise UserError(f"prompts and responses have up to {longest} tokens", where=f"{where}.options", fix=fix)
    if settings.weights == "memory" and sys.platform != "linux":
        raise UserError("only Linux hands weights over so", where=f"{where}.weights", fix="set weights: files")
    if not settings.urls:
        _check_interpreter(name, settings.python or sys.executable, where=f"{where}.python")


def check_experts(name: str, device: torch.device) -> None:
    """Raise UserError where an engine returns no experts on the device."""
    if name == "vllm" and device.type == "cpu":
        what = "vLLM returns the experts that it routed to by its V2 model runner only, which does not run on a CPU"
        raise UserError(what, where="actor.routing_replay: engine", fix="set routing_replay: policy, or use a GPU")


def _check_interpreter(name: str, python: str, *, where: str) -> None:
    made = " (`make vllm` makes one for a CPU)" if name == "vllm" else ""
    fix = f"name the interpreter of an environment that has {name}{made}: {where}=.venv-{name}/bin/python"
    try:
        look = [python, "-I", "-c", _LOOK, name]  # apart from what lies in the working directory
        looked = subprocess.run(look, check=False, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        what = error.strerror if isinstance(error, OSError) else f"no answer within {_SECONDS:g} s"
        raise UserError(f"this interpreter cannot be run: {what}", where=f"{where}: {python}", fix=fix) from None
    if "has it" not in looked.stdout:
        raise UserError(f"this interpreter has no {name}", where=f"{where}: {python}", fix=fix)
