"""SGLang's server (0.5.23): its command line, its requests and its answers.

It has met no real server: the tests hold it to the classes and keys in SGLang's own source.
"""

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspo.engine.engine import Completion
from gspo.engine.server.api import Request, SampleRequest, bad_answers, completion_of, require
from gspo.recipe.sections import AtPublish, ServerConfig

# SGLang takes its key from the command line alone, which everybody on the machine can read: it is added from within.
_LAUNCH = (
    "import os, runpy, sys; sys.argv += ['--api-key', os.environ['GSPO_ENGINE_KEY']]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)
_SLACK = 8  # tokens of its context that SGLang keeps free of prompt and response
_WHOLE: dict[str, Any] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # all tokens
_REFUSED = ["quantization", "speculative_algorithm", "rl_on_policy_target", "preferred_sampling_params"]
_REFUSED += ["allow_auto_truncate", "enable_deterministic_inference"]  # the latter draws a group's responses alike
_OURS, _CHANGES = "gspo sets it", "it would change what is sampled, or its log-likelihoods"
REFUSED_OPTIONS = {
    **dict.fromkeys(("model_path", "host", "port", "api_key", "admin_api_key", "load_format", "log_level"), _OURS),
    **dict.fromkeys(("skip_tokenizer_init", "json_model_override_args", "context_length"), _OURS),
    **dict.fromkeys(("max_running_requests", "device"), _OURS),
    **dict.fromkeys((*_REFUSED, "kv_cache_dtype", "tokenizer_path", "enable_lora"), _CHANGES),
    "dtype": "rollout.sglang.dtype is",
    "enable_return_routed_experts": "actor.routing_replay: engine sets it",
}
# Below level warning SGLang logs all its options, the key among them. A model's own end tokens would end responses too.
_FIXED = {"load_format": "dummy", "skip_tokenizer_init": True, "log_level": "warning"}
_FIXED |= {"json_model_override_args": {"eos_token_id": None}}


class SglangApi:
    """SGLang as gspo starts it, or as its documentation asks others to start it."""

    name = "sglang"
    about_path = "/server_info"  # all its options, the key among them: nothing may print the answer
    label_path = "/model_info"

    def __init__(
        self,
        settings: ServerConfig,
        *,
        max_rows: int,
        experts: tuple[int, int] | None,
        at_publish: AtPublish = "none",
    ) -> None:
        """`experts`: the model's layers and its experts a token, where responses come with their experts."""
        self._settings, self._max_rows, self._experts, self._at_publish = settings, max_rows, experts, at_publish

    def command(self, *, model: Path, address: str, port: int, max_length: int, dtype: str, kind: str) -> list[str]:
        """Return what starts a server for a model's configuration; its weights are dummies until some are published."""
        needed = {"model_path": str(model), "host": address, "port": port, "device": kind, "dtype": dtype}
        needed |= {"context_length": max_length + _SLACK, "max_running_requests": self._max_rows}
        needed |= {"enable_return_routed_experts": self._experts is not None}
        options = {**_FIXED, **needed, **self._settings.options}
        arguments = [text for name, value in options.items() for text in _as_option(name, value)]
        return [self._settings.python or sys.executable, "-c", _LAUNCH, *arguments]

    def environment(self, key: str) -> Mapping[str, str]:
        """The key, and what has no option."""
        return {
            "GSPO_ENGINE_KEY": key,
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the slack may be beyond the model's own length
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-likelihoods at the temperature
        }

    def sample(self, request: SampleRequest) -> Request:
        """Make one request for all completions: the prompt is read once. SGLang has no use for the seed."""
        sampling = request.sampling
        assert not sampling.is_shaped, "log-likelihoods would be of the distribution before top_p, top_k and min_p"
        parameters = {**_WHOLE, "n": len(request.prompts), "temperature": sampling.temperature}
        parameters |= {"max_new_tokens": request.max_new_tokens, "stop_token_ids": list(sampling.stop_ids)}
        parameters["ignore_eos"] = not sampling.stop_ids  # true, it would ignore stop_token_ids, too
        body = {"input_ids": list(request.ids), "sampling_params": parameters, "return_logprob": True}
        body |= {"return_routed_experts": request.experts is not None, "cache_salt": request.label}
        return Request(path="/generate", body=body)

    def read(self, answer: Any, request: SampleRequest) -> list[Completion]:
        """The completions in their order; BadAnswerError where they are not what was asked for."""
        answers = [answer] if isinstance(answer, dict) else answer  # one alone is no list
        with bad_answers():
            if len(answers) != len(request.prompts):
                raise ValueError(f"{len(answers)} completions where {len(request.prompts)} were asked for")
            return [self._completion(each, request) for each in answers]

    def check(self, about: Any, *, max_length: int) -> Mapping[str, str]:
        """The version and the dtype; ValueError where log-likelihoods would not be those of the policy."""
        try:
            version, dtype, longest = str(about["version"]), str(about["dtype"]), about["max_req_input_len"]
            needed = {
                "a dtype that is not auto": dtype != "auto",
                "skip_tokenizer_init": about["skip_tokenizer_init"],
                f"context_length {max_length + _SLACK} or more, and memory for it": longest >= max_length,
                "enable_return_routed_experts": not self._experts or about["enable_return_routed_experts"],
                "kv_cache_dtype auto": about["kv_cache_dtype"] in ("auto", dtype),
                **{f"no {name}": not about[name] for name in _REFUSED},
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"its /server_info is not that of SGLang 0.5.23: {error!r}") from None
        require(needed)
        return {"engine version": version, "engine dtype": dtype}

    def publish(self, paths: Sequence[str], label: str) -> list[Request]:
        """Hand over weights. Nothing is sampled in between; what the cache holds is of others, and dropped."""
        folder = Path(paths[0]).parent  # SGLang loads all that is in it
        assert sorted(folder.glob("*.safetensors")) == sorted(map(Path, paths)), "other weights are there, too"
        mode = {"recompute": "retract", "keep": "in_place"}.get(self._at_publish, "abort")
        update = {"model_path": str(folder), "weight_version": label, "abort_all_requests": mode == "abort"}
        update["flush_cache"] = mode != "in_place"
        update["load_format"] = "safetensors"  # by default it is that of the start: dummies
        bodies = {"pause_generation": {"mode": mode}, "update_weights_from_disk": update, "continue_generation": {}}
        return [Request(path=f"/{name}", body=body) for name, body in bodies.items()]

    def _completion(self, answer: Mapping[str, Any], request: SampleRequest) -> Completion:
        """A completion of the answer."""
        ids, meta = answer["output_ids"], answer["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] == "abort" or meta["prompt_tokens"] != len(request.ids):
            raise ValueError(f"aborted, or another prompt: {finish}, {meta.get('prompt_tokens')} tokens of the prompt")
        is_other = finish["type"] == "stop" and finish["matched"] != ids[-1]  # after NaN: the text "NaN happened"
        if not meta.get("weight_versions") and self._at_publish != "none":
            raise ValueError("SGLang 0.5.16 names only the weights of the end, not those of each token")
        whole = {"version": meta["weight_version"], "start": 0, "end": len(ids)}
        experts = None
        if request.experts is not None:  # of each token but the last; the shape is not sent
            assert self._experts is not None
            flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4")
            experts = flat.reshape(-1, *self._experts)
        spans = meta.get("weight_versions") or [whole]
        scored = [(token, logprob) for logprob, token, *_ in meta["output_token_logprobs"]]
        reason = str(finish) if is_other else finish["type"]
        return completion_of(request, ids, scored, reason, spans, experts)


def _as_option(name: str, value: Any) -> list[str]:
    """An option of the command line: of truth values the true ones, a list item by item, a mapping as JSON."""
    if value is False:
        return []
    items = [] if value is True else value if isinstance(value, list) else [value]
    texts = (json.dumps(item) if isinstance(item, dict) else str(item) for item in items)
    return [f"--{name.replace('_', '-')}", *texts]
