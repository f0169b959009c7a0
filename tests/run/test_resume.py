"""Taking a run up: what is taken up and what is refused, what is said, and that a refusal changes nothing."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

import gspo
from gspo import cli
from gspo.learner.trainer import Trainer
from gspo.queries.row import lay_out
from gspo.queries.source import QuerySet, RowSet
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.run import run as run_module
from gspo.run.checkpoint.store import MANIFEST, seal, verified
from gspo.run.console import Display
from gspo.run.lock import Lock
from gspo.run.progress import Progress
from gspo.run.recorder import Recorder
from gspo.run.resume import rows_digest, tokens_digest
from gspo.types import Query

TINY = Path(__file__).parents[1] / "tiny.yaml"
RUN = Path("runs/tiny")
ROWS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}", "answer": str(2 * n)} for n in range(8)]


@pytest.fixture(autouse=True)
def _rows(own_directory: None) -> None:
    write_rows(ROWS)


def write_rows(rows: list[dict[str, Any]]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe_of(*overrides: str) -> Recipe:
    fixed = [
        "queries={path: rows.jsonl}",
        "cold_start={steps: 1, path: rows.jsonl}",
        "rollout.queries_per_step=4",
        "rollout.max_new_tokens=4",
        "reward=[{function: format, options: {pattern: '[1-4]'}}]",
        "evaluation.num_queries=0",
        "checkpoint.every=1",
    ]
    return load_recipe(TINY, [*fixed, *overrides])


def train(recipe: Recipe, **given: Any) -> str:
    """Train; what was said."""
    text = StringIO()
    gspo.train(recipe, display=Display(Console(file=text, width=200)), **given)
    return text.getvalue()


def entries() -> dict[str, tuple[int, bytes]]:
    """Everything in the run's directory, but for who has locked it."""
    paths = [path for path in RUN.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in paths}


@pytest.fixture
def refused() -> Callable[..., str]:
    """Resume, which must be refused and leave everything as it is; the message."""

    def resume(recipe: Recipe, **given: Any) -> str:
        before = entries()
        with pytest.raises(gspo.UserError) as caught:
            train(recipe, resume=True, **given)
        assert entries() == before
        return str(caught.value)

    return resume


def newest() -> Path:
    return max((RUN / "checkpoints").iterdir())


def reseal(path: Path, **changed: Any) -> None:
    """Write a checkpoint's manifest anew, for its files as they are now."""
    about = {**json.loads((path / MANIFEST).read_text())["content"], **changed}
    (path / MANIFEST).unlink()
    seal(path, {key: value for key, value in about.items() if key != "files"})


def test_every_key_that_may_not_change_is_named_with_what_it_was_and_is(refused: Any) -> None:
    train(recipe_of())
    changes = ["seed=5", "actor.optimizer.lr=1e-4", "rollout.group_size=2", "reward.0.weight=2", "steps=9"]
    message = refused(recipe_of(*changes))
    for line in (
        "seed was 0, is 5",
        "actor.optimizer.lr was 0.001, is 0.0001",
        "rollout.group_size was 4, is 2",
        "reward.0.weight was 1.0, is 2.0",
    ):
        assert f"    {line}\n" in message
    what, _, advice = message.partition("fix: ")
    assert "steps" not in what
    assert advice.startswith("set these keys back") and f"model.path={newest()}/model" in advice


def test_after_a_refusal_the_same_process_can_resume(refused: Any) -> None:
    train(recipe_of())
    refused(recipe_of("seed=5"))
    assert "resumed from" in train(recipe_of("steps=3"), resume=True)


def test_keys_that_change_nothing_that_is_learned_may_change_and_are_said() -> None:
    train(recipe_of("steps=1"))
    changes = ["steps=2", "checkpoint.keep=5", "reward.0.time_limit_seconds=9", "actor.optimizer.schedule=constant"]
    said = train(recipe_of(*changes), resume=True)
    for line in ("steps was 1, is 2", "checkpoint.keep was 2, is 5", "reward.0.time_limit_seconds was 60.0, is 9.0"):
        assert f"changed since: {line}\n" in said
    assert said.count("changed since") == 3 and "stretched" not in said
    assert load_recipe(RUN / "recipe.yaml") == recipe_of(*changes)
    assert "changed since" not in train(recipe_of(*changes), resume=True)


def test_a_run_whose_turns_were_kept_as_sampled_can_have_them_so_further() -> None:
    """Before `history` held for tools, their recipes had its default, which they did not follow."""
    train(recipe_of("steps=1"))
    said = train(recipe_of("steps=2", "rollout.history=append"), resume=True)
    assert "NOT an exact resume: rollout.history was branch, is append" in said


def test_a_run_from_before_some_keys_goes_on() -> None:
    train(recipe_of("steps=1"))
    newer = ("trust_remote_code: ", "discount: ", "minirl_cap: ", "epochs: ", "refresh_weight: ", "frozen: ")
    for path in (RUN / "recipe.yaml", newest() / "recipe.yaml"):
        lines = path.read_text().splitlines(keepends=True)
        older = [line for line in lines if not line.strip().startswith(newer)]
        assert len(older) == len(lines) - len(newer)
        path.write_text("".join(older))
    reseal(newest())
    said = train(recipe_of("steps=2"), resume=True)
    assert "resumed from" in said and not any(key in said for key in newer)


def test_a_run_of_before_whose_stale_responses_counted_as_the_policys_goes_on_as_it_was(refused: Any) -> None:
    train(recipe_of("steps=1", "rollout.max_staleness=1", "actor.correction=ignore"))
    for path in (RUN / "recipe.yaml", newest() / "recipe.yaml"):
        path.write_text(path.read_text().replace("correction: ignore", "correction: none"))
    reseal(newest())
    assert load_recipe(RUN / "recipe.yaml", of_run=True).actor.correction == "ignore"
    assert cli.main(["resume", str(RUN), "steps=2"]) == 0
    assert load_recipe(RUN / "recipe.yaml").actor.correction == "ignore"
    others = ("rollout.max_staleness=2", "actor.correction=decoupled")  # which had a say before, too
    assert "actor.correction was ignore, is decoupled" in refused(recipe_of("steps=3", *others))


@pytest.mark.parametrize("how", ["actor.correction=decoupled", "actor.old_logprobs=engine"])
def test_a_run_may_go_on_with_stale_responses_once_it_says_how_they_count(how: str, refused: Any) -> None:
    train(recipe_of("steps=1"))
    assert "actor.correction was none, is ignore" in refused(recipe_of("actor.correction=ignore"))
    said = train(recipe_of("steps=2", "rollout.max_staleness=1", how), resume=True)
    for change in ("rollout.max_staleness was 0, is 1", f"{how.partition('=')[0]} was "):
        assert f"NOT an exact resume: {change}" in said
    assert len((RUN / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_schedule_that_more_steps_stretch_is_said() -> None:
    train(recipe_of("steps=1", "actor.optimizer.schedule=linear"))
    said = train(recipe_of("steps=2", "actor.optimizer.schedule=linear"), resume=True)
    assert "the linear schedule of the learning rate is stretched over the new number of steps" in said


@pytest.mark.parametrize("change", ["a column", "a prompt", "a row less", "the order"])
def test_other_data_is_refused(change: str, refused: Any) -> None:
    train(recipe_of("cold_start.steps=0"))
    rows = [dict(row) for row in ROWS]
    if change in ("a column", "a prompt"):
        rows[3][{"a column": "answer", "a prompt": "prompt"}[change]] = "8 + 3"
    write_rows(rows[:-1] if change == "a row less" else rows[::-1] if change == "the order" else rows)
    message = refused(recipe_of("cold_start.steps=0", "steps=3"))
    assert message.startswith("queries: ") and f"model.path={newest()}/model" in message
    write_rows(ROWS)
    train(recipe_of("cold_start.steps=0", "steps=3"), resume=True)


DATED = (
    "{{ strftime_now('%d %B %Y') }}: {% for m in messages %}[{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def templated(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Recipe]:
    """A recipe whose tokenizer has a chat template, on a day of June."""
    from tests.queries.conftest import _byte_tokenizer

    def recipe(template: str, day: int) -> Recipe:
        tokenizer = _byte_tokenizer(after="")
        tokenizer.chat_template = template
        tokenizer.save_pretrained("tokenizer")
        clock = type("datetime", (), {"now": staticmethod(lambda: datetime(2026, 6, day))})
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        return recipe_of("model.tokenizer=tokenizer", "cold_start.steps=0", f"steps={day}")

    return recipe


def test_a_run_of_yesterday_whose_prompts_have_a_date_is_resumed(templated: Any) -> None:
    train(templated(DATED, 1))
    assert "resumed from" in train(templated(DATED, 2), resume=True)
    lines = [json.loads(line) for path in RUN.glob("rollouts/*") for line in path.read_text("utf-8").splitlines()]
    assert {line["prompt"][:15] for line in lines} == {"01 January 2026"}


def test_other_prompts_than_the_run_had_are_refused(templated: Any, refused: Any) -> None:
    train(templated(DATED, 1))
    assert "the queries have other tokens than they had" in refused(templated(DATED.replace("[{{", "<{{"), 2))


ODD = [{**row, "score": math.nan, "entry": {"a": [-math.inf, "\ud83d"]}, "te\ud800xt": 1} for row in ROWS]


def test_data_and_messages_that_no_file_can_hold_train_and_resume(named_reward: str) -> None:
    write_rows(ODD)
    odd = [f"reward=[{{function: '{named_reward}'}}]", "rollout.queries_per_step=8", "cold_start.steps=0"]
    train(recipe_of(*odd, "steps=1"))
    train(recipe_of(*odd, "steps=2"), resume=True)
    lines = [json.loads(line) for path in RUN.glob("rollouts/*") for line in path.read_text("utf-8").splitlines()]
    assert len(lines) == 2 * 8 * 4
    assert {line["columns"]["score"] for line in lines} == {None}
    assert {line["columns"]["te\\ud800xt"] for line in lines} == {1}
    assert {line["failure"] for line in lines if line["columns"]["answer"] == "6"} == {
        f"reward function f: it raises ValueError: half \\ud83d, at {Path('mine.py').resolve()}:3"
    }


@pytest.fixture
def named_reward() -> str:
    source = "def f(completions, score, entry, answer, **columns):\n    if answer[0] == '6':\n"
    source += "        raise ValueError('half \\ud83d')\n"
    source += "    assert (score[0], entry[0]) == (None, {'a': [None, '\\\\ud83d']})\n"
    Path("mine.py").write_text(source + "    return [float(len(text)) for text in completions]\n")
    return "mine.py:f"


@pytest.mark.parametrize(
    ("row", "digest"),
    [
        ({"score": 0.5, "nested": {"a": [1, "é"]}}, "cdbf9d46eb5b7469205d00b6adadf25ff588557ab5ecda6622c7567e6279d664"),
        (
            {"score": math.nan, "nested": {"a": [math.inf, "\ud800"]}},
            "a7f937148a60542d0046b6b3300f0d21b93481260cffffec1b9489b91928816c",
        ),
    ],
)
def test_data_has_the_digest_that_checkpoints_of_earlier_versions_hold(row: dict[str, Any], digest: str) -> None:
    rows = lay_out([{"prompt": "1 + 1 =", "answer": "2", **row}], source="rows.jsonl")
    assert rows_digest(RowSet(train=tuple(rows), held_out=()), []) == digest


def test_tokens_have_the_digest_that_checkpoints_of_earlier_versions_hold() -> None:
    made = [Query(id=str(n), prompt="p", text="t", prompt_ids=(n, 2, 3**n), columns={}) for n in range(5)]
    digest = tokens_digest(QuerySet(train=tuple(made[:3]), held_out=tuple(made[3:])))
    assert digest == "4ec49931c6aeabbc82e1234ff6f03b18b55ad98dd28b4dce95fa29a9b567d17d"


def test_rows_held_out_and_demonstrations_belong_to_the_digest() -> None:
    one, two, three = lay_out(ROWS[:3], source="rows.jsonl")
    other = replace(three, columns={**three.columns, "answer": "5"})
    data = [
        ([one, two], [three], []),
        ([one, two], [other], []),
        ([one, two], [], []),
        ([one], [two, three], []),
        ([one, two, three], [], []),
        ([one, two], [three], [(one, " 0")]),
        ([one, two], [three], [(one, " 1")]),
    ]
    digests = {rows_digest(RowSet(train=tuple(train), held_out=tuple(held)), pairs) for train, held, pairs in data}
    assert len(digests) == len(data)


def test_other_demonstrations_are_refused(refused: Any) -> None:
    demonstrations = Path("demonstrations.jsonl")
    demonstrations.write_text(Path("rows.jsonl").read_text())
    recipe = recipe_of("cold_start.path=demonstrations.jsonl", "steps=1")
    train(recipe)
    swapped = {'" 8"': '" 6"', '" 6"': '" 8"'}  # which leaves the fitted tokenizer as it was
    demonstrations.write_text(re.sub('" [68]"', lambda found: swapped[found[0]], demonstrations.read_text()))
    refused(recipe)


def test_weights_that_are_not_bit_by_bit_those_of_the_run_are_refused(refused: Any) -> None:
    train(recipe_of())
    weights = newest() / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] += 1e-6
    save_file(tensors, weights, {"format": "pt"})
    reseal(newest())
    message = refused(recipe_of("steps=3"))
    assert "not bit by bit those that were saved" in message and '"torch":' in message


def test_other_versions_are_said_to_make_it_no_exact_resume_and_the_run_goes_on() -> None:
    train(recipe_of())
    environment = verified(newest())["environment"]
    assert "NOT an exact resume" not in train(recipe_of("steps=3"), resume=True)
    reseal(newest(), environment={**environment, "torch": "1.0", "threads": "64"})
    said = train(recipe_of("steps=4"), resume=True)
    assert f"NOT an exact resume: threads was 64, is {environment['threads']}\n" in said
    assert f"NOT an exact resume: torch was 1.0, is {environment['torch']}\n" in said
    assert len((RUN / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_directory_that_is_no_runs_is_refused(refused: Any, capsys: pytest.CaptureFixture[str]) -> None:
    RUN.mkdir(parents=True)
    (RUN / "precious").write_text("text")
    assert "no recipe.yaml" in refused(recipe_of())
    assert [path.name for path in RUN.iterdir()] == ["precious"]
    for target, words in ((RUN, ".*no recipe.yaml"), (Path("absent"), "no such directory")):
        assert cli.main(["resume", str(target)]) == 2
        assert re.match(f"error: {target}: {words}", capsys.readouterr().err)
    assert not Path("absent").exists()


def test_a_run_that_another_process_goes_on_with_is_refused(refused: Any) -> None:
    train(recipe_of())
    lock = Lock(RUN)
    assert "is writing to this directory" in refused(recipe_of("steps=3"))
    lock.release()
    train(recipe_of("steps=3"), resume=True)


def test_where_there_is_nothing_to_resume_the_run_is_begun(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/empty").mkdir(parents=True)
    for directory in ("runs/absent", "runs/empty"):
        target = ["train", str(TINY), "--resume", f"output_dir={directory}", "steps=1", "cold_start.steps=0"]
        assert cli.main([*target, "evaluation.num_queries=0"]) == 0
        assert f"nothing to resume in {Path(directory).absolute()}: from the start" in capsys.readouterr().out
        assert Path(directory, "model", "model.safetensors").is_file()


def test_a_run_that_ended_before_its_first_checkpoint_is_begun_again() -> None:
    train(recipe_of())
    expected = {path: content for path, (_, content) in entries().items() if path.endswith((".safetensors", "1.jsonl"))}
    for name in ("checkpoints", "cold_start", "model"):
        shutil.rmtree(RUN / name)
    with (RUN / "metrics.jsonl").open("a") as file:
        file.write('{"half')
    assert "no checkpoint in runs/tiny/checkpoints yet: from the start" in train(recipe_of(), resume=True)
    assert {path: content for path, (_, content) in entries().items() if path in expected} == expected
    assert [json.loads(line)["step"] for line in (RUN / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert len((RUN / "cold_start.jsonl").read_text().splitlines()) == 1


def test_a_finished_run_whose_checkpoints_are_gone_is_not_begun_again(refused: Any) -> None:
    train(recipe_of())
    shutil.rmtree(RUN / "checkpoints")
    assert f"model.path={RUN / 'model'}" in refused(recipe_of("steps=9"))


def test_a_finished_run_is_left_as_it_is_but_for_a_line_of_its_history() -> None:
    train(recipe_of())
    before = {path: content for path, (_, content) in entries().items()}
    assert "resumed from runs/tiny/checkpoints/step_000002: step 2" in train(recipe_of(), resume=True)
    after = {path: content for path, (_, content) in entries().items()}
    history = str(RUN / "history.jsonl")
    assert after.pop(history).startswith(before.pop(history))
    assert after == before


def test_damaged_checkpoints_are_passed_over_named_and_kept(refused: Any) -> None:
    train(recipe_of())
    (newest() / "state.json").write_text("{}")
    said = train(recipe_of(), resume=True)
    assert "passed over step_000002: state.json has 2 bytes" in said and "set aside as damaged_step_000002" in said
    assert "resumed from runs/tiny/checkpoints/step_000001: step 1" in said
    names = {path.name for path in (RUN / "checkpoints").iterdir()}
    assert names == {"damaged_step_000002", "step_000001", "step_000002"}
    for path in (RUN / "checkpoints").glob("step_*"):
        (path / "state.safetensors").unlink()
    message = refused(recipe_of())
    assert message.count("state.safetensors is missing") == 2 and "no checkpoint is whole" in message


def test_what_a_cold_start_left_that_was_killed_as_it_ended_is_removed() -> None:
    train(recipe_of("steps=1"))
    left = RUN / "cold_start_checkpoints"
    shutil.copytree(RUN / "cold_start", left / "step_000001")
    assert "resumed from runs/tiny/checkpoints" in train(recipe_of("steps=1"), resume=True)
    assert not left.exists()


def test_what_lies_beside_a_runs_own_files_stops_no_resume_and_stays() -> None:
    train(recipe_of("steps=1"))
    others = {f"rollouts/step_000001{end}.jsonl" for end in ("-copy", ".bak")} | {"checkpoints/unfinished_notes"}
    shutil.copytree(newest(), RUN / "checkpoints" / "step_99")
    for name in others:
        (RUN / name).write_text("mine")
    (RUN / "checkpoints" / "unfinished_thoughts").symlink_to(Path("rows.jsonl").absolute())
    (RUN / "unfinished_metrics.jsonl").write_text("what a killed process has left")
    assert "resumed from runs/tiny/checkpoints/step_000001" in train(recipe_of(), resume=True)
    left = {path.relative_to(RUN).as_posix() for path in RUN.rglob("unfinished_*")}
    assert left == {"checkpoints/unfinished_notes", "checkpoints/unfinished_thoughts"}
    assert all((RUN / name).read_text() == "mine" for name in others)
    assert (RUN / "checkpoints" / "step_99").is_dir() and "step_000002" in {
        path.name for path in (RUN / "checkpoints").iterdir()
    }


def test_a_manifest_that_is_nested_too_deep_is_damage() -> None:
    train(recipe_of())
    (newest() / MANIFEST).write_text("[" * 10**5)
    said = train(recipe_of(), resume=True)
    assert "passed over step_000002: manifest.json cannot be read (RecursionError)" in said


def test_of_two_runs_that_a_removed_lock_has_let_in_the_first_ends_and_no_step_is_there_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def let_in_another(*arguments: Any, **keywords: Any) -> Progress:
        progress = step(*arguments, **keywords)
        if not others:
            (RUN / "lock").unlink()
            others.append(Lock(RUN))
            before.update(entries())
        return progress

    others: list[Lock] = []
    before: dict[str, Any] = {}
    step = Recorder.step
    monkeypatch.setattr(Recorder, "step", let_in_another)
    with pytest.raises(gspo.RunError, match="was moved, removed or replaced"):
        train(recipe_of("steps=3", "checkpoint.every=0"))
    assert entries() == before
    others[0].release()
    train(recipe_of("steps=3", "checkpoint.every=0"), resume=True)
    assert [json.loads(line)["step"] for line in (RUN / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_ranks_wait_for_what_the_first_does_with_data_of_any_size_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between verbs others wait as long as rank 0 lives; a collective, within one, has a limit."""
    trainers, is_between_verbs, begin = list[Trainer](), dict[str, bool](), Trainer.__init__

    def noted(trainer: Trainer) -> None:
        begin(trainer)
        trainers.append(trainer)

    def watch(name: str) -> None:
        make = getattr(run_module, name)

        def watched(*arguments: Any) -> Any:
            is_between_verbs[name] = not trainers[-1]._lock.locked()
            return make(*arguments)

        monkeypatch.setattr(run_module, name, watched)

    monkeypatch.setattr(Trainer, "__init__", noted)
    for name in ("rows_digest", "tokens_digest"):
        watch(name)
    train(recipe_of("steps=1"))
    train(recipe_of("steps=2"), resume=True)
    assert is_between_verbs == {"rows_digest": True, "tokens_digest": True}
