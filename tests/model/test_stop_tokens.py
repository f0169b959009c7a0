"""Which tokens end a response: those that files declare, and the chat template's own end of a turn, proven by it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.small_model import save_small_model
from transformers import AutoTokenizer, GenerationConfig

import gspo
from gspo.check import check
from gspo.model.load import turn_end, turn_marks
from gspo.recipe.sections import QueriesConfig
from gspo.run.checkpoint.store import MANIFEST, seal
from gspo.run.console import Display

ALTERNATING = "{% if loop.last and m.role == 'assistant' %}{{ raise_exception('a user must come last') }}{% endif %}"


def template(turn: str, ask: str = "", first: str = "") -> str:
    """A chat template of turns, with M for a message's text and ROLE for who says it."""
    body = turn.replace("ROLE", "{{ m.role }}").replace("M", "{{ m.content }}")
    prompted = f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    return f"{first}{{% for m in messages %}}{body}{{% endfor %}}{prompted}"


def by_role(user: str, assistant: str, ask: str = "") -> str:
    return template(f"{{% if m.role == 'user' %}}{user}{{% else %}}{assistant}{{% endif %}}", ask)


CHATML = template("<|im_start|>ROLE\nM<|im_end|>\n", "<|im_start|>assistant\n")
TEMPLATES = {
    "ChatML": (CHATML, "<|im_end|>", ["<|im_end|>", "<|im_start|>user"]),
    "an end, and that of the text": (
        template("<|ROLE|>\nM<|end|>\n") + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        "<|end|>",
        ["<|end|>\n<|endoftext|>", "<|end|>\n<|user|>"],
    ),
    "the end of the text alone": (by_role("[INST] M [/INST]", " M </s>"), "</s>", ["</s>", "[INST]"]),
    "between turns only": (by_role("<s>[INST] M [/INST]", "M{% if not loop.last %}</s>{% endif %}"), "</s>", None),
    "headers only": (template("<|ROLE|>\nM\n", "<|assistant|>\n"), "<|user|>", ["<|user|>"]),
    "an assistant may not come last": (template(ALTERNATING + "<|ROLE|>M<|end|>"), "<|end|>", None),
    "another end in the midst of a talk": (
        template("<|ROLE|>M{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}"),
        "<|return|>",
        ["<|return|>", "<|end|><|user|>"],
    ),
    "no special token": (template("ROLE: M\n", "assistant: "), None, ["user:"]),
    "an end in plain words": (template("ROLE: M ###\n"), None, ["###", "user:"]),
    "one that refuses all": ("{{ raise_exception('no') }}", None, []),
    "none": (None, None, []),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    save_small_model(path)
    made = AutoTokenizer.from_pretrained(path)
    made.add_tokens(["<|im_end|>", "<|end|>", "<|user|>"])  # not all of them are flagged as special
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|assistant|>", "</s>", "<|return|>"]})
    made.eos_token = "<|endoftext|>"
    return made


@pytest.mark.parametrize(("chat_template", "end", "marks"), TEMPLATES.values(), ids=TEMPLATES)
def test_the_end_of_a_turn_is_the_token_that_the_template_writes_behind_an_answer(
    chat_template: str | None, end: str | None, marks: Sequence[str] | None, tokenizer: Any
) -> None:
    tokenizer.chat_template = chat_template
    assert turn_end(tokenizer, QueriesConfig()) == (() if end is None else (end,))
    assert turn_end(tokenizer, QueriesConfig(chat=False)) == ()
    assert marks is None or turn_marks(tokenizer, QueriesConfig()) == marks


def test_the_templates_variables_are_the_recipes(tokenizer: Any) -> None:
    tokenizer.chat_template = template("M{% if old %}</s>{% else %}<|end|>{% endif %}")
    assert turn_end(tokenizer, QueriesConfig(chat_template_kwargs={"old": True})) == ("</s>",)


# --- a base model, whose files name another end than its template writes ---


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    save_small_model(Path("base"), special=("<|im_start|>", "<|im_end|>"), chat_template=CHATML)
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 1?", "answer": f"{n}"}) + "\n" for n in range(6))
    )
    return {
        "name": "a",
        "steps": 2,
        "model": {"path": "base", "device": "cpu"},
        "queries": {"path": "rows.jsonl"},
        "rollout": {"queries_per_step": 2, "group_size": 2, "max_new_tokens": 8},
        "reward": [{"function": "format", "options": {"pattern": "a"}}],
        "actor": {"mini_batches": 1},
        "evaluation": {"num_queries": 0},
        "checkpoint": {"every": 1},
    }


def ends_of(path: Path | str) -> list[int]:
    ends = GenerationConfig.from_pretrained(path).eos_token_id
    return sorted(ends if isinstance(ends, list) else [ends])


def stop_line(recipe: dict[str, Any]) -> str:
    return next(line for line in check(recipe) if line.startswith("stop tokens "))


def test_check_names_each_end_and_whose_the_templates_is(recipe: dict[str, Any]) -> None:
    of_template = "; <|im_end|> is what the chat template ends an answer with"
    assert stop_line(recipe) == f'stop tokens "<|end|>" (0), "<|im_end|>" (258){of_template}'
    recipe["rollout"]["stop_tokens"] = ["\n"]
    newline = AutoTokenizer.from_pretrained("base")("\n").input_ids[0]
    assert stop_line(recipe) == f'stop tokens "<|end|>" (0), "\\n" ({newline}), "<|im_end|>" (258){of_template}'
    recipe["queries"]["chat"] = False
    assert stop_line(recipe) == f'stop tokens "<|end|>" (0), "\\n" ({newline})'


@pytest.mark.parametrize("declared", [None, 5, [7, 5]])
def test_check_reads_the_ends_that_the_loaded_model_has(declared: Any, recipe: dict[str, Any]) -> None:
    path = Path("base/generation_config.json")
    path.unlink()
    if declared is not None:
        path.write_text(json.dumps({"eos_token_id": declared}))
    said, out = stop_line(recipe), gspo.train({**recipe, "steps": 1}, display=Display(quiet=True))
    trained = ends_of(out.model)
    assert trained == sorted({0, 258, *([] if declared is None else [declared] if declared == 5 else declared)})
    assert [f"({end})" in said for end in trained] == [True] * len(trained) and said.count("(") == len(trained)


def test_a_run_ends_responses_there_says_so_and_saves_it(
    recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends_of("base") == [0]
    out = gspo.train(recipe)
    assert 'a response ends with "<|end|>" (0), "<|im_end|>" (258)' in " ".join(capsys.readouterr().out.split())
    assert ends_of(out.model) == [0, 258]


def test_a_run_that_was_begun_without_it_goes_on_without_it(recipe: dict[str, Any]) -> None:
    gspo.train({**recipe, "steps": 1}, display=Display(quiet=True))
    saved = Path("runs/a/checkpoints/step_000001")
    file = saved / "model" / "generation_config.json"  # as an earlier version has written it
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [0]}))
    about = json.loads((saved / MANIFEST).read_text())["content"]
    (saved / MANIFEST).unlink()
    seal(saved, {key: value for key, value in about.items() if key != "files"})
    out = gspo.train(recipe, resume=True, display=Display(quiet=True))
    assert len(out.metrics) == 2 and ends_of(out.model) == [0]


def test_an_evaluation_ends_responses_there_and_keeps_in_mind_that_it_did(recipe: dict[str, Any]) -> None:
    suite = {"name": "s", "queries": {"path": "rows.jsonl"}, "reward": recipe["reward"], "max_new_tokens": 4}
    for chat, ends in ((None, ["<|im_end|>"]), (False, [])):
        suite["queries"]["chat"] = chat
        tree = gspo.evaluate("base", [suite], out=f"out-{chat}", display=Display(quiet=True)).tree
        assert tree["suites"]["s"]["settings"]["stop_tokens"] == ends
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained("base")  # as it is declared, it needs no mention
    suite["queries"]["chat"] = None
    tree = gspo.evaluate("base", [suite], out="declared", display=Display(quiet=True)).tree
    assert tree["suites"]["s"]["settings"]["stop_tokens"] == []
