"""Training from Python and on one's own data, rewards and models."""

import asyncio
import csv
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import gspo
from gspo import cli
from gspo.errors import UserError
from gspo.queries.source import load_rows
from gspo.recipe.load import load_recipe, make_recipe
from gspo.recipe.schema import Recipe
from gspo.run.console import Display
from gspo.train import Outcome, train

pytestmark = pytest.mark.usefixtures("own_directory", "format_in_process")

TINY = Path(__file__).with_name("tiny.yaml")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} / {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
OWN_DATA = ["queries.procedural=null", "cold_start.steps=0", "evaluation.num_queries=1", "rollout.queries_per_step=4"]
ROWS: list[dict[str, Any]] = [
    {"prompt": f"Say {number} please.", "answer": str(number), "bonus": number / 10} for number in range(6)
]
GSM8K = [
    {"question": f"Tom has {n} pens and buys {n} more. How many?", "answer": f"{n}+{n}={2 * n}.\n#### {2 * n}"}
    for n in range(2, 8)
]
VERL = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{n} + {n} ="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"index": n},
    }
    for n in range(1, 7)
]


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe(TINY, [*OWN_DATA, *overrides])


def run(recipe: Recipe, **given: Any) -> Outcome:
    return train(recipe, display=Display(quiet=True), **given)


def rollouts_in(run_directory: Path) -> list[dict[str, Any]]:
    text = (run_directory / "rollouts" / "step_000001.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def rollouts(outcome: Outcome) -> list[dict[str, Any]]:
    return rollouts_in(outcome.model.parent)


def length_of(completions: Sequence[str], **columns: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A saved small model of a family, its tokenizer with or without a chat template."""

    def save(family: str, *, chat_template: str | None = None) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        from gspo.model.load import fit_tokenizer

        tokenizer = fit_tokenizer([*(json.dumps(row) for row in (*ROWS, *GSM8K, *VERL)), "user assistant system : /"])
        tokenizer.chat_template = chat_template
        shape = load_recipe(TINY).model.architecture or {}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in family else {}
        ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        config = AutoConfig.for_model(**{**shape, **experts, **ids, "model_type": family})
        path = tmp_path_factory.mktemp(family) / "model"
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    return save


def test_gspo_train_is_the_function_whatever_was_imported_before() -> None:
    importlib.import_module("gspo.train")
    assert gspo.train is train
    assert gspo.train is train  # and stays so


def test_rows_and_a_function_give_metrics_and_a_model_that_loads() -> None:
    from transformers import AutoModelForCausalLM

    outcome = run(recipe_of(), queries=ROWS, reward=length_of)
    assert [line["step"] for line in outcome.metrics] == [0, 1, 2]
    written = (outcome.model.parent / "metrics.jsonl").read_text(encoding="utf-8")
    in_memory = json.loads(json.dumps(outcome.metrics).replace("NaN", "null"))  # as a file has it
    assert [json.loads(line) for line in written.splitlines()] == in_memory
    assert AutoModelForCausalLM.from_pretrained(outcome.model).num_parameters() > 0
    assert sum("evaluation/held_out/pass_at_1" in line for line in outcome.metrics) == 2
    assert outcome.signal is None and outcome.seconds > 0


def test_a_recipe_made_in_code_trains_like_its_yaml() -> None:
    tree = {
        "name": "made",
        "steps": 1,
        "model": {"architecture": load_recipe(TINY).model.architecture, "tokenizer": "fit", "device": "cpu"},
        "rollout": {"queries_per_step": 4, "group_size": 4, "max_new_tokens": 8},
        "evaluation": {"num_queries": 0},
    }
    made = gspo.make_recipe(tree)
    Path("made.yaml").write_text(json.dumps({**tree, "name": "read"}), encoding="utf-8")
    metrics = [
        run(recipe, queries=ROWS, reward=length_of).metrics[0] for recipe in (made, gspo.load_recipe("made.yaml"))
    ]
    assert metrics[0]["reward/mean"] == metrics[1]["reward/mean"]
    assert metrics[0]["policy/grad_norm"] == metrics[1]["policy/grad_norm"]


def test_a_mapping_and_a_file_are_taken_wherever_a_recipe_is() -> None:
    from gspo.check import check

    keys = ["steps=1", "evaluation.num_queries=0", "cold_start.steps=0"]
    tree = load_recipe(TINY, keys).model_dump(mode="json")
    Path("sub").mkdir()
    Path("sub/own.py").write_text("def f(completions, **_):\n    return [1.0 for _ in completions]\n", encoding="utf-8")
    in_file = {**tree, "name": "file", "reward": "own.py:f"}
    Path("sub/own.yaml").write_text(json.dumps(in_file), encoding="utf-8")
    metrics = [train(recipe, display=Display(quiet=True)).metrics[0] for recipe in (tree, "sub/own.yaml")]
    assert metrics[1]["reward/mean"] == 1.0 and metrics[0]["response/mean_tokens"] == metrics[1]["response/mean_tokens"]
    for recipe in (tree, "sub/own.yaml", Path("sub/own.yaml")):
        assert next(iter(check(recipe))).startswith("recipe ")
    Path("sub/own.yaml").write_text(json.dumps({**in_file, "name": "x", "queries": {"path": "absent.jsonl"}}))
    with pytest.raises(UserError, match=r"queries\.path: absent\.jsonl: no such file(.|\n)*beside the recipe"):
        train("sub/own.yaml", display=Display(quiet=True))
    twice = [*ROWS, *({**row, "prompt": f"{row['prompt']} "} for row in ROWS)]
    assert train("sub/own.yaml", queries=twice, display=Display(quiet=True)).model.parent == Path("runs/x")


def test_an_outcome_is_shown_as_a_short_table_and_keeps_its_numbers() -> None:
    outcome = run(recipe_of("steps=1"), queries=ROWS, reward=length_of)
    lines = repr(outcome).splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) < 200
    for label in ("pass@1", "reward ", "model ", "time "):
        assert any(line.startswith(label) for line in lines)
    assert "runs/tiny/model" in repr(outcome) and len(outcome.metrics[-1]) > 20


def test_rows_may_come_from_a_generator_and_are_not_changed() -> None:
    rows = [dict(row) for row in ROWS]
    run(recipe_of("steps=1"), queries=(row for row in rows), reward=length_of)
    assert rows == ROWS


def test_several_functions_sync_and_async_add_up() -> None:
    async def patient(completions: Sequence[str], bonus: Sequence[float], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return list(bonus)

    outcome = run(recipe_of("steps=1"), queries=ROWS, reward=[length_of, patient])
    lines = rollouts(outcome)
    bonus_of = {row["prompt"]: row["bonus"] for row in ROWS}
    for line in lines:
        assert line["rewards"] == {"length_of": float(len(line["completion"])), "patient": bonus_of[line["prompt"]]}
        assert line["reward"] == pytest.approx(sum(line["rewards"].values()))
    assert {"reward/length_of/mean", "reward/patient/mean"} <= outcome.metrics[-1].keys()


def test_weights_and_logs_of_functions_from_python_and_rewards_compared_one_by_one() -> None:
    def shaped(completions: Sequence[str], trainer_state: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_metric("step", trainer_state.global_step)
        return [text.count("a") + trainer_state.max_steps for text in completions]

    def judged(solution_str: str, ground_truth: str) -> dict[str, Any]:
        return {"score": float(ground_truth in solution_str), "length": len(solution_str)}

    said: list[str] = []
    display = Display(quiet=True)
    display.note = lambda text, **_: said.append(text)  # type: ignore[method-assign]
    recipe = recipe_of("actor.reward_aggregation=normalize_then_sum", 'reward=[{"function": "math"}]')
    outcome = train(recipe, queries=ROWS, reward=[gspo.Reward(shaped, weight=0.25), judged], display=display)
    before, first, second = outcome.metrics
    assert [line["logged/shaped/step"] for line in (first, second)] == [0.0, 1.0]
    assert before["evaluation/held_out/logged/shaped/step"] == 0.0
    assert second["evaluation/held_out/logged/shaped/step"] == 2.0
    lines = rollouts(outcome)
    assert first["logged/judged/length"] == sum(len(line["completion"]) for line in lines) / len(lines)
    assert all(line["extra"] == {"judged/length": len(line["completion"])} for line in lines)
    for line in lines:
        assert line["reward"] == 0.25 * line["rewards"]["shaped"] + line["rewards"]["judged"]
    assert any("gspo.Reward(function, weight=…)" in note for note in said)
    assert any("each reward normalised in its group, then summed" in note for note in said)


def test_the_rules_of_a_recipe_hold_of_functions_from_python() -> None:
    for given, words in (
        (gspo.Reward(length_of, weight=0), "every function has weight 0"),
        (gspo.Reward(length_of, per="token"), "reward.0.per: token gives every token"),
        (gspo.Reward(length_of, per="segment"), "rollout.segment_separator"),
    ):
        with pytest.raises(UserError, match=words):
            run(recipe_of(), queries=ROWS, reward=given)
    assert not Path("runs").exists()


def test_none_leaves_a_response_out_of_its_group_and_of_the_mean() -> None:
    def every_other(completions: Sequence[str], **columns: Any) -> list[float | None]:
        return [None if number % 2 else float(number) for number in range(len(completions))]

    outcome = run(recipe_of("steps=1"), queries=ROWS, reward=every_other)
    step = outcome.metrics[-1]
    assert step["reward/unscored_fraction"] == 0.5
    assert step["reward/mean"] == 1.0  # of 0 and 2
    for number, line in enumerate(rollouts(outcome)):
        left_out = number % 2 == 1
        assert (line["reward"] is None) == left_out
        assert (line["advantage"] == 0) == left_out


def test_a_step_in_which_no_reward_applies_trains_nothing_and_says_so() -> None:
    def judge(completions: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
        return [None if trainer_state.global_step else float(len(text) % 2) for text in completions]

    outcome = run(recipe_of("steps=2"), queries=ROWS, reward=judge)
    assert outcome.metrics[-1]["reward/unscored_fraction"] == 1
    assert outcome.metrics[-1]["policy/grad_norm"] == 0
    assert "unscored" in outcome.diagnoses


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_a_model_directory_of_each_family_is_trained(model_directory: Callable[..., Path], family: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = model_directory(family)
    recipe = recipe_of("model.architecture=null", "model.tokenizer=null", f"model.path={path}", "steps=1")
    outcome = run(recipe, queries=ROWS, reward=length_of)
    before = AutoModelForCausalLM.from_pretrained(path)
    after = AutoModelForCausalLM.from_pretrained(outcome.model)
    assert type(after) is type(before)
    pairs = list(zip(before.parameters(), after.parameters(), strict=True))
    assert any(not torch.equal(one, two) for one, two in pairs)
    assert outcome.metrics[-1]["mismatch/logprob_gap_max"] < 1e-5
    assert outcome.metrics[-1]["clip/token_fraction_by_mini_batch"][0] == 0


def test_chat_messages_go_through_the_template_and_completions_come_as_messages(
    model_directory: Callable[..., Path],
) -> None:
    seen: list[Any] = []

    def of_messages(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        seen.append((prompts[0], completions[0]))
        return [float(len(completion[-1]["content"])) for completion in completions]

    path = model_directory("qwen3", chat_template=CHAT_TEMPLATE)
    recipe = recipe_of(f"model.path={path}", "model.architecture=null", "model.tokenizer=null", "steps=1")
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    outcome = run(recipe, queries=rows, reward=of_messages)
    assert all(line["prompt"].startswith("user: Say ") for line in rollouts(outcome))
    assert all(line["prompt"].endswith("assistant: ") for line in rollouts(outcome))
    assert all(prompt[0]["role"] == "user" and reply[0]["role"] == "assistant" for prompt, reply in seen)


def write_rows(rows: Sequence[Mapping[str, Any]], name: str) -> None:
    path = Path(name)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


REWARD_FILE = """
def mentions(prompts, completions, answer, **columns):
    return [float(str(gold) in text) for gold, text in zip(answer, completions)]
"""


def test_a_file_trains_from_the_command_line_with_a_reward_file() -> None:
    name = "rows.csv"  # tests/queries/test_files.py has the other kinds
    write_rows(ROWS, name)
    Path("reward.py").write_text(REWARD_FILE, encoding="utf-8")
    overrides = [*OWN_DATA, f"queries.path={name}", "reward=reward.py:mentions", "steps=1"]
    assert cli.main(["train", str(TINY), *overrides]) == 0
    lines = rollouts_in(Path("runs/tiny"))
    answers = {row["prompt"]: row["answer"] for row in ROWS}
    for line in lines:
        assert line["reward"] == float(answers[line["prompt"]] in line["completion"])
    assert lines[0]["query"].startswith(f"{name}:")


def test_a_fitted_tokenizer_can_write_the_template_around_the_prompts() -> None:
    from transformers import AutoTokenizer

    outcome = run(recipe_of("queries.template='Question: {prompt}!'", "steps=1"), queries=ROWS, reward=length_of)
    tokenizer = AutoTokenizer.from_pretrained(outcome.model)
    for line in rollouts(outcome):
        assert tokenizer.unk_token_id not in tokenizer(line["prompt"]).input_ids


def test_gsm8k_rows_train_with_the_math_reward() -> None:
    write_rows(GSM8K, "train.jsonl")
    overrides = [*OWN_DATA, "queries.path=train.jsonl", "reward=math", "steps=1", "rollout.max_new_tokens=4"]
    assert cli.main(["train", str(TINY), *overrides]) == 0
    lines = rollouts_in(Path("runs/tiny"))
    assert {line["reward"] for line in lines} <= {0.0, 1.0}


def test_verl_rows_train_on_their_ground_truth(model_directory: Callable[..., Path]) -> None:
    write_rows(VERL, "verl.parquet")
    path = model_directory("qwen3", chat_template=CHAT_TEMPLATE)
    model = [f"model.path={path}", "model.architecture=null", "model.tokenizer=null"]
    overrides = [*OWN_DATA, *model, "queries.path=verl.parquet", "reward=exact_match", "steps=1"]
    assert cli.main(["train", str(TINY), *overrides]) == 0


def test_a_separate_evaluation_file_gives_its_name_to_the_metrics_and_is_not_trained_on() -> None:
    write_rows(ROWS[:4], "train.jsonl")
    write_rows(ROWS[4:], "exam.jsonl")
    recipe = recipe_of("queries.path=train.jsonl", "evaluation.path=exam.jsonl", "evaluation.num_queries=2", "steps=1")
    outcome = run(recipe, reward=length_of)
    assert "evaluation/exam/pass_at_1" in outcome.metrics[0]
    assert {line["prompt"] for line in rollouts(outcome)} == {row["prompt"] for row in ROWS[:4]}


def test_an_evaluation_says_how_few_queries_it_has_what_failed_and_what_the_reward_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def marks(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
        if len(completions) == 1 and answer[0] == held_out[0]:  # an evaluation has one completion a query
            raise ValueError("unreadable")
        return [float(10 + int(gold)) for gold in answer]

    held_out: list[str] = []
    rows = [{"prompt": f"Say {number} please.", "answer": str(number)} for number in range(26)]
    recipe = recipe_of("evaluation.num_queries=16", "evaluation.pass_threshold=30", "steps=1")
    held_out += [str(row.columns["answer"]) for row in load_rows(recipe, rows).held_out]
    train(recipe, queries=rows, reward=marks)
    said = capsys.readouterr().out
    assert "note: 2 rows are held out for evaluation, not the 16 of evaluation.num_queries" in said
    assert f"0.000 on 2 held-out queries, reward {10 + int(held_out[1])}.000\n" in said
    assert "warning: reward functions failed on some of 2 held-out responses: 1 count as not passed, 1 have no" in said
    assert "reward function marks: it raises ValueError: unreadable" in said


def test_input_that_cannot_be_used_is_a_user_error_and_leaves_nothing() -> None:
    for rows in ([], ["just text"], [{"text": "no prompt"}], [{"prompt": ""}]):
        with pytest.raises(gspo.UserError):
            run(recipe_of(), queries=rows, reward=length_of)
    with pytest.raises(gspo.UserError, match="reward"):
        run(recipe_of(), queries=ROWS, reward=[])
    assert not Path("runs").exists()


def test_a_function_that_raises_ends_the_run_with_a_checkpoint_from_which_it_goes_on_once_mended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM

    recipe = make_recipe({**recipe_of().model_dump(), "steps": 5})
    calls: list[int] = []

    def fails_later(completions: Sequence[str], **columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) > 6:
            raise ZeroDivisionError("too late")
        return [float(number) for number in range(len(completions))]

    with pytest.raises(gspo.UserError, match=r"fails_later.*ZeroDivisionError: too late"):
        run(recipe, queries=ROWS, reward=fails_later)
    (saved,) = Path("runs/tiny/checkpoints").iterdir()
    assert AutoModelForCausalLM.from_pretrained(saved / "model").num_parameters() > 0
    assert cli.main(["resume", "runs/tiny"]) == 2  # which has neither the queries nor the reward
    assert "gspo.train(recipe, queries=…, reward=…, resume=True)" in capsys.readouterr().err
    outcome = run(recipe, queries=ROWS, reward=length_of, resume=True)
    assert [line["step"] for line in outcome.metrics] == [0, 1, 2, 3, 4, 5]


def test_what_python_stands_in_for_is_not_written_as_the_runs_recipe() -> None:
    recipe = gspo.load_recipe(TINY, ["steps=1", "evaluation.num_queries=0", "cold_start.steps=0"])
    outcome = gspo.train(
        recipe, queries=[{"prompt": f"{n} + 1 ="} for n in range(8)], reward=lambda prompts, **_: [1.0] * len(prompts)
    )
    written = gspo.load_recipe(outcome.model.parent / "recipe.yaml")
    assert written.queries.procedural is None and written.reward == ()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: train("own.yaml"), "no such recipe file"),
        (lambda: train(cast("Any", 3)), "a recipe is a mapping, not 3"),
        (lambda: gspo.make_recipe(cast("Any", "own.yaml")), "a recipe is a mapping"),
        (lambda: gspo.make_recipe(cast("Any", None)), "a recipe is a mapping"),
        (lambda: gspo.load_recipe(TINY, "steps=2"), "a list of texts"),
        (lambda: gspo.load_recipe(TINY, cast("Any", [3])), "a list of texts"),
        (lambda: run(recipe_of(), queries=3, reward=length_of), "a row is not '3'"),
        (lambda: run(recipe_of(), queries="own.jsonl", reward=length_of), "a row is not 'own.jsonl'"),
        (lambda: run(recipe_of(), queries=ROWS, reward=3), "a reward is a function, not 3"),
        (lambda: run(recipe_of(), queries=ROWS, reward="own.py:f"), "a reward is a function, not 'own.py:f'"),
        (lambda: run(recipe_of(), queries=ROWS, reward=dict), "does not tell what arguments"),
    ],
)
def test_what_is_of_another_type_is_one_message_that_says_what_to_give(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as error:
        call()
    assert error.value.where and error.value.fix
    assert not Path("runs").exists()


def test_a_script_that_trains_with_itself_as_its_reward_file_is_told_at_once() -> None:
    recipe = f"gspo.load_recipe({str(TINY)!r}, ['reward=script.py:score'])"
    score = "def score(completions, **_):\n    return []"
    Path("script.py").write_text(f"import gspo\n\n{score}\n\ngspo.train({recipe})\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"script\.py, line 6 .*it calls gspo\.train") as error:
        run(load_recipe(TINY, ["reward=script.py:score"]))
    assert error.value.fix is not None and "__main__" in error.value.fix and not Path("runs").exists()


def test_several_sets_are_evaluated_and_the_responses_of_each_are_kept() -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    suite: dict[str, Any] = {"name": "own", "queries": {"path": "rows.jsonl"}, "reward": [{"function": "exact_match"}]}
    suite |= {"samples": 2, "temperature": 1.0, "max_new_tokens": 4}
    tree = recipe_of().model_dump(mode="json")
    tree["evaluation"] |= {"suites": [suite, suite | {"name": "greedy", "samples": 1, "temperature": 0}]}
    outcome = run(make_recipe(tree), queries=ROWS, evaluation={"mine": ROWS[:3]})
    sizes = {"held_out": 1, "own": 2 * len(ROWS), "greedy": len(ROWS), "mine": 3}
    for line in (outcome.metrics[0], outcome.metrics[-1]):
        assert {name.split("/")[1] for name in line if name.startswith("evaluation/")} == sizes.keys()
        assert ("evaluation/own/pass_at_2" in line) and "evaluation/mine/pass_at_2" not in line
        path = outcome.model.parent / "evaluation" / f"step_{line['step']:06}.jsonl"
        kept = [json.loads(own)["set"] for own in path.read_text().splitlines()]
        assert {name: kept.count(name) for name in kept} == sizes


def test_a_run_whose_suite_has_other_rows_is_not_resumed() -> None:
    Path("rows.jsonl").write_text('{"prompt": "Say 1 please.", "answer": "1"}\n')
    suite: dict[str, Any] = {"name": "own", "queries": {"path": "rows.jsonl"}, "reward": [{"function": "exact_match"}]}
    tree = recipe_of().model_dump(mode="json")
    tree["evaluation"] |= {"suites": [suite]}
    run(make_recipe(tree), queries=ROWS)
    Path("rows.jsonl").write_text('{"prompt": "Say 2 please.", "answer": "2"}\n')
    with pytest.raises(UserError, match="not those the run was trained on"):
        run(make_recipe({**tree, "steps": 3}), queries=ROWS, resume=True)
