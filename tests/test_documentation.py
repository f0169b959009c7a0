"""What the documents say is so: links lead somewhere, metrics and keys are the code's, commands and examples run."""

import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.needs import require
from tests.small_model import save_small_model

from gspo import cli
from gspo.metrics.definitions import families, general_name
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.run.console import Display
from gspo.train import train

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TINY = Path(__file__).with_name("tiny.yaml")
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
OUTSIDE: Sequence[str] = runpy.run_path(str(DOCS / "outside_pages.py"))["OUTSIDE"]  # pages of the site, too
NOT_RUN = ("git clone", "cd ", "source ", "pip install", "apt install", "python -m venv")  # they set a machine up
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
        text = path.read_text(encoding="utf-8")
        for fence in re.finditer(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
            _, language, info, body = fence.groups()
            title = re.search(r'title="([^"]+)"', info)
            line = text.count("\n", 0, fence.start()) + 1
            place = path.relative_to(ROOT).as_posix()
            yield Block(place, line, language, title[1] if title else None, textwrap.dedent(body))


BLOCKS = list(blocks())
SHOWN = {
    command.partition("  #")[0].strip(): block.place
    for block in reversed(BLOCKS)
    if block.language in ("bash", "sh", "console") and block.title is None
    for command in block.text.replace("\\\n", " ").splitlines()
    if shlex.split(command, comments=True)
}  # each command once, however many documents have it
OF_RECIPES = {f"gspo {command} recipes/{path.name}": path.name for path in RECIPES for command in ("check", "train")}
COMMANDS = [(place, command) for command, place in {**OF_RECIPES, **SHOWN}.items()]
EXAMPLES = [block for block in BLOCKS if block.language == "python" and block.title is None]


def words_of(command: str) -> list[str]:
    """The command without comment, prompt, environment and the path of the environment's programs."""
    words = shlex.split(command.removeprefix("$ "), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return [words[0].removeprefix(".venv/bin/"), *words[1:]]


INITS = [words_of(command)[1:] for _, command in COMMANDS if command.startswith("gspo init --")]


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


@pytest.fixture(scope="module")
def readers_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader who follows the documents has: the recipes, the files shown, a model, GSM8K, what `init` writes."""
    path = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "recipes", path / "recipes")
    subprocess.run([sys.executable, str(path / "recipes" / "programs.py")], check=True)
    for block in BLOCKS:
        if block.title is not None and block.title != "rewards.py":
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
    with as_the_reader(path):
        for words in INITS:
            assert cli.main(words) == 0
    for block in BLOCKS:
        if block.title == "rewards.py":  # the reader's own instead of what `init` wrote
            (path / block.title).write_text(block.text, encoding="utf-8")
    return path


def models_named(directory: Path) -> set[str]:
    """Every model.path of the recipes and the commands, unless a run of the documents makes it."""
    named = {word.partition("=")[2] for _, command in COMMANDS for word in words_of(command) if "model.path=" in word}
    named |= {words[words.index("--model") + 1] for words in INITS}
    recipes = [*(directory / "recipes").rglob("*.yaml"), *directory.glob("*.yaml")]
    named |= {recipe.model.path for recipe in map(load_recipe, recipes) if recipe.model.path}
    return {name for name in named if not name.startswith("runs/") and not Path(name).is_absolute()}


@contextlib.contextmanager
def as_the_reader(directory: Path) -> Iterator[None]:
    with contextlib.chdir(directory), pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", directory / "cache")
        patch.syspath_prepend(directory)  # as a program that lies there has it
        yield


def run_gspo(words: Sequence[str], directory: Path) -> int:
    command, recipe_path, *overrides = words
    if command == "init":  # where it has not been run yet
        shutil.rmtree("elsewhere", ignore_errors=True)
        return cli.main([*words, "--out", "elsewhere"])
    if command == "import":  # of a file that the reader has
        shutil.copy(ROOT / "tests" / "importing" / "files" / f"areal_{recipe_path}", recipe_path)
        return cli.main(list(words))
    if command == "launch":
        return cli.main(list(words))
    if command not in ("train", "check") or recipe_path.startswith("-"):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        return int(ended.value.code or 0)
    options = overrides[-2:] if "--processes" in overrides else []
    recipe = load_recipe(recipe_path, overrides[: len(overrides) - len(options)])
    if any(reward.function == "code" for reward in recipe.reward):
        require("sandbox")
    if command == "train" and recipe.run_dir.exists():
        assert directory in recipe.run_dir.resolve().parents
        shutil.rmtree(recipe.run_dir)  # of the same recipe with other overrides
    return cli.main([command, recipe_path, *overrides, *shrunk(recipe)])


def check_make(words: Sequence[str]) -> int:
    """The targets must exist, and the `gspo` commands that they stand for be among those that are run here."""
    dry = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert dry.returncode == 0, dry.stderr
    for line in dry.stdout.splitlines():
        program, _, rest = line.strip().partition(" ")
        if Path(program).name == "gspo" and not rest.startswith("get "):  # which downloads, and is tested by itself
            assert f"gspo {rest}".strip() in [command for _, command in COMMANDS]
    return dry.returncode


def run_python(words: Sequence[str]) -> int:
    script, *options = words
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, str(ROOT / script), *options, "--quick"]
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.returncode


@pytest.mark.parametrize(("place", "command"), COMMANDS, ids=[f"{place} {command}" for place, command in COMMANDS])
def test_a_command_of_the_documents_runs(place: str, command: str, readers_directory: Path) -> None:
    program, *words = words_of(command)
    with as_the_reader(readers_directory):
        if program == "gspo":
            assert run_gspo(words, readers_directory) == 0
        elif program == "make":
            assert check_make(words) == 0
        elif program == "python" and words[0].endswith(".py"):
            assert run_python(words) == 0
        else:
            assert shlex.join([program, *words]).startswith(NOT_RUN), f"{place}: a command of no known kind"


def test_the_gsm8k_recipe_trains_on_files_as_its_comment_says(readers_directory: Path) -> None:
    comment = (ROOT / "recipes" / "gsm8k.yaml").read_text(encoding="utf-8").partition("\nname:")[0]
    overrides = re.findall(r"[\w.]+=[\w./]+", comment)
    assert "queries.path=train.jsonl" in overrides
    with as_the_reader(readers_directory):
        assert run_gspo(["train", "recipes/gsm8k.yaml", *overrides, "name=files"], readers_directory) == 0


@pytest.mark.parametrize("block", EXAMPLES, ids=[block.place for block in EXAMPLES])
def test_an_example_in_python_runs(block: Block, readers_directory: Path) -> None:
    for word, part in (("gspo.sandbox", "sandbox"), ("compile_cpp", "g++")):
        if word in block.text:
            require(part)
    path = readers_directory / "example.py"
    path.write_text(block.text, encoding="utf-8")
    with as_the_reader(readers_directory):
        runpy.run_path(str(path))


def test_the_readme_is_short_and_shows_how_to_start() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    in_the_readme = [block for block in BLOCKS if block.document == "README.md"]
    assert {"make train", "make test", "gspo check my_run.yaml"} <= SHOWN.keys()
    assert {"my_prompts.jsonl", "rewards.py", None} == {block.title for block in in_the_readme}
    assert any(block in EXAMPLES for block in in_the_readme)


def test_the_readmes_figure_names_files_of_the_package() -> None:
    (figure,) = [block.text for block in BLOCKS if block.document == "README.md" and "──▶" in block.text]
    _, rooms, files, *_ = [re.split(r"\s{2,}", line.strip()) for line in figure.splitlines()]
    assert len(rooms) == len(files) == 6
    for room, file in zip(rooms, files, strict=True):
        assert (ROOT / "src" / "gspo" / room / file).is_file(), room + file


def test_the_walk_through_a_step_names_what_is_there() -> None:
    text = (DOCS / "concepts" / "training_step.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "gspo"
    for path in re.findall(r"`([a-z_]+/[\w/]+\.py)`", text):
        assert (package / path).is_file(), path
    named = re.findall(r"`(?:\w+\.)?(\w+)`(?: \(|,? in )`([\w/]+\.py)`", text)
    assert len(named) > 20
    for name, path in named:
        assert re.search(rf"(def|class) {name}\b", (package / path).read_text(encoding="utf-8")), f"{path}: {name}"
    (listed,) = [block.text for block in BLOCKS if block.document.endswith("training_step.md")]
    for line in listed.splitlines():
        room, *files = line.split()
        for file in files if room.endswith("/") else [room, *files]:
            assert (package / (room if room.endswith("/") else "") / file).is_file(), line


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("place", dict.fromkeys([*(path.relative_to(ROOT).as_posix() for path in DOCUMENTS), *OUTSIDE]))
def test_every_link_of_a_document_leads_somewhere(place: str) -> None:
    document = ROOT / place
    for target, anchor in re.findall(r"\]\(([^()#:\s]*)(#[^()\s]*)?\)", document.read_text(encoding="utf-8")):
        path = document.parent / target if target else document
        assert path.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor[1:] in anchors(path), f"{document.name} links to {target}{anchor}"


def test_the_site_has_every_page() -> None:
    def pages(nav: object) -> Iterator[str]:
        if isinstance(nav, str):
            yield nav
        for part in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
            yield from pages(part)

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    documents = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert set(pages(site["nav"])) == documents | set(OUTSIDE)


def test_the_reference_is_the_codes() -> None:
    made: Mapping[str, str] = runpy.run_path(str(DOCS / "make_reference.py"))["pages"]()
    for name, text in made.items():
        written = (DOCS / "reference" / name).read_text(encoding="utf-8")
        assert written == text, f"{name} is old; run: python docs/make_reference.py"


EXPERTS = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16"
SUMS = "task: chain_sum, max_terms: 3, min_digits: 1, max_digits: 1, size: 32"
REWARDS = "[{function: exact_match}, {function: format, options: {pattern: '<answer>'}}]"
RUNS = {  # together, every part that logs numbers of its own
    "experts, several rewards, evaluations": [
        f"model.architecture={{model_type: qwen3_moe, hidden_size: 32, {EXPERTS}}}",
        f"reward={REWARDS}",
        "evaluation.every=1",
        "evaluation.samples=2",
        "phases=[{from_step: 2, rollout: {temperature: 0.9}}]",
        "checkpoint.every=1",
        f"hooks=[{Path(__file__).parent / 'run' / 'logging_hook.py'}:log]",
        "actor.routing_replay=engine",
        "actor.router_aux_loss=0.01",
    ],
    "value model, KL in the loss, a reward that logs": [
        *("actor.surrogate=ppo", "actor.kl.coefficient=0.01", "rollout.overlong=penalty", "reward=LOGS:right"),
        *(
            "rollout.tools=[calculator]",
            "rollout.history=append",
            "teacher.prompt='{prompt} {answer}'",
            "actor.observation_loss=0.1",
        ),
        "queries.procedural=null",
        f"queries.sources={{sums: {{procedural: {{{SUMS}}}}}}}",
    ],
    "dynamic sampling, corrections, KL in the reward": [
        *("rollout.dynamic_sampling=true", "queries.sampler=difficulty"),
        "rollout.overlong=mask",
        "rollout.top_p=0.9",
        "actor.clip_fraction=0.15",
        "actor.correction=tis",
        "actor.opsm_delta=0.01",
        "actor.advantage=leave_one_out",
        "actor.kl={coefficient: 0.01, estimator: k1, place: reward}",
        *("rollout.max_staleness=1", "rollout.in_turn=true"),
    ],
}


@pytest.fixture(scope="module")
def everything_on(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    """The keys that the runs have written, by file."""
    written: dict[str, set[str]] = {}
    logs = tmp_path_factory.mktemp("guide") / "logs.py"
    logs.write_text(next(block.text for block in BLOCKS if block.title == logs.name), encoding="utf-8")
    for overrides in RUNS.values():
        path = tmp_path_factory.mktemp("everything") / "run"
        overrides = [f"output_dir={path}", "steps=1", *(given.replace("LOGS", str(logs)) for given in overrides)]
        train(load_recipe(TINY, overrides), display=Display(quiet=True))
        files = {name: path / name for name in ("metrics.jsonl", "cold_start.jsonl", "history.jsonl")}
        files |= {name: path / name / "step_000001.jsonl" for name in ("rollouts", "evaluation")}
        for name, file in files.items():
            lines = file.read_text(encoding="utf-8").splitlines()
            written.setdefault(name, set()).update(key for line in lines for key in json.loads(line))
    return written


def test_every_key_of_a_run_is_defined(everything_on: Mapping[str, set[str]]) -> None:
    metrics = {name for family in families() for name in family.metrics}
    text = (DOCS / "reference" / "run_directory.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`([^`\n]+)`", text))
    for file, keys in everything_on.items():
        defined = metrics if file == "metrics.jsonl" else files
        assert {general_name(key) for key in keys} - defined == set(), file


def test_no_metric_is_defined_that_no_run_logs(everything_on: Mapping[str, set[str]]) -> None:
    logged = {general_name(key) for key in everything_on["metrics.jsonl"]}
    not_logged = {name for family in families() for name in family.metrics} - logged
    assert {name for name in not_logged if not name.startswith("engine/")} == set()  # those need a server
