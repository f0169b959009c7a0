"""Settings that mean nothing together are refused with the reason; what a recipe leaves out is as published."""

from collections.abc import Mapping
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.recipe.load import make_recipe
from gspo.recipe.published import CORRECTIONS, LEVELS, ONLY, PUBLISHED
from gspo.recipe.rules import ineffective_settings
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ActorConfig

SOUND: dict[str, Any] = {
    "name": "sound",
    "steps": 10,
    "model": {"path": "somewhere"},
    "queries": {"path": "rows.jsonl"},
    "reward": [{"function": "math"}],
}
VLLM, SGLANG = {"engine": "vllm"}, {"engine": "sglang"}
ADAPTERS, ADAPTED = {**VLLM, "vllm": {"adapters": True}}, {"path": "x", "lora": {}}
BY_FUNCTION, TOKENS = {"reward_aggregation": "normalize_then_sum"}, {"importance_sampling_level": "sequence_token"}


def recipe(tree: Mapping[str, Any]) -> Recipe:
    return make_recipe({**SOUND, **tree})


@pytest.mark.parametrize(
    ("tree", "reasons"),
    [
        ({"actor": {"surrogate": "gmpo", "importance_sampling_level": "sequence"}}, ["geometric mean", "token"]),
        ({"actor": {"surrogate": "dppo", "importance_sampling_level": "sequence"}}, ["probability of a token"]),
        ({"actor": {"surrogate": "minirl", "importance_sampling_level": "sequence_token"}}, ["first-order"]),
        ({"actor": {"surrogate": "reinforce", "importance_sampling_level": "sequence"}}, ["no importance ratio"]),
        ({"actor": {"surrogate": "ppo", "importance_sampling_level": "sequence"}}, ["value model", "sequence_token"]),
        ({"actor": {"advantage": "gae"}}, ["every token an advantage of its own", "sequence_token"]),
        ({"actor": {"advantage": "optimal_token_baseline"}}, ["every token an advantage of its own", "sequence_token"]),
        ({"actor": {**TOKENS, "advantage": "optimal_token_baseline", "discount": 0.9}}, ["set actor.discount: 1"]),
        ({"actor": {"surrogate": "gmpo", "advantage": "gae"}}, ["gmpo weighs whole sequences"]),
        ({"reward": [{"function": "math", "per": "token"}]}, ["reward.0.per: token", "sequence_token"]),
        ({"actor": {**BY_FUNCTION, "advantage": "group_mean"}}, ["as advantage: group does, not group_mean"]),
        ({"actor": {**BY_FUNCTION, "surrogate": "ppo"}}, ["as advantage: group does"]),
        (
            {"actor": {**BY_FUNCTION, **TOKENS}, "reward": [{"function": "math", "per": "token"}]},
            ["one number a response of each function; reward.0.per: token"],
        ),
        ({"actor": BY_FUNCTION, "rollout": {"overlong": "penalty"}}, ["with rollout.overlong: penalty"]),
        (
            {"actor": {"surrogate": "ppo"}, "reward": [{"function": "math", "per": "token"}]},
            ["one reward at the end"],
        ),
        ({"actor": {"surrogate": "ppo"}, "rollout": {"dynamic_sampling": True}}, ["dynamic_sampling: false"]),
        ({"actor": {"kl": {"coefficient": 0.1, "estimator": "k1"}}}, ["expected gradient is 0", "k2"]),
        ({"actor": {"kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}}}, ["deviation", "group_mean"]),
        ({"rollout": {"group_size": 1}}, ["rollout.group_size", "ppo"]),
        ({"model": {"path": "x", "lora": {"quantize": "nf4", "dora": True}}}, ["whole weights"]),
        ({"reward": [{"function": "math", "weight": 0}]}, ["weight 0", "nothing to train on"]),
        ({"actor": {"surrogate": "grpo"}}, ["actor.surrogate", "importance_sampling_level: token"]),
        ({"actor": {"surrogate": "drgrpo"}}, ["did you mean dr_grpo"]),
        ({"reward": [{"function": "math", "per": "segment"}]}, ["rollout.segment_separator"]),
        ({"early_stop": {"metric": "reward/mean"}}, ["early_stop.patience", "early_stop.goal"]),
        (
            {"checkpoint": {"best": "evaluation/held_out/pass_at_1"}, "evaluation": {"num_queries": 0}},
            ["checkpoint.best", "evaluation.num_queries is 0"],
        ),
        (
            {
                "actor": {"clip_fraction": 0.1, "importance_sampling_level": "sequence_token"},
                "reward": [{"function": "math", "per": "token"}],
            },
            ["advantages of their own"],
        ),
        ({"actor": {"correction": "tis", "old_logprobs": "engine"}}, ["π_old/π_engine", "recompute"]),
        ({"actor": {"correction": "mis", "surrogate": "minirl"}}, ["π_θ/π_engine already"]),
        (
            {"rollout": {"max_staleness": 2}, "actor": {"correction": "none"}},
            ["which has sampled none", "old_logprobs: engine", "correction: decoupled", "max_staleness: 0", "ignore"],
        ),
        ({"actor": {"correction": "icepop"}}, ["single tokens", "geometric_mask"]),
        ({"actor": {"correction": "icepop", "surrogate": "gmpo"}}, ["single tokens"]),
        ({"actor": {"correction": "mis"}}, ["single tokens", "correction_level: sequence"]),
        ({"actor": {"correction": "icepop", "correction_level": "sequence"}}, ["is by token"]),
        ({"actor": {"correction": "kpop"}}, ["single tokens"]),
        ({"actor": {"correction": "kpop", "correction_low": 0.1, "surrogate": "dapo"}}, ["one bound", "in nats"]),
        ({"actor": {"correction": "tis", "surrogate": "ipo"}}, ["weighs by π_θ/π_engine already"]),
        (
            {"actor": {"advantage": "max_rl"}, "rollout": {"overlong": "penalty", "overlong_margin": 0.5}},
            ["max_rl divides by the mean reward", "overlong: mask"],
        ),
        (
            {"actor": {"advantage": "max_rl"}, "reward": [{"function": "math", "weight": -1}]},
            ["max_rl divides by the mean reward", "no such weight"],
        ),
        (
            {"actor": {"advantage": "max_rl", "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}}},
            ["max_rl divides by the mean reward", "kl.place: loss"],
        ),
        ({"actor": {"correction": "geometric_mask", "correction_level": "token"}}, ["is by sequence"]),
        ({"actor": {"correction": "tis", "surrogate": "dppo"}}, ["weighs by π_θ/π_engine already", "geometric_mask"]),
        (
            {"actor": {"correction": "mis", "correction_low": 2, "correction_level": "sequence"}},
            ["below correction_high"],
        ),
        ({"actor": {"clip_fraction": 0.1, "surrogate": "sapo"}}, ["no clip range"]),
        ({"actor": {"clip_fraction": 0.1, "surrogate": "dapo"}}, ["each token has its own"]),
        ({"actor": {"clip_fraction": 0.1, "mini_batches": 1}}, ["every ratio is 1"]),
        ({"model": {"path": "x", "architecture": {"model_type": "qwen3"}}}, ["exactly one of model.path"]),
        ({"model": {"architecture": {}}}, ["model.architecture needs a model_type", "needs model.tokenizer"]),
        (
            {"model": {"architecture": {"model_type": "qwen3"}, "tokenizer": "fit", "kwargs": {"a": 1}}},
            ["model.kwargs is for model.path"],
        ),
        ({"cold_start": {"steps": 1}}, ["exactly one of cold_start.path and cold_start.demonstrations"]),
        ({"queries": {"path": "rows.jsonl", "template": "no place"}}, ["queries.template must contain {prompt}"]),
        ({"queries": {"path": "rows.jsonl", "config": "main"}}, ["queries.config: main", "a file has none"]),
        ({"queries": {"path": "rows.jsonl", "procedural": {"task": "chain_sum"}}}, ["not both"]),
        (
            {"rollout": {**VLLM, "top_p": 0.9}, "actor": {"old_logprobs": "engine"}},
            ["rollout.top_p", "set old_logprobs: recompute"],
        ),
        (
            {
                "rollout": {**VLLM, "top_k": 5},
                "actor": {"advantage": "group_mean", "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}},
            },
            ["rollout.top_k", "set kl.place: loss"],
        ),
        ({"rollout": {**SGLANG, "min_p": 0.1}}, ["before min_p", "set engine: vllm"]),
        ({"rollout": {**SGLANG, "sglang": {"weights": "nccl"}}}, ["SGLang's own code", "set memory or files"]),
        ({"rollout": ADAPTERS}, ["rollout.vllm.adapters: true without model.lora", "leave adapters out"]),
        ({"rollout": ADAPTERS, "model": {"path": "x", "lora": {"dora": True}}}, ["adapters: true", "lora.dora"]),
        (
            {"rollout": {**VLLM, "vllm": {"adapters": True, "weights": "nccl"}}, "model": ADAPTED},
            ["adapters: true with weights: nccl, which hands over whole"],
        ),
        (
            {"rollout": {**VLLM, "vllm": {"adapters": True, "urls": ["http://a:1"]}}, "model": ADAPTED},
            ["adapters: true with urls"],
        ),
        ({"rollout": {**SGLANG, "sglang": {"adapters": True}}, "model": ADAPTED}, ["rollout.sglang.adapters"]),
        ({"rollout": {**VLLM, "min_p": 0.1, "top_k": 5}}, ["vLLM applies min_p first"]),
        ({"rollout": {**VLLM, "temperature": 0.001}}, ["vllm takes 0.01 for anything below"]),
        ({"rollout": {**VLLM, "vllm": {"weights": "files"}}}, ["needs weights_dir"]),
        ({"rollout": {**VLLM, "vllm": {"weights_dir": "shared"}}}, ["others need none"]),
        (
            {"rollout": {**VLLM, "vllm": {"urls": ["http://a:1"], "python": "p"}}},
            ["python, devices and options are theirs"],
        ),
        ({"rollout": {**VLLM, "vllm": {"urls": ["http://a:1", "http://a:1"]}}}, ["names a server twice"]),
        ({"rollout": {"max_staleness": 1, "embedded": {"dtype": "float16"}}}, ["is a thread of the trainer"]),
        ({"cluster": {"engines": 1}}, ["cluster.engines places servers, and rollout.engine is embedded"]),
        ({"rollout": {**VLLM, "vllm": {"urls": ["http://a:1"]}}, "cluster": {"engines": 1}}, ["give one of the two"]),
        ({"rollout": {**VLLM, "vllm": {"devices": ["0"]}}, "cluster": {"engines": 1}}, ["leave out rollout.vllm.dev"]),
        ({"rollout": {**VLLM, "vllm": {"weights": "ipc"}}, "cluster": {"engines": 1}}, ["ipc stays within"]),
        (
            {"teacher": {"path": "t"}},
            ["teacher gives every token an advantage", "(GSPO-token) or token"],
        ),
        ({"teacher": {"path": "t", "prompt": "Hint: {answer}"}}, ["teacher.prompt"]),
        ({"teacher": {"path": "t", "url": "http://a:1", "model": "m"}}, ["give one of teacher.path and teacher.url"]),
        ({"teacher": {"url": "http://a:1"}}, ["teacher.url needs teacher.model"]),
        (
            {"teacher": {"url": "http://a:1", "model": "m"}, "rollout": {"temperature": 0.8}},
            ["scores a text at temperature 1, and rollout.temperature is 0.8"],
        ),
        (
            {"teacher": {"path": "t"}, "actor": TOKENS, "rollout": {**VLLM, "top_p": 0.9}},
            ["rollout.top_p with rollout.engine: vllm and a teacher"],
        ),
        (
            {"teacher": {"prompt": "{prompt} {answer}"}, "actor": TOKENS, "rollout": {"agent": "a.py:solve"}},
            ["teacher.prompt with rollout.agent", "leave prompt out"],
        ),
        (
            {"teacher": {"prompt": "{prompt} {answer}"}, "actor": TOKENS, "rollout": {"tools": ["a.py:add"]}},
            ["teacher.prompt with rollout.history: branch", "set rollout.history: append"],
        ),
        (
            {"teacher": {"path": "t", "advantage_weight": 0}, "actor": TOKENS, "rollout": {"dynamic_sampling": True}},
            ["drops groups that the teacher would train on"],
        ),
        ({"actor": {"observation_loss": 0.1}}, ["here nothing is", "rollout.tools, mcp, environment or agent"]),
        (
            {"actor": {"observation_loss": 0.1}, "rollout": {"tools": ["a.py:add"], "max_turns": 1}},
            ["here nothing is", "max_turns above 1"],
        ),
        (
            {"rollout": {"tools": ["calculator"]}, "actor": {"turn_credit": "return_to_go"}},
            ["set actor.advantage: leave_one_out", "(GSPO-token) or token"],
        ),
        (
            {
                "rollout": {"tools": ["calculator"]},
                "reward": [{"function": "a.py:f", "per": "token"}],
                "actor": {**TOKENS, "turn_credit": "return_to_go", "advantage": "leave_one_out"},
            },
            ["actor.turn_credit: return_to_go with a reward per: segment or token"],
        ),
        ({"actor": {"mini_batches": 5}}, ["actor.mini_batches (5) must divide rollout.queries_per_step (64)"]),
    ],
)
def test_what_means_nothing_together_is_refused_with_the_reason(tree: Mapping[str, Any], reasons: list[str]) -> None:
    with pytest.raises(UserError) as error:
        recipe(tree)
    assert all(reason in str(error.value) for reason in reasons), str(error.value)


def test_all_faults_are_said_at_once() -> None:
    with pytest.raises(UserError) as error:
        recipe({"actor": {"correction": "tis", "old_logprobs": "engine", "kl": {"coefficient": 1, "estimator": "k1"}}})
    assert "π_old/π_engine" in str(error.value) and "expected gradient" in str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("level", LEVELS)
def test_a_surrogate_takes_every_level_it_does_not_refuse_with_a_reason(name: Any, level: Any) -> None:
    tree = {"actor": {"surrogate": name, "importance_sampling_level": level}}
    if level in PUBLISHED[name].levels:
        assert recipe(tree).actor.importance_sampling_level == level
        return
    assert ONLY[name]
    with pytest.raises(UserError, match=f"{name} has no level {level}"):
        recipe(tree)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_recipe_leaves_out_or_sets_to_null_is_as_published(name: Any) -> None:
    published = PUBLISHED[name]
    nulls = dict.fromkeys(["importance_sampling_level", "advantage", "length_norm", "clip_low", "clip_high"])
    for actor in (
        ActorConfig.model_validate({"surrogate": name}),
        ActorConfig.model_validate({"surrogate": name, **nulls}),
    ):
        assert actor.importance_sampling_level == published.level
        assert actor.advantage == published.advantage
        assert actor.length_norm == published.length_norm
        assert (actor.clip_low, actor.clip_high) == published.range(published.level)


@pytest.mark.parametrize(
    "tree",
    [
        {"actor": {"surrogate": "ppo"}, "rollout": {"group_size": 1}},
        {"actor": {"correction": "decoupled", "correction_high": 5}},
        {
            "teacher": {"prompt": "{prompt} {answer}"},
            "actor": TOKENS,
            "rollout": {"tools": ["a.py:add"], "history": "append"},
        },
        {"actor": {"correction": "tis", "old_logprobs": "engine"}, "rollout": {"top_p": 0.9}},  # π_old/q is not 1
        {"actor": {"opsm_delta": 1e-4, "old_logprobs": "engine"}},
        {"actor": {"opsm_delta": 0.1}},
        {"actor": {"surrogate": "minirl", "minirl_cap": 3, "correction": "geometric_mask"}},
        {"actor": {"length_norm": "own", "kl": {"coefficient": 0.1}, "entropy_bonus": 0.1}},
        {"actor": {"correction": "tis", "correction_level": "sequence", "correction_high": 1.02}},
        {"actor": {"opsm_delta": 0.1, "importance_sampling_level": "token"}},
        {"actor": {"surrogate": "dr_grpo"}, "reward": [{"function": "math", "weight": 2}]},
        {"actor": {"clip_fraction": 0.15, "clip_low": 0.3, "clip_high": 0.4}},
        {"actor": {"advantage": "leave_one_out", "kl": {"coefficient": 0.1, "estimator": "k1", "place": "reward"}}},
    ],
)
def test_what_has_an_effect_is_told_nothing(tree: Mapping[str, Any]) -> None:
    assert ineffective_settings(recipe(tree)) == []


def test_a_key_of_a_sections_optimizer_leaves_its_other_defaults_as_they_are() -> None:
    made = recipe({"critic": {"optimizer": {"eps": 1e-6}}, "cold_start": {"optimizer": {"eps": 1e-6}}})
    assert (made.critic.optimizer.lr, made.cold_start.optimizer.lr) == (1e-5, 1e-3)
    assert made.cold_start.optimizer.schedule == "linear"


def test_the_papers_ranges_belong_to_the_level() -> None:
    assert (ActorConfig().clip_low, ActorConfig().clip_high) == (3e-4, 4e-4)
    assert ActorConfig.model_validate({"importance_sampling_level": "token"}).clip_high == 0.27
    dapo = ActorConfig.model_validate({"surrogate": "dapo"})
    assert (dapo.clip_low, dapo.clip_high) == (0.2, 0.28)
    at_sequence = ActorConfig.model_validate({"surrogate": "dapo", "importance_sampling_level": "sequence"})
    assert (at_sequence.clip_low, at_sequence.clip_high) == (3e-4, 4e-4)


def test_what_a_recipe_sets_stays_whatever_was_published() -> None:
    actor = ActorConfig.model_validate(
        {"surrogate": "dr_grpo", "advantage": "group", "clip_high": 0.3, "length_norm": "own"}
    )
    assert (actor.advantage, actor.clip_high, actor.length_norm, actor.clip_low) == ("group", 0.3, "own", 0.2)


@pytest.mark.parametrize("method", CORRECTIONS)
def test_a_correction_brings_its_own_bounds_and_level(method: Any) -> None:
    actor, published = ActorConfig.model_validate({"correction": method}), CORRECTIONS[method]
    assert (actor.correction_low, actor.correction_high) == (published.low, published.high)
    assert actor.correction_level == ("sequence" if method == "geometric_mask" else "token")
    bounds = {"correction_low": None, "correction_high": None}  # not: no bound at all
    assert ActorConfig.model_validate({"correction": method, **bounds}) == actor


@pytest.mark.parametrize(
    ("actor", "correction"),
    [
        ({}, "decoupled"),
        ({"old_logprobs": "recompute", "surrogate": "dapo"}, "decoupled"),
        ({"old_logprobs": "engine"}, "none"),
        ({"surrogate": "ipo"}, "none"),  # it weighs by the engine itself
        ({"correction": "tis"}, "tis"),
        ({"correction": "ignore"}, "ignore"),
    ],
)
def test_the_age_of_responses_counts_unless_a_recipe_says_that_it_is_not_to(
    actor: Mapping[str, Any], correction: str
) -> None:
    stale = recipe({"rollout": {"max_staleness": 2}, "actor": actor})
    assert stale.actor.correction == correction and ineffective_settings(stale) == []
    assert recipe({"actor": actor, "rollout": {}}).actor.correction == actor.get("correction", "none")


@pytest.mark.parametrize("value", [["clip"], {"name": "clip"}, 3, None, "gspo"])
def test_a_surrogate_that_is_none_is_one_message(value: Any) -> None:
    with pytest.raises(UserError, match=r"actor\.surrogate"):
        recipe({"actor": {"surrogate": value}})


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"actor": {"dual_clip": 4}}, "actor.dual_clip"),
        ({"actor": {"sapo_temperature": [1, 2]}}, "actor.sapo_temperature"),
        ({"actor": {"kl": {"estimator": "k2"}}}, "actor.kl.coefficient"),
        ({"actor": {"advantage": "group_mean", "kl": {"coefficient": 0.1, "place": "reward"}}}, "only k1"),
        ({"actor": {"minirl_cap": 4}}, "actor.minirl_cap"),
        ({"actor": {"correction_level": "sequence"}}, "actor.correction_level"),
        ({"actor": {"correction_high": 2}}, "actor.correction_high has no effect without"),
        (
            {"actor": {"correction": "ignore", "correction_low": 0.5}, "rollout": {"max_staleness": 1}},
            "actor.correction_low has no effect without",
        ),
        ({"actor": {"advantage": "leave_one_out", "advantage_ddof": 0}}, "actor.advantage_ddof has no effect without"),
        ({"rollout": {**VLLM, "vllm": {"adapters": False}}}, "rollout.vllm.adapters has no effect without model.lora"),
        ({"actor": {"correction": "ignore"}}, "actor.correction: ignore has no effect: it is about stale"),
        ({"actor": {"length_norm": "none", "kl": {"coefficient": 0.1}}}, "weaker by the length"),
        ({"actor": {"surrogate": "luspo", "entropy_bonus": 0.1}}, "weaker by the length"),
        (
            {"actor": {"surrogate": "dapo", "observation_loss": 0.1}, "rollout": {"tools": ["calculator"]}},
            "weaker by the length",
        ),
        ({"actor": {"surrogate": "dapo", "entropy_bonus": 0.1}}, "the divisor of length_norm: mean"),
        ({"actor": {"surrogate": "reinforce"}}, "no ratio"),
        ({"actor": {"clip_low": 0.2}}, "0.2/0.0004 is far from 0.0003/0.0004"),
        ({"actor": {"surrogate": "dapo", "clip_high": 4e-4}}, "0.2/0.0004 is far from 0.2/0.28"),
        ({"actor": {"surrogate": "cispo", "clip_low": 3e-3, "clip_high": 4e-3}}, "which null takes"),
        ({"actor": {"surrogate": "dppo", "clip_low": 3e-3, "clip_high": 4e-3}}, "which null takes"),
        ({"actor": {"clip_fraction": 0.4, "mini_batches": 2}}, "actor.clip_fraction"),
        ({"critic": {"trunk": "shared"}}, "critic has no effect without"),
        (
            {"actor": {"surrogate": "dapo", "clip_low": 3e-3, "clip_high": 4e-3}},
            "far from 0.2/0.28, which null takes",
        ),
        ({"rollout": {"overlong_margin": 0.5}}, "rollout.overlong_margin"),
        ({"rollout": {"history": "append"}}, "rollout.history has no effect without rollout.tools"),
        ({"teacher": {"path": "t", "model": "m"}, "actor": TOKENS}, "teacher.model has no effect without teacher.url"),
        ({"cold_start": {"rows": 5}}, "cold_start has no effect"),
        ({"checkpoint": {"best": "evaluation/held_out/pass_at_1"}}, "set evaluation.every"),
        ({"early_stop": {"patience": 3}}, "early_stop has no effect"),
    ],
)
def test_a_key_of_another_objective_is_named_as_without_effect(tree: Mapping[str, Any], key: str) -> None:
    assert any(key in sentence for sentence in ineffective_settings(recipe(tree)))


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "reinforce"])
def test_a_surrogate_as_published_is_told_nothing(name: Any) -> None:
    assert ineffective_settings(recipe({"actor": {"surrogate": name}})) == []
