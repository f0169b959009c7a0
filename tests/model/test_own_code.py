"""Code that a model's or a tokenizer's directory brings along runs only where the recipe says so; nobody is asked."""

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.model.load import check_tokens, fit_tokenizer, load_config, make_tokenizer
from gspo.model.policy import Policy, load_policy
from gspo.queries.source import load_rows
from gspo.recipe.load import make_recipe
from gspo.recipe.sections import ModelConfig

MODEL_CODE = """
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
Path({ran!r}).touch()
class OwnConfig(Qwen3Config):
    model_type = "own"
class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({ran!r}).touch()
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever asks is told yes, as `yes | gspo` does; copies of foreign code lie in a directory of the test's."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """A file that is there once foreign code has run."""
    return tmp_path / "ran"


def edit(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.fixture
def own_model(new_policy: Callable[..., Policy], tmp_path: Path, ran: Path) -> Path:
    path = tmp_path / "own_model"
    new_policy("qwen3").save(path)
    (path / "own.py").write_text(MODEL_CODE.format(ran=str(ran)))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit(path / "config.json", model_type="own", auto_map=auto_map)
    return path


@pytest.fixture
def own_tokenizer(new_policy: Callable[..., Policy], tmp_path: Path, ran: Path) -> Path:
    path = tmp_path / "own_tokenizer"
    new_policy("qwen3").save(path)
    (path / "own.py").write_text(TOKENIZER_CODE.format(ran=str(ran)))
    auto_map = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    edit(path / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map)
    edit(path / "config.json", model_type="no_such_model")  # else the tokenizer of the model's kind would do
    return path


def test_a_models_code_is_refused_by_the_key_that_allows_it(own_model: Path, ran: Path) -> None:
    recipe = ModelConfig(path=str(own_model), device="cpu")
    for load in (load_config, lambda model: load_policy(model, fit_tokenizer(["a"]), seed=0)):
        with pytest.raises(UserError, match=r"own_model(.|\n)*model\.trust_remote_code: true"):
            load(recipe)
    assert not ran.exists()


def test_a_tokenizers_code_is_refused_by_the_key_that_allows_it(own_tokenizer: Path, ran: Path) -> None:
    with pytest.raises(UserError, match=r"own_tokenizer(.|\n)*model\.trust_remote_code: true"):
        make_tokenizer(ModelConfig(path="elsewhere", tokenizer=str(own_tokenizer)), [])
    assert not ran.exists()


def test_a_reference_models_code_is_refused_too(own_model: Path, ran: Path) -> None:
    with pytest.raises(UserError, match=r"actor\.kl\.reference(.|\n)*model\.trust_remote_code: true"):
        check_tokens(str(own_model), fit_tokenizer(["a"]), where="actor.kl.reference")
    assert not ran.exists()


def test_a_new_model_runs_no_code_that_its_architecture_names(
    own_model: Path, ran: Path, new_policy: Callable[..., Policy]
) -> None:
    own = {"AutoConfig": f"{own_model}--own.OwnConfig", "AutoModelForCausalLM": f"{own_model}--own.OwnModel"}
    assert type(new_policy("qwen3", auto_map=own).model).__name__ == "Qwen3ForCausalLM"
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_with_the_key_the_code_runs(kind: str, request: pytest.FixtureRequest, ran: Path) -> None:
    path = request.getfixturevalue(f"own_{kind}")
    recipe = ModelConfig(path=str(path), device="cpu", trust_remote_code=True)
    tokenizer = make_tokenizer(recipe, [])
    if kind == "model":
        policy = load_policy(recipe, tokenizer, seed=0)
        assert type(policy.model).__name__ == "OwnModel"
    assert ran.exists()


def test_the_code_of_a_data_set_never_runs(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    Path("rows/rows.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    Path("rows/train.jsonl").write_text('{"prompt": "a", "trust_remote_code": true}\n')
    tree = {"name": "a", "steps": 1, "model": {"path": "m", "trust_remote_code": True}, "queries": {"path": "rows"}}
    with pytest.raises(UserError, match="rows"):
        load_rows(make_recipe(tree), None)
    assert not ran.exists()
