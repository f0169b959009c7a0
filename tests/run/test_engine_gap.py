"""An embedded engine that samples from another distribution than the policy's ends a float32 run in its first step."""

from pathlib import Path
from typing import Any

import pytest

from gspo.engine.embedded import decoding
from gspo.errors import DivergedError
from gspo.recipe.load import load_recipe, make_recipe
from gspo.run.console import Display
from gspo.run.recorder import check_gap
from gspo.train import Outcome, train

TINY = Path(__file__).parents[1] / "tiny.yaml"


def trained(tmp_path: Path, shift: float, monkeypatch: pytest.MonkeyPatch, dtype: str, old_logprobs: str) -> Outcome:
    """One step with an engine whose log-likelihoods are off by so many nats a token."""
    usual = decoding.sample_tokens

    def shifted(*args: Any, **options: Any) -> Any:
        token, logprob, full = usual(*args, **options)
        return token, logprob + shift, full

    monkeypatch.setattr(decoding, "sample_tokens", shifted)
    tree = load_recipe(TINY).model_dump(mode="json")
    tree |= {"output_dir": str(tmp_path), "steps": 1, "evaluation": {"num_queries": 0}, "cold_start": {}}
    tree |= {"model": {**tree["model"], "dtype": dtype}, "actor": {**tree["actor"], "old_logprobs": old_logprobs}}
    return train(make_recipe(tree, where="test"), display=Display(quiet=True))


@pytest.mark.parametrize("old_logprobs", ["recompute", "engine"])
def test_a_gap_above_the_bound_ends_the_run(old_logprobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DivergedError, match=r"step 1: .* 0\.05 nats a token; in float32 more than 0\.01"):
        trained(tmp_path, -0.05, monkeypatch, "float32", old_logprobs)
    assert not [*tmp_path.rglob("*.safetensors")]


def test_in_half_precision_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = trained(tmp_path, -0.05, monkeypatch, "bfloat16", "recompute")
    assert outcome.metrics[-1]["mismatch/logprob_gap_mean"] > 0.03


@pytest.mark.parametrize("name", ["mismatch/logprob_gap_mean", "ratio/mismatch_log_std"])
def test_rounding_passes_and_more_does_not(name: str) -> None:
    line = {"mismatch/logprob_gap_mean": 0.0, "ratio/mismatch_log_std": float("nan")}
    for gap in (0.0, 1e-4, 9e-3):
        check_gap({**line, name: gap})
    with pytest.raises(DivergedError):
        check_gap({**line, name: 0.011})
