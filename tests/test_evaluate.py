"""`gspo eval`: what a model is judged to be, that nothing judged is lost or judged again, and what it refuses."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest
from tests.evaluation.test_rating import contest_of, save

import gspo
from gspo.cli import main
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.engine.engine import Completion, Prompt, Sampling
from gspo.errors import RunError, UserError, writable
from gspo.evaluate import evaluation_recipe
from gspo.evaluation.rating import rate, read_contests
from gspo.model.policy import Policy
from gspo.run.console import Display
from gspo.run.lock import Lock

NUM_QUESTIONS, SAMPLES = 6, 3
SUITE = """
queries: {path: rows.jsonl}
samples: 3
temperature: 1.0
max_new_tokens: 6
reward: judge.py:is_even
"""
# It notes what it judges and, where a file says so, kills the evaluation at that call.
JUDGE = """
import os, signal
from pathlib import Path

def is_even(prompts, completions, answer, **columns):
    with open("judged.txt", "a") as file:
        file.write(prompts[0] + "\\n")
    limit = Path("kill_at.txt")
    if limit.exists() and len(Path("judged.txt").read_text().splitlines()) >= int(limit.read_text()):
        limit.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
    return [float(len(completion) % 2 == 0) for completion in completions]
"""


def furnish(path: Path, new_policy: Callable[..., Policy]) -> Path:
    """Give a directory two models, a suite, its rows and its verifier."""
    new_policy().save(path / "model_a")
    new_policy(seed=1).save(path / "model_b")
    rows = [{"prompt": f"{n} + 2 =", "answer": str(n + 2)} for n in (1, 2, 3, 7, 11, 12)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "even.yaml").write_text(SUITE)
    (path / "judge.py").write_text(JUDGE)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_policy: Callable[..., Policy]) -> Path:
    monkeypatch.chdir(tmp_path)
    return furnish(tmp_path, new_policy)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, new_policy: Callable[..., Policy]) -> Path:
    """A furnished directory with an evaluation, and beside it what nothing can be judged by."""
    path = furnish(tmp_path_factory.mktemp("judged"), new_policy)
    with contextlib.chdir(path):
        evaluated()
    (path / "no_answer.jsonl").write_text('{"prompt": "1 + 2 ="}\n')
    (path / "odd_answer.jsonl").write_text('{"prompt": "1 + 2 =", "answer": {"a": 1}}\n')
    (path / "other.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    (path / "odd.yaml").write_text("sample: 4")
    (path / "odd").mkdir()
    (path / "odd/evaluation.json").write_text("[]")
    return path


def evaluated(target: str = "model_a", *overrides: str, suite: str = "even.yaml", **given: Any) -> dict[str, Any]:
    given.setdefault("display", Display(quiet=True))
    return dict(gspo.evaluate(target, [suite], overrides=overrides, **given).tree)


def without_times(tree: dict[str, Any]) -> dict[str, Any]:
    for own in tree["suites"].values():
        for name in ("seconds_sampling", "seconds_judging"):
            own["numbers"].pop(name, None)
    return tree


def test_the_numbers_follow_from_the_responses_all_of_which_are_kept(place: Path) -> None:
    tree = evaluated()
    assert json.loads((place / "evaluations" / "model_a" / "evaluation.json").read_text()) == tree == evaluated()
    own = tree["suites"]["even"]
    responses, numbers = own["responses"], own["numbers"]
    assert Counter(line["query"] for line in responses) == {f"even:{n}": SAMPLES for n in range(1, NUM_QUESTIONS + 1)}
    rates = []
    for n in range(1, NUM_QUESTIONS + 1):
        lines = [line for line in responses if line["query"] == f"even:{n}"]
        assert [line["sample"] for line in lines] == [0, 1, 2] and lines[0]["columns"] == {
            "answer": lines[0]["columns"]["answer"]
        }
        assert all(line["passed"] == (len(line["completion"]) % 2 == 0) for line in lines)
        rates.append(sum(line["passed"] for line in lines) / SAMPLES)
    assert 0 < numbers["pass_at_1"] < 1
    assert numbers["pass_at_1"] == pytest.approx(sum(rates) / NUM_QUESTIONS)
    assert numbers["error_over_questions"] == pytest.approx(stdev(rates) / math.sqrt(NUM_QUESTIONS))
    chance = math.sqrt(sum(p * (1 - p) / (SAMPLES - 1) for p in rates)) / NUM_QUESTIONS
    assert numbers["error_over_samples"] == pytest.approx(chance)
    assert numbers["pass_at_k"]["3"] == pytest.approx(sum(rate > 0 for rate in rates) / NUM_QUESTIONS)
    assert numbers["mean_response_tokens"] == pytest.approx(sum(line["tokens"] for line in responses) / len(responses))
    cut = [line["finish_reason"] == "length" for line in responses]
    assert numbers["truncated_fraction"] == pytest.approx(sum(cut) / len(cut))


def killed_at(place: Path, call: int) -> None:
    """Evaluate, two questions at a time, in a process that is killed when so many questions are judged."""
    (place / "judged.txt").unlink(missing_ok=True)
    (place / "kill_at.txt").write_text(str(call))
    command = [sys.executable, "-m", "gspo", "eval", "model_a", "--suite", "even.yaml", "rollout.max_rows=3"]
    killed = subprocess.run(command, check=False, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -9


def test_an_evaluation_killed_twice_goes_on_and_judges_nothing_twice(place: Path) -> None:
    unbroken = without_times(evaluated(out="unbroken"))
    journal = place / "evaluations" / "model_a" / "unfinished.jsonl"
    # A verifier is tried on the first question before anything is sampled; the fourth call is in the second pair, which
    # is not written any more.
    for pairs in (1, 2):
        killed_at(place, 4)
        records = [json.loads(line) for line in journal.read_text().splitlines()]
        counts = Counter(record["line"]["query"] for record in records if "line" in record)
        kept = counts.keys() - {"even:5"}  # of which the first kill leaves a part
        assert kept == {f"even:{number}" for number in range(1, 2 * pairs + 1)}
        torn = json.dumps({"suite": "even", "line": records[-2]["line"] | {"query": "even:5"}}) + '\n{"suite": "ev'
        journal.write_text(journal.read_text() + torn)  # as a kill in the midst of writing a further question
    (place / "judged.txt").unlink()
    assert without_times(evaluated("model_a", "rollout.max_rows=3")) == unbroken
    judged = Counter((place / "judged.txt").read_text().splitlines())
    assert judged == {"1 + 2 =": 1, "11 + 2 =": 1, "12 + 2 =": 1}
    assert not journal.exists()


def test_one_process_at_a_time_writes_an_evaluation(place: Path) -> None:
    (place / "out").mkdir()
    lock = Lock(place / "out")
    with pytest.raises(UserError, match="is writing to this directory"):
        evaluated(out="out")
    lock.release()
    assert evaluated(out="out")["suites"]


def test_the_data_of_a_suite_may_have_any_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "model_a", "--suite", "even.yaml", "--data", "🙂.jsonl"]) == 2
    assert "suite even, 🙂.jsonl: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["runs/lr=1e-3/model", "samples=4", "a=b=c"])
def test_a_word_that_is_a_directory_is_a_model_whatever_its_name(
    place: Path, path: str, capsys: pytest.CaptureFixture
) -> None:
    shutil.copytree(place / "model_a", place / path)
    shutil.copy(place / "rows.jsonl", place / "a=1.jsonl")
    assert main(["eval", path, "samples=1", "--suite", "even.yaml", "--data", "a=1.jsonl", "--out", "out"]) == 0
    tree = json.loads((place / "out/evaluation.json").read_text())
    assert tree["model"]["path"] == path and tree["suites"]["even"]["settings"]["samples"] == 1


def test_a_model_that_is_not_there_is_no_key_where_its_name_is_a_path(
    place: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["eval", "runs/lr=1e-4/model", "--suite", "even.yaml"]) == 2
    assert "unknown key" not in (error := capsys.readouterr().err) and "runs/lr=1e-4/model" in error


def test_a_further_suite_joins_a_whole_evaluation(place: Path) -> None:
    first = evaluated()["suites"]["even"]
    greedy = {"suite": "even.yaml", "name": "greedy", "samples": 1, "temperature": 0}
    both = gspo.evaluate("model_a", [greedy], display=Display(quiet=True)).tree["suites"]
    assert both["even"] == first and len(both["greedy"]["responses"]) == NUM_QUESTIONS


def test_a_run_is_judged_by_its_model_as_it_was_trained_to_sample(place: Path, capsys: pytest.CaptureFixture) -> None:
    tiny = Path(__file__).with_name("tiny.yaml")
    keys = ["rollout.queries_per_step=3", "rollout.group_size=3", "actor.mini_batches=1"]  # no others' divisor
    recipe = gspo.load_recipe(tiny, ["evaluation.num_queries=0", "rollout.stop_strings=['=']", *keys])
    gspo.train(recipe, display=Display(quiet=True))
    assert main(["eval", "runs/tiny", "--suite", "even.yaml", "samples=2", "even.max_new_tokens=4"]) == 0
    printed = capsys.readouterr().out
    assert "evaluations/tiny/evaluation.json" in printed and "pass@1" in printed
    settings = json.loads((place / "evaluations/tiny/evaluation.json").read_text())["suites"]["even"]["settings"]
    assert (settings["samples"], settings["max_new_tokens"], settings["stop_strings"]) == (2, 4, ["="])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model_a", "--suite", "gsm9k"], "no suite 'gsm9k'"),
        (["model_a", "--suite", "even.yaml", "--data", "none.jsonl"], "no such file"),
        (["model_a", "--suite", "even.yaml", "odd.queries.path=rows.jsonl"], "unknown key odd.queries.path"),
        (["model_a", "--suite", "even.yaml,gsm8k", "--data", "rows.jsonl"], "even.queries.path=rows.jsonl"),
        (["model_a", "--suite", "even.yaml", "--data", "no_answer.jsonl"], "suite even, no_answer.jsonl"),
        (["model_a", "--suite", "even.yaml", "reward=math", "--data", "odd_answer.jsonl"], "holds {'a': 1}: a mapping"),
        (["model_a", "--suite", "even.yaml", "queries.chat=true"], "no chat template"),
        (["model_a", "--suite", "even.yaml", "sampels=3"], "did you mean samples"),
        (["model_a", "--suite", "even.yaml", "max_new_tokens=4000"], "lower the suite's max_new_tokens"),
        (["nowhere/model", "--suite", "even.yaml"], "nowhere/model"),
        (["model_a", "nowhere/model", "--suite", "even.yaml"], "nowhere/model"),
        (["--suite", "even.yaml"], "name a model|missing"),
        (["model_a"], "--suite"),
        (["model_a", "--suite", ","], "there is no suite ''"),
        (["model_a", "--suite", "even.yaml,even.yaml"], "two suites are named 'even'"),
        (["model_a", "--suite", "odd.yaml"], "odd.yaml: cannot be used:"),
        (["model_a", "--suite", "odd.yaml"], "unknown key sample: did you mean samples?"),
        (["model_a", "--suite", "odd.yaml"], "\n  reward: this key is needed and missing"),
        (["model_a", "--suite", "even.yaml", "temperature=1e-40"], "at least 1e-6"),
        (["model_b", "--suite", "even.yaml", "--out", "evaluations/model_a"], "the evaluation of another model"),
        (["model_a", "--suite", "even.yaml", "samples=2"], "it has even with settings.samples 3, and now it is 2"),
        (["model_a", "--suite", "even.yaml", "--data", "other.jsonl"], "it has even with data"),
        (["model_a", "--suite", "even.yaml", "--out", "odd"], "no evaluation that gspo has written"),
    ],
)
def test_what_cannot_be_judged_is_refused_with_one_message_and_nothing_is_lost(
    judged: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(judged)
    before = {path: path.read_bytes() for path in judged.rglob("*.json")}
    assert main(["eval", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and "Traceback" not in error
    assert any(part in error for part in message.split("|")), error
    assert {path: path.read_bytes() for path in judged.rglob("*.json")} == before


def test_what_was_judged_before_an_engine_died_is_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    submit, calls = EmbeddedEngine.submit, []

    def dying(self: EmbeddedEngine, prompts: Sequence[Prompt], sampling: Sampling) -> list[Future[Completion]]:
        calls.append(prompts)
        if len(calls) != 2:
            return submit(self, prompts, sampling)
        futures = [Future[Completion]() for _ in prompts]
        for future in futures:
            future.set_exception(RunError("the server has ended"))
        return futures

    monkeypatch.setattr(EmbeddedEngine, "submit", dying)
    words = ["eval", "model_a", "--suite", "even.yaml", "rollout.max_rows=3"]
    assert main(words) == 2
    assert "the server has ended" in (error := capsys.readouterr().err) and "run the same command again" in error
    assert main(words) == 0 and len(calls) == 4
    assert "2 of 6 questions are judged already" in capsys.readouterr().out


def test_tries_at_stored_contests_make_a_rating(place: Path, capsys: pytest.CaptureFixture) -> None:
    humans = np.array([2100.0, 1500.0, 900.0])
    contests = [contest_of(humans, humans, np.array([800.0, 1600.0]), number, max_points=500.0) for number in (7, 8)]
    save(place / "site", contests)
    (place / "judge.py").write_text(
        "def by_length(completions, **columns): return [len(c) % 3 == 0 for c in completions]"
    )
    words = ['codeforces.queries.template="{prompt}"', "samples=2", "temperature=1", "max_new_tokens=6"]
    words += ["reward=judge.py:by_length", "--data", "site"]
    assert main(["eval", "model_a", "--suite", "codeforces", *words]) == 0
    own = json.loads((place / "evaluations/model_a/evaluation.json").read_text())["suites"]["codeforces"]
    tries: dict[tuple[int, str], list[bool]] = {}
    for line in own["responses"]:
        tries.setdefault((line["columns"]["contest"], line["columns"]["index"]), []).append(line["passed"])
    expected = writable(rate(read_contests(place / "site"), tries))
    assert len(tries) == 4 and own["numbers"]["rating"] == json.loads(json.dumps(expected))
    assert "codeforces: rating" in capsys.readouterr().out


def test_models_whose_directories_have_one_name_are_compared(place: Path, capsys: pytest.CaptureFixture) -> None:
    (place / "runs").mkdir()
    (place / "model_b").rename(place / "runs" / "model_a")
    for words, directory in (([], "evaluations"), (["--out", "here"], "here")):
        assert main(["eval", "model_a", "runs/model_a", "--suite", "even.yaml", *words]) == 0
        assert "even: model_a − model_a: " in capsys.readouterr().out
        assert len([*(place / directory).glob("*/evaluation.json")]) == 2
        assert (place / directory / "compared.html").is_file()


def test_a_verifier_whose_code_has_changed_does_not_go_on(place: Path) -> None:
    evaluated()
    (place / "judge.py").write_text(JUDGE + "# changed\n")
    sys.modules.pop("judge", None)
    with pytest.raises(UserError, match="other code of the reward function is_even"):
        evaluated()


def test_an_adapter_is_merged_for_an_evaluation_though_its_run_handed_it_over_alone(place: Path) -> None:
    (place / "run" / "model").mkdir(parents=True)
    recipe = {"name": "run", "steps": 1, "queries": {"path": "rows.jsonl"}, "reward": [{"function": "math"}]}
    recipe |= {"model": {"path": "x", "lora": {}}, "rollout": {"engine": "vllm", "vllm": {"adapters": True}}}
    (place / "run" / "recipe.yaml").write_text(json.dumps(recipe))
    assert evaluation_recipe("run", ["even.yaml"]).rollout.vllm.adapters is None
