"""A real classifier, made here, as the reward: its own scores, whatever is judged beside a response."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.breaking_off import TINY, train
from tests.samples import scores_of
from tests.small_model import save_small_model

from gspo.errors import UserError
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import RewardConfig
from gspo.reward import reward_model as scoring
from gspo.reward.functions import close_functions, load_functions
from gspo.reward.reward_model import reward_model
from gspo.reward.score import score

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
COMPLETIONS = ["4", "It is five, or six.", "", "four " * 9, "5"]


def save_classifier(path: Path, *, num_labels: int = 1, positions: int = 512, chat: bool = True, **config: Any) -> Path:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    save_small_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if not chat:
        tokenizer.chat_template = None
        (path / "chat_template.jinja").unlink()
    torch.manual_seed(0)
    made = AutoConfig.for_model(
        "llama",
        **{**SHAPE, "vocab_size": len(tokenizer), "num_labels": num_labels, "max_position_embeddings": positions},
        **config,
    )
    model = AutoModelForSequenceClassification.from_config(made)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def plain_logits(path: Path, texts: list[str]) -> torch.Tensor:
    """One pass for each text, by transformers alone."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_score_is_the_models_own_of_the_conversation(batch_size: int, tmp_path: Path) -> None:
    path = save_classifier(tmp_path, pad_token_id=3)
    texts = [f"user: 2 + 2?\nassistant: {completion}\n" for completion in COMPLETIONS]
    expected = plain_logits(path, texts)[:, 0].tolist()
    asked = ["2 + 2?"] * len(COMPLETIONS)
    found = reward_model(asked, COMPLETIONS, path=str(path), batch_size=batch_size, device="cpu")
    assert found == pytest.approx(expected, abs=1e-5) and len({*found}) == len(found)
    messages = [[{"role": "user", "content": text}] for text in asked]
    said = [[{"role": "assistant", "content": completion}] for completion in COMPLETIONS]
    assert reward_model(messages, said, path=str(path), device="cpu") == pytest.approx(expected, abs=1e-5)


def test_without_a_template_it_reads_one_text_and_of_several_labels_one_is_named(tmp_path: Path) -> None:
    path = save_classifier(tmp_path, num_labels=3, chat=False)
    expected = plain_logits(path, [f"2 + 2? {completion}" for completion in COMPLETIONS]).softmax(-1)
    asked: dict[str, Any] = {"path": str(path), "device": "cpu"}
    for label in range(3):
        found = reward_model(["2 + 2? "] * len(COMPLETIONS), COMPLETIONS, label=label, **asked)
        assert found == pytest.approx(expected[:, label].tolist(), abs=1e-5)
    for wrong in (None, 3, -1):
        with pytest.raises(UserError, match=rf"the model has 3 labels, and label is {wrong}"):
            reward_model(["a"], ["b"], label=wrong, **asked)


def test_a_model_without_a_padding_token_reads_one_at_a_time_and_has_no_label_to_choose(tmp_path: Path) -> None:
    path = save_classifier(tmp_path)
    assert not scoring._load(str(path), "cpu", False)[-1]
    padded = save_classifier(tmp_path / "padded", pad_token_id=3)
    assert scoring._load(str(padded), "cpu", False)[-1]
    with pytest.raises(UserError, match=r"the model has 1 labels(.|\n)*leave out the option label"):
        reward_model(["a"], ["b"], path=str(path), device="cpu", label=0)


def test_a_model_that_padding_changes_reads_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = save_classifier(tmp_path, pad_token_id=3), list[int]()
    original = scoring._logits

    def with_padding_seen(model: Any, sequences: Any) -> Any:
        sizes.append(len(sequences))
        logits = original(model, sequences)
        return logits + len(sequences) - 1  # as of a model that is no stranger to what lies beside a text

    monkeypatch.setattr(scoring, "_logits", with_padding_seen)
    assert not scoring._load(str(path), "cpu", False)[-1]
    sizes.clear()
    reward_model(["a"] * 3, ["b", "cc", "ddd"], path=str(path), device="cpu")
    assert sizes.count(1) == 3


def test_what_cannot_score_is_refused(tmp_path: Path) -> None:
    save_small_model(tmp_path / "policy")
    for path, what in ((tmp_path / "policy", "it has no weights for score.weight"), (tmp_path / "none", "no reward")):
        with pytest.raises(UserError, match=what):
            reward_model(["a"], ["b"], path=str(path), device="cpu")
    short = save_classifier(tmp_path / "short", positions=20)
    with pytest.raises(UserError, match="has 22 tokens, and the model reads 20"):
        reward_model(["ab"], ["c"], path=str(short), device="cpu")


def test_a_recipe_names_it_and_a_run_trains_on_it(groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = save_classifier(tmp_path / "judge")
    functions = load_functions([RewardConfig(function="reward_model", options={"path": str(path)})])
    try:
        scores = scores_of(score(groups(COMPLETIONS, prompt="2 + 2?"), functions))
    finally:
        close_functions(functions)
    found = reward_model(["2 + 2?"] * len(COMPLETIONS), COMPLETIONS, path=str(path), device="cpu")
    assert [own.reward for own in scores] == pytest.approx(found, abs=1e-5)
    keys = ("steps=1", "reward=[{function: reward_model, options: {path: judge, device: cpu}}]")
    metrics = train(load_recipe(TINY, keys)).metrics[-1]
    assert metrics["group/zero_variance_fraction"] == 0 and metrics["reward/std"] > 0
