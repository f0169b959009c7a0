"""The command line as a shell sees it: help, overrides, exit codes, what is printed."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import pytest

from gspo import cli
from gspo.recipe.load import load_recipe

TINY = Path(__file__).with_name("tiny.yaml")
GSPO = Path(sys.executable).with_name("gspo")
COMMANDS = ("train", "resume", "check")
HEAVY = ("torch", "transformers", "datasets", "reasoning_gym", "pydantic", "rich")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gspo re", {"resume", "report"}),
        ("gspo train recipe.yaml actor.clip_l", {"actor.clip_low="}),
        ("gspo train recipe.yaml actor.clip", {"actor.clip_low=", "actor.clip_high=", "actor.clip_fraction="}),
        ("gspo report --o", {"--out"}),
    ],
)
def test_a_shell_completes_commands_options_and_keys_of_a_recipe(
    line: str, words: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argcomplete, answer = pytest.importorskip("argcomplete"), BytesIO()
    finder = partial(argcomplete.CompletionFinder(), exit_method=sys.exit, output_stream=answer)
    monkeypatch.setattr(argcomplete, "autocomplete", finder)
    for name, value in {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli.main([])
    assert {word.strip() for word in answer.getvalue().decode().split("\x0b")} == words


def test_the_installed_command_trains_and_prints_plain_lines(environment: dict[str, str]) -> None:
    ended = subprocess.run([GSPO, "train", TINY], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert "\x1b" not in ended.stdout and "\r" not in ended.stdout
    assert len(re.findall(r"^step \d/2 .* reward ", ended.stdout, re.MULTILINE)) == 2
    for piece in ("pass@1", "before", "after", "runs/tiny/model", "AutoModelForCausalLM.from_pretrained"):
        assert piece in ended.stdout


def test_without_a_command_or_a_recipe_the_usage_is_shown_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["train"], ["resume"], ["tarin", "x.yaml"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        assert "usage: gspo" in capsys.readouterr().err


def test_overrides_are_taken_with_or_without_a_plus_and_the_last_one_holds() -> None:
    overrides = ["+steps=1", "rollout.group_size=2", "rollout.group_size=3", "evaluation.num_queries=0"]
    assert cli.main(["train", str(TINY), *overrides]) == 0
    written = load_recipe("runs/tiny/recipe.yaml")
    assert (written.steps, written.rollout.group_size) == (1, 3)


def test_an_override_in_the_style_of_an_option_is_refused_with_the_right_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", str(TINY), "--steps=3"]) == 2
    error = capsys.readouterr().err
    assert "--steps=3" in error and "key.subkey=value" in error


def test_the_paths_in_the_summary_can_be_copied_whole(capsys: pytest.CaptureFixture[str]) -> None:
    output = Path("a_directory_with_a_long_name_" * 3, "[bold]run")
    assert cli.main(["train", str(TINY), f"output_dir={output}", "steps=1"]) == 0
    assert f'AutoModelForCausalLM.from_pretrained("{output / "model"}")' in capsys.readouterr().out


def test_a_reader_that_has_enough_ends_a_check_without_a_traceback() -> None:
    process = subprocess.Popen([GSPO, "check", TINY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE
