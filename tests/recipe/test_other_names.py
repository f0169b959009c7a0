"""What an unknown key says: the name here of a key of TRL, verl or AReaL, or of another section; else a near one."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from gspo.errors import UserError
from gspo.recipe.faults import hint
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import recipe_keys

ROOT = Path(__file__).parents[2]
NAMES: Mapping[str, str] = yaml.safe_load((ROOT / "src/gspo/recipe/other_names.yaml").read_text())
PAIRS = [(name, meant) for meant, names in NAMES.items() for name in names.split()]
GUIDES = "".join((ROOT / f"docs/guides/from_{library}.md").read_text() for library in ("trl", "verl", "areal"))
ANYBODYS = {"epochs", "lr", "lora", "max_tokens", "clip_ratio", "fp16", "enable_thinking", "warmup_ratio"}
ANYBODYS |= {"eval_strategy", "vllm_mode", "overlong_buffer", "turn_separator"}
KEYS = {name for name, _ in recipe_keys()}
SECTIONS = {name.partition(".")[0] for name in KEYS if "." in name}


def fault(tmp_path: Path, *overrides: str, text: str = "") -> str:
    path = tmp_path / "base.yaml"
    path.write_text(f"name: a\nsteps: 1\nmodel: {{path: x}}\n{text}", encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_recipe(path, overrides)
    return str(error.value).replace(str(path), "base.yaml")


def keys_of(text: str) -> set[str]:
    names = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", re.sub(r"\S+\.(md|py|jsonl)\b", "", text))
    return {name for name in names if name.partition(".")[0] in SECTIONS}


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("group_size=8", "did you mean rollout.group_size?"),
        ("actor.group_size=8", "did you mean rollout.group_size?"),
        ("rollout.num_generations=8", "here it is rollout.group_size"),
        ("actor.eps_clip=0.2", "here it is actor.clip_low and actor.clip_high"),
        ("actor.clip_ratio_low=0.2", "here it is actor.clip_low"),
        ("num_iterations=2", "here it is actor.epochs"),
        ("epochs=2", "not here: steps = epochs × rows ÷ rollout.queries_per_step"),
        ("report_to=wandb", "here it is report.trackers"),
        ("learning_rate=1e-6", "here it is actor.optimizer.lr"),
        ("actor.learning_rate=1e-6", "here it is actor.optimizer.lr"),
        ("beta=0.04", "here it is actor.kl.coefficient"),
        ("bf16=true", "here it is model.dtype: bfloat16"),
        ("lora.r=8", "here it is model.lora"),
        ("lora_rank=8", "here it is model.lora.rank"),
        ("model.lora.dropout=0.1", "known: rank, alpha, targets, rslora, dora, quantize"),
        ("actor.kl_coef=0.1", "here it is actor.kl.coefficient, with actor.kl.place: reward"),
        ("rollout.n=8", "here it is rollout.group_size"),
        ("rollout.max_completion_length=64", "here it is rollout.max_new_tokens"),
        ("actor_rollout_ref.actor.clip_ratio_low=0.2", "here it is actor.clip_low"),
        ("gconfig.n_samples=4", "here it is rollout.group_size"),
        ("temperature=1", "did you mean rollout.temperature or evaluation.temperature?"),
        ("optimizer.lr=1", "did you mean actor.optimizer.lr or cold_start.optimizer.lr"),
        ("cold_start.optimizer.beta=0.9", "did you mean cold_start.optimizer.betas?"),  # misspelt, not TRL's beta
        ("actor.clip_lwo=1", "did you mean actor.clip_low?"),
        ("zzz=1", "known: name, seed, steps"),
    ],
)
def test_an_unknown_key_is_blamed_on_the_command_line_and_names_the_one_that_is_meant(
    override: str, meant: str, tmp_path: Path
) -> None:
    text = fault(tmp_path, override)
    assert text.startswith(f"command line: unknown key {override.partition('=')[0]}: ") and meant in text


def test_each_key_of_an_unknown_section_of_the_file_is_a_fault_of_the_file(tmp_path: Path) -> None:
    text = fault(tmp_path, text="data: {train_batch_size: 64, max_response_length: 9}\nlora: {r: 8}\natcor: {lr: 1}\n")
    for line in (
        "base.yaml: cannot be used:",
        "unknown key data.train_batch_size: here it is rollout.queries_per_step",
        "unknown key data.max_response_length: here it is rollout.max_new_tokens",
        "unknown key lora.r: here it is model.lora",
        "unknown key atcor: did you mean actor?",
    ):
        assert line in text


def test_a_fault_is_blamed_on_the_file_or_on_the_command_line_and_all_are_listed_at_once(tmp_path: Path) -> None:
    assert fault(tmp_path, "steps=0").startswith("command line: steps: should be greater than 0")
    assert fault(tmp_path, "seed=1", text="group_size: 8\n").startswith("base.yaml: unknown key group_size")
    assert fault(tmp_path, "actor.mini_batches=3").startswith("command line: actor.mini_batches (3) must divide")
    assert fault(tmp_path, "seed=1", text="actor: {mini_batches: 3}\n").startswith("base.yaml: actor.mini_batches (3)")
    assert fault(tmp_path, "model={}").startswith("command line: give exactly one of model.path")
    both = fault(tmp_path, "rollout.group_size=0", "reward+=5", text="seed: -1\n").splitlines()
    assert both[0] == "base.yaml and command line: cannot be used:"
    assert [line.split(": ")[0:2] for line in both[1:]] == [
        ["  base.yaml", "seed"],
        ["  command line", "rollout.group_size"],
        ["  command line", "reward.0"],
    ]


def test_an_objective_of_another_library_is_not_taken_for_one_that_sounds_like_it(tmp_path: Path) -> None:
    assert "actor.surrogate: vespo: not here: VESPO is an objective of its own" in fault(
        tmp_path, "actor.surrogate=vespo"
    )


@pytest.mark.parametrize(("name", "meant"), PAIRS, ids=[name for name, _ in PAIRS])
def test_a_name_leads_to_keys_that_exist_and_a_guide_says_the_same(name: str, meant: str) -> None:
    assert name not in KEYS and keys_of(meant) <= KEYS
    assert meant in (hint(name) or "") or "=" in name
    last = re.compile(rf"`[^`]*(?<![a-z_]){name.rpartition('.')[2]}(?![a-z_])[^`]*`|^ {name} $")
    rows = [row for row in GUIDES.splitlines() if row.startswith("| ") and last.search(row.split("|")[1])]
    if "=" in name or name in ANYBODYS:
        return
    assert rows, "no guide has a row for it"
    keys = set() if meant.startswith("not here") else keys_of(meant.partition("(")[0])
    assert any(keys <= keys_of(row) for row in rows), rows


def test_a_name_is_in_the_table_once() -> None:
    assert len({name for name, _ in PAIRS}) == len(PAIRS)
