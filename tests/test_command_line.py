"""The command line as a shell sees it: help, overrides, exit codes, what is printed."""

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.needs import needs

from gspo import cli
from gspo.recipe.load import dump_recipe, load_recipe

pytestmark = pytest.mark.usefixtures("own_directory")

TINY = Path(__file__).with_name("tiny.yaml")
GSPO = Path(sys.executable).with_name("gspo")
COMMANDS = ("train", "resume", "check")
HEAVY = ("torch", "transformers", "datasets", "reasoning_gym", "pydantic", "rich")


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_and_version_load_nothing_heavy(arguments: list[str], environment: dict[str, str]) -> None:
    code = f"""
import runpy, sys
sys.argv[1:] = {arguments!r}
try:
    runpy.run_module("gspo", run_name="__main__")
except SystemExit as ended:
    assert ended.code == 0
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "[]"
    assert ended.stdout.startswith("gspo " if arguments == ["--version"] else "usage: gspo ")


def test_help_names_every_command_and_how_to_override() -> None:
    for arguments, named in [
        (["--help"], COMMANDS),
        (["train", "--help"], ["RECIPE", "key=value", "--resume"]),
        (["resume", "--help"], ["RUN_DIR", "key=value"]),
    ]:
        ended = subprocess.run([GSPO, *arguments], capture_output=True, text=True, check=True)
        assert [word for word in named if word.lower() not in ended.stdout.lower()] == []


def test_the_version_names_what_a_report_of_a_fault_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert re.fullmatch(rf"gspo {version('gspo')}, Python 3\.\d+\.\d+\S*, torch {re.escape(version('torch'))}\n", shown)


@needs("argcomplete")
@pytest.mark.parametrize(
    ("line", "words"), [("gspo re", {"resume", "report"}), ("gspo train a.yaml actor.clip_l", {"actor.clip_low="})]
)
def test_a_shell_completes_commands_and_keys_of_a_recipe(
    line: str, words: set[str], environment: dict[str, str]
) -> None:
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": "answer", "_ARGCOMPLETE_IFS": "\n"}
    subprocess.run([sys.executable, "-m", "gspo"], env={**environment, **asked}, check=True)
    assert {word.strip() for word in Path("answer").read_text().splitlines()} == words


def test_a_name_of_any_letters_is_written_and_found_where_the_locale_has_none(environment: dict[str, str]) -> None:
    directory = "ünï名"
    given = {**environment, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    given.pop("PYTHONUTF8", None)
    Path("tiny.yaml").write_text(f"{TINY.read_text()}output_dir: {directory}\n")
    command = [sys.executable, "-m", "gspo"]
    words = (["check", "tiny.yaml"], ["show", directory], ["check", "tiny.yaml", f"output_dir={directory}x"])
    done = [subprocess.run([*command, *each], env=given, capture_output=True, text=True, check=False) for each in words]
    assert [each.returncode for each in done] == [0, 2, 0] and "no such directory" in done[1].stderr


def test_the_installed_command_trains_and_prints_plain_lines(environment: dict[str, str]) -> None:
    ended = subprocess.run([GSPO, "train", TINY], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert "\x1b" not in ended.stdout and "\r" not in ended.stdout
    assert len(re.findall(r"^step \d/2 .* reward ", ended.stdout, re.MULTILINE)) == 2
    for piece in ("pass@1", "before", "after", "runs/tiny/model", "AutoModelForCausalLM.from_pretrained"):
        assert piece in ended.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "missing: COMMAND"),
        ("train", "missing: RECIPE\n"),
        ("resume", "missing: RUN_DIR\n"),
        ("tarin x.yaml", "there is no command 'tarin' (choose from "),
        ("train x.yaml --new --resume", "not allowed with"),
        ("init --model m --data a.jsonl --data b.jsonl", "--data is given twice"),
        ("show runs/a --step x", "argument --step: 'x' is no whole number from 0 on"),
    ],
)
def test_what_is_no_command_shows_the_usage_with_exit_code_2(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: command line: ") and said in error and "fix: usage: gspo" in error


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("train --config base.yaml", "the recipe comes first: gspo train base.yaml"),
        ("check --config base.yaml", "the recipe comes first: gspo check base.yaml"),
        ("train base.yaml --steps 3", "keys follow the recipe as key.subkey=value; steps: here it is steps=3"),
        ("train base.yaml --steps=3", "here it is steps=3"),
        ("train --steps 3", "here it is steps=3"),
        ("train base.yaml --lr 1e-6", "lr: here it is actor.optimizer.lr"),
        ("train base.yaml --learning-rate=1e-6 seed=1", "learning_rate: here it is actor.optimizer.lr"),
        ("train base.yaml --actor.clip_low 1e-3", "here it is actor.clip_low=1e-3"),
        ("train base.yaml --use_vllm", "use_vllm: here it is rollout.engine"),
        ("train base.yaml --group_size 8", "group_size: did you mean rollout.group_size?"),
        ("show runs/a --steps 3", "see gspo show --help"),
        ("train -c base.yaml", "the recipe comes first: gspo train base.yaml"),
        ("train base.yaml --zzz", "see gspo train --help"),
    ],
)
def test_an_option_of_another_program_says_how_it_is_written_here(
    line: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    error = capsys.readouterr().err
    assert "there is no option '-" in error and fix in error.partition("fix: ")[2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train TINY queries.procedural=null queries.path=absent.jsonl", "queries.path: absent.jsonl: no such file"),
        ("check TINY reward=absent.py:f", "reward.0.function: absent.py: no such file"),
        ("train TINY model.path=./absent model.architecture=null model.tokenizer=null", "no such directory"),
        ("train TINY", "runs/tiny: this output directory exists"),
        ("train TINY --overwrite output_dir=runs", "runs: this is not a run's directory, so it is not overwritten"),
        ("resume absent", "absent: no such directory"),
        ("resume TINY", "this is a file or a checkpoint, not a run's directory"),
        ("resume runs/tiny/cold_start", "not a run's directory\n  fix: name the run: runs/tiny"),
        ("resume runs", "this is not a run's directory: it has no recipe.yaml\n  fix: there are: runs/tiny"),
        ("resume runs/tiny group_size=3", "command line: unknown key group_size"),
        ("show TINY", "fix: name the directory that a run has made"),
    ],
)
def test_a_cheap_mistake_is_one_message_before_anything_heavy_is_loaded(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("runs/tiny/cold_start").mkdir(parents=True)
    for name in ("recipe.yaml", "lock", "history.jsonl", "notes"):
        Path("runs/tiny", name).touch()
    Path("runs/tiny/recipe.yaml").write_text(dump_recipe(load_recipe(TINY)), encoding="utf-8")
    for name in ("recipe.yaml", "manifest.json"):
        Path("runs/tiny/cold_start", name).touch()

    def heavy() -> None:
        raise AssertionError("the heavy libraries are loaded")

    monkeypatch.setattr(cli, "_display", heavy)
    assert cli.main(line.replace("TINY", str(TINY)).split()) == 2
    assert said in capsys.readouterr().err


def test_what_a_command_reads_before_it_starts_loads_nothing_heavy(environment: dict[str, str]) -> None:
    code = """
import sys
import gspo.recipe.files, gspo.recipe.load, gspo.report.run_files, gspo.run.place
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_run_of_a_recipe_in_another_directory_is_resumed_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path.cwd()
    Path("sub").mkdir()
    Path("sub/own.py").write_text("def f(completions, **_):\n    return [1.0 for _ in completions]\n", encoding="utf-8")
    short = {"name": "own", "steps": 1, "reward": "own.py:f", "cold_start": {}, "evaluation": {"num_queries": 0}}
    tree = {**load_recipe(TINY).model_dump(mode="json"), **short}
    Path("sub/own.yaml").write_text(json.dumps(tree), encoding="utf-8")
    assert cli.main(["train", "sub/own.yaml"]) == 0
    Path("runs/own/own.py").write_text("raise ValueError\n", encoding="utf-8")  # beside the run's recipe: not meant
    monkeypatch.chdir(TINY.parent)
    assert cli.main(["resume", str(home / "runs/own"), "steps=2"]) == 0
    lines = (home / "runs/own/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["reward/mean"] for line in lines] == [1.0, 1.0]


def test_a_new_run_gets_a_number_or_takes_the_place_of_the_one_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    short = [str(TINY), "steps=1", "evaluation.num_queries=0", "cold_start.steps=0"]
    for options in ([], ["--new"], ["--overwrite", "seed=5"]):
        assert cli.main(["train", *short, *options]) == 0
    assert "new: this run is tiny-2, in runs/tiny-2\n" in capsys.readouterr().out
    assert sorted(path.name for path in Path("runs").iterdir()) == ["tiny", "tiny-2", "tiny.old-1"]
    assert load_recipe("runs/tiny/recipe.yaml").seed == 5
    assert Path("runs/tiny-2/report.html").is_file() and Path("runs/tiny/report.html").is_file()
    assert cli.main(["report", "runs"]) == 0
    assert "3 runs" in Path("compared.html").read_text(encoding="utf-8").partition("</title>")[0]


def test_the_paths_in_the_summary_can_be_copied_whole(capsys: pytest.CaptureFixture[str]) -> None:
    output = Path("a_directory_with_a_long_name_" * 3, "[bold]run")
    assert cli.main(["train", str(TINY), f"output_dir={output}", "steps=1"]) == 0
    assert f'AutoModelForCausalLM.from_pretrained("{output / "model"}")' in capsys.readouterr().out


def test_a_diagnosis_is_printed_once_at_the_end_of_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(TINY), "steps=1", "rollout.max_new_tokens=1", "evaluation.num_queries=0"]) == 0
    assert capsys.readouterr().out.count("100% of responses cut off at rollout.max_new_tokens") == 1


def test_a_reader_that_has_enough_ends_a_check_without_a_traceback() -> None:
    process = subprocess.Popen([GSPO, "check", TINY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = [line for line in process.stderr if "so far" not in line]  # what a slow machine waits for
    assert said == [] and process.wait() == 128 + signal.SIGPIPE
