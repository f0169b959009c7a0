"""What is refused before any server is started."""

import sys

import pytest
import torch

from gspo.engine.make import check_experts, check_settings
from gspo.errors import UserError
from gspo.recipe.sections import ServerConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"python": "/absent/python"}, "cannot be run: No such file or directory\n  fix: .*`make vllm`"),
        ({"python": sys.executable}, "this interpreter has no vllm\n  fix: .*`make vllm`"),
        ({"python": "/bin/true"}, "this interpreter has no vllm"),
        ({"options": {"quantization": "fp8"}}, "options.quantization: .* it would change what is sampled"),
        ({"options": {"quant": "fp8"}}, "options.quant: .* it would change"),  # vLLM takes abbreviations
        ({"options": {"hf-over": {}}}, "options.hf_over: .* it would change"),
        ({"options": {"config": "c.yaml"}}, "options.config: .* gspo sets it"),
        ({"options": {"dtype": "half"}}, "options.dtype: .* rollout.vllm.dtype is"),
        ({"options": {"max-model-len": 99}}, "prompts and responses have up to 100 tokens"),
    ],
)
def test_settings_that_cannot_serve_are_refused_with_what_would(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_settings("vllm", ServerConfig.model_validate(settings), longest=100)


def test_servers_that_run_already_need_no_interpreter_here() -> None:
    settings = ServerConfig(urls=("http://127.0.0.1:8000",))
    check_settings("vllm", settings, longest=100)
    check_settings("sglang", settings, longest=100)


def test_vllm_returns_experts_on_a_gpu_only() -> None:
    with pytest.raises(UserError, match="does not run on a CPU\n  fix: set routing_replay: policy"):
        check_experts("vllm", torch.device("cpu"))
    check_experts("vllm", torch.device("cuda", 0))
    check_experts("sglang", torch.device("cpu"))
