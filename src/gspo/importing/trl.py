"""The translation of TRL's GRPOConfig and GRPOTrainer; trl.yaml has the keys that need no more than a word."""

import ast
import math
from typing import Any

from gspo.importing.draft import (
    FILL_IN,
    WHERE,
    Draft,
    Line,
    Theirs,
    line,
    mini_batches,
    model_line,
    ratio_notes,
    rows_of,
    short,
    slug,
    steps_line,
)

_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr")


def translate(theirs: Theirs) -> Draft:
    """The lines that need more than one key, or another number; and what TRL's file cannot do."""
    get = theirs.value
    batches = _batches(theirs)
    updates = batches[1].value * get("num_iterations")
    lines = [*batches, *_run(theirs, batches[0].value, updates), *_data(theirs), *_reward(theirs), *_turns(theirs)]
    lines += _often(theirs, updates)
    wanted = _pieces(theirs)[1] * get("num_iterations")
    notes = ratio_notes(get("importance_sampling_level"), wanted, batches[0].value)
    if get("use_vllm") and get("vllm_importance_sampling_correction") and not _corrects(theirs):
        mode = get("vllm_importance_sampling_mode")
        notes.append(
            f"TRL's {mode} bounds the product over a response; with rollout.engine: vllm the nearest is "
            "actor.correction=geometric_mask, and the embedded engine needs none"
        )
    if get("loss_type") == "cispo" and get("epsilon_high") is None:
        notes.append(
            "cispo without epsilon_high caps every weight at epsilon, 0.2 in TRL: the published range is written"
        )
    if "num_processes" not in theirs.given:
        notes.append("accelerate sets the number of processes; one is assumed: with 8, gspo import … num_processes=8")
    own = {"per_device_train_batch_size", "learning_rate", "num_generations", "max_completion_length"}
    if theirs.path.suffix == ".py" and own.isdisjoint(theirs.given):
        notes.append("arguments of the script's command line are added as key=value")
    return Draft(lines=tuple(lines), said=_said(theirs), notes=tuple(notes))


def _pieces(theirs: Theirs) -> tuple[int, int, tuple[str, ...]]:
    """Responses in a rollout batch, optimiser steps on it, and the keys that say so."""
    get = theirs.value
    device, gathered = get("per_device_train_batch_size") * get("num_processes"), get("gradient_accumulation_steps")
    keys: tuple[str, ...] = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    whole, steps = get("generation_batch_size"), get("steps_per_generation")
    keys += tuple(key for key in ("generation_batch_size", "steps_per_generation") if get(key))
    steps = steps or (max(whole // device, 1) if whole else gathered)
    return device * max(steps, gathered), max(steps // gathered, 1), keys


def _batches(theirs: Theirs) -> list[Line]:
    responses, wanted, keys = _pieces(theirs)
    queries = max(responses // theirs.value("num_generations"), 1)
    note = f"{responses} responses"
    return [
        line("rollout.queries_per_step", queries, *keys, "num_generations", note=note),
        mini_batches(wanted, queries, keys[1:2] + keys[3:]),
    ]


def _run(theirs: Theirs, queries: int, updates: int) -> list[Line]:
    get, data = theirs.value, _data_set(theirs)
    most = max(get("max_steps") or 0, 0) // updates
    ends = ("max_steps",) if most else ("num_train_epochs",)
    rows = None if most else rows_of(data.get("path"))[0]
    steps = steps_line(most=most, epochs=get("num_train_epochs"), rows=rows, queries=queries, origins=ends)
    name = slug(str(get("output_dir") or theirs.path.stem).rstrip("/").rpartition("/")[2])
    named = line("name", name, "output_dir") if get("output_dir") else line("name", name, note="that of the file")
    ratio = get("warmup_ratio")
    warmup = get("warmup_steps") or 0
    if warmup < 1:  # transformers takes what is below 1 for a part of all steps
        warmup = math.ceil((warmup or ratio or 0) * steps.value * updates)
    origin = "warmup_ratio" if ratio and not get("warmup_steps") else "warmup_steps"
    return [named, steps, line("actor.optimizer.warmup_steps", int(warmup), origin)]


def _data_set(theirs: Theirs, key: str = "train_dataset") -> dict[str, Any]:
    found = theirs.value(key) or (theirs.value("dataset_name") if key == "train_dataset" else None)
    return {"path": found} if isinstance(found, str) else found if isinstance(found, dict) else {}


def _data(theirs: Theirs) -> list[Line]:
    get, data = theirs.value, _data_set(theirs)
    key = theirs.first("train_dataset", "dataset_name")
    note = "" if data.get("path") else f"{FILL_IN}: {short(theirs.given.get(key) or 'the program makes the rows')}"
    note = note or (f"{FILL_IN}: the program changes the rows" if data.get("changed") else "")
    lines = [model_line(theirs, "model", "model_name_or_path")]
    lines.append(line("queries.path", data.get("path") or "queries.jsonl", key, note=note))
    split, config = get("dataset_train_split") or data.get("split"), get("dataset_config") or data.get("config")
    parts = {"queries.split": split, "queries.config": config or ("main" if "gsm8k" in str(data.get("path")) else None)}
    lines += [line(ours, value, key) for ours, value in parts.items() if isinstance(value, str)]
    return lines


def _reward(theirs: Theirs) -> list[Line]:
    get = theirs.value
    functions, weights = get("reward_funcs"), get("reward_weights")
    functions = [functions] if isinstance(functions, str) else functions
    if not isinstance(functions, list) or not all(isinstance(name, str) and ":" in name for name in functions):
        note = f"{FILL_IN}: {short(theirs.given.get('reward_funcs') or 'the program names it')}"
        return [line("reward", [{"function": "rewards.py:reward"}], note=note)]
    rewards: list[dict[str, Any]] = [{"function": _own(theirs, name)} for name in functions]
    for reward, weight in zip(rewards, weights or (), strict=False):
        reward["weight"] = weight
    runs = any(name.startswith(":") for name in functions) and not _is_guarded(theirs)
    note = f"{FILL_IN}: move it to a file of its own, for this one trains as it is read" if runs else ""
    return [line("reward", rewards, "reward_funcs", *["reward_weights"] * bool(weights), note=note)]


def _own(theirs: Theirs, name: str) -> str:
    """A function or class, `module:name`, or of the file itself, as a recipe names it."""
    return f"{theirs.beside}{name}" if name.startswith(":") else name


def _turns(theirs: Theirs) -> list[Line]:
    get, lines = theirs.value, list[Line]()
    if isinstance(get("tools"), list) and all(isinstance(tool, str) for tool in get("tools")):
        lines.append(line("rollout.tools", [_own(theirs, tool) for tool in get("tools")], "tools"))
    if isinstance(get("environment_factory"), str):
        lines.append(line("rollout.environment", _own(theirs, get("environment_factory")), "environment_factory"))
    return lines


def _is_guarded(theirs: Theirs) -> bool:
    """Tell whether the file trains only where it is run, so that its functions can be imported."""
    tree = ast.parse(theirs.path.read_text(encoding="utf-8"))
    calls = (node for part in tree.body if not isinstance(part, ast.If | ast.FunctionDef) for node in ast.walk(part))
    return not any(getattr(node, "attr", "") == "train" or getattr(node, "id", "") == "GRPOTrainer" for node in calls)


def _corrects(theirs: Theirs) -> bool:
    """Tell whether the correction for vLLM has a counterpart: that of single tokens."""
    get, kind = theirs.value, theirs.value("vllm_importance_sampling_mode")
    is_on = get("use_vllm") and get("vllm_importance_sampling_correction")
    by_token = kind == "token_truncate" or (kind == "token_mask" and get("importance_sampling_level") == "token")
    return bool(is_on and by_token)


def _often(theirs: Theirs, updates: int) -> list[Line]:
    """The lines of how often the run is saved and evaluated: TRL counts optimiser steps."""
    get, note = theirs.value, f"{updates} updates in a step" if updates > 1 else ""
    saves = str(get("save_strategy")) == "steps" and get("save_steps") >= 1
    every = max(int(get("save_steps")) // updates, 1) if saves else 0
    lines = [line("checkpoint.every", every, "save_steps" if saves else "save_strategy", note=note)]
    if get("beta") and get("sync_ref_model"):
        refresh = max(get("ref_model_sync_steps") // updates, 1)
        lines.append(line("actor.kl.refresh_steps", refresh, "sync_ref_model", "ref_model_sync_steps"))
    data = _data_set(theirs, "eval_dataset")
    if str(get("eval_strategy")) in ("no", "False") or not data.get("path"):
        key = "eval_strategy" if str(get("eval_strategy")) in ("no", "False") else "eval_dataset"
        return [*lines, line("evaluation.num_queries", 0, key)]
    steps = get("eval_steps") or get("logging_steps")
    lines.append(line("evaluation.every", max(int(steps) // updates, 1), "eval_strategy", "eval_steps", note=note))
    lines.append(line("evaluation.path", data["path"], "eval_dataset"))
    lines += [line("evaluation.split", data["split"], "eval_dataset")] * isinstance(data.get("split"), str)
    samples = "num_generations_eval" if get("num_generations_eval") else "num_generations"
    return [*lines, line("evaluation.samples", get(samples), samples)]


def _said(theirs: Theirs) -> dict[str, str]:
    get, said = theirs.value, dict[str, str]()
    if get("loss_type") == "vespo":
        said["loss_type"] = "not here: VESPO has no counterpart; token ratios are clipped"
    if get("loss_type") == "bnpo":
        said["loss_type"] = "not here: it depends on the cut into micro-batches; length_norm: mean is the nearest"
    if str(get("lr_scheduler_type")) not in _SCHEDULES:
        said["lr_scheduler_type"] = "not here: actor.optimizer.schedule: linear is written; or cosine, constant"
    if not _corrects(theirs):
        said["use_vllm"] = WHERE
    if not get("use_vllm"):
        for key in theirs.given:
            if key.startswith("vllm_importance_sampling_"):
                said[key] = "implied: it has no effect without vLLM"
    if isinstance(get("optim"), str) and "adamw" not in get("optim"):
        said["optim"] = "not here: name it as actor.optimizer.name"
    if get("bf16") is False and not get("fp16"):
        said["bf16"] = "not here: set model.dtype: float32"
    return said
