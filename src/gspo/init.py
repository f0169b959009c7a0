"""`gspo init`: a recipe and a reward file for own data, with the reason beside each value.

Sizes follow from the data, the model's shape and this machine's memory, by formulas: they are a start.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from keyword import iskeyword
from pathlib import Path
from typing import Any

import yaml

from gspo.errors import UserError, writing
from gspo.recipe.load import make_recipe
from gspo.recipe.schema import Recipe
from gspo.recipe.yaml_text import Dumper, read_yaml
from gspo.reward.builtin import math
from gspo.reward.functions import MAX_TRIED
from gspo.reward.marks import gold_answer

# The columns in which published data has the right answer, by precedence; matched without regard to case.
_ANSWERS = "answer ground_truth final_answer expected_answer gold target label solution reference output completion"
_ASKS_BOX = r"Please reason step by step, and put your final answer within \boxed{}."
_ASKS_TAG = "End with your final answer, {which}, between <answer> and </answer>."
_MAX_CHOICES = 10  # of right answers that are named to the model
_HAS_INSTRUCTION = re.compile(r"\\boxed|####|<answer>")
_MATHEMATICAL = re.compile(r"[-−+]?[$€£]?\.?\d[\d,./]*\s?%?$|.*\\[a-zA-Z]|\$.+\$$", re.DOTALL)
_MAX_LETTERS = 80  # of a right answer that is compared as text
_MIN_NEW_TOKENS = 16
_GROUP_SIZE = 8
_SHARE = 0.8  # of the memory that an estimate may fill
_ON_GPU = {"new_tokens": 1024, "queries": 64, "pass_tokens": 16_384, "held_out": 512, "steps": 200}  # at most
_ON_CPU = {"new_tokens": 256, "queries": 8, "pass_tokens": 4096, "held_out": 64, "steps": 60}
_CLIP_FRACTION = "\n  clip_fraction: 0.15 # of the tokens are clipped, which scales both"
_KEYS = re.compile(r"queries\.(prompt|config|split)|model\.path")

RECIPE = """\
# Written by gspo init; every key is in docs/reference/recipe.md
name: {name}
steps: {steps} # gspo check says how many epochs that is

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
  clip_low: 3e-4 # the paper's, for thousands of tokens
  clip_high: 4e-4{clip_fraction}
  mini_batches: {mini_batches} # optimiser steps for one rollout batch
  micro_batch_tokens: {micro_batch_tokens} # in one pass; about {update:,.2g} GiB in all in the update
  optimizer: {{lr: {lr}}} # for {num_parameters:,} parameters; 1e-6 is for billions

evaluation:
  num_queries: {num_held_out} # held out of the rows; evaluation.path: FILE gives others
"""
REWARDS = '''\
"""Reward functions for {name}.yaml, as docs/guides/rewards.md has them; `gspo check` tries those that it names."""

# The columns of the data, with the first row's values:{columns}


def score(completions, {parameters}**columns):
    """A number for each response: the higher, the better; None where the function does not apply."""
    texts = [{text} for completion in completions]
    raise NotImplementedError("return a number for each of the texts: what makes a response good?")
'''


def init(
    data: str,
    model: str,
    *,
    out: Path = Path(),
    name: str | None = None,
    answer: str | None = None,
    **queries: str | None,
) -> list[str]:
    """Write NAME.yaml and rewards.py into the directory `out`; returns lines on what was read and what to run.

    Where there is a rewards.py, it is rewards_NAME.py.

    `answer` names the column with the right answers, where none of the usual names does. `queries` are keys of that
    section: prompt, config and split. Raises UserError before anything is written.
    """
    name = name or re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data).stem).strip("-._") or "my-run"
    recipe_file, reward_file = out / f"{name}.yaml", out / "rewards.py"
    if os.path.lexists(reward_file):  # of another recipe
        reward_file = out / f"rewards_{name}.py"
    for file in (recipe_file, reward_file):
        if os.path.lexists(file):
            fix = "add --out DIRECTORY or --name NAME"
            raise UserError("this file exists, and none is overwritten", where=str(file), fix=fix)
    given = {"path": data, **{key: value for key, value in queries.items() if value is not None}, "overlong": "filter"}
    draft = {"name": name, "steps": 1, "model": {"path": model}, "queries": given, "actor": {"mini_batches": 1}}
    draft |= {"rollout": {"queries_per_step": 1, "max_new_tokens": _MIN_NEW_TOKENS}, "evaluation": {"num_queries": 0}}
    try:
        values = _values(make_recipe(draft, where="gspo init"), reward_file, answer)
    except UserError as error:  # of a recipe's keys
        parts = (error.what, error.where or "", error.fix or "")
        what, where, fix = (_KEYS.sub(lambda key: f"--{key[1] or 'model'}", part) for part in parts)
        raise UserError(what, where=where, fix=fix) from None
    texts = {recipe_file: RECIPE.format(**values), reward_file: REWARDS.format(**values)}
    recipe = make_recipe(read_yaml(texts[recipe_file], where=str(recipe_file)), where=str(recipe_file))
    values["about_time"] = _about_time(recipe, values)
    with writing(out, fix="add --out DIRECTORY, one that you may write to"):
        out.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    labels = ("data", "model", "machine", "disk", "time", "reward")
    lines = [f"{label:<9} {values[f'about_{label}']}" for label in labels]
    lines += [f"written   {recipe_file}, {reward_file}"]
    lines += [f"first     write score in {reward_file}"] if not values["builtin"] else []
    return [*lines, "", *(f"gspo {command} {shlex.quote(str(recipe_file))}" for command in ("check", "train"))]


def _values(draft: Recipe, reward_file: Path, answer: str | None) -> dict[str, Any]:
    """Return what fills the templates: of the draft's data and model, and of this machine."""
    from gspo.model.inputs import quiet_transformers
    from gspo.model.load import load_config, load_tokenizer, max_positions
    from gspo.queries.source import load_rows, render_rows

    quiet_transformers()
    data, model, queries = str(draft.queries.path), str(draft.model.path), draft.queries
    rows = load_rows(draft)
    config, tokenizer, first = load_config(draft.model), load_tokenizer(model), rows.train[0]
    asks, reward = _reward(rows.train, answer, reward_file.name)
    render = partial(render_rows, tokenizer=tokenizer, max_positions=max_positions(config))
    rendered, instruction = render(rows, recipe=draft).train, dict[str, str]()
    if asks and not _HAS_INSTRUCTION.search(str(first.prompt)):
        ids = {query.id for query in rendered}
        fitting = replace(rows, train=tuple(row for row in rows.train if row.id in ids))
        for wanted in ({"system": asks}, {"template": f"{{prompt}}\n{asks}\n"}):
            recipe = draft.model_copy(update={"queries": queries.model_copy(update={**wanted, "overlong": "error"})})
            with suppress(UserError):  # no chat template, one without system messages, rows with one, or no room
                rendered, instruction = render(fitting, recipe=recipe).train, wanted
                break
    lengths = [len(query.prompt_ids) for query in rendered]
    sizes = _sizes(draft, config, max(lengths), len({str(row.prompt) for row in rows.train}))
    if reward_file.parent.resolve() != Path.cwd():  # then paths are absolute, but for hub ids
        data, model = (str(Path(path).absolute()) if Path(path).exists() else path for path in (data, model))
    keys = {"config": queries.config, "prompt": queries.prompt, **instruction}
    keys |= {"split": queries.split} if queries.split != "train" else {}
    keys |= {"overlong": "filter"} if len(rendered) < len(rows.train) else {}  # more will be: a response needs room
    left_out = f", {len(rows.train) - len(rendered):,} of them too long" if len(rendered) < len(rows.train) else ""
    of_lengths = f"{min(lengths):,} to {max(lengths):,}"
    kind = "text" if isinstance(first.prompt, str) else "chat"
    template = "with a chat template" if tokenizer.chat_template else "without a chat template"
    return {
        **reward,
        **sizes,
        "config": config,
        "prompt_tokens": sum(lengths) / len(lengths),
        "name": _yaml(draft.name),
        "model": _yaml(model),
        "data": _yaml(data),
        "queries": "".join(f"\n  {key}: {_yaml(value)}" for key, value in keys.items() if value is not None),
        "about_model": f"{config.model_type}, {sizes['num_parameters']:,} parameters, {template}",
        "about_data": f"{len(rows.train):,} rows{left_out}, {kind} prompts of {of_lengths} tokens",
    }


def _about_time(recipe: Recipe, values: Mapping[str, Any]) -> str:
    from gspo.model.policy import device_of, dtype_of
    from gspo.run.minutes import measured_speed, time_line, work_of

    held_out = recipe.rollout.model_copy(update={"group_size": recipe.evaluation.samples})
    device, dtype = device_of(recipe.model.device), dtype_of(recipe.model)
    work = work_of(recipe, values["config"], values["prompt_tokens"], dtype.itemsize)
    line = time_line(recipe, work, measured_speed(device, dtype), [(int(values["num_held_out"]), held_out)])
    return line or "not computed for a small model: its first steps say more"


def _yaml(text: str) -> str:
    return yaml.dump(text, Dumper=Dumper, width=10**6, allow_unicode=True).removesuffix("...\n").strip()


def _sizes(draft: Recipe, config: Any, longest: int, num_prompts: int) -> dict[str, Any]:
    """The numbers that depend on the model, the memory here, the longest prompt's tokens and the different prompts."""
    from gspo.model.load import max_positions
    from gspo.model.policy import device_of
    from gspo.run.memory import available_bytes, disk_line, memory_of

    positions, device = max_positions(config), device_of("auto")
    is_gpu, available = device.type == "cuda", available_bytes(device)
    most = _ON_GPU if is_gpu else _ON_CPU
    num_held_out = min(most["held_out"], max(num_prompts // 10, int(num_prompts > 2)))
    queries_per_step = min(most["queries"], 1 << (num_prompts - num_held_out).bit_length() - 1)
    new_tokens = min(most["new_tokens"], (positions or 2**20) - longest)
    sizes: dict[str, Any] = {
        "steps": most["steps"],
        "num_held_out": num_held_out,
        "queries_per_step": queries_per_step,
        "mini_batches": min(4, queries_per_step),
        "max_new_tokens": new_tokens,
        "max_rows": 512,
        "micro_batch_tokens": max(longest + new_tokens, most["pass_tokens"]),
    }

    def parts(stage: str) -> Mapping[str, float]:
        sections = {"rollout": draft.rollout.model_copy(update=sizes), "actor": draft.actor.model_copy(update=sizes)}
        try:
            return memory_of(draft.model_copy(update=sections), config, prompt_tokens=longest, device=device)[stage]
        except Exception as error:  # transformers raises many kinds
            what, fix = f"no model can be made: {str(error)[:200]}", "give a causal language model"
            raise UserError(what, where=f"--model: {draft.model.path}", fix=fix) from None

    least_of = {"micro_batch_tokens": longest + new_tokens, "max_rows": _GROUP_SIZE}
    for key, stage in {"micro_batch_tokens": "in the update", "max_rows": "while sampling"}.items():
        while sum(parts(stage).values()) > _SHARE * available and sizes[key] > least_of[key]:
            sizes[key] = max(least_of[key], sizes[key] // 2)
        sizes[stage.split()[-1]] = sum(parts(stage).values()) / 2**30
    num_parameters = int(parts("in the update")["weights"]) // (2 if is_gpu else 4)
    needed, (disk, has_room) = max(sizes["update"], sizes["sampling"]), disk_line(draft, config)
    about = f"{'bfloat16 on the GPU' if is_gpu else 'float32 on the CPU'} with {available / 2**30:.0f} GiB"
    too_large = f"; about {needed:,.0f} GiB are needed: choose a smaller model"
    return sizes | {
        "num_parameters": num_parameters,
        "clip_fraction": _CLIP_FRACTION * (sizes["mini_batches"] > 1),  # which one update does not have
        "lr": "1e-6" if num_parameters >= 10**9 else "1e-5" if num_parameters >= 10**7 else "1e-4",
        "about_disk": disk + ("" if has_room else ": too little room"),
        "about_machine": about + (too_large if needed * 2**30 > available else ""),
        "about_tokens": f"prompts have up to {longest:,} tokens{f' of {positions:,} positions' if positions else ''}",
    }


def _reward(rows: Sequence[Any], answer: str | None, file: str) -> tuple[str, dict[str, str]]:
    """Return what asks for an answer in the form that the reward reads, or nothing; and what fills the templates."""
    first = rows[0].clean_columns
    usual = (name for wanted in _ANSWERS.split() for name in first if name.lower() == wanted)
    column = next(usual, "") if answer is None else answer
    if answer is not None and answer not in first:
        what = f"no column {answer!r}; the columns there are: {', '.join(first) or 'none'}"
        raise UserError(what, where=rows[0].id, fix="set --answer to the column with the right answers")
    builtin, about, asks = _builtin(column, [row.clean_columns.get(column) for row in rows])
    quoted = json.dumps(column, ensure_ascii=False)
    options = "" if column == "answer" else f"\n    options: {{answer_column: {quoted}}}"
    entry = f"- function: {file}:score # "
    verifier = f"\n  - function: {builtin} # {about}{options}\n  # {entry}one of your own, once it is written"
    names = [name for name in first if name.isidentifier() and not iskeyword(name)]
    return asks, {
        "builtin": builtin,
        "reward": verifier if builtin else f"\n  {entry}{about}",
        "about_reward": f"{builtin or file}: {about}",
        "columns": "".join(f"\n#   {name!r}: {' '.join(repr(value).split())[:100]}" for name, value in first.items()),
        "parameters": "".join(f"{name}, " for name in names if name not in ("completions", "columns")),
        "text": "completion" if isinstance(rows[0].prompt, str) else "completion[-1]['content']",
    }


def _builtin(column: str, answers: Sequence[Any]) -> tuple[str, str, str]:
    """The built-in function that compares responses with such answers, or none; why; what asks for such an answer."""
    entries = [entry for answer in answers for entry in (answer if isinstance(answer, list) else [answer])]
    texts = [text for entry in entries if entry is not None and (text := gold_answer(str(entry)).strip())]
    if not texts:
        usual = "your own function; for a built-in one, --answer COLUMN names the column with the right answers"
        return "", f"column {column!r} is empty" if column else usual, ""
    tried, longest = texts[:: -(-len(texts) // MAX_TRIED)], max(map(len, texts))
    rights = math([""] * len(tried), [f"\\boxed{{{text}}}" for text in tried], answer=tried)
    num_numbers = sum(right == 1 and bool(_MATHEMATICAL.match(text)) for text, right in zip(tried, rights, strict=True))
    if num_numbers >= 0.9 * len(tried) and len(entries) == len(answers):
        about = f"{num_numbers:,} of {len(tried):,} rows have a number or a formula as {column!r}"
        return "math", about, _ASKS_BOX
    if any(isinstance(entry, Mapping) for entry in entries):
        return "", f"column {column!r} has mappings: no text to compare with", ""
    if longest > _MAX_LETTERS:
        return "", f"column {column!r} has texts of up to {longest:,} letters: no short text to compare with", ""
    is_choice = len(choices := sorted(set(texts))) <= min(_MAX_CHOICES, len(texts) // 3)
    which = f"one of {', '.join(choices)}" if is_choice else "and nothing else"
    about = f"column {column!r} has {len(choices):,} different short texts"
    return "exact_match", about, _ASKS_TAG.format(which=which)
