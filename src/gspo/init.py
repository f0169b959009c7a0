"""`gspo init`: a recipe and a reward file for own data, with the reason beside each value.

Sizes follow from the data, the model's shape and this machine's memory, by formulas: they are a start.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from keyword import iskeyword
from pathlib import Path
from typing import Any

import yaml

from gspo.errors import UserError
from gspo.recipe.load import make_recipe
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import QueriesConfig
from gspo.recipe.yaml_text import Dumper, read_yaml

# The columns in which published data has the right answer, by precedence; matched without regard to case.
ANSWER_COLUMNS = (
    *("answer", "ground_truth", "final_answer", "expected_answer", "gold", "target", "label", "solution"),
    *("reference", "expected", "output", "response", "completion"),
)
INSTRUCTIONS = {
    "math": r"Please reason step by step, and put your final answer within \boxed{}.",
    "exact_match": "End with your final answer, and nothing else, between <answer> and </answer>.",
}
_HAS_INSTRUCTION = re.compile(r"\\boxed|####|<answer>")
_NUMBER_OR_FORMULA = re.compile(r"[-−+]?[$€£]?\.?\d[\d,./]*\s?%?|.*\\[a-zA-Z]+.*|\$.+\$", re.DOTALL)
_MAX_LETTERS = 80  # of a right answer that is compared as text
_MIN_NEW_TOKENS = 16
_SHORT = 128  # tokens of a response, for which the paper's clip range is narrow
_GROUP_SIZE = 8
_TAKEN = ("completions", "columns", "prompts", "completion_ids", "float", "len", "zip", "str")  # in the templates
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_REPLAY = "\n  routing_replay: none # experts may differ between sampling and update: docs/concepts/experts.md"
_KEYS = re.compile(r"queries\.(prompt|config|split)|model\.path")

RECIPE = """\
# Written by gspo init; every key is in docs/reference/recipe.md
name: {name}
steps: {steps} # {epochs:.2g} epochs of the rows

model:
  path: {model} # {about_model}
  dtype: auto # {about_machine}

queries:
  path: {data} # {about_data}{queries}

rollout:
  queries_per_step: {queries_per_step}
  group_size: 8 # responses to each query; an advantage compares them
  max_new_tokens: {max_new_tokens} # {about_tokens}
  max_rows: {max_rows} # responses side by side; each takes about {row_bytes:,} bytes while sampling

reward:{reward}

actor:
  clip_low: {clip_low} # {about_clip}
  clip_high: {clip_high}
  mini_batches: {mini_batches} # optimiser steps for one rollout batch
  micro_batch_tokens: {micro_batch_tokens} # in one pass; each takes about {token_bytes:,} bytes in the update
  optimizer: {{lr: {lr}}} # for {num_parameters:,} parameters: docs/guides/models.md{experts}

evaluation:
  num_queries: {num_held_out} # {about_held_out}
"""
REWARDS = '''\
"""Reward functions of {name}.yaml. They get lists with an entry for each response, and return a number for each.

`None` in place of a number says that the function does not apply. `python rewards.py` runs the example at the end.
"""

# The columns of the data, with the first row's values:
{columns}


{function}'''
MEASURE = '''\
def contains_answer(completions, {parameters}**columns):
    """1.0 where the right answer is anywhere in the response: less strict than `{builtin}`, so it is only measured."""
    pairs = zip(completions, {answers})
    return [None if right in (None, "") else float({test}) for completion, right in pairs]


if __name__ == "__main__":
    assert contains_answer([{good}, {bad}], {arguments}) == [1.0, 0.0]
'''
UNWRITTEN = '''\
def score(completions, {parameters}**columns):
    """A number for each response: the higher, the better."""
    texts = [{text} for completion in completions]
    raise NotImplementedError("write here what makes a response good, and remove this line")
    return [float(len(text) < 200) for text in texts]


if __name__ == "__main__":
    good, bad = score([{good}, {bad}], {arguments})
    assert good > bad
'''


def init(
    data: str,
    model: str,
    *,
    out: Path = Path(),
    name: str | None = None,
    say: Callable[[str], object] = lambda _: None,
    **queries: str | None,
) -> list[str]:
    """Write NAME.yaml and rewards.py into the directory `out`; returns lines on what was read and what to run.

    `queries` are keys of that section: prompt, config and split. `say` is called with what is waited for next.
    Raises UserError, before anything is written, where a file exists and where data or model cannot be used.
    """
    name = name or re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data).stem).strip("-._") or "my-run"
    recipe_file, reward_file = out / f"{name}.yaml", out / "rewards.py"
    for file, fix in ((recipe_file, "--name NAME or --out DIRECTORY"), (reward_file, "--out DIRECTORY")):
        if os.path.lexists(file):
            raise UserError("this file exists, and none is overwritten", where=str(file), fix=f"add {fix}")
    given = {"path": data, **{key: value for key, value in queries.items() if value is not None}}
    smallest = {"rollout": {"queries_per_step": 1}, "actor": {"mini_batches": 1}, "evaluation": {"num_queries": 0}}
    draft = {"name": name, "steps": 1, "model": {"path": model}, "queries": given, **smallest}
    with _keys_as_options():
        values = _values(make_recipe(draft, where="gspo init"), out, say)
    texts = {recipe_file: RECIPE.format(**values), reward_file: REWARDS.format(**values)}
    make_recipe(read_yaml(texts[recipe_file], where=str(recipe_file)), where=str(recipe_file))
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            with file.open("x", encoding="utf-8") as stream:
                stream.write(text)
    except OSError as error:
        fix = "add --out DIRECTORY, one that you may write to"
        raise UserError(f"cannot be written: {error.strerror}", where=str(out), fix=fix) from None
    lines = [f"{label:<9} {values[f'about_{label}']}" for label in ("data", "model", "machine", "reward")]
    lines += [f"written   {recipe_file}, {reward_file}"]
    lines += [f"first     write the function score in {reward_file}"] if not values["builtin"] else []
    return [*lines, "", *(f"gspo {command} {shlex.quote(str(recipe_file))}" for command in ("check", "train"))]


@contextmanager
def _keys_as_options() -> Iterator[None]:
    """Errors within name the options of `gspo init` in place of a recipe's keys."""
    try:
        yield
    except UserError as error:
        parts = [error.what, error.where or "", error.fix or ""]
        what, where, fix = (_KEYS.sub(lambda key: f"--{key[1] or 'model'}", part) for part in parts)
        raise UserError(what, where=where, fix=fix) from None


def _values(draft: Recipe, out: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """What fills the templates: of the draft's data and model, and of this machine."""
    from gspo.model.load import load_config, load_tokenizer, max_positions
    from gspo.queries.source import load_rows
    from gspo.run.prepare import quiet_transformers

    quiet_transformers()
    data, model, queries = str(draft.queries.path), str(draft.model.path), draft.queries
    say(f"reading {data}")
    rows = load_rows(draft).train
    say(f"loading the tokenizer of {model}, and reading the prompts with it")
    config, tokenizer = load_config(draft.model), load_tokenizer(model)
    positions, reward = max_positions(config), _reward(rows, _path("rewards.py", out))
    rendered, system = _rendered(rows, tokenizer, queries, reward["builtin"], positions)
    lengths = [len(query.prompt_ids) for query in rendered]
    sizes = _sizes(config, max(lengths), positions, len({str(row.prompt) for row in rows}))
    split = queries.split if queries.split != "train" else None
    keys = {"config": queries.config, "split": split, "prompt": queries.prompt, "system": system}
    kind = "text" if isinstance(rows[0].prompt, str) else "chat"
    template = "with a chat template" if tokenizer.chat_template else "without a chat template"
    return {
        **reward,
        **sizes,
        "name": _yaml(draft.name),
        "epochs": sizes["steps"] * sizes["queries_per_step"] / (len(rows) - sizes["num_held_out"]),
        "model": _yaml(_path(model, out)),
        "about_model": f"{config.model_type}, {sizes['num_parameters']:,} parameters, {template}",
        "data": _yaml(_path(data, out)),
        "about_data": f"{len(rows):,} rows, {kind} prompts of {min(lengths):,} to {max(lengths):,} tokens",
        "queries": "".join(f"\n  {key}: {_yaml(value)}" for key, value in keys.items() if value is not None),
    }


def _path(path: str, out: Path) -> str:
    """The path as it was given if the recipe lies in the working directory; else, but for a hub id, an absolute one."""
    if out.resolve() == Path.cwd():
        return path
    return (
        str((out if path == "rewards.py" else Path()).absolute() / path)
        if path == "rewards.py" or Path(path).exists()
        else path
    )


def _yaml(text: Any) -> str:
    return yaml.dump(text, Dumper=Dumper, width=10**6, allow_unicode=True).removesuffix("...\n").strip()


def _rendered(
    rows: Sequence[Any], tokenizer: Any, queries: QueriesConfig, builtin: str, positions: int | None
) -> tuple[Sequence[Any], str | None]:
    """The rows as the model reads them, and a system message about the form of the answer where the model takes one."""
    from gspo.queries.render import render_all

    render = partial(render_all, rows, tokenizer, max_prompt_tokens=positions and positions - _MIN_NEW_TOKENS)
    system = None if _HAS_INSTRUCTION.search(str(rows[0].prompt)) else INSTRUCTIONS.get(builtin)
    with suppress(UserError):  # no chat template, one that takes no system message, or rows with their own
        return render(queries=queries.model_copy(update={"system": system})), system
    return render(queries=queries), None


def _sizes(config: Any, longest: int, positions: int | None, num_prompts: int) -> dict[str, Any]:
    """The numbers that depend on memory, on the lengths of prompts and on the number of rows.

    A response has a key and a value in each layer for each token, and three float32 copies of its logits. In the
    update, a token has about 17 numbers of the hidden size in each layer (arXiv 2205.05198, equation 2).
    """
    text, num_parameters = config.get_text_config(), _num_parameters(config)
    on_gpu, memory, machine = _machine()
    number_bytes, training_bytes = (2, 18 * num_parameters) if on_gpu else (4, 16 * num_parameters)
    if training_bytes > memory:
        machine += f"; training takes about {training_bytes / 2**30:,.0f} GiB: choose a smaller model"
    spare = max(memory - training_bytes, 0) // 2
    max_new_tokens = min(1024 if on_gpu else 256, (positions or 2**20) - longest)
    heads, head_size = text.num_attention_heads, getattr(text, "head_dim", None)
    token_cache = 2 * number_bytes * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads)
    row_bytes = token_cache * (head_size or text.hidden_size // heads) * (longest + max_new_tokens)
    row_bytes += 12 * text.vocab_size
    token_bytes = 17 * number_bytes * text.num_hidden_layers * text.hidden_size
    num_held_out = min(512 if on_gpu else 64, num_prompts // 10)
    queries_per_step = _power_of_two(num_prompts - num_held_out, 1, 64 if on_gpu else 8)
    few = "fewer than ten different prompts: give a file with others as evaluation.path"
    reads = f"prompts have up to {longest:,} tokens"
    is_short = max_new_tokens <= _SHORT
    return {
        "about_machine": machine,
        "num_parameters": num_parameters,
        "max_new_tokens": max_new_tokens,
        "about_tokens": reads if positions is None else f"{reads}; the model has {positions:,} positions",
        "max_rows": _power_of_two(spare // row_bytes, _GROUP_SIZE, 512),
        "row_bytes": row_bytes,
        "micro_batch_tokens": _power_of_two(spare // token_bytes, longest + max_new_tokens, 16_384 if on_gpu else 4096),
        "token_bytes": token_bytes,
        "num_held_out": num_held_out,
        "about_held_out": "held out of the rows" if num_held_out else few,
        "queries_per_step": queries_per_step,
        "mini_batches": min(4, queries_per_step),
        "steps": 200 if on_gpu else 20,
        "clip_low": "3e-3" if is_short else "3e-4",
        "clip_high": "4e-3" if is_short else "4e-4",
        "about_clip": "for short responses, as in recipes/arithmetic.yaml" if is_short else "the GSPO paper's range",
        "lr": "1e-6" if num_parameters >= 10**8 else "1e-5" if num_parameters >= 10**7 else "1e-4",
        "experts": _EXPERTS_KEY if any(getattr(text, name, None) for name in _EXPERTS) else "",
    }


def _num_parameters(config: Any) -> int:
    """Of a model of this configuration, without memory for the weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())


def _machine() -> tuple[bool, int, str]:
    """Whether there is a GPU, the bytes of memory there or here, and both in words."""
    import torch

    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        return True, gpu.total_memory, f"bfloat16 on {gpu.name} with {gpu.total_memory / 2**30:.0f} GiB"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return False, memory, f"float32 on a CPU, {torch.get_num_threads()} threads, {memory / 2**30:.0f} GiB; no GPU here"


def _power_of_two(most: int, low: int, high: int) -> int:
    """The largest power of two up to `most`, within the bounds."""
    return max(low, min(high, 1 << max(most.bit_length() - 1, 0)))


def _reward(rows: Sequence[Any], reward_path: str) -> dict[str, Any]:
    """The reward that fits the column with the right answer: a built-in one, or a function that is to be written."""
    is_text, first = isinstance(rows[0].prompt, str), rows[0].clean_columns
    column = next((name for wanted in ANSWER_COLUMNS for name in first if name.lower() == wanted), "")
    answers = [row.clean_columns.get(column) for row in rows]
    builtin, about = _builtin(column, answers)
    own = _yaml(f"{reward_path}:{'contains_answer' if builtin else 'score'}")
    lines = f"\n  - function: {own} # {about}"
    names = [name for name in first if name.isidentifier() and not iskeyword(name) and name not in _TAKEN]
    if builtin:
        options = f"\n    options: {{answer_column: {column}}}" if column != "answer" else ""
        lines = f"\n  - function: {builtin} # {about}{options}\n  - function: {own}\n    weight: 0 # measured only"
        names = [column]
    is_list, good, bad = any(isinstance(answer, list) for answer in answers), "It is 42.", "I do not know."
    example = (
        {name: _literal(first[name]) for name in names} if not builtin else {column: "['42']" if is_list else "'42'"}
    )
    text = "completion" if is_text else 'completion[-1]["content"]'
    values = {
        "builtin": builtin,
        "parameters": "".join(f"{name}, " for name in names),
        "answers": column,
        "text": text,
        "test": f"any(str(entry) in {text} for entry in right)" if is_list else f"str(right) in {text}",
        "good": _literal(good if is_text else [{"role": "assistant", "content": good}]),
        "bad": repr(bad if is_text else [{"role": "assistant", "content": bad}]),
        "arguments": ", ".join(f"{name}=[{value}] * 2" for name, value in example.items()),
    }
    shown = [f"#   {name!r}: {' '.join(repr(value).split())[:100]}" for name, value in first.items()]
    return {
        "reward": lines,
        "about_reward": f"{builtin or 'to be written'}: {about}",
        "columns": "\n".join(shown) or "#   (there is none besides the prompt)",
        "builtin": builtin,
        "function": (MEASURE if builtin else UNWRITTEN).format(**values),
    }


def _builtin(column: str, answers: Sequence[Any]) -> tuple[str, str]:
    """The built-in function that compares responses with such answers; empty if there is none. Why it is so."""
    if not column:
        return "", "no column looks like the right answer"
    entries = [entry for answer in answers for entry in (answer if isinstance(answer, list) else [answer])]
    texts = [text for entry in entries if entry is not None and (text := str(entry).strip())]
    if not texts:
        return "", f"column {column} is empty"
    num_numbers, is_list = sum(map(bool, map(_NUMBER_OR_FORMULA.fullmatch, texts))), len(entries) > len(answers)
    if num_numbers >= 0.9 * len(texts) and not is_list:
        return "math", f"{num_numbers:,} of {len(answers):,} rows have a number or a formula in column {column}"
    if max(map(len, texts)) <= _MAX_LETTERS and not any(isinstance(entry, Mapping) for entry in entries):
        return "exact_match", f"compares with the short texts in column {column}"
    return "", f"column {column} has texts of up to {max(map(len, texts)):,} letters, too long to be compared"


def _literal(value: Any) -> str:
    """The value as Python has it, if it is short and plain."""
    is_plain = isinstance(value, str | int | float | None) and len(repr(value)) <= _MAX_LETTERS
    return repr(value) if is_plain else "'…'"
