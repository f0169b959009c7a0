"""The engine of a recipe: the one place that knows all of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.engine.engine import Engine
from gspo.engine.server.api import ServerApi
from gspo.engine.server.engine import ServerEngine
from gspo.engine.server.fleet import Fleet
from gspo.engine.server.probe import LENGTH, Probe
from gspo.engine.server.process import LOOPBACK, Host, ThisHost
from gspo.engine.server.ray_host import ray_hosts
from gspo.engine.server.settings import check_experts, check_settings
from gspo.engine.server.sglang import REFUSED_OPTIONS as SGLANG_REFUSED
from gspo.engine.server.sglang import SglangApi
from gspo.engine.server.vllm import REFUSED_OPTIONS as VLLM_REFUSED
from gspo.engine.server.vllm import VllmApi
from gspo.engine.server.vllm_sender import check_transfer
from gspo.errors import UserError
from gspo.model.policy import Policy, load_policy
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ServerConfig


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


def check_engine(recipe: Recipe, *, device: torch.device, longest_sequence: int) -> None:
    """Raise UserError where the recipe's engine cannot be used, or would compute something else; start nothing."""
    name = recipe.rollout.engine
    if name == "embedded":
        return
    refused = {"vllm": VLLM_REFUSED, "sglang": SGLANG_REFUSED}[name]
    check_settings(name, getattr(recipe.rollout, name), refused, longest=longest_sequence)
    check_transfer(name, getattr(recipe.rollout, name), device, on_cluster=recipe.cluster.engines > 0)
    if recipe.actor.routing_replay == "engine":
        check_experts(name, device)


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
    if recipe.rollout.engine == "embedded":
        return _embedded_engine(recipe, policy, say)
    return _server_engine(recipe, policy, longest_sequence=longest_sequence, directory=directory, say=say)


def _embedded_engine(recipe: Recipe, policy: Policy, say: Callable[[str], object]) -> EmbeddedEngine:
    rollout, options = recipe.rollout, dict[str, Any]()
    if rollout.at_publish != "none":  # it samples while the policy is trained
        say("loading the engine's copy of the model")
        model = recipe.model.model_copy(update={"dtype": str(policy.dtype).removeprefix("torch.")})
        copy = load_policy(model, policy.tokenizer, seed=recipe.seed, stop_tokens=rollout.stop_tokens)
        options = {"copy": copy, "at_publish": rollout.at_publish}
        options["num_threads"] = _half_of_the_cores() if _shares_cores(policy) else None
    return EmbeddedEngine(policy, max_rows=rollout.max_rows, **options)


def _shares_cores(policy: Policy) -> bool:
    return policy.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ


def _half_of_the_cores() -> int:
    return max(1, torch.get_num_threads() // 2)


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
        api = VllmApi(settings, group_size=max(group_sizes), returns_experts=returns_experts, **common)
    else:
        experts = (routing.num_layers, routing.top_k) if returns_experts and routing else None
        api = SglangApi(settings, experts=experts, **common)
    dtype = str(policy.dtype).removeprefix("torch.") if settings.dtype == "auto" else settings.dtype
    probe = Probe(policy, getattr(torch, dtype), rollout.temperature)
    shares_cores = _shares_cores(policy) and rollout.at_publish != "none"
    hosts = _hosts(recipe, settings, shares_cores=shares_cores)
    max_length = max(longest_sequence, LENGTH)
    fleet = Fleet(api, policy, probe, settings, hosts, dtype=dtype, max_length=max_length, **options)
    return ServerEngine(
        api,
        fleet,
        request_seconds=settings.request_seconds * (1 + rollout.max_staleness),  # steps asked for at the same time
        experts=routing.dtype if returns_experts and routing else None,
        num_threads=_half_of_the_cores() if shares_cores and hosts else None,
    )


def _hosts(recipe: Recipe, settings: ServerConfig, *, shares_cores: bool) -> list[Host]:
    """Return where the run's own servers are started, one on each; on a CPU they share half of the cores."""
    if settings.urls:
        return []
    if not recipe.cluster.engines:
        devices = settings.devices or (None,)
        threads = max(1, _half_of_the_cores() // len(devices)) if shares_cores else None
        return [ThisHost(devices=each, threads=threads) for each in devices]
    hosts = ray_hosts(recipe.cluster.engines)
    if settings.weights == "memory" and any(host.address != LOOPBACK for host in hosts):
        where = f"rollout.{recipe.rollout.engine}.weights"
        fix = "set files, with a weights_dir that all hosts share, or nccl"
        raise UserError("memory is this machine's, and Ray has placed a server on another", where=where, fix=fix)
    return [*hosts]
