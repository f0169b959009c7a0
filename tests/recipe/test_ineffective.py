"""What leaves the loss flat, costs time or memory, or is of a part that is off gets a sentence, and nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gspo.recipe.load import load_recipe, make_recipe
from gspo.recipe.rules import ineffective_settings

SOUND: dict[str, Any] = {
    "name": "sound",
    "steps": 10,
    "model": {"path": "somewhere"},
    "queries": {"path": "rows.jsonl"},
    "reward": [{"function": "math"}],
}


def said(tree: Mapping[str, Any]) -> list[str]:
    return ineffective_settings(make_recipe({**SOUND, **tree}))


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"actor": {"importance_sampling_level": "token", "clip_low": 0.2, "clip_high": 0.27}},
        {"actor": {"clip_low": 3e-3, "clip_high": 4e-3}},
        {"cold_start": {"steps": 5, "path": "demonstrations.jsonl"}},
        {"checkpoint": {"every": 10}, "evaluation": {"every": 10}},
        {"report": {"project": "mine", "trackers": ["wandb"]}},
        {"report": {"rollouts": False}},
        {"actor": {"optimizer": {"schedule": "cosine", "min_lr_fraction": 0.1}}},
        {"reward": [{"function": "math", "weight": 2}, {"function": "format", "options": {"pattern": "a"}}]},
        {"reward": ["math", "exact_match"], "actor": {"reward_aggregation": "normalize_then_sum"}},
        {"actor": {"mini_batches": 1, "epochs": 2, "clip_fraction": 0.2}},
        {"actor": {"kl": {"coefficient": 0.1, "refresh_steps": 9, "refresh_weight": 0.5}}},
        {"actor": {"optimizer": {"weight_decay": 0.1, "no_decay": ["*norm*"], "options": {"amsgrad": True}}}},
        {"actor": {"optimizer": {"warmup_steps": 79}, "epochs": 2}},
        {"model": {"path": "somewhere", "attn_implementation": "sdpa", "frozen": ["*embed*"]}},
    ],
)
def test_a_recipe_whose_settings_all_act_is_told_nothing(tree: Mapping[str, Any]) -> None:
    assert said(tree) == []


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"actor": {"mini_batches": 1}}, "actor.mini_batches"),
        ({"actor": {"importance_sampling_level": "sequence_token"}}, "sequence_token"),
        ({"actor": {"clip_low": 0.2, "clip_high": 0.27}}, "actor.clip_low"),
        ({"actor": {"importance_sampling_level": "token", "clip_low": 3e-4, "clip_high": 4e-4}}, "actor.clip_low"),
        ({"actor": {"optimizer": {"warmup_steps": 100}}}, "actor.optimizer.warmup_steps"),
        ({"cold_start": {"demonstrations": "module:f"}}, "cold_start has no effect without cold_start.steps"),
        ({"actor": {"optimizer": {"lr": 1e5}}}, "actor.optimizer.lr 100000 is far above"),
        ({"actor": {"routing_replay": "policy", "old_logprobs": "engine"}}, "actor.routing_replay: policy"),
        (
            {
                "actor": {
                    "turn_credit": "return_to_go",
                    "advantage": "leave_one_out",
                    "importance_sampling_level": "token",
                }
            },
            "actor.turn_credit has no effect without rollout.tools, mcp, environment or agent",
        ),
        ({"actor": {"length_norm": "turns"}}, "actor.length_norm: turns is mean"),
        (
            {
                "rollout": {"tools": ["calculator"]},
                "actor": {
                    "turn_credit": "return_to_go",
                    "advantage": "leave_one_out",
                    "importance_sampling_level": "token",
                },
            },
            "actor.turn_credit: return_to_go with length_norm: own",
        ),
        ({"actor": {"kl": {"refresh_steps": 2}}}, "actor.kl has no effect without actor.kl.coefficient"),
        ({"actor": {"kl": {"refresh_weight": 0.5}}}, "actor.kl has no effect without actor.kl.coefficient"),
        ({"actor": {"surrogate": "reinforce", "mini_batches": 1, "epochs": 3}}, "first of 3 mini-batches are stale"),
        ({"actor": {"clip_fraction": 0.3, "mini_batches": 1, "epochs": 2}}, "2 mini-batches clip about 0.25 at most"),
        ({"model": {"path": "x", "attn_implementation": "eager"}}, "model.attn_implementation: eager: sequences are"),
        ({"model": {"path": "x", "trust_remote_code": True}}, "runs the Python code of x with your rights"),
    ],
)
def test_a_setting_without_effect_is_named(tree: Mapping[str, Any], key: str) -> None:
    sentences = said(tree)
    assert len(sentences) == 1 and key in sentences[0], sentences


def test_the_default_recipes_settings_all_act() -> None:
    for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml"):
        assert ineffective_settings(load_recipe(path)) == [], path
