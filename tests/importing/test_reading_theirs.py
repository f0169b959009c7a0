"""What is read of another library's file: interpolations, overrides, the shell; one message for what is wrong."""

import re
from pathlib import Path

import pytest

from gspo.cli import main
from gspo.errors import UserError
from gspo.importing.draft import Computed
from gspo.importing.read import read_theirs
from gspo.importing.scripts import shell_words

FILES = Path(__file__).with_name("files")
AREAL = "actor: {path: x, lr: '${gconfig.n}'}\ngconfig: {n: 4, m: '${actor.lr}', t: 'a-${.n}', o: '${oc.env:HOME}'}\n"


def read(folder: Path, text: str, *overrides: str, name: str = "a.yaml") -> dict[str, object]:
    (folder / name).write_text(text, encoding="utf-8")
    return read_theirs(folder / name, overrides)[1]


def test_interpolations_have_the_value_of_their_key_after_overrides(tmp_path: Path) -> None:
    assert read(tmp_path, AREAL)["gconfig.m"] == 4
    given = read(tmp_path, AREAL, "+gconfig.n=5", "++actor.new.key=1e-4", "actor.path='${gconfig.n}-b'")
    assert (given["actor.lr"], given["gconfig.m"], given["actor.new.key"]) == (5, 5, 1e-4)
    assert given["actor.path"] == "5-b"
    assert all(isinstance(given[key], Computed) for key in ("gconfig.t", "gconfig.o"))


def test_an_interpolation_of_a_key_that_areal_has_a_default_for_is_that(tmp_path: Path) -> None:
    assert read(tmp_path, "actor: {n: '${gconfig.n_samples}'}\ngconfig: {}\n")["actor.n"] == 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("n=4\npython3 -m verl.trainer.main_ppo a.b=$n \\\n  +c=${n} $@", ["a.b=4", "+c=4"]),
        ("python -m verl.trainer.main_ppo a=$((2 * (3 + 1))) b='$x' c=\"$HOME/d\"", ["a=8", "b=$x", "c=~/d"]),
        ("python3 -m verl.trainer.main_ppo a=${X:-7} b=${1:-vllm} | tee log=1", ["a=7", "b=vllm"]),
        ('A=(\n  a=1  # why\n  b="x y"\n)\npython3 -m verl.trainer.main_ppo "${A[@]}" c=2', ["a=1", "b=x y", "c=2"]),
        ("P=\"\n a=1 \\\n b=2\"\npython3 -m verl.trainer.main_ppo $P c=['d','e']", ["a=1", "b=2", "c=[d,e]"]),
        ("python3 -m verl.trainer.main_ppo a=1 # b=2\nc=3", ["a=1"]),
    ],
)  # fmt: skip
def test_words_are_those_that_the_shell_passes_on(script: str, words: list[str]) -> None:
    assert shell_words(script) == words


def test_what_only_the_shell_knows_is_computed() -> None:
    words = shell_words("d=$(date +%Y)\npython3 -m verl.trainer.main_ppo a=$UNSET b=x-$d c=$((n * 2)) d=1")
    assert words == ["a=$UNSET", "b=x-$(date +%Y)", "c=$((n * 2))", "d=1"]
    assert [isinstance(word, Computed) for word in words] == [True, True, True, False]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "a: 1\n", "no configuration of AReaL, verl or TRL"),
        ("a.yaml", "a: [1\n", "not valid YAML: line 2"),
        ("a.yaml", "name: a\nsteps: 1\nmodel: {path: x}\n", "this is a recipe already"),
        ("a.yaml", "actor: {a: '${b.c}'}\ngconfig: {}\n", "${b.c}: there is no key b.c"),
        ("a.yaml", "actor: {a: '${actor.b}', b: '${actor.a}'}\ngconfig: {}\n", "circular interpolation: actor.b →"),
        ("a.py", "print(1)\n", "a Python file without GRPOConfig"),
        ("a.py", "x = (\n", "not valid Python: line 1"),
        ("a.sh", "echo hello: world\n", "no configuration of AReaL, verl or TRL"),
        ("a.yaml", "actor: {path: x}\nrollout: {group_size: 4}\n", "no configuration of AReaL, verl or TRL"),
        ("a.yaml", "actor: {path: x}\ngconfig: {}\ntrain_dataset: {batch_size: x}\n", "of no kind that AReaL takes"),
        ("a.sh", "python3 -m verl.trainer.main_ppo data.train_batch_size=[1]\n", "of no kind that verl takes"),
        ("a.yaml", "actor: {ppo_n_minibatches: 0, path: x}\ngconfig: {}\n", "AReaL takes: 0 mini-batches"),
        ("a.json", '{"num_generations": 0}', "a value is of no kind that TRL takes"),
        ("a.yaml", "actor: {path: x}\ngconfig: {n_samples: 1}\n", "rollout.group_size must be at least 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_one_message(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert main(["import", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: ") and message in error
    assert re.search(r"\n  fix: \S", error)


def test_an_override_that_is_none_and_a_file_that_is_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not of the form key=value"):
        read(tmp_path, AREAL, "gconfig")
    with pytest.raises(UserError, match="no such file"):
        read_theirs(tmp_path / "none.yaml")


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_command_that_wants_a_recipe_says_how_to_import(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = FILES / "areal_gsm8k_grpo.yaml"
    assert main([command, str(path), "+actor.importance_sampling_level=sequence"]) == 2
    words = f"gspo import {path} +actor.importance_sampling_level=sequence -o recipe.yaml"
    assert f"this is a file of AReaL, not a recipe\n  fix: {words}\n" in capsys.readouterr().err


def test_the_recipe_is_written_beside_the_list_and_never_over_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["import", str(FILES / "verl_gspo.sh"), "-o", str(tmp_path / "recipe.yaml")]
    assert main(words) == 0
    said, text = capsys.readouterr().out, (tmp_path / "recipe.yaml").read_text()
    assert "translated:" in said and text.startswith("# Made of verl's verl_gspo.sh by: gspo import verl_gspo.sh\n")
    assert main(words) == 2
    assert "cannot be written: File exists" in capsys.readouterr().err
    assert main(words[:2]) == 0
    assert capsys.readouterr().out == text
