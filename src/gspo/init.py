"""`gspo init`: a recipe and a reward file for own data, with the reason beside each value.

Sizes follow from the data, the model's shape and this machine's memory, by formulas: they are a start.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
_ANSWERS = "answer ground_truth final_answer expected_answer gold target label solution reference output completion"
_ASKS_BOX = r"Please reason step by step, and put your final answer within \boxed{}."
_ASKS_TAG = "End with your final answer, {which}, between <answer> and </answer>."
_MAX_CHOICES = 10  # of right answers that are named to the model
_HAS_INSTRUCTION = re.compile(r"\\boxed|####|<answer>")
_NUMBER_OR_FORMULA = re.compile(r"[-−+]?[$€£]?\.?\d[\d,./]*\s?%?|.*\\[a-zA-Z]+.*|\$.+\$", re.DOTALL)
_MAX_LETTERS = 80  # of a right answer that is compared as text
_MIN_NEW_TOKENS = 16
_GROUP_SIZE = 8
_SHARE = 0.8  # of the memory that an estimate may fill
_ON_GPU = {"new_tokens": 1024, "queries": 64, "pass_tokens": 16_384, "held_out": 512, "steps": 200}  # at most
_ON_CPU = {"new_tokens": 256, "queries": 8, "pass_tokens": 4096, "held_out": 64, "steps": 20}
_CLIP = "clip_low: 3e-4 # the GSPO paper's range\n  clip_high: 4e-4"
_CLIP_OF_SHORT = "clip_low: 3e-3 # ten times the GSPO paper's range, for responses this short\n  clip_high: 4e-3"
_SHORT = 128  # tokens of a response
_REPLAY = "\n  routing_replay: none # experts: policy and engine are explained in docs/concepts/experts.md"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
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
  max_rows: {max_rows} # responses side by side; about {sampling:,.2g} GiB in all while sampling

reward:{reward}

actor:
  {clip}
  mini_batches: {mini_batches} # optimiser steps for one rollout batch
  micro_batch_tokens: {micro_batch_tokens} # in one pass; about {update:,.2g} GiB in all in the update
  optimizer: {{lr: {lr}}} # for {num_parameters:,} parameters: docs/guides/models.md{experts}

evaluation:
  num_queries: {num_held_out} # held out of the rows; evaluation.path: FILE gives others
"""
REWARDS = '''\
"""Reward functions of {name}.yaml; `python rewards.py` tries the example at the end.

A function gets lists with an entry for each response, and returns a number for each, or None where it does not apply.
"""

# The columns of the data, with the first row's values:{columns}


def {function}(completions, {parameters}**columns):
    """{meaning}"""
    texts = [{text} for completion in completions]
    {body}


if __name__ == "__main__":
    good, bad = {function}([{examples}], {arguments})
    assert good > bad
'''
_MEASURE = """\
rights = [right if isinstance(right, list) else [right] for right in {answers}]
    return [float(any(str(entry) in text for entry in right)) for text, right in zip(texts, rights)]"""
_TO_WRITE = 'raise NotImplementedError("return a number for each of the texts: what makes a response good?")'


def init(
    data: str,
    model: str | None,
    *,
    out: Path = Path(),
    name: str | None = None,
    answer: str | None = None,
    say: Callable[[str], object] = lambda _: None,
    **queries: str | None,
) -> list[str]:
    """Write NAME.yaml and rewards.py into the directory `out`; returns lines on what was read and what to run.

    `answer` names the column with the right answers, where none of the usual names does. `queries` are keys of that
    section: prompt, config and split. `say` is called with what is waited for next.
    Raises UserError, before anything is written, where a file exists and where data or model cannot be used.
    """
    if model is None:
        fix = "add --model DIR, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct; to see a run without one: make train"
        raise UserError("there is no model", where="gspo init", fix=fix)
    name = name or re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data).stem).strip("-._") or "my-run"
    recipe_file, reward_file = out / f"{name}.yaml", out / "rewards.py"
    for file, fix in ((recipe_file, "--name NAME or --out DIRECTORY"), (reward_file, "--out DIRECTORY")):
        if os.path.lexists(file):
            raise UserError("this file exists, and none is overwritten", where=str(file), fix=f"add {fix}")
    given = {"path": data, **{key: value for key, value in queries.items() if value is not None}}
    smallest = {"rollout": {"queries_per_step": 1}, "actor": {"mini_batches": 1}, "evaluation": {"num_queries": 0}}
    draft = {"name": name, "steps": 1, "model": {"path": model}, "queries": given, **smallest}
    try:
        values = _values(make_recipe(draft, where="gspo init"), out, answer, say)
    except UserError as error:  # of a recipe's keys
        parts = (error.what, error.where or "", error.fix or "")
        what, where, fix = (_KEYS.sub(lambda key: f"--{key[1] or 'model'}", part) for part in parts)
        raise UserError(what, where=where, fix=fix) from None
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
    lines += [f"first     write {values['function']} in {reward_file}"] if values["function"] == "score" else []
    return [*lines, "", *(f"gspo {command} {shlex.quote(str(recipe_file))}" for command in ("check", "train"))]


def _values(draft: Recipe, out: Path, answer: str | None, say: Callable[[str], object]) -> dict[str, Any]:
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
    is_here = out.resolve() == Path.cwd()  # else paths are absolute, but for hub ids
    data, model = (path if is_here or not Path(path).exists() else str(Path(path).absolute()) for path in (data, model))
    positions, (asks, reward) = max_positions(config), _reward(rows, answer, "" if is_here else f"{out.absolute()}/")
    rendered, instruction = _rendered(rows, tokenizer, queries, asks)
    lengths = [len(query.prompt_ids) for query in rendered]
    most = (positions or math.inf) - _MIN_NEW_TOKENS
    if num_too_long := sum(length > most for length in lengths):
        what = f"{num_too_long:,} prompts have more than {most:,} tokens, the longest {max(lengths):,}"
        fix = f"remove them, or give a model that reads more than {positions:,} tokens"
        raise UserError(what, where=data, fix=fix)
    sizes = _sizes(draft, config, max(lengths), len({str(row.prompt) for row in rows}))
    split = queries.split if queries.split != "train" else None
    keys = {"config": queries.config, "split": split, "prompt": queries.prompt, **instruction}
    kind = "text" if isinstance(rows[0].prompt, str) else "chat"
    template = "with a chat template" if tokenizer.chat_template else "without a chat template"
    return {
        **reward,
        **sizes,
        "name": _yaml(draft.name),
        "epochs": sizes["steps"] * sizes["queries_per_step"] / (len(rows) - sizes["num_held_out"]),
        "model": _yaml(model),
        "about_model": f"{config.model_type}, {sizes['num_parameters']:,} parameters, {template}",
        "data": _yaml(data),
        "about_data": f"{len(rows):,} rows, {kind} prompts of {min(lengths):,} to {max(lengths):,} tokens",
        "queries": "".join(f"\n  {key}: {_yaml(value)}" for key, value in keys.items() if value is not None),
    }


def _yaml(text: str) -> str:
    return yaml.dump(text, Dumper=Dumper, width=10**6, allow_unicode=True).removesuffix("...\n").strip()


def _rendered(
    rows: Sequence[Any], tokenizer: Any, queries: QueriesConfig, asks: str
) -> tuple[Sequence[Any], dict[str, str]]:
    """The rows as the model reads them, and the key that asks for the form of the answer, unless the rows do."""
    from gspo.queries.render import render_all

    is_asked = not asks or _HAS_INSTRUCTION.search(str(rows[0].prompt))
    for key in () if is_asked else ({"system": asks}, {"template": f"{{prompt}}\n{asks}\n"}):
        with suppress(UserError):  # no chat template, one that takes no system message, or rows with their own
            return render_all(rows, tokenizer, queries=queries.model_copy(update=key)), key
    return render_all(rows, tokenizer, queries=queries), {}


def _sizes(draft: Recipe, config: Any, longest: int, num_prompts: int) -> dict[str, Any]:
    """The numbers that depend on the model, the memory here, the longest prompt's tokens and the different prompts."""
    from gspo.model.load import max_positions
    from gspo.model.policy import device_of

    text, positions, device = config.get_text_config(), max_positions(config), device_of("auto")
    most = _ON_GPU if device.type == "cuda" else _ON_CPU
    new_tokens = min(most["new_tokens"], (positions or 2**20) - longest)
    num_held_out = min(most["held_out"], max(num_prompts // 10, int(num_prompts > 2)))
    queries_per_step = min(most["queries"], 1 << (num_prompts - num_held_out).bit_length() - 1)
    sizes: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "about_tokens": f"prompts have up to {longest:,} tokens{f' of {positions:,} positions' if positions else ''}",
        "num_held_out": num_held_out,
        "queries_per_step": queries_per_step,
        "mini_batches": min(4, queries_per_step),
        "steps": most["steps"],
        "clip": _CLIP_OF_SHORT if new_tokens <= _SHORT else _CLIP,
        "experts": _REPLAY if any(getattr(text, name, None) for name in _EXPERTS) else "",
    }
    sizes |= _fitted(draft, config, device, sizes, prompt_tokens=longest, pass_tokens=most["pass_tokens"])
    size = sizes["num_parameters"]
    return {**sizes, "lr": "1e-6" if size >= 10**8 else "1e-5" if size >= 10**7 else "1e-4"}


def _fitted(
    draft: Recipe, config: Any, device: Any, sizes: Mapping[str, int], *, prompt_tokens: int, pass_tokens: int
) -> dict[str, Any]:
    """The most rows and tokens of a pass, in powers of two, with which a run fits into the memory here."""
    from gspo.run.memory import available_bytes, memory_of

    rows, least, available = 512, prompt_tokens + sizes["max_new_tokens"], available_bytes(device)
    while True:
        rollout = {key: sizes[key] for key in ("queries_per_step", "max_new_tokens")} | {"max_rows": rows}
        actor = {"mini_batches": sizes["mini_batches"], "micro_batch_tokens": pass_tokens}
        own = {"rollout": draft.rollout.model_copy(update=rollout), "actor": draft.actor.model_copy(update=actor)}
        try:
            stages = memory_of(draft.model_copy(update=own), config, prompt_tokens=prompt_tokens, device=device)
        except Exception as error:  # transformers raises many kinds
            what, fix = f"no model can be made: {str(error)[:200]}", "give a causal language model"
            raise UserError(what, where=f"--model: {draft.model.path}", fix=fix) from None
        update, sampling = (sum(stages[stage].values()) for stage in ("in the update", "while sampling"))
        less_tokens, fewer_rows = (need > _SHARE * available for need in (update, sampling))
        if not (less_tokens and pass_tokens > least) and not (fewer_rows and rows > _GROUP_SIZE):
            break
        pass_tokens //= 2 if less_tokens else 1
        rows //= 2 if fewer_rows and rows > _GROUP_SIZE else 1
    is_gpu, gib = device.type == "cuda", 2**30
    about = f"{'bfloat16 on the GPU' if is_gpu else 'float32 on the CPU'} with {available / gib:.0f} GiB"
    too_large = f"; about {max(update, sampling) / gib:,.0f} GiB are needed: choose a smaller model"
    return {
        "about_machine": about + (too_large if max(update, sampling) > available else ""),
        "num_parameters": int(stages["in the update"]["weights"]) // (2 if is_gpu else 4),
        "max_rows": rows,
        "micro_batch_tokens": max(least, pass_tokens),
        "sampling": sampling / gib,
        "update": update / gib,
    }


def _reward(rows: Sequence[Any], answer: str | None, folder: str) -> tuple[str, dict[str, str]]:
    """What asks for an answer in the form that the reward reads, or nothing; and what fills the templates."""
    first, is_text = rows[0].clean_columns, isinstance(rows[0].prompt, str)
    usual = (name for wanted in _ANSWERS.split() for name in first if name.lower() == wanted)
    column = next(usual, "") if answer is None else answer
    if answer is not None and answer not in first:
        what = f"no column {answer!r}; the columns there are: {', '.join(first) or 'none'}"
        raise UserError(what, where=rows[0].id, fix="set --answer to the column with the right answers")
    builtin, about, asks = _builtin(column, [row.clean_columns.get(column) for row in rows])
    function = "contains_answer" if builtin else "score"
    own = f"function: {_yaml(f'{folder}rewards.py:{function}')}"
    named = f"\n    options: {{answer_column: {json.dumps(column, ensure_ascii=False)}}}"
    options = named if column != "answer" else ""
    verifier = f"\n  - function: {builtin} # {about}{options}\n  - {own}\n    weight: 0 # measured only"
    names = [name for name in ([column] if builtin else first) if name.isidentifier() and not iskeyword(name)]
    names = [name for name in names if name not in ("completions", "columns")]  # the function's own parameters
    plain = {name: value for name, value in first.items() if type(value) in (str, int, float)}
    example = {name: [value] * 2 for name, value in ({column: "42"} if builtin else plain).items()}
    texts = [text if is_text else [{"role": "assistant", "content": text}] for text in ("It is 42.", "I don't know.")]
    meaning = "1.0 where the right answer is anywhere in it, else 0.0." if builtin else "The higher, the better."
    return asks, {
        "function": function,
        "meaning": f"A number for each response. {meaning}",
        "body": _MEASURE.format(answers=column if names else f"columns[{column!r}]") if builtin else _TO_WRITE,
        "reward": verifier if builtin else f"\n  - {own} # {about}",
        "about_reward": f"{builtin or 'rewards.py'}: {about}",
        "columns": "".join(f"\n#   {name!r}: {' '.join(repr(value).split())[:100]}" for name, value in first.items()),
        "parameters": "".join(f"{name}, " for name in names),
        "text": "completion" if is_text else "completion[-1]['content']",
        "examples": ", ".join(map(repr, texts)),
        "arguments": f"**{example!r}",
    }


def _builtin(column: str, answers: Sequence[Any]) -> tuple[str, str, str]:
    """The built-in function that compares responses with such answers, or none; why; what asks for such an answer."""
    entries = [entry for answer in answers for entry in (answer if isinstance(answer, list) else [answer])]
    texts = [text for entry in entries if entry is not None and (text := str(entry).strip())]
    if not texts:
        usual = "no column has a usual name for the right answer; --answer COLUMN names one"
        return "", f"column {column!r} is empty" if column else usual, ""
    num_numbers, longest = sum(map(bool, map(_NUMBER_OR_FORMULA.fullmatch, texts))), max(map(len, texts))
    if num_numbers >= 0.9 * len(texts) and len(entries) == len(answers):
        about = f"{num_numbers:,} of {len(answers):,} rows have a number or a formula as {column!r}"
        return "math", about, _ASKS_BOX
    if longest > _MAX_LETTERS or any(isinstance(entry, Mapping) for entry in entries):
        return "", f"column {column!r} has texts of up to {longest:,} letters: no short text to compare with", ""
    is_choice = len(choices := sorted(set(texts))) <= min(_MAX_CHOICES, len(texts) // 3)
    which = f"one of {', '.join(choices)}" if is_choice else "and nothing else"
    about = f"column {column!r} has {len(choices):,} different short texts"
    return "exact_match", about, _ASKS_TAG.format(which=which)
