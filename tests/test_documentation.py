"""What the documents say is so: every metric is defined, every command and every example runs."""

import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gspo import cli
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.run.console import Display
from gspo.train import train

ROOT = Path(__file__).parents[1]
TINY = Path(__file__).with_name("tiny.yaml")
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = ("git clone", "cd ", "source ", "pip install", "python -m venv")  # they set a machine up
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GSM8K_CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]
---
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    title: str | None  # the file it shows
    text: str

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


def blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            language, info, body = found.groups()
            title = re.search(r'title="([^"]+)"', info) or re.match(r"(?:#|//) ([\w./-]+\.\w+)\n", body)
            line = text.count("\n", 0, found.start()) + 1
            yield Block(path.name, line, language, title[1] if title else None, body)


BLOCKS = list(blocks())
COMMANDS = [
    (block.place, command)
    for block in BLOCKS
    if block.language in ("bash", "sh", "console") and block.title is None
    for command in block.text.replace("\\\n", " ").splitlines()
    if shlex.split(command, comments=True)
]
EXAMPLES = [block for block in BLOCKS if block.language == "python" and block.title is None]


def words_of(command: str) -> list[str]:
    """The command without comment, prompt, environment and the path of the environment's programs."""
    words = shlex.split(command.removeprefix("$ "), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]


def shrunk(recipe: Recipe) -> list[str]:
    """Overrides that make the recipe's run a short one; a value that is small already stays."""
    rollout, parts = recipe.rollout, min(recipe.actor.mini_batches, 2)
    wanted: dict[str, int] = {
        "steps": 1,
        "cold_start.steps": min(recipe.cold_start.steps, 2),
        "evaluation.num_queries": min(recipe.evaluation.num_queries, 4),
        "rollout.queries_per_step": min(rollout.queries_per_step, 4),
        "rollout.group_size": 2,
        "rollout.max_new_tokens": min(rollout.max_new_tokens, 8),
        "actor.mini_batches": parts,
    }
    if recipe.queries.procedural is not None:
        wanted |= {"queries.procedural.size": 64}
    return [f"{key}={value}" for key, value in wanted.items()]


def gsm8k_rows(number: int) -> str:
    rows = [
        {"question": f"Tom has {n} pens and buys {n}. How many?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"}
        for n in range(1, number + 1)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def save_small_model(path: Path) -> None:
    """An untrained chat model that reads any text, at the path where a reader would have a real one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)
    shape = {**(load_recipe(TINY).model.architecture or {}), "max_position_embeddings": 2048}
    config = AutoConfig.for_model(**{**shape, "vocab_size": len(tokens), "eos_token_id": 0, "bos_token_id": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="module")
def readers_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader who follows the documents has: the recipes, the files shown, a model, GSM8K."""
    path = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "recipes", path / "recipes")
    for block in BLOCKS:
        if block.title is not None:
            (path / block.title).parent.mkdir(parents=True, exist_ok=True)
            (path / block.title).write_text(block.text, encoding="utf-8")
    gsm8k = path / "openai" / "gsm8k"  # where `datasets` looks before it asks the hub
    gsm8k.mkdir(parents=True)
    (gsm8k / "README.md").write_text(GSM8K_CARD, encoding="utf-8")
    for place in (gsm8k, path):
        for name, number in (("train.jsonl", 12), ("test.jsonl", 6)):
            if not (place / name).exists():
                (place / name).write_text(gsm8k_rows(number), encoding="utf-8")
    for name in models_named(path):
        if not (path / name).exists():
            save_small_model(path / name)
    return path


def models_named(directory: Path) -> set[str]:
    """Every model.path of the recipes and the commands, unless a run of the documents makes it."""
    named = {word.partition("=")[2] for _, command in COMMANDS for word in words_of(command) if "model.path=" in word}
    recipes = [*(directory / "recipes").rglob("*.yaml"), *directory.glob("*.yaml")]
    named |= {recipe.model.path for recipe in map(load_recipe, recipes) if recipe.model.path}
    return {name for name in named if not name.startswith("runs/") and not Path(name).is_absolute()}


@contextlib.contextmanager
def as_the_reader(directory: Path) -> Iterator[None]:
    with contextlib.chdir(directory), pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", directory / "cache")
        yield


def run_gspo(words: Sequence[str], directory: Path) -> int:
    command, recipe_path, *overrides = words
    if command not in ("train", "check") or recipe_path.startswith("-"):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        return int(ended.value.code or 0)
    recipe = load_recipe(recipe_path, overrides)
    if command == "train" and recipe.run_dir.exists():
        assert directory in recipe.run_dir.resolve().parents
        shutil.rmtree(recipe.run_dir)  # of the same command in another document
    return cli.main([command, recipe_path, *overrides, *shrunk(recipe)])


def run_make(words: Sequence[str], directory: Path) -> int:
    """The targets must exist; a `gspo` command they stand for is run, shrunk."""
    dry = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert dry.returncode == 0, dry.stderr
    for line in dry.stdout.splitlines():
        program, _, rest = line.partition(" ")
        if Path(program).name == "gspo":
            assert run_gspo(shlex.split(rest), directory) == 0
    return dry.returncode


def run_python(words: Sequence[str]) -> int:
    script, *options = words
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, str(ROOT / script), *options, "--quick"]
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.returncode


def test_the_documents_exist_and_have_commands_and_examples() -> None:
    assert (ROOT / "README.md").is_file() and (ROOT / "docs" / "metrics.md").is_file()
    in_the_readme = [command for place, command in COMMANDS if place.startswith("README.md")]
    assert {"make train", "make test"} <= set(in_the_readme)
    assert any(words_of(command)[0] == "gspo" for command in in_the_readme)
    assert any(block.document == "README.md" for block in EXAMPLES)
    assert {block.title for block in BLOCKS if block.title}, "the README shows no file"


@pytest.mark.parametrize(("place", "command"), COMMANDS, ids=[f"{place} {command}" for place, command in COMMANDS])
def test_a_command_of_the_documents_runs(place: str, command: str, readers_directory: Path) -> None:
    program, *words = words_of(command)
    with as_the_reader(readers_directory):
        if program == "gspo":
            assert run_gspo(words, readers_directory) == 0
        elif program == "make":
            assert run_make(words, readers_directory) == 0
        elif program == "python" and words[0].endswith(".py"):
            assert run_python(words) == 0
        else:
            assert shlex.join([program, *words]).startswith(NOT_RUN), f"{place}: a command of no known kind"


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_recipe_is_checked_and_trains_where_its_model_and_data_are(path: Path, readers_directory: Path) -> None:
    with as_the_reader(readers_directory):
        for command in ("check", "train"):
            assert run_gspo([command, f"recipes/{path.name}"], readers_directory) == 0


def test_the_gsm8k_recipe_trains_on_files_as_its_comment_says(readers_directory: Path) -> None:
    comment = (ROOT / "recipes" / "gsm8k.yaml").read_text(encoding="utf-8").partition("\nname:")[0]
    overrides = re.findall(r"[\w.]+=[\w./]+", comment)
    assert "queries.path=train.jsonl" in overrides
    with as_the_reader(readers_directory):
        assert run_gspo(["train", "recipes/gsm8k.yaml", *overrides, "name=files"], readers_directory) == 0


@pytest.mark.parametrize("block", EXAMPLES, ids=[block.place for block in EXAMPLES])
def test_an_example_in_python_runs(block: Block, readers_directory: Path) -> None:
    path = readers_directory / "example.py"
    path.write_text(block.text, encoding="utf-8")
    with as_the_reader(readers_directory):
        runpy.run_path(str(path))


def test_every_file_that_a_document_links_to_exists() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_path_of_the_readmes_tree_exists() -> None:
    (tree,) = [block.text for block in BLOCKS if block.document == "README.md" and "src/gspo/" in block.text]
    parent = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            parent = ROOT
        assert (parent / name).exists(), name
        if name == "src/gspo/":
            parent = ROOT / name


EXPERTS = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16"
REWARDS = "[{function: reasoning_gym}, {function: format, options: {pattern: '<answer>'}}]"
RUNS = {  # together, every part that logs numbers of its own
    "experts, several rewards, evaluations": [
        f"model.architecture={{model_type: qwen3_moe, hidden_size: 32, {EXPERTS}}}",
        f"reward={REWARDS}",
        "evaluation.every=1",
        "checkpoint.every=1",
        "actor.routing_replay=engine",
        "actor.router_aux_loss=0.01",
    ],
    "value model, KL in the loss": ["actor.surrogate=ppo", "actor.kl.coefficient=0.01", "rollout.overlong=penalty"],
    "dynamic sampling, corrections, KL in the reward": [
        "rollout.dynamic_sampling=true",
        "rollout.overlong=mask",
        "actor.clip_fraction=0.15",
        "actor.correction=tis",
        "actor.opsm_delta=0.01",
        "actor.advantage=leave_one_out",
        "actor.kl={coefficient: 0.01, estimator: k1, place: reward}",
    ],
}


@pytest.fixture(scope="module")
def everything_on(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    """The keys that the runs have written, by file."""
    found: dict[str, set[str]] = {}
    for overrides in RUNS.values():
        path = tmp_path_factory.mktemp("everything") / "run"
        train(load_recipe(TINY, [f"output_dir={path}", *overrides]), display=Display(quiet=True))
        files = {name: path / name for name in ("metrics.jsonl", "cold_start.jsonl", "history.jsonl")}
        files["rollouts"] = path / "rollouts" / "step_000001.jsonl"
        for name, file in files.items():
            lines = file.read_text(encoding="utf-8").splitlines()
            found.setdefault(name, set()).update(key for line in lines for key in json.loads(line))
    return found


def general_name(key: str) -> str:
    key = re.sub(r"^evaluation/[^/]+/", "evaluation/<set>/", key)
    key = re.sub(r"^evaluation/<set>/[^/]+/mean$", "evaluation/<set>/<function>/mean", key)
    return re.sub(r"^reward/[^/]+/(mean|seconds)$", r"reward/<function>/\1", key)


def test_every_key_of_a_run_is_defined_in_the_glossary(everything_on: Mapping[str, set[str]]) -> None:
    defined = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    for file, keys in everything_on.items():
        assert {general_name(key) for key in keys} - defined == set(), file


def test_the_glossarys_table_defines_nothing_that_no_run_logs(everything_on: Mapping[str, set[str]]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    defined = set(re.findall(r"^\| `([a-z_]+/[^`]+)` \|", text, re.MULTILINE))
    assert defined - {general_name(key) for key in everything_on["metrics.jsonl"]} == set()
