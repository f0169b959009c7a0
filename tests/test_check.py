"""`gspo check`: what a run would be, without training and without touching the disk."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.conftest import FAMILIES, SHAPE
from tests.small_model import save_small_model

from gspo import cli

pytestmark = pytest.mark.usefixtures("own_directory", "format_in_process")

TINY = Path(__file__).with_name("tiny.yaml")
GPT_OSS = {"model_type": "gpt_oss", **SHAPE, **FAMILIES["gpt_oss"]}


def check(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert cli.main(["check", str(TINY), *overrides]) == 0
    return capsys.readouterr().out


def test_check_tells_model_data_prompt_reward_and_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    said = check(capsys, "steps=5")
    for piece in (
        "qwen3",
        "64 to train on, 8 held out",
        "answer, task",  # the columns
        "State the final answer",  # the prompt, rendered
        "<answer>",  # a demonstration
        "8 queries × 4 responses = 32 sequences a step",
        "4 mini-batch(es) of 8",
        "5 steps = 20 optimiser steps",
        "runs/tiny",
    ):
        assert piece in said, piece


def test_check_counts_the_optimiser_steps_of_every_pass(capsys: pytest.CaptureFixture[str]) -> None:
    said = check(capsys, "actor.epochs=3")
    assert "4 mini-batch(es) of 8, 3 passes over them; 2 steps = 24 optimiser steps" in said


def test_check_scores_the_gold_answer_and_junk(capsys: pytest.CaptureFixture[str]) -> None:
    line = next(line for line in check(capsys, "reward=reasoning_gym").splitlines() if line.startswith("reward"))
    gold, junk = line.split("junk")
    assert "1.0" in gold and "1.0" not in junk


def test_check_tells_each_suite_and_tries_its_reward(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)}) for number in range(3)]
    Path("rows.jsonl").write_text("\n".join(rows))
    suite = "{name: sums, queries: {path: rows.jsonl}, reward: exact_match, samples: 4, temperature: 0.5}"
    lines = check(capsys, f"evaluation.suites=[{suite}]").splitlines()
    place = lines.index("evaluation  sums: 3 questions, 4 sampled at temperature 0.5")
    assert lines[place + 1] == 'reward      exact_match: gold "1" → 1.0, junk "I do not know." → 0.0'


def test_check_counts_the_rows_on_which_no_response_can_get_1(capsys: pytest.CaptureFixture[str]) -> None:
    prose = "we see, as it was to be shown, that nothing at all is left to do " * 3
    solutions = [r"Then it is $\fbox{\frac12}$.", "So it is.\n#### 1,234", prose, r"\boxed 5"]
    rows = [json.dumps({"prompt": "a b", "notes": text}) for text in solutions]
    Path("rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    data = ["queries.procedural=null", "queries.path=rows.jsonl", "evaluation.num_queries=0", "cold_start.steps=0"]
    said = check(
        capsys,
        *data,
        "reward=[{function: format, options: {pattern: x}}, {function: math, options: {answer_column: notes}}]",
        "rollout.queries_per_step=4",
    )
    assert r'math: gold "\\frac12" → 1.0' in said
    assert "note        no response can get 1 on 1 of 4 rows, such as rows.jsonl:3: math gives its own answer 0" in said


def test_check_scores_junk_alone_where_there_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a b", "b a", "c", "c a"))
    Path("rows.jsonl").write_text(rows, encoding="utf-8")
    data = ["queries.procedural=null", "queries.path=rows.jsonl", "evaluation.num_queries=0", "cold_start.steps=0"]
    reward = "reward=[{function: format, options: {pattern: I}}]"
    said = check(capsys, *data, reward, "rollout.queries_per_step=4")
    assert "junk" in said and "gold" not in said


def test_check_says_what_of_the_rows_one_would_not_expect(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"<image>{n % 8}?", "answer": str(n % 16), "index": n} for n in range(64)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = ["queries.procedural=null", "queries.path=rows.jsonl", "evaluation.num_queries=0", "cold_start.steps=0"]
    said = check(capsys, *data)
    for note in (
        "48 rows are left out: each repeats one of the 16 training rows",
        "16 training rows have 8 different prompts; those with the same one differ in answer",
        "16 of 16 prompts: it has <image>, and the model reads texts alone",
    ):
        assert f"note        {note}" in said


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("actor.mini_batches=1", "every importance ratio is 1"),
        ("actor.importance_sampling_level=sequence_token", "equals sequence"),
        ("actor.optimizer={name: torch.optim.SGD, eps: 1e-3}", "actor.optimizer.eps has no effect: torch.optim.SGD"),
        ("actor={importance_sampling_level: token, clip_low: 3e-4, clip_high: 4e-4}", "is far from 0.2/0.27"),
        ("rollout.top_p=0.9", "top_p"),
        ("cold_start.steps=0", "no effect without cold_start.steps"),
    ],
)
def test_check_says_what_will_be_inert(capsys: pytest.CaptureFixture[str], override: str, named: str) -> None:
    notes = [line for line in check(capsys, override).splitlines() if line.startswith("note")]
    assert any(named in note for note in notes), notes


def test_check_says_how_many_processes_would_have_nothing_to_train_on(capsys: pytest.CaptureFixture[str]) -> None:
    note = "note        a mini-batch has 8 sequences: 2 processes train on none"
    assert note in check(capsys, "--processes", "10").splitlines()
    assert "train on none" not in check(capsys, "--processes", "8")


def test_check_of_a_sound_recipe_has_no_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "note" not in check(capsys)


def test_check_says_how_many_rows_are_held_out_and_how_to_have_more(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)}) for number in range(26)]
    Path("rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    data = ["queries.procedural=null", "queries.path=rows.jsonl", "cold_start={}", "reward=[exact_match]"]
    (note,) = (line for line in check(capsys, *data, "evaluation.num_queries=16").splitlines() if line[:4] == "note")
    assert "2 rows are held out for evaluation, not the 16 of evaluation.num_queries" in note
    assert "evaluation.path" in note and "evaluation.num_queries=2" in note
    assert "note" not in check(capsys, *data, "evaluation.num_queries=2")


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ("[10.0 * (text == gold) for text, gold in zip(completions, answer)]", None),
        ("[0.5 * (text == gold) for text, gold in zip(completions, answer)]", "f gives the row's own answer 0.5"),
        ("[2.0 + (text == gold) for text, gold in zip(completions, answer)]", "f gives junk 2"),
    ],
)
def test_check_names_a_threshold_that_the_reward_cannot_reach_or_always_does(
    scores: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(f"def f(completions, answer, **columns):\n    return {scores}\n", encoding="utf-8")
    notes = [line for line in check(capsys, "reward=[{function: mine.py:f}]").splitlines() if line[:4] == "note"]
    assert [said in note and "evaluation.pass_threshold is 1" in note for note in notes if said] == [True] * bool(said)
    assert bool(notes) == bool(said)


def test_check_looks_for_the_bare_answer_in_the_function_that_judges(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "def other(completions, **columns):\n    return [None for text in completions]\n"
        "def strict(completions, **columns):\n    return [0.0 for text in completions]\n",
        encoding="utf-8",
    )
    said = check(capsys, "reward=[{function: mine.py:other}, {function: mine.py:strict}]")
    assert "other returns None for both" in said and "strict scores the bare answer like junk" in said


def test_check_creates_nothing_and_removes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/tiny").mkdir(parents=True)
    before = sorted(Path().rglob("*"))
    check(capsys)
    assert sorted(Path().rglob("*")) == before


def test_check_mentions_an_output_directory_that_is_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/metrics.jsonl").write_text("", encoding="utf-8")
    assert "never overwrites" in check(capsys)


def test_check_reads_a_model_directory_without_its_weights_being_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(TINY), "steps=1", "evaluation.num_queries=0"]) == 0
    shutil.copytree("runs/tiny/model", "model")
    save_file({"other": torch.zeros(1)}, "model/model.safetensors")  # the header alone is read
    said = check(capsys, "model.path=model", "model.architecture=null", "model.tokenizer=null", "cold_start.steps=0")
    assert "model" in said and "qwen3" in said and "chat template" not in said
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    Path("model/chat_template.jinja").write_text(template, encoding="utf-8")
    keys = ("model.path=model", "model.architecture=null", "model.tokenizer=null", "cold_start.steps=0")
    assert "tokens, a text put through the chat template (queries.chat: false" in check(capsys, *keys)
    assert "chat template" not in check(capsys, *keys, "queries.chat=true")  # who asks for it knows


@pytest.mark.parametrize(
    "override",
    [
        "steps=0",
        "model.device=nowhere",
        "queries.procedural.task=nothing",
        "reward.0.function=absent.py:f",
        "rollout.max_new_tokens=127",
    ],
)
def test_check_refuses_what_train_would_refuse(capsys: pytest.CaptureFixture[str], override: str) -> None:
    messages = []
    for command in ("check", "train"):
        assert cli.main([command, str(TINY), override]) == 2
        messages.append(capsys.readouterr().err)
    assert messages[0] == messages[1]
    assert not Path("runs").exists()


def test_check_runs_a_reward_of_ones_own_and_names_its_fault(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def f(completions, **columns):\n    return [1 / 0]\n", encoding="utf-8")
    assert cli.main(["check", str(TINY), "reward=mine.py:f"]) == 2
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error and "mine.py:2" in error


def test_check_shows_the_prompt_as_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    said = check(capsys, r'queries.template="Q: {prompt}\nA:"')
    line = next(line for line in said.splitlines() if line.startswith("one prompt"))
    assert json.loads(line.partition("tokens: ")[2]).startswith("Q: State")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.frozen=['*nothing*']", "model.frozen: '*nothing*' matches no parameter"),
        (
            "actor.surrogate=ppo|critic.optimizer={no_decay: ['nothing'], weight_decay: 0.1}",
            "critic.optimizer.no_decay: 'nothing' matches no parameter",
        ),
        ("cold_start.optimizer.no_decay=['*bias']", "cold_start.optimizer.no_decay: '*bias' matches no parameter"),
        ("actor.optimizer.name=torch.optim.LBFGS", "actor.optimizer.name: torch.optim.LBFGS: it cannot make a step"),
        ("cold_start.optimizer.options={momentum: 1}", "fix: correct cold_start.optimizer.options"),
        ("model.attn_implementation=flash_attention_9", "model.attn_implementation: flash_attention_9: no model"),
        ("--processes=2|cold_start.optimizer.name=torch.optim.Adafactor", "fix: name another, such as adamw"),
        (f"--processes=2|model.architecture={json.dumps(GPT_OSS)}", "cannot be sharded: its attention"),
    ],
)
def test_check_refuses_what_a_run_would(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(TINY), *override.split("|")]) == 2
    assert message in capsys.readouterr().err


TOKENIZER_CODE = """
from transformers import PreTrainedTokenizerFast
class OwnTokenizer(PreTrainedTokenizerFast):
    def save_pretrained(self, *_, **__):
        raise NotImplementedError("this vocabulary has no file")
"""


def edit(path: Path, **changed: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.mark.parametrize("command", ["check", "train"])
def test_what_could_not_be_saved_is_refused_before_the_first_step(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", "modules")
    save_small_model(Path("model"))
    Path("model/own.py").write_text(TOKENIZER_CODE)
    auto_map = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    edit(Path("model/tokenizer_config.json"), tokenizer_class="OwnTokenizer", auto_map=auto_map)
    Path("tokenizer").mkdir()
    for path in Path("model").glob("*"):
        if "token" in path.name or path.suffix == ".py":
            path.rename(Path("tokenizer") / path.name)
    model = "model={path: model, tokenizer: ./tokenizer, trust_remote_code: true}"
    assert cli.main([command, str(TINY), model, "cold_start.steps=0"]) == 2
    assert "cannot be saved: this vocabulary has no file" in capsys.readouterr().err
    assert not list(Path().glob("runs/*/rollouts/*"))


def test_check_says_which_weights_are_left_out_or_cannot_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    save_small_model(Path("model"))
    model = ["model={path: model}", "cold_start.steps=0"]
    edit(Path("model/config.json"), num_nextn_predict_layers=2)
    assert "note        its files may have 2 layers that predict further tokens" in check(capsys, *model)
    edit(Path("model/config.json"), quantization_config={"quant_method": "awq", "bits": 4})
    assert cli.main(["check", str(TINY), *model]) == 2
    assert "quantised weights cannot be trained" in capsys.readouterr().err


def test_a_gpu_by_its_number_is_refused_for_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(TINY), "model.device=meta:0", "--processes", "2"]) == 2
    said = capsys.readouterr().err
    assert "model.device: meta:0: all 2 processes would compute on this one" in said
    assert "set model.device: meta, of which each process takes its own" in said
