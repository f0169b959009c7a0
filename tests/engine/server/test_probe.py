"""What counts as the policy's weights where the server computes in another precision than the trainer."""

from collections.abc import Callable

import pytest
import torch

from gspo.engine.server.probe import TOLERANCE, Probe
from gspo.model.policy import Policy

NewPolicy = Callable[..., Policy]


@pytest.mark.parametrize(("own", "servers"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("scale", [0.05, 1.5])
def test_the_tolerance_is_what_the_model_itself_loses_by_the_servers_precision(
    scale: float, own: str, servers: str, new_policy: NewPolicy
) -> None:
    policy = new_policy("qwen3", own, initializer_range=scale)
    probe = Probe(policy, getattr(torch, servers), 0.8)
    other = new_policy("qwen3", own, initializer_range=scale)
    other.model.to(getattr(torch, servers))
    gaps = []
    for prompt in probe._prompts:
        ids = torch.tensor([[*prompt, *probe._prompts[-1]]])
        with torch.no_grad():
            both = [
                (each.model(input_ids=ids).logits[0, :-1].float() / 0.8).log_softmax(-1) for each in (policy, other)
            ]
        gaps.append((both[0] - both[1]).gather(1, ids[0, 1:, None]).abs())
    rounding = 3 * float(torch.cat(gaps).mean())
    assert (rounding > TOLERANCE[torch.bfloat16]) == (scale == 1.5)
    assert probe._tolerance == pytest.approx(max(rounding, TOLERANCE[torch.bfloat16]), rel=0.2)


def test_without_another_precision_the_tolerance_is_fixed(new_policy: NewPolicy) -> None:
    for name, tolerance in (("float32", 1e-4), ("bfloat16", 5e-2)):
        policy = new_policy("qwen3", name, initializer_range=1.5)
        assert Probe(policy, getattr(torch, name), 1.0)._tolerance == tolerance
