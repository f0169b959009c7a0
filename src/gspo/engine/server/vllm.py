"""vLLM's server (0.32): its command line, its requests and its answers."""

import base64
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.lib.format import read_array

from gspo.engine.engine import Completion
from gspo.engine.server.api import Request, SampleRequest, bad_answers, completion_of, require
from gspo.engine.server.probe import NUM_RESPONSES
from gspo.recipe.rules import LOWEST_TEMPERATURE
from gspo.recipe.sections import AtPublish, ServerConfig

_FOLDER, _WORKER = Path(__file__).parent / "in_server", "gspo_vllm_worker.Worker"
# Compiling takes minutes there, for little; vLLM ends where a seeded request's prompt is read in chunks.
_ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": 32}
# vLLM's own choice there is a worker process that spins on a core for a second after each call, beside the trainer.
_ONE_PROCESS = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that an adapter's may be at most, which a server reserves
GPU_TRANSFERS = ("ipc", "nccl")  # the ways of weights that are vLLM's own
_OURS, _CHANGES = "gspo sets it", "it would change what is sampled, or its log-likelihoods"
REFUSED_OPTIONS = {
    **dict.fromkeys(("model", "served_model_name", "host", "port", "uds", "api_key", "middleware", "config"), _OURS),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "root_path"), _OURS),
    **dict.fromkeys(("load_format", "skip_tokenizer_init", "generation_config", "logprobs_mode"), _OURS),
    **dict.fromkeys(("enable_scale_out", "worker_extension_cls", "max_num_seqs", "weight_transfer_config"), _OURS),
    **dict.fromkeys(("quantization", "kv_cache_dtype", "speculative_config", "logits_processors"), _CHANGES),
    **dict.fromkeys(("override_generation_config", "hf_overrides", "tokenizer"), _CHANGES),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "lora_dtype"), "rollout.vllm.adapters is"),
    "dtype": "rollout.vllm.dtype is",
    "enable_return_routed_experts": "actor.routing_replay: engine sets it",
}


class VllmApi:
    """vLLM as gspo starts it, or as its documentation asks others to start it."""

    name = "vllm"
    about_path = "/server_info?config_format=json"
    label_path = "/weight_info"

    def __init__(
        self,
        settings: ServerConfig,
        *,
        max_rows: int,
        returns_experts: bool,
        group_size: int = 1,
        at_publish: AtPublish = "none",
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        """`lora`: options of a server that is given adapters; without them it is given whole weights."""
        self._settings, self._max_rows, self._returns_experts = settings, max_rows, returns_experts
        self.lora = lora or {}
        self._min_rows = group_size  # of one request
        self._is_transferred = settings.weights in GPU_TRANSFERS
        # vLLM 0.32 forgets at the pause what requests have computed, unless it is told not to.
        how = {"wait": "wait", "keep": "keep&clear_cache=false"}.get(at_publish, "keep")
        seconds = settings.request_seconds if at_publish == "wait" else None
        self.pause = Request(path=f"/pause?mode={how}", body={}, seconds=seconds)
        self._is_beside = at_publish != "none"  # then the proof's few tokens come before what waits
        query = "?reset_running_requests=true" if at_publish == "recompute" else ""
        self.forget = Request(path=f"/reset_prefix_cache{query}", body={})

    def command(self, *, model: Path, address: str, port: int, max_length: int, dtype: str, kind: str) -> list[str]:
        """Return what starts a server for a model's configuration; its weights are dummies until some are published."""
        options: dict[str, Any] = {
            "model": str(model),
            "served_model_name": "policy",
            "host": address,
            "port": port,
            "dtype": dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "enable_scale_out": True,
            "worker_extension_cls": _WORKER,
            "middleware": "gspo_vllm_worker.RequireKey",
            "max_model_len": max_length,
            # A proof needs room beside responses that go on.
            "max_num_seqs": self._max_rows + NUM_RESPONSES * self._is_beside,
            "disable_uvicorn_access_log": True,
            **({"weight_transfer_config": {"backend": self._settings.weights}} if self._is_transferred else {}),
            **({"enable_return_routed_experts": True} if self._returns_experts else {}),
            **({"scheduling_policy": "priority"} if self._is_beside else {}),
            **self.lora,
            **(_ON_CPU if kind == "cpu" else {}),
            **(_ONE_PROCESS if kind == "cpu" and "parallel" not in " ".join(self._settings.options) else {}),
            **self._settings.options,
        }
        arguments = [text for name, value in options.items() for text in _as_option(name, value)]
        return [self._settings.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]

    def environment(self, key: str) -> Mapping[str, str]:
        """The key, and where gspo's part of the server is found."""
        return {
            "GSPO_ENGINE_KEY": key,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_FOLDER), os.environ.get("PYTHONPATH")))),
            "PYTHONSAFEPATH": "1",  # no folder named vllm where the trainer runs
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if self._settings.weights == "ipc" else {}),
            **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.lora else {}),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),  # GiB; else nearly all memory
        }

    def sample(self, request: SampleRequest) -> Request:
        """Make one request for all completions: the prompt is read once."""
        sampling = request.sampling
        parameters = {
            "n": len(request.prompts),
            "max_tokens": request.max_new_tokens,
            "temperature": sampling.temperature and max(sampling.temperature, LOWEST_TEMPERATURE),  # 0: greedy
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": {str(token): bias for token, bias in sampling.biases.items()} or None,
            "seed": request.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # the policy's end tokens are among those to stop at
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        }
        body: dict[str, Any] = {
            "token_ids": list(request.ids),
            "sampling_params": parameters,
            "cache_salt": request.label,
        }
        if request.base:
            body["model"] = request.label
        if request.goes_first and self._is_beside:
            body["priority"] = -1
        return Request(path="/inference/v1/generate", body=body)

    def read(self, answer: Any, request: SampleRequest) -> list[Completion]:
        """The completions in their order; BadAnswerError where they are not what was asked for."""
        with bad_answers():
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            numbers = [choice["index"] for choice in choices]
            if numbers != list(range(len(request.prompts))):
                what = f"{len(choices)} completions where {len(request.prompts)} were asked for"
                raise ValueError(f"{what}, by index {numbers}")
            return [_completion(choice, request) for choice in choices]

    def check(self, about: Any, *, max_length: int) -> Mapping[str, str]:
        """The version and the dtype; ValueError where log-likelihoods would not be those of the policy."""
        config = about["vllm_config"]
        model, cache = config["model_config"], config["cache_config"]
        needed = {
            "--worker-extension-cls gspo_vllm_worker.Worker": config["parallel_config"]["worker_extension_cls"]
            == _WORKER,
            "--logprobs-mode processed_logprobs": model["logprobs_mode"] == "processed_logprobs",
            "--scheduling-policy priority": not self._is_beside or config["scheduler_config"]["policy"] == "priority",
            f"--max-model-len {max_length} or more": model["max_model_len"] >= max_length,
            f"--max-num-seqs {self._min_rows} or more": config["scheduler_config"]["max_num_seqs"] >= self._min_rows,
            "no quantisation": model["quantization"] is None and cache["cache_dtype"] in ("auto", model["dtype"]),
            "no speculative decoding": config["speculative_config"] is None,
            "no logits processors": not model["logits_processors"],
            f"--weight-transfer-config with backend {self._settings.weights}": not self._is_transferred
            or (config["weight_transfer_config"] or {}).get("backend") == self._settings.weights,
        }
        require(needed)
        version = about["system_env"].get("vllm_version", "of an unknown version")
        return {"engine version": str(version), "engine dtype": model["dtype"].removeprefix("torch.")}

    def publish(self, paths: Sequence[str], label: str) -> list[Request]:
        """Hand over weights. Nothing is sampled in between; what the cache holds is of others, and dropped."""
        return [
            self.pause,
            Request(path="/collective_rpc", body={"method": "load_policy", "args": [list(paths)]}),
            self.forget,
            Request(path="/update_weight_version", body={"new_version": label}),
            Request(path="/resume", body={}),
        ]

    def load(self, label: str, folder: Path) -> Request:
        """Have the server take the adapter of a folder, for requests that name it."""
        body = {"lora_name": label, "lora_path": str(folder)}
        return Request(path="/v1/load_lora_adapter", body=body, is_json=False)

    def unload(self, label: str) -> Request:
        """Have the server take no further requests for an adapter; it ends those under way."""
        return Request(path="/v1/unload_lora_adapter", body={"lora_name": label}, is_json=False)


def _as_option(name: str, value: Any) -> list[str]:
    """An option of the command line: `--flag` and `--no-flag` for truth values, JSON for mappings and lists."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _completion(choice: Mapping[str, Any], request: SampleRequest) -> Completion:
    """A choice of the answer."""
    scored = [(entry["token_id"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    experts = None
    if request.experts is not None:
        experts = read_array(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    spans = choice["weight_versions"]  # of whole weights alone
    if request.base:
        spans = [{**span, "version": request.label} if span["version"] == request.base else span for span in spans]
    return completion_of(request, choice["token_ids"], scored, choice["finish_reason"], spans, experts)
