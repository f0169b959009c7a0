"""Optimisers by name: what each of them steps, with which arguments, and their states in a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gspo.errors import UserError
from gspo.learner.optimizer import Optimizer, check_optimizer
from gspo.model.policy import Policy
from gspo.recipe.sections import OptimizerConfig

NewPolicy = Callable[..., Policy]
CPU = torch.device("cpu")


class Counting(torch.optim.SGD):
    """SGD whose state has numbers too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"], state["rate"] = state.get("count", 0) + 1, state.get("rate", 0.1) * 1.1
                p.sub_(p.grad, alpha=group["lr"] * state["rate"] / state["count"])


class Forgetful(torch.optim.SGD):
    """Its state has a thing that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["of"] = [torch.zeros_like(p)]


class Changing(torch.optim.SGD):
    """Its steps change an option."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.param_groups[0]["momentum"] += 0.1


class Plain(torch.optim.SGD):
    """With an option that has no default, as some packages have it."""

    def __init__(self, params: Any, lr: float, *, wanted: int) -> None:
        super().__init__(params, lr=lr * wanted)


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)


def take_step(optimizer: Optimizer, model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in model.parameters())
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert optimizer.step().applied


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


EVERY: dict[str, dict[str, Any]] = {
    "adamw": {"amsgrad": True},
    "torch.optim.Adafactor": {},
    "torch.optim.Adagrad": {"lr_decay": 0.1},
    "torch.optim.Muon": {"lr": 0.02, "momentum": 0.8},
    "torch.optim.NAdam": {},
    "torch.optim.Rprop": {},
    "torch.optim.SGD": {"momentum": 0.9},
    f"{__name__}:Counting": {},
}


@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_any_optimizer_put_back_goes_on_bit_by_bit(name: str, dtype: torch.dtype, taken: int, tmp_path: Path) -> None:
    model, again = small_model(dtype), small_model(dtype)
    settings = OptimizerConfig(name=name, options=EVERY[name], lr=1e-2, schedule="cosine", warmup_steps=2)
    assert check_optimizer(settings, where="actor.optimizer", device=CPU) == []
    optimizer, other = Optimizer(model, settings, total_steps=7), Optimizer(again, settings, total_steps=7)
    for step in range(taken):
        take_step(optimizer, model, step)
    save_file({key: tensor.contiguous() for key, tensor in optimizer.state().items()}, tmp_path / "state")
    copies = weights(model)
    for step in range(taken, 7):
        take_step(optimizer, model, step)
    take_step(other, again, 99)  # what it has seen is to be forgotten
    with torch.no_grad():
        for parameter, copy in zip(again.parameters(), copies, strict=True):
            parameter.copy_(copy)
    other.restore(load_file(tmp_path / "state"))
    for step in range(taken, 7):
        take_step(other, again, step)
    assert same(weights(again), weights(model)) and not same(weights(model), copies)
    states = optimizer.state(), other.state()
    assert states[0].keys() == states[1].keys() and all(states[0][key].equal(states[1][key]) for key in states[0])


SHAREABLE = {"adamw", "torch.optim.Adagrad", "torch.optim.Muon", "torch.optim.NAdam", "torch.optim.SGD"}


@pytest.mark.parametrize("name", EVERY)
def test_whether_ranks_can_step_shared_parameters_with_it_shows_before_a_run(name: str) -> None:
    settings = OptimizerConfig(name=name, options=EVERY[name])
    if name in SHAREABLE | {f"{__name__}:Counting"}:
        assert check_optimizer(settings, where="actor.optimizer", device=CPU, num_ranks=2) == []
    else:
        with pytest.raises(UserError, match=f"{name}: it cannot step parameters that 2 processes share"):
            check_optimizer(settings, where="actor.optimizer", device=CPU, num_ranks=2)
    assert not torch.distributed.is_initialized()


def test_numbers_of_a_state_come_back_as_they_were() -> None:
    model, settings = small_model(), OptimizerConfig(name=f"{__name__}:Counting", lr=1e-2)
    optimizer, again = (Optimizer(model, settings, total_steps=9) for _ in range(2))
    for step in range(3):
        take_step(optimizer, model, step)
    again.restore(optimizer.state())
    for own, other in zip(optimizer._states().values(), again._states().values(), strict=True):
        assert other == own and other["count"] == 3 and type(other["count"]) is int


def test_step_counts_that_lie_on_the_cpu_beside_parameters_elsewhere_come_back_there() -> None:
    model, settings = small_model().to("meta"), OptimizerConfig(name="torch.optim.NAdam", lr=1e-2)
    optimizer, count = Optimizer(model, settings, total_steps=9), torch.tensor(3.0)
    for own in optimizer._states().values():
        own.update({"step": count, "exp_avg": torch.ones(2, device="meta")})
    optimizer.restore({name: value.cpu() if "step/" in name else value for name, value in optimizer.state().items()})
    for own in optimizer._states().values():
        assert own["step"].equal(count) and own["exp_avg"].device == torch.device("meta")


@pytest.mark.parametrize("tied", [True, False])
def test_muon_steps_the_matrices_and_adamw_the_rest(tied: bool, new_policy: NewPolicy) -> None:
    policy, twin = (new_policy("llama", tie_word_embeddings=tied, attention_bias=True) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"}
    settings = OptimizerConfig(
        name="torch.optim.Muon", options=options, lr=3e-3, betas=(0.8, 0.9), weight_decay=0.1, max_grad_norm=1e9
    )
    optimizer = Optimizer(policy.model, settings, total_steps=9)
    named = dict(twin.model.named_parameters())
    matrices = [name for name in named if "layers" in name and name.endswith("proj.weight")]
    others = [name for name in named if name not in matrices]
    assert len(matrices) == 14 and {"model.norm.weight", "model.embed_tokens.weight"} < {*others}
    assert ("lm_head.weight" in others) != tied and any(name.endswith("bias") for name in others)
    muon = torch.optim.Muon([named[name] for name in matrices], weight_decay=0.1, **options)
    adamw = torch.optim.AdamW([named[name] for name in others], lr=3e-3, betas=(0.8, 0.9), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, parameter in policy.model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad, named[name].grad = gradient, gradient.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-6, atol=1e-7)


def test_the_schedule_scales_a_rate_of_muons_own() -> None:
    settings = OptimizerConfig(name="torch.optim.Muon", options={"lr": 0.5}, lr=0.1, schedule="linear")
    optimizer = Optimizer(small_model(), settings, total_steps=4)
    rates: list[list[float]] = []
    for _ in range(4):
        assert optimizer.step().learning_rate == pytest.approx(0.1 * (4 - len(rates)) / 4)
        rates.append([group["lr"] for group in optimizer._groups])
    assert [rate for rate, _ in rates] == pytest.approx([0.5, 0.375, 0.25, 0.125])
    assert [rate for _, rate in rates] == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_parameters_without_decay_keep_their_size() -> None:
    model = small_model()
    settings = OptimizerConfig(lr=0.1, weight_decay=0.5, no_decay=("*.bias", "1.weight"))
    before = dict(zip(dict(model.named_parameters()), weights(model), strict=True))
    Optimizer(model, settings, total_steps=1).step()  # with a gradient of 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if name == "0.weight" else 1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "muon"}, r"actor\.optimizer\.name: muon: no such optimiser\n  fix: write .* torch\.optim\.Muon"),
        ({"name": "adam_8bit"}, "no such optimiser\n  fix: write adamw, torch.optim.NAME such as"),
        ({"name": "torch.optim.Moun"}, "has no function 'Moun'\n  fix: did you mean Muon"),
        ({"name": "no_such_package:AdamW"}, "no_such_package raises ModuleNotFoundError(.|\n)*fix: install it"),
        ({"name": "torch.optim.LBFGS"}, "missing 1 required positional argument: 'closure'"),
        ({"name": "torch.optim.SparseAdam"}, "SparseAdam does not support dense gradients"),
        ({"name": "torch.nn:Linear"}, "name: torch.nn:Linear: it cannot make a step"),
        ({"name": "torch.optim.SGD", "options": {"momentun": 1}}, "argument 'momentun'(.|\n)*fix: correct .*options"),
        ({"options": {"foreach": True}}, "RuntimeError: `fused` and `foreach` cannot be `True`"),
        ({"name": f"{__name__}:Plain"}, "missing 1 required keyword-only argument: 'wanted'"),
        ({"name": f"{__name__}:Forgetful"}, "could resume from: TypeError: its of is neither a tensor nor a number"),
        ({"name": f"{__name__}:Changing"}, "could resume from: TypeError: its steps change its options"),
    ],
)
def test_what_cannot_train_is_refused_before_a_run(changes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_optimizer(OptimizerConfig(**changes), where="actor.optimizer", device=CPU)
    assert caught.value.where and caught.value.where.startswith("actor.optimizer.")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch.optim.SGD", ["betas", "eps"]),
        ("torch.optim.Adafactor", ["betas", "eps"]),
        ("torch.optim.Rprop", ["betas", "eps", "weight_decay"]),
        ("torch.optim.Adam", []),
        ("torch.optim.Muon", []),
        ("adamw", []),
    ],
)
def test_keys_that_an_optimizer_does_not_take_are_named(name: str, said: list[str]) -> None:
    settings = OptimizerConfig(name=name, betas=(0.1, 0.2), eps=1e-3, weight_decay=0.1)
    notes = check_optimizer(settings, where="critic.optimizer", device=CPU)
    assert [note.split(" ")[0] for note in notes] == [f"critic.optimizer.{key}" for key in said]


def test_a_pattern_that_matches_nothing_says_which_names_there_are(new_policy: NewPolicy) -> None:
    settings = OptimizerConfig(weight_decay=0.1, no_decay=("*.bias",))
    with pytest.raises(UserError, match=r"no_decay: '\*\.bias' matches no parameter(.|\n)*model\.layers\.\*\.mlp\."):
        Optimizer(new_policy().model, settings, total_steps=1)
