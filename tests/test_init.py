"""`gspo init`: what it writes for each layout passes `gspo check` and trains; bad input is refused."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tests.small_model import save_small_model

from gspo import cli
from gspo.init import _builtin, _sizes
from gspo.recipe.load import load_recipe, make_recipe
from gspo.recipe.schema import Recipe

CHAT = [{"role": "user", "content": "What is {} + {}?"}]
VERL = [{"role": "user", "content": 'What is {} + {}? Output the final answer after "####".'}]


def rows_of(prompt: Any, number: int = 20, **columns: Any) -> list[dict[str, Any]]:
    """Rows whose every {} is the row's number, and [] twice that."""
    text = json.dumps({"prompt": prompt, **columns})
    return [json.loads(text.replace("{}", str(n)).replace('"[]"', f'"{2 * n}"')) for n in range(number)]


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(rows), name)
    elif name.endswith(".csv"):
        lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
        Path(name).write_text("\n".join(lines), encoding="utf-8")
    else:
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_small_model(path / "chat")
    shutil.copytree(path / "chat", path / "plain")
    (path / "plain" / "chat_template.jinja").unlink()
    return path


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model in models.iterdir():
        Path(model.name).symlink_to(model)


def init(*arguments: str, model: str = "chat") -> Recipe:
    assert cli.main(["init", "--model", model, "--name", "mine", *arguments]) == 0
    out = arguments[arguments.index("--out") + 1] if "--out" in arguments else "."
    return load_recipe(Path(out, "mine.yaml"))


LAYOUTS = {
    "TRL, text": ("rows.jsonl", rows_of("What is {} + {}?", answer="[]"), "math"),
    "TRL, chat": ("rows.jsonl", rows_of(CHAT, answer="[]"), "math"),
    "GSM8K": (
        "rows.jsonl",
        [{"question": f"{n} + {n}?", "answer": f"2 * {n}\n#### {2 * n}"} for n in range(20)],
        "math",
    ),
    "verl": ("rows.parquet", rows_of(VERL, data_source="own", reward_model={"ground_truth": "[]"}), "math"),
    "formulas": ("rows.json", [], "math"),
    "CSV, labels": (
        "rows.csv",
        [{"Question": f"How, {n}?", "Label": ("spam", "ham")[n % 2]} for n in range(20)],
        "exact_match",
    ),
    "three rows": ("rows.jsonl", rows_of("What is {} + {}?", 3, answer="[]"), "math"),
    "several right answers": ("rows.jsonl", rows_of("Who is {}?", target=["Ann", "Anna"]), "exact_match"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_for_a_layout_passes_check_and_rewards_the_answer(
    layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, rows, builtin = LAYOUTS[layout]
    if name.endswith(".json"):
        formulas = [{"problem": f"Half of {n}?", "solution": rf"\frac{{{n}}}{{2}}"} for n in range(1, 21)]
        Path(name).write_text(json.dumps(formulas), encoding="utf-8")
    else:
        write(name, rows)
    recipe = init("--data", name)
    shown = capsys.readouterr().out
    assert shown.splitlines()[-2:] == ["gspo check mine.yaml", "gspo train mine.yaml"]
    assert [reward.function for reward in recipe.reward] == [builtin]
    assert cli.main(["check", "mine.yaml"]) == 0
    checked = capsys.readouterr().out
    assert [line for line in checked.splitlines() if line[:4] == "note"] == []
    assert f"reward      {builtin}: gold" in checked


def test_the_column_with_the_right_answers_may_have_any_name() -> None:
    write(
        "rows.jsonl", [{"prompt": f"Ticket {n}", 'Our "team", since': ("login", "billing")[n % 2]} for n in range(20)]
    )
    recipe = init("--data", "rows.jsonl", "--answer", 'Our "team", since')
    assert "one of billing, login," in str(recipe.queries.system)
    assert [reward.function for reward in recipe.reward] == ["exact_match"]
    assert cli.main(["check", "mine.yaml"]) == 0
    assert cli.main(["check", "mine.yaml", "reward+=rewards.py:score"]) == 2  # it is to be written


def test_a_written_recipe_trains_and_says_why_it_has_each_value() -> None:
    write("rows.jsonl", rows_of("What is {} + {}?", answer="[]"))
    init("--data", "rows.jsonl")
    lines = Path("mine.yaml").read_text(encoding="utf-8").splitlines()
    uncommented = [line for line in lines if line.startswith("  ") and "#" not in line]
    assert len(uncommented) < 0.4 * len(lines), uncommented
    assert "20 rows" in next(line for line in lines if "rows.jsonl" in line)
    small = ["steps=2", "rollout.max_new_tokens=8", "rollout.group_size=2"]
    assert cli.main(["train", "mine.yaml", *small]) == 0
    metrics = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if line["step"]] == [1, 2]


@pytest.mark.parametrize("rows", [rows_of("Say {}.", letter="b"), rows_of("Write on {}.", reference="word " * 30)])
def test_without_a_comparable_answer_the_reward_is_to_be_written_and_check_refuses_until_it_is(
    rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    write("rows.jsonl", [{**row, "class": 1, "odd name": None} for row in rows])
    init("--data", "rows.jsonl")
    assert "first     write score in rewards.py" in capsys.readouterr().out
    assert cli.main(["check", "mine.yaml"]) == 2
    assert "NotImplementedError: return a number" in capsys.readouterr().err
    text, column = Path("rewards.py").read_text(encoding="utf-8"), list(rows[0])[1]
    assert f"def score(completions, {column}, **columns):" in text and "'odd name': None" in text
    body = next(line for line in text.splitlines() if "raise NotImplementedError" in line)
    Path("rewards.py").write_text(text.replace(body, "    return [float('42' in text) for text in texts]"))
    assert cli.main(["check", "mine.yaml"]) == 0


def test_the_form_of_the_answer_is_asked_for_only_where_the_model_and_the_rows_leave_room_for_it() -> None:
    asked = {}
    for case, (prompt, model) in {
        "text": ("What is {} + {}?", "chat"),
        "own instruction": (VERL, "chat"),
        "own system message": ([{"role": "system", "content": "Be brief."}, *CHAT], "chat"),
        "no chat template": ("What is {} + {}?", "plain"),
    }.items():
        write("rows.jsonl", rows_of(prompt, answer="[]"))
        queries = init("--data", "rows.jsonl", "--out", case, model=model).queries
        asked[case] = ["boxed" in str(text) for text in (queries.system, queries.template)]
        assert cli.main(["check", f"{case}/mine.yaml"]) == 0
    none = [False, False]
    assert asked == {
        **{"text": [True, False], "own instruction": none},
        **{"own system message": none, "no chat template": [False, True]},
    }


def test_rows_with_the_same_prompt_are_not_all_held_out() -> None:
    write("rows.jsonl", rows_of("What is it?", 40, answer="7"))
    assert init("--data", "rows.jsonl").evaluation.num_queries == 0
    assert cli.main(["check", "mine.yaml"]) == 0


def test_nothing_is_overwritten_and_the_message_says_where_else_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    write("rows.jsonl", rows_of("What is {}?", answer="[]"))
    Path("rewards.py").write_text("precious", encoding="utf-8")
    for file in ("mine.yaml", "rewards_mine.py"):
        Path(file).write_text("precious", encoding="utf-8")
        before = sorted(Path().iterdir())
        assert cli.main(["init", "--data", "rows.jsonl", "--model", "chat", "--name", "mine"]) == 2
        error = capsys.readouterr().err
        assert file in error and "--name" in error and "--out" in error
        assert Path(file).read_text(encoding="utf-8") == "precious" and sorted(Path().iterdir()) == before
        Path(file).unlink()
    init("--data", "rows.jsonl")  # beside the other's
    assert "rewards_mine.py:score" in Path("mine.yaml").read_text(encoding="utf-8")
    assert Path("rewards.py").read_text(encoding="utf-8") == "precious" and Path("rewards_mine.py").exists()


def test_a_recipe_in_another_directory_works_from_there_and_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("rows.jsonl", rows_of("What is {}?", answer="[]"))
    init("--data", "rows.jsonl", "--out", "new/project")
    assert cli.main(["check", "new/project/mine.yaml"]) == 0
    monkeypatch.chdir("new/project")
    assert cli.main(["check", "mine.yaml"]) == 0


def test_without_a_model_the_message_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--data", write("rows.jsonl", rows_of("What is {}?"))]) == 2
    assert "--model DIR" in capsys.readouterr().err and not Path("rows.yaml").exists()


def _damaged(model: str, *missing: str) -> None:
    shutil.copytree("chat", model)
    for name in missing:
        for path in Path(model).glob(name):
            path.unlink()


FAULTS = [
    (["--data", "absent.jsonl"], ["absent.jsonl", "no such file", "rows.jsonl"]),
    (["--data", "empty.jsonl"], ["empty.jsonl", "no rows"]),
    (["--data", "rows.txt"], ["rows.txt", "'.txt'", ".parquet"]),
    (["--data", "latin.csv"], ["latin.csv", "UTF-8"]),
    (["--data", "broken.jsonl"], ["broken.jsonl, line 1", "JSON"]),
    (["--data", "chat"], ["chat", "hub"]),
    (["--data", "some/where"], ["some/where", "hub", "--config"]),
    (["--data", "other.jsonl"], ["instruction, output", "--prompt"]),
    (["--data", "other.jsonl", "--prompt", "query"], ["'query'", "instruction, output"]),
    (["--data", "rows.jsonl", "--answer", "gold"], ["'gold'", "answer", "--answer"]),
    (["--data", "rows.jsonl", "--config", "main"], ["--config", "hub"]),
    (["--data", "long.jsonl"], ["long.jsonl", "20 of 20 prompts", "3018", "2032"]),
    (["--data", "rows.jsonl", "--name", "a/b"], ["name", "'a/b'"]),
    (["--data", "rows.jsonl", "--out", "rows.txt"], ["rows.txt", "--out"]),
    (["--data", "rows.jsonl", "--model", "not/there/model"], ["--model", "no such directory"]),
    (["--data", "rows.jsonl", "--model", "some/model"], ["some/model", "hub"]),
    (["--data", "rows.jsonl", "--model", "new"], ["config.json"]),
    (["--data", "rows.jsonl", "--model", "adapter"], ["adapter", "model"]),
    (["--data", "rows.jsonl", "--model", "no-tokenizer"], ["no-tokenizer", "tokenizer"]),
    (["--data", "rows.jsonl", "--model", "translator"], ["--model: translator", "T5"]),
    (["--data", "rows.jsonl", "--model", "no-weights"], ["no-weights", "no weights"]),
    (["--data", "chat.jsonl", "--model", "plain"], ["chat.jsonl:1", "chat template"]),
]


@pytest.mark.parametrize(("arguments", "named"), FAULTS, ids=[" ".join(arguments) for arguments, _ in FAULTS])
def test_what_cannot_be_used_is_named_and_nothing_is_written(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write("rows.jsonl", rows_of("What is {}?", answer="[]"))
    write("chat.jsonl", rows_of(CHAT, answer="[]"))
    write("other.jsonl", [{"instruction": "Say b.", "output": "b"}])
    write("long.jsonl", rows_of("word " * 600, level="{}"))
    Path("empty.jsonl").write_text("\n")
    Path("rows.txt").write_text("a")
    Path("latin.csv").write_bytes(b"prompt\ncaf\xe9\n")
    Path("broken.jsonl").write_text("{")
    Path("new").mkdir()
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    _damaged("no-tokenizer", "tokenizer*", "chat_template*")
    _damaged("no-weights", "*.safetensors")
    _damaged("translator", "generation_config.json")
    config_of("t5", is_encoder_decoder=True).save_pretrained("translator")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    capsys.readouterr()
    assert cli.main(["init", "--model", "chat", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and [part for part in named if part not in error] == [], error
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("answers", "builtin"),
    [
        (["72", "-3.5", "1,000", "$18", "50%", "3/4", 7, 0, None], "math"),
        ([r"\frac{1}{2}", "$x+1$"], "math"),
        (["A", "B", True], "exact_match"),
        ([["Ann", "Anna"], ["Bob"]], "exact_match"),
        ([["1", "2"], ["3"]], "exact_match"),  # math takes no list
        (["", None, []], ""),
        (["word " * 20], ""),
        ([r"we see that $x = \frac12$ holds, as " + "it must be " * 9], ""),  # a formula in it makes no answer
        ([r"Then $x$ is $\boxed{\frac12}$, as it must be.", r"It is \fbox{3}.", "By hand.\n#### 18"], "math"),
        ([f"We see that it is $\\boxed{{\\text{{{name}}}}}$" for name in ("Ann", "Bob")], "math"),
        ([f"So, {'of course, ' * 9}it is \\boxed{{{letter}}}" for letter in "AB"], "exact_match"),
        ([{"target": "a"}], ""),
    ],
)
def test_the_reward_fits_the_right_answers(answers: list[Any], builtin: str) -> None:
    assert _builtin("answer", answers)[0] == builtin


def config_of(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **changes)


def draft_of() -> Recipe:
    smallest = {"rollout": {"queries_per_step": 1}, "actor": {"mini_batches": 1}}
    return make_recipe({"name": "draft", "steps": 1, "model": {"path": "a-model"}, **smallest})


def test_sizes_fit_into_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    half_a_billion = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151_936}
    half_a_billion |= {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = config_of("qwen2", **half_a_billion)
    monkeypatch.setattr("gspo.model.policy.device_of", lambda _: torch.device("cuda"))
    fitted = {}
    for gigabytes in (8, 24, 80):
        monkeypatch.setattr("gspo.run.memory.available_bytes", lambda _, most=gigabytes * 10**9: most)
        sizes = fitted[gigabytes] = _sizes(draft_of(), config, 200, 5000)
        assert sizes["num_parameters"] == 494_032_768  # of Qwen2.5-0.5B
        needed = max(sizes["update"], sizes["sampling"]) * 2**30
        assert (needed > gigabytes * 10**9) == ("choose a smaller model" in sizes["about_machine"]) == (gigabytes == 8)
    assert fitted[8]["max_rows"] < fitted[24]["max_rows"] <= fitted[80]["max_rows"] == 512
    assert fitted[8]["micro_batch_tokens"] < fitted[24]["micro_batch_tokens"] < fitted[80]["micro_batch_tokens"]
    assert fitted[8]["micro_batch_tokens"] >= 200 + 1024  # the longest prompt and response are one sequence
    assert fitted[80]["queries_per_step"] == 64 and fitted[80]["num_held_out"] == 500 and fitted[80]["lr"] == "1e-5"


def test_a_short_context_and_few_rows_are_seen() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    small |= {"max_position_embeddings": 128}
    sizes = _sizes(draft_of(), config_of("qwen3", **small), 100, 5)
    assert sizes["max_new_tokens"] == 28 and sizes["lr"] == "1e-4"
    assert (sizes["num_held_out"], sizes["queries_per_step"], sizes["mini_batches"]) == (1, 4, 4)


def test_prompts_that_are_too_long_are_left_out_and_the_others_are_asked_for_the_form() -> None:
    rows = [*rows_of("What is {} + {}?", answer="[]"), {"prompt": "word " * 4000, "answer": "1"}]
    recipe = init("--data", write("rows.jsonl", rows))
    assert "of them too long" in Path(f"{recipe.name}.yaml").read_text()
    assert recipe.queries.overlong == "filter" and "boxed" in str(recipe.queries.system or recipe.queries.template)
