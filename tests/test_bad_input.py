"""Input that cannot be used: one clear message that names the thing, exit code 2, nothing left on disk."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gspo import cli
from gspo.model.load import load_config
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import ModelConfig
from gspo.run.console import Display
from gspo.train import train

TINY = Path(__file__).with_name("tiny.yaml")
OWN_DATA = ["queries.procedural=null", "cold_start.steps=0", "cold_start.demonstrations=null"]
OWN_DATA += ["evaluation.num_queries=0", "rollout.queries_per_step=4"]
OWN_MODEL = ["model.architecture=null", "model.tokenizer=null"]
Failing = Callable[..., str]


@pytest.fixture(autouse=True)
def _rows(own_directory: None, format_in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rows = [{"prompt": f"{number} + {number} =", "answer": str(2 * number)} for number in range(6)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def failing(capfd: pytest.CaptureFixture[str]) -> Failing:
    """Run a command that must fail with exit code 2 and one message; returns the message."""

    def call(command: str, recipe: str | Path, *overrides: str) -> str:
        before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "__pycache__" not in path.parts}
        capfd.readouterr()
        code = cli.main([command, str(recipe), *overrides])
        error = capfd.readouterr().err
        after = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if "__pycache__" not in path.parts}
        assert code == 2, error
        assert error.startswith("error: ") and error.count("error: ") == 1
        assert "Traceback" not in error
        # The message and how to fix it: no page of somebody else's text.
        assert len(error.splitlines()) <= 6 and len(error) < 700, error
        assert after == before
        return error

    return call


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run"
    recipe = load_recipe(TINY, [f"output_dir={path}", "steps=1", "evaluation.num_queries=0"])
    return train(recipe, display=Display(quiet=True)).model


RECIPE_FAULTS = [
    (["actor.clip_lwo=1"], ["actor.clip_lwo", "actor.clip_low"]),
    (["actor.optimizer.learning_rate=1"], ["actor.optimizer.learning_rate", "lr"]),
    (["atcor.mini_batches=2"], ["atcor", "actor"]),
    (["reward.0.wieght=2"], ["reward.0.wieght", "reward.0.weight"]),
    (["no_such_thing=1"], ["no_such_thing", "known: name, seed"]),
    (["steps=many"], ["steps", "integer", "'many'"]),
    (["steps=2.5"], ["steps", "2.5"]),
    (["steps=0"], ["steps", "0"]),
    (["steps=null"], ["steps"]),
    (["seed=-1"], ["seed", "-1"]),
    (["name=a/b"], ["name", "'a/b'", "Text of another form"]),
    (["model=3"], ["model", "3"]),
    (["reward=3"], ["reward", "3"]),
    (["queries.procedural=chain_sum"], ["queries.procedural", "'chain_sum'"]),
    (["actor.optimizer.lr=-1e-3"], ["actor.optimizer.lr", "-0.001"]),
    (["actor.optimizer.lr=.nan"], ["actor.optimizer.lr", "nan"]),
    (["actor.optimizer.betas=[1,1]"], ["actor.optimizer.betas"]),
    (["actor.optimizer.betas=[0.9]"], ["actor.optimizer.betas"]),
    (["reward.0.weight=.nan"], ["reward.0.weight"]),
    (["reward.0.weight=.inf"], ["reward.0.weight"]),
    (["rollout.group_size=1"], ["rollout.group_size", "at least 2", "advantage"]),
    (["actor.mini_batches=3"], ["actor.mini_batches (3)", "rollout.queries_per_step (8)"]),
    (["actor.importance_sampling_level=sequnce"], ["actor.importance_sampling_level", "'sequence'", "'sequnce'"]),
    (["rollout.engine=vlm"], ["rollout.engine", "'embedded'", "'vllm'"]),
    (["report.trackers=[wndb]"], ["report.trackers", "wandb"]),
    (["model.path=somewhere"], ["model.path", "model.architecture"]),
    (["model.architecture=null"], ["model.path", "model.architecture"]),
    (["model.tokenizer=null"], ["model.tokenizer"]),
    (["cold_start.demonstrations=null"], ["cold_start.demonstrations", "cold_start.path"]),
    (["queries.template=no place"], ["queries.template", "{prompt}"]),
    (["rollout.min_p=1.5"], ["rollout.min_p", "less than or equal to 1"]),
    (["rollout.repetition_penalty=0"], ["rollout.repetition_penalty", "greater than 0"]),
    (["rollout.stop_strings=['']"], ["rollout.stop_strings.0", "at least 1 character"]),
    (["rollout.stop_strings=abc"], ["rollout.stop_strings", "a list", "write ['abc']"]),
    (["rollout.logit_bias={a: -.inf}"], ["rollout.logit_bias.a", "-100"]),
    (["rollout.logit_bias=[1]"], ["rollout.logit_bias", "a mapping"]),
    (["queries.chat_template_kwargs=off"], ["queries.chat_template_kwargs", "a mapping"]),
    (["queries.overlong=drop"], ["queries.overlong", "filter"]),
    (["evaluation.temperature=-1"], ["evaluation.temperature", "0", "greedy"]),
    (["queries.path=rows.jsonl"], ["queries.path", "queries.procedural"]),
    (["steps"], ["'steps'", "key.subkey=value"]),
    (["=3"], ["'=3'", "key.subkey=value"]),
    (["reward.5.function=math"], ["reward.5"]),
    (["steps={a"], ["steps={a", "YAML"]),
]


@pytest.mark.parametrize(("overrides", "named"), RECIPE_FAULTS, ids=[" ".join(faults) for faults, _ in RECIPE_FAULTS])
def test_a_fault_in_the_recipe_is_named_with_what_would_be_right(
    failing: Failing, overrides: list[str], named: list[str]
) -> None:
    message = failing("train", TINY, *overrides)
    assert [part for part in named if part not in message] == [], message


STAGE_FAULTS = [
    (["queries.procedural.task=chain_sm"], ["'chain_sm'", "chain_sum"]),
    (["queries.procedural.min_trms=1"], ["min_trms", "min_terms"]),
    (["queries.procedural.min_terms=9"], ["chain_sum", "max_terms"]),
    (["reward=[]"], ["no reward", "exact_match", "file.py:name"]),
    (["reward.0.function=mth"], ["'mth'", "math"]),
    (["reward.0.function=absent.py:score"], ["absent.py"]),
    (["reward.0.function=no_such_module:score"], ["no_such_module"]),
    (["reward.0.function=json:lods"], ["'lods'", "loads"]),
    (["reward.0.options={patern: a}"], ["'patern'"]),
    (["rollout.max_new_tokens=120"], ["chain_sum:1", "max_new_tokens", "prompt"]),
    (["rollout.queries_per_step=128"], ["128", "64"]),
    (["rollout.stop_tokens=[unseen]"], ["rollout.stop_tokens", "'unseen'"]),
    (["rollout.stop_strings=['3<eos>']"], ["rollout.stop_strings", "<eos>", "rollout.stop_tokens"]),
    (["rollout.logit_bias={unseen: 1}"], ["rollout.logit_bias", "'unseen'", "not a single token"]),
    (["rollout.logit_bias={1 + 2: 1}"], ["'1 + 2'", "'1', ' + ', '2'"]),
    (["rollout.logit_bias={99999: 1}"], ["'id:99999'", "tokens 0 to"]),
    (["queries.max_prompt_tokens=3"], ["have too many tokens", "queries.max_prompt_tokens is 3", "overlong: filter"]),
    (["queries.max_prompt_tokens=3", "queries.overlong=filter"], ["0 training and 0 held-out queries are left"]),
    (["queries.chat_template_kwargs={x: 1}"], ["queries.chat_template_kwargs needs a chat template"]),
    (["model.architecture.model_type=qwen9"], ["qwen9", "qwen3"]),
    (["model.architecture.hiden_size=16"], ["hiden_size", "hidden_size"]),
    (["model.architecture.vocab_size=3"], ["tokens", "embedding"]),
    (["model.device=nowhere"], ["model.device", "nowhere", "auto takes what there is"]),
    (["output_dir=rows.jsonl/run"], ["rows.jsonl/run"]),
    ([*OWN_MODEL, "model.path=not/there/model", "cold_start.steps=0"], ["not/there/model", "no such directory"]),
    ([*OWN_MODEL, "model.path=not_there", "cold_start.steps=0"], ["not_there", "directory", "hub"]),
    ([*OWN_DATA, "queries.path=rosw.jsonl"], ["rosw.jsonl", "rows.jsonl"]),
    ([*OWN_DATA, "queries.path=rows.jsonl", "queries.prompt=text"], ["'text'", "prompt, answer"]),
    (["queries.procedural=null", "cold_start.steps=0"], ["queries.path", "queries.procedural"]),
]


@pytest.mark.parametrize(("overrides", "named"), STAGE_FAULTS, ids=[" ".join(faults) for faults, _ in STAGE_FAULTS])
def test_a_fault_in_data_model_or_reward_is_named_before_anything_is_written(
    failing: Failing, overrides: list[str], named: list[str]
) -> None:
    message = failing("train", TINY, *overrides)
    assert [part for part in named if part not in message] == [], message


def test_a_missing_recipe_is_named_with_those_there_are(failing: Failing) -> None:
    shutil.copy(TINY, "mine.yaml")
    message = failing("train", "mein.yaml")
    assert "mein.yaml" in message and "mine.yaml" in message


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"name: [a,\nsteps: }", "not valid YAML"),
        (b"name: caf\xe9", "UTF-8"),
        (b"- a list", "mapping"),
        (b"", "a recipe is a mapping, and this is empty"),
        (b"name: x\nsteps: 1\nsteps: 2", "'steps' is given twice"),
        (b"name: x\n1: 2\n", "1"),
        (b"steps: 1\nmodel: {path: x}", "name"),
    ],
)
def test_a_recipe_file_that_is_none_is_named_with_its_fault(failing: Failing, content: bytes, named: str) -> None:
    Path("broken.yaml").write_bytes(content)
    message = failing("train", "broken.yaml")
    assert "broken.yaml" in message and named in message
    assert "<unicode string>" not in message  # YAML's own name for the text


def test_every_fault_of_a_recipe_is_told_at_once(failing: Failing) -> None:
    message = failing("train", TINY, "steps=0", "rollout.group_size=0", "atcor=3")
    assert all(name in message for name in ("steps", "rollout.group_size", "atcor"))


def test_empty_data_and_a_missing_column_name_the_file_and_its_columns(failing: Failing) -> None:
    Path("empty.jsonl").write_text("\n", encoding="utf-8")
    assert "empty.jsonl" in failing("train", TINY, *OWN_DATA, "queries.path=empty.jsonl")
    Path("other.csv").write_text("text,label\nhello,1\n", encoding="utf-8")
    message = failing("train", TINY, *OWN_DATA, "queries.path=other.csv")
    assert "text, label" in message and "queries.prompt" in message


def test_a_model_directory_without_weights_or_tokenizer_or_config_is_refused(
    failing: Failing, saved_model: Path
) -> None:
    faults = {"model.safetensors": "no weights", "tokenizer*": "tokenizer", "config.json": "config.json"}
    for missing, named in faults.items():
        shutil.copytree(saved_model, "model")
        for path in Path("model").glob(missing):
            path.unlink()
        for command in ("train", "check"):
            data = [*OWN_DATA, "queries.path=rows.jsonl"]
            message = failing(command, TINY, *OWN_MODEL, *data, "model.path=model")
            assert "model: " in message and named in message
        shutil.rmtree("model")


def test_weights_whose_download_has_not_ended_are_refused(failing: Failing, saved_model: Path) -> None:
    shutil.copytree(saved_model, "model")
    file = Path("model/model.safetensors")
    for size in (0, file.stat().st_size // 2):
        file.write_bytes(file.read_bytes()[:size])
        for command in ("train", "check"):
            message = failing(command, TINY, *OWN_MODEL, *OWN_DATA, "queries.path=rows.jsonl", "model.path=model")
            assert "model/model.safetensors: it is no whole file of weights" in message and "fetch it again" in message
        shutil.copy(saved_model / "model.safetensors", file)
    file.rename("model/model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    Path("model/model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    message = failing("check", TINY, *OWN_MODEL, *OWN_DATA, "queries.path=rows.jsonl", "model.path=model")
    assert "model/model-00002-of-00002.safetensors: model.safetensors.index.json names it, and it is not" in message


def test_other_files_of_weights_may_lie_beside_the_models_own(saved_model: Path) -> None:
    shutil.copytree(saved_model, "model")
    for name in ("consolidated.safetensors", "._model.safetensors"):
        Path("model", name).write_text("version https://git-lfs.github.com/spec/v1")
    load_config(ModelConfig(path="model"))


def test_an_adapter_is_told_from_a_model(failing: Failing) -> None:
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}", encoding="utf-8")
    message = failing("check", TINY, *OWN_MODEL, "cold_start.steps=0", "model.path=adapter")
    assert "adapter_config.json: it does not say which model it is of" in message


def test_an_existing_output_directory_is_left_as_it_is(failing: Failing) -> None:
    Path("runs/tiny/rollouts").mkdir(parents=True)
    Path("runs/tiny/metrics.jsonl").write_text("precious", encoding="utf-8")
    message = failing("train", TINY)
    assert "runs/tiny" in message and "name=" in message and "output_dir=" in message
    assert Path("runs/tiny/metrics.jsonl").read_text(encoding="utf-8") == "precious"


def test_an_existing_run_can_be_gone_on_from_as_the_message_says(failing: Failing) -> None:
    run = ["steps=1", "evaluation.num_queries=0"]
    assert cli.main(["train", str(TINY), *run]) == 0
    message = failing("train", TINY, *run)
    advice = message.partition("to go on with that run: gspo ")[2].partition(";")[0].split()
    assert advice == ["resume", "runs/tiny"]
    assert cli.main([*advice, "steps=2"]) == 0
    steps = [json.loads(line)["step"] for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_an_empty_output_directory_is_used_and_one_behind_a_link_too() -> None:
    Path("real").mkdir()
    Path("link").symlink_to("real")
    for output in ("real", "link"):
        assert cli.main(["train", str(TINY), f"output_dir={output}", "steps=1", "evaluation.num_queries=0"]) == 0
        assert Path(output, "metrics.jsonl").is_file()
        shutil.rmtree("real")
        Path("real").mkdir()


REWARDS = {
    "raises": ("def score(completions, **columns):\n    return [1 / 0 for _ in completions]\n", "ZeroDivisionError"),
    "too few": ("def score(completions, **columns):\n    return [1.0]\n", "a list of 1 for 2 completions"),
    "NaN": ("def score(completions, **columns):\n    return [float('nan')] * len(completions)\n", "nan"),
    "strings": ("def score(completions, **columns):\n    return ['1.0'] * len(completions)\n", "'1.0'"),
    "a number": ("def score(completions, **columns):\n    return 1.0\n", "1.0 for 2 completions"),
}


@pytest.mark.parametrize("fault", REWARDS)
def test_a_reward_that_cannot_be_used_is_named_with_its_row_before_anything_is_written(
    fault: str, failing: Failing
) -> None:
    source, named = REWARDS[fault]
    Path("my_reward.py").write_text(source, encoding="utf-8")
    message = failing("train", TINY, *OWN_DATA, "queries.path=rows.jsonl", "reward=my_reward.py:score")
    assert "reward function score, row rows.jsonl:" in message and named in message


def test_a_reward_that_needs_a_column_that_is_not_there_is_refused_before_anything_is_trained(failing: Failing) -> None:
    Path("my_reward.py").write_text("def score(completions, solution):\n    return [1.0]\n", encoding="utf-8")
    message = failing("train", TINY, *OWN_DATA, "queries.path=rows.jsonl", "reward=my_reward.py:score")
    assert "reward function score, row rows.jsonl:" in message and "solution" in message and "answer" in message


def test_a_reward_file_that_cannot_be_imported_is_named_with_its_line(failing: Failing) -> None:
    Path("my_reward.py").write_text("import json\nimport no_such_module\n", encoding="utf-8")
    data = [*OWN_DATA, "queries.path=rows.jsonl"]
    message = failing("train", TINY, *data, "reward=my_reward.py:score")
    assert "my_reward.py, line 2" in message and "no_such_module" in message


def test_a_reward_file_that_ends_the_program_is_an_error_and_nothing_is_written(failing: Failing) -> None:
    source = "import sys\ndef score(completions, **columns):\n    return [1.0] * len(completions)\nsys.exit(0)\n"
    Path("my_reward.py").write_text(source, encoding="utf-8")
    for command in ("train", "check"):
        message = failing(command, TINY, "reward=my_reward.py:score")
        assert "my_reward.py, line 4 raises SystemExit: 0" in message and "__name__" in message


def test_whatever_ends_a_command_before_its_time_is_an_error_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in ((SystemExit(0), 2), (SystemExit(), 2), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr("gspo.recipe.load.load_recipe", raising(error))
        assert cli.main(["check", str(TINY)]) == code
        assert capsys.readouterr().err


def raising(error: BaseException) -> Callable[..., object]:
    def fail(*_: object) -> object:
        raise error

    return fail


def test_a_path_that_cannot_be_is_refused_on_the_command_line(failing: Failing) -> None:
    assert "File name too long" in failing("train", f"{'c' * 300}.yaml")
    for path in ("c" * 300, "a\0b"):
        assert "this path" in failing("resume", path)


def test_a_recipe_that_may_not_be_read_says_so(failing: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def forbidden(path: Path, **options: str) -> str:
        if path == TINY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", forbidden)
    assert "cannot be read: Permission denied" in failing("train", TINY)


def test_sequence_token_is_accepted_and_said_to_equal_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(TINY), "actor.importance_sampling_level=sequence_token", "steps=1"]) == 0
    assert "sequence_token equals sequence" in capsys.readouterr().out
