"""A recipe about experts for a model without any, or with routers that cannot be overruled: told before a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.mixtures import GROUP_LIMITED, MIXTURES
from transformers import AutoConfig, AutoModelForCausalLM

from gspo import cli
from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.model.routing import check_declared, find_routing, refuse_experts
from gspo.recipe.load import make_recipe
from gspo.recipe.rules import ineffective_settings
from gspo.recipe.sections import ActorConfig

pytestmark = pytest.mark.usefixtures("own_directory")

NewPolicy = Callable[..., Policy]
TINY = Path(__file__).parents[1] / "tiny.yaml"
REPLAYS, EVENS = ["actor.routing_replay=policy"], ["actor.router_aux_loss=0.01"]
PHIMOE = ["model.architecture.model_type=phimoe", "model.architecture.num_local_experts=4"]
MIXTURE = ["model.architecture.model_type=qwen3_moe", "model.architecture.num_experts=4"]
MIXTURE += ["model.architecture.num_experts_per_tok=2", "model.architecture.moe_intermediate_size=16"]

LLAMA4: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}


def check_routing(actor: ActorConfig, policy: Policy) -> None:
    """As a run does with a model that it has loaded."""
    if policy.routing is None:
        refuse_experts(actor, type(policy.model).__name__, policy.unknown_routers)


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[[str, Sequence[str]], str]:
    """Run a command that must end with exit code 2, one message and nothing on disk; returns the message."""

    def call(command: str, overrides: Sequence[str]) -> str:
        capfd.readouterr()
        assert cli.main([command, str(TINY), *overrides]) == 2
        error = capfd.readouterr().err
        assert error.startswith("error: ") and error.count("error: ") == 1 and "Traceback" not in error
        assert len(error.splitlines()) <= 6 and len(error) < 700
        assert list(Path().iterdir()) == []
        return error

    return call


@pytest.mark.parametrize(("command", "asked"), [("check", REPLAYS), ("train", EVENS), ("train", [*EVENS, *REPLAYS])])
def test_a_dense_model_has_no_experts_to_replay_or_to_even_out(
    command: str, asked: list[str], refused: Callable[[str, Sequence[str]], str]
) -> None:
    message = refused(command, asked)
    key, off = ("actor.routing_replay", "none") if REPLAYS[0] in asked else ("actor.router_aux_loss", "0")
    assert key in message.splitlines()[0] and "Qwen3ForCausalLM is no mixture of experts" in message
    assert f"set {key} to {off}" in message


def test_routers_of_another_kind_are_named_before_a_run_begins(refused: Callable[[str, Sequence[str]], str]) -> None:
    message = refused("train", [*PHIMOE, *REPLAYS])
    assert "actor.routing_replay" in message.splitlines()[0] and "PhimoeTopKRouter" in message and "topk" in message
    assert "set actor.routing_replay to none" in message


@pytest.mark.parametrize("actor", [ActorConfig(routing_replay="engine"), ActorConfig(router_aux_loss=1e-3)])
@pytest.mark.parametrize(
    ("family", "changes", "router", "why"),
    [
        ("phimoe", {"num_local_experts": 4}, "PhimoeTopKRouter", "topk"),
        ("llama4_text", LLAMA4, "Llama4Router", "(logits, weights, indices)"),
        ("deepseek_v2", GROUP_LIMITED, "DeepseekV2TopkRouter", "no weight of their own"),
    ],
    ids=["phimoe", "llama4", "deepseek_v2"],
)
def test_a_router_that_cannot_be_overruled_is_named_with_what_it_lacks(
    family: str, changes: dict[str, Any], router: str, why: str, actor: ActorConfig, new_policy: NewPolicy
) -> None:
    policy = new_policy(family, **changes)
    with pytest.raises(UserError) as raised:
        check_declared(actor, policy.model.config)
        check_routing(actor, policy)
    key = "actor.router_aux_loss" if actor.router_aux_loss else "actor.routing_replay"
    message = str(raised.value)
    assert key in message.splitlines()[0] and router in message and why in message and f"set {key} to " in message


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_that_can_be_replayed_is_let_through(family: str, new_policy: NewPolicy) -> None:
    policy = new_policy(family, **MIXTURES[family])
    for actor in (
        ActorConfig(),
        ActorConfig(routing_replay="policy"),
        ActorConfig(routing_replay="engine", router_aux_loss=1e-3),
    ):
        check_declared(actor, policy.model.config)
        check_routing(actor, policy)


def test_a_mixture_whose_routers_only_its_modules_show_is_let_through() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 32, "vocab_size_per_layer_input": 32}
    config = AutoConfig.for_model("gemma4_text", **sizes, **experts)
    model = AutoModelForCausalLM.from_config(config).eval()
    routing, _ = find_routing(model, model.model)
    assert routing is not None and routing.gives_probabilities
    check_declared(ActorConfig(), config)
    check_declared(ActorConfig(routing_replay="engine"), config)


def test_a_recipe_about_experts_for_a_mixture_is_checked(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(TINY), *MIXTURE, *REPLAYS, *EVENS]) == 0


@pytest.mark.parametrize("family", ["qwen3", "phimoe"])
def test_without_such_a_wish_no_model_is_refused(family: str, new_policy: NewPolicy) -> None:
    policy = new_policy(family)
    assert policy.routing is None
    check_routing(ActorConfig(), policy)
    for actor in (ActorConfig(routing_replay="engine"), ActorConfig(router_aux_loss=1e-3)):
        with pytest.raises(UserError):
            check_routing(actor, policy)


def test_a_mixture_that_cannot_be_replayed_trains_and_says_that_it_is_not_measured(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", str(TINY), *PHIMOE, "steps=1", "evaluation.num_queries=0"]) == 0
    said = capfd.readouterr()
    assert "its experts are not measured (PhimoeTopKRouter: " in " ".join((said.out + said.err).split())
    assert "moe/" not in Path("runs/tiny/metrics.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize(("replay", "mini_batches", "told"), [("policy", 1, 1), ("policy", 2, 0), ("engine", 1, 0)])
def test_replaying_the_policys_own_experts_in_its_only_update_is_said_to_do_nothing(
    replay: str, mini_batches: int, told: int
) -> None:
    tree = {"name": "sound", "steps": 10, "model": {"path": "somewhere"}, "queries": {"path": "rows.jsonl"}}
    actor = {"routing_replay": replay, "mini_batches": mini_batches}
    said = ineffective_settings(make_recipe({**tree, "reward": [{"function": "math"}], "actor": actor}))
    assert sum("actor.routing_replay has no effect" in sentence for sentence in said) == told
    assert all("actor.mini_batches" in sentence for sentence in said)


@pytest.mark.parametrize("actor", [{"router_aux_loss": -0.1}, {"router_aux_loss": "nan"}, {"routing_replay": "every"}])
def test_what_is_no_setting_of_experts_is_named(actor: dict[str, Any]) -> None:
    tree = {"name": "x", "steps": 1, "model": {"path": "p"}, "queries": {"path": "q"}, "reward": [{"function": "math"}]}
    with pytest.raises(UserError, match=f"actor.{next(iter(actor))}"):
        make_recipe({**tree, "actor": actor})
