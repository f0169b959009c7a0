"""Linear layers by oneDNN: values and gradients are those of float64, and a whole model's those of torch's layers."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from gspo.model import linear as linear_layers
from gspo.model.linear import linear, use_onednn
from gspo.model.policy import response_likelihood


@pytest.fixture(autouse=True)
def _by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """These layers, too, on whatever processor."""
    monkeypatch.setattr(linear_layers, "_LEAST", 2**18)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 5), (2, 3, 4), (0,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(512, 640), (640, 512), (16, 24)], ids=str)  # the last stays with torch
def test_values_and_gradients_are_those_of_float64(shape: tuple[int, ...], bias: bool, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer, states = nn.Linear(*size, bias=bias), torch.randn(*shape, size[0])
    upstream = torch.randn(*shape, size[1])
    results = []
    for dtype in (torch.float32, torch.float64):
        own = nn.Linear(*size, bias=bias, dtype=dtype)
        own.load_state_dict(layer.state_dict())
        use_onednn(own)
        given = states.to(dtype, copy=True).requires_grad_()
        product = own(given)
        product.backward(upstream.to(dtype))
        results.append([product.detach(), given.grad, *(parameter.grad for parameter in own.parameters())])
        with torch.no_grad():
            torch.testing.assert_close(own(given), results[-1][0], rtol=0, atol=1e-5)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_a_gradient_that_is_one_number_spread_over_all_places() -> None:
    layer = nn.Linear(512, 640)
    use_onednn(layer)
    states = torch.randn(5, 512)
    layer(states).sum().backward()
    torch.testing.assert_close(layer.weight.grad, states.sum(0).expand(640, 512), rtol=1e-4, atol=1e-4)


def test_a_frozen_weight_has_no_gradient_and_passes_one_on() -> None:
    weight, states = torch.randn(640, 512), torch.randn(3, 512, requires_grad=True)
    product: Any = linear(states, weight)
    (kept,) = [tensor for tensor in product.grad_fn.saved_tensors if tensor is not None]
    assert kept.shape == weight.shape  # the states would be of no use
    product.sum().backward()
    torch.testing.assert_close(states.grad, weight.sum(0).expand(3, 512), rtol=1e-4, atol=1e-3)


def test_it_computes_in_inference_mode_where_the_engine_decodes() -> None:
    layer, states = nn.Linear(512, 640), torch.randn(3, 512)
    expected = layer(states)
    use_onednn(layer)
    with torch.inference_mode(), torch.enable_grad():  # as the proofs at load would be run by an engine
        torch.testing.assert_close(layer(states * 1), expected.detach(), rtol=1e-5, atol=1e-5)


# 286 MiB where a thousand compiled products are kept, 80 as it is.
_NEW_NUMBERS_OF_ROWS = """
import torch
from gspo.model import linear as linear_layers
linear, linear_layers._LEAST = linear_layers.linear, 2**18
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
weight = torch.zeros(512, 512)
with torch.no_grad():
    linear(torch.zeros(1, 512), weight)
    before = resident()
    for rows in range(2, 402):
        linear(torch.zeros(rows, 512), weight)
print(resident() - before)
"""


def test_new_numbers_of_rows_cost_no_memory_that_stays() -> None:
    fresh = {name: value for name, value in os.environ.items() if name not in linear_layers.LIMITS}
    command = [sys.executable, "-c", _NEW_NUMBERS_OF_ROWS]
    found = subprocess.run(command, env=fresh, capture_output=True, text=True, check=True)
    assert int(found.stdout) < 150


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "granite"])
def test_a_whole_model_has_the_gradient_that_it_has_with_torchs_own_layers(
    family: str,
    new_policy: Any,
    ragged_sequences: Any,
    plain_logprobs: Any,
    gradient_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policies = [new_policy(family), new_policy(family)]
    sequences = ragged_sequences(6, vocabulary=len(policies[0].tokenizer))
    expected = plain_logprobs(policies[0], sequences)
    weights = torch.linspace(-1, 1, len(expected))
    (expected * weights).sum().backward()
    monkeypatch.setattr(linear_layers, "_LEAST", 0)
    use_onednn(policies[1].model)
    found = response_likelihood(policies[1], sequences).logprobs
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(*(gradient_of(policy.model) for policy in policies), rtol=1e-3, atol=1e-4)


def test_with_avx2_alone_large_layers_are_onednns_where_they_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    by_onednn: list[torch.Size] = []
    own = linear_layers._by_onednn

    def noted(states: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
        by_onednn.append(weight.shape)
        return own(states, weight, *bias)

    monkeypatch.setattr(linear_layers, "_LEAST", 2**24)
    monkeypatch.setattr(linear_layers, "_by_onednn", noted)
    states, weight = torch.randn(3, 512), torch.randn(640, 512)
    with torch.no_grad():
        trained, decoded = linear(states, weight), linear(states, weight, decodes=True)
    assert by_onednn == [weight.shape]
    torch.testing.assert_close(trained, decoded, rtol=1e-4, atol=1e-4)
