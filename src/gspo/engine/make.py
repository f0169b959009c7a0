"""The engine of a recipe, checked and made: the one place that knows all of them."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.engine.engine import Engine
from gspo.engine.server.engine import ServerEngine
from gspo.engine.server.fleet import Fleet
from gspo.engine.server.hosts import LOOPBACK, Host, ThisHost, ray_hosts
from gspo.engine.server.probe import LENGTH, Probe
from gspo.engine.server.server import ServerApi
from gspo.engine.server.sglang import REFUSED_OPTIONS as SGLANG_REFUSED
from gspo.engine.server.sglang import SglangApi
from gspo.engine.server.vllm import GPU_TRANSFERS, RANKS, VllmApi
from gspo.engine.server.vllm import REFUSED_OPTIONS as VLLM_REFUSED
from gspo.errors import UserError
from gspo.model.load import empty_model
from gspo.model.lora import add_lora, plain_rank
from gspo.model.policy import Policy, load_policy
from gspo.model.routing import routers_in
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ServerConfig

_LOOK = "import importlib.util, sys; print('has it' * (importlib.util.find_spec(sys.argv[1]) is not None))"
_LOOK_SECONDS = 60.0


def engine_summary(recipe: Recipe) -> str:
    """The engine of the recipe in a line."""
    name = recipe.rollout.engine
    if name == "embedded":
        is_copy = recipe.rollout.at_publish != "none"
        return "embedded, in the trainer's process" + is_copy * ", with a copy of the weights"
    server: ServerConfig = getattr(recipe.rollout, name)
    number = recipe.cluster.engines or max(1, len(server.devices))
    started = f"{number} to be started by {server.python or 'the interpreter that runs gspo'}"
    return f"{name}: {', '.join(server.urls) or started}; it is proven to have the weights when the run starts"


def check_engine(recipe: Recipe, config: Any, *, device: torch.device, longest_sequence: int) -> None:
    """Raise UserError where the recipe's engine cannot be used, or would compute something else; start nothing."""
    name, lora = recipe.rollout.engine, recipe.model.lora
    if name == "embedded":
        return
    settings: ServerConfig = getattr(recipe.rollout, name)
    check_settings(name, settings, longest=longest_sequence)
    check_transfer(name, settings, device, on_cluster=recipe.cluster.engines > 0)
    if recipe.actor.routing_replay == "engine":
        check_experts(name, device)
    if name == "vllm" and recipe.rollout.vllm.adapters and lora is not None:
        empty = empty_model(recipe.model, config)
        add_lora(empty, lora, is_sharded=False)
        _reserved_rank(empty, must=True)


def check_settings(name: str, settings: ServerConfig, *, longest: int) -> None:
    """Raise UserError where no server could be started with the settings, or one that computes something else.

    `longest` is the longest sequence that a run may need.
    """
    where, refused = f"rollout.{name}", {"vllm": VLLM_REFUSED, "sglang": SGLANG_REFUSED}[name]
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


def check_transfer(name: str, settings: ServerConfig, device: torch.device, *, on_cluster: bool) -> None:
    """Raise UserError where weights cannot get to the engine of this name from a trainer on this device as they should.

    `on_cluster`: it is not the settings that say where servers run, but the section `cluster`.
    """
    way, gpus = settings.weights, {gpu.strip() for entry in settings.devices for gpu in entry.split(",")}
    problems = {
        "vLLM alone takes them so": name != "vllm",
        f"the trainer's device is {device.type}, not a GPU": device.type != "cuda",
        "vLLM is not in the trainer's own environment": importlib.util.find_spec("vllm") is None,
        "they stay within the trainer's GPU, and `devices` names several": way == "ipc" and len(gpus) > 1,
        "they go to other GPUs than the trainer's, and `devices` names none": way == "nccl"
        and not (gpus or settings.urls or on_cluster),
    }
    if problem := next((text for text, is_so in problems.items() if way in GPU_TRANSFERS and is_so), None):
        fix = "docs/engines.md says what it takes; `weights: memory` needs nothing of it"
        raise UserError(f"weights cannot be handed over by {way}: {problem}", where=f"rollout.{name}.weights", fix=fix)


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
        looked = subprocess.run(look, check=False, capture_output=True, text=True, timeout=_LOOK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        what = error.strerror if isinstance(error, OSError) else f"no answer within {_LOOK_SECONDS:g} s"
        raise UserError(f"this interpreter cannot be run: {what}", where=f"{where}: {python}", fix=fix) from None
    if "has it" not in looked.stdout:
        raise UserError(f"this interpreter has no {name}", where=f"{where}: {python}", fix=fix)


def make_engine(
    recipe: Recipe,
    policy: Policy,
    *,
    directory: Path = Path(),
    longest_sequence: int = 0,
    say: Callable[[str], object] = lambda _: None,
) -> Engine:
    """The engine that `rollout.engine` names; it samples once the policy's weights are published.

    A server writes its log into the directory, and takes prompt and completion of up to `longest_sequence` tokens.
    UserError where it cannot be used.
    """
    if recipe.rollout.engine != "embedded":
        return _server_engine(recipe, policy, longest_sequence=longest_sequence, directory=directory, say=say)
    rollout, copy = recipe.rollout, None
    if rollout.at_publish != "none":  # it samples while the policy is trained
        say("loading the engine's copy of the model")
        model = recipe.model.model_copy(update={"dtype": str(policy.dtype).removeprefix("torch.")})
        copy = load_policy(model, policy.tokenizer, seed=recipe.seed, stop_tokens=rollout.stop_tokens)
    threads = _half_of_the_cores(recipe, policy)
    options: dict[str, Any] = {"copy": copy, "at_publish": rollout.at_publish, "num_threads": threads}
    return EmbeddedEngine(policy, max_rows=rollout.max_rows, **options)


def _half_of_the_cores(recipe: Recipe, policy: Policy) -> int | None:
    """The threads of the trainer, and those of the engine, where both compute on the cores at the same time."""
    shares = recipe.rollout.at_publish != "none" and policy.device.type == "cpu"
    return max(1, torch.get_num_threads() // 2) if shares and "OMP_NUM_THREADS" not in os.environ else None


def _server_engine(recipe: Recipe, policy: Policy, *, longest_sequence: int, **options: Any) -> ServerEngine:
    """The engine of a recipe whose `rollout.engine` is a server; options are those of Fleet."""
    rollout, routing = recipe.rollout, policy.routing
    settings: ServerConfig = getattr(rollout, rollout.engine)
    suites = recipe.evaluation.suites
    group_sizes = [rollout.group_size, recipe.evaluation.samples, *(suite.samples for suite in suites)]
    max_rows = max(rollout.max_rows, *group_sizes)
    returns_experts = recipe.actor.routing_replay == "engine"
    common: dict[str, Any] = {"max_rows": max_rows, "at_publish": rollout.at_publish}
    api: ServerApi
    if rollout.engine == "vllm":
        common |= {"returns_experts": returns_experts, "lora": _lora_options(recipe, policy)}
        api = VllmApi(settings, group_size=max(group_sizes), **common)
    else:
        experts = (routing.num_layers, routing.top_k) if returns_experts and routing else None
        api = SglangApi(settings, experts=experts, **common)
    dtype = str(policy.dtype).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype
    probe = Probe(policy, getattr(torch, dtype), rollout.temperature)
    threads = _half_of_the_cores(recipe, policy)
    hosts = _hosts(recipe, settings, threads)
    max_length = max(longest_sequence, LENGTH)
    fleet = Fleet(api, policy, probe, settings, hosts, dtype=dtype, max_length=max_length, **options)
    return ServerEngine(
        fleet,
        request_seconds=settings.request_seconds * (1 + rollout.max_staleness),  # steps asked for at the same time
        experts=routing.dtype if returns_experts and routing else None,
        num_threads=threads if hosts else None,
    )


def _lora_options(recipe: Recipe, policy: Policy) -> dict[str, Any]:
    """Return the options of a vLLM server that gets the adapter alone; none where it cannot take it, or shall not."""
    settings = recipe.rollout.vllm
    is_wanted = policy.device.type != "cpu" if settings.adapters is None else settings.adapters
    is_ours = not settings.urls and settings.weights not in GPU_TRANSFERS
    rank = _reserved_rank(policy.model, must=bool(settings.adapters)) if is_wanted and is_ours else None
    if rank is None:
        return {}
    # One that is new, beside each that a response under way may have begun with.
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": 2 + recipe.rollout.max_staleness}


def _reserved_rank(model: Any, *, must: bool) -> int | None:
    """The rank that a vLLM server reserves for the model's adapter; None, or UserError, where it cannot take that."""
    needed, most = plain_rank(model), RANKS[-1]
    problems = {
        "vLLM 0.32 takes none for a mixture of experts": routers_in(model),
        "vLLM takes it for linear layers alone, and others have one": needed is None,
        f"vLLM takes a rank of {most} at most, and this is {needed}": needed and needed > most,
    }
    problem = next((text for text, is_so in problems.items() if is_so), None)
    if problem and must:
        what, fix = f"the adapter has to be merged here: {problem}", "leave it out, or set false"
        raise UserError(what, where="rollout.vllm.adapters: true", fix=fix)
    return None if problem else next(rank for rank in RANKS if needed and rank >= needed)


def _hosts(recipe: Recipe, settings: ServerConfig, threads: int | None) -> list[Host]:
    """Return where the run's own servers are started, one on each; those of this machine share the threads."""
    if settings.urls:
        return []
    if not recipe.cluster.engines:
        devices = settings.devices or (None,)
        own = threads and max(1, threads // len(devices))
        return [ThisHost(devices=each, threads=own) for each in devices]
    hosts = ray_hosts(recipe.cluster.engines)
    if settings.weights == "memory" and any(host.address != LOOPBACK for host in hosts):
        where = f"rollout.{recipe.rollout.engine}.weights"
        fix = "set files, with a weights_dir that all hosts share, or nccl"
        raise UserError("memory is this machine's, and Ray has placed a server on another", where=where, fix=fix)
    return [*hosts]
