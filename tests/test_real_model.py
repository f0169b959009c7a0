"""A real language model, of `make smollm2`: its tokens, and a run that samples, trains, saves and resumes it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.needs import MODEL, needs

from gspo import cli

pytestmark = needs("smollm2")
RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_sums.yaml"
SHORT = ["steps=2", "rollout.queries_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=12"]
SHORT += ["actor.mini_batches=2", "evaluation.num_queries=2", "evaluation.samples=1", "evaluation.suites=[]"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def test_each_digit_is_a_token_and_texts_come_back(tokenizer: Any) -> None:
    assert tokenizer.tokenize("12 + 345 = 357") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5", "Ġ=", "Ġ", "3", "5", "7"]
    assert tokenizer.tokenize("The capital of France") == ["The", "Ġcapital", "Ġof", "ĠFrance"]
    for text in ("x\t= {'a':  1}\n\n", "naïve 你好 🙂 <|im_end|>", " leading", "it's 3.14, I'd say"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_template_is_the_models_own(tokenizer: Any) -> None:
    asked = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2


def test_a_run_trains_it_packed_and_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPE.parents[1])
    common = [str(RECIPE), *SHORT, "checkpoint.seconds=null"]
    assert cli.main(["train", *common, f"output_dir={tmp_path / 'whole'}"]) == 0
    assert cli.main(["train", *common, f"output_dir={tmp_path / 'parts'}", "steps=1"]) == 0
    assert cli.main(["train", *common, f"output_dir={tmp_path / 'parts'}", "--resume"]) == 0
    whole, parts = (metrics(tmp_path / name) for name in ("whole", "parts"))
    for name in ("reward/mean", "policy/grad_norm", "response/length_mean"):
        assert [line.get(name) for line in parts] == [line.get(name) for line in whole], name
    assert all(line["mismatch/logprob_gap_max"] < 1e-3 for line in whole[1:3])


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
