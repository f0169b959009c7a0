"""The translation of verl's configuration; verl.yaml has the keys that need no more than a word."""

from typing import Any

from gspo.importing.draft import (
    FILL_IN,
    Computed,
    Draft,
    Line,
    Theirs,
    line,
    mini_batches,
    model_line,
    ratio_notes,
    rows_of,
    slug,
    steps_line,
)

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
_LOSSES = ("gspo", "vanilla", "geo_mean", "cispo", "sapo", "gpg")


def translate(theirs: Theirs) -> Draft:
    """The lines that need more than one key, or another number; and what verl's file cannot do."""
    get, sizes = theirs.value, ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    queries, mini = map(get, sizes)
    wanted = max(queries // mini, 1)
    batches = mini_batches(wanted, queries, sizes)
    updates = wanted * get(f"{ACTOR}.ppo_epochs")
    loss = get(f"{ACTOR}.policy_loss.loss_mode")
    lines = [*_run(theirs, batches.value * get(f"{ACTOR}.ppo_epochs")), batches, *_data(theirs), _reward(theirs)]
    lines.append(model_line(theirs, f"{MODEL}.path"))
    notes = ratio_notes("sequence" if loss == "gspo" else "token", updates, queries)
    if get(f"{ACTOR}.clip_ratio") is not None and theirs.given.get(f"{ACTOR}.clip_ratio_low") is None:
        notes.append("clip_ratio alone changes nothing in verl: clip_ratio_low and clip_ratio_high are 0.2 beside it")
    return Draft(lines=tuple(lines), said=_said(theirs, loss), notes=tuple(notes))


def _run(theirs: Theirs, updates: int) -> list[Line]:
    get, names = theirs.value, ("trainer.project_name", "trainer.experiment_name")
    most = "trainer.total_training_steps"
    ends = ("trainer.total_epochs", *[most] * bool(get(most)))
    rows, queries = _rows(theirs), get("data.train_batch_size")
    steps = steps_line(most=get(most), epochs=get(ends[0]), rows=rows, queries=queries, origins=ends)
    lines = [line("name", slug(*map(get, names)), *names), steps]
    number, share = f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"
    is_number = (get(number) or -1) >= 0
    # verl's ratio is of trainer.total_training_steps where that is given, whatever the epochs are.
    warmup = get(number) if is_number else int(get(share) * (get(most) or steps.value))
    note = f"verl counts rollout batches, with {updates} updates each" if warmup else ""
    origin = number if is_number else share
    return [*lines, line("actor.optimizer.warmup_steps", int(warmup) * updates, origin, note=note)]


def _files(value: Any) -> str | None:
    return value[0] if isinstance(value, list) and value else value or None


def _rows(theirs: Theirs) -> int | None:
    files = theirs.value("data.train_files")
    rows = [rows_of(file)[0] for file in (files if isinstance(files, list) else [files])]
    return sum(row or 0 for row in rows) if all(rows) else None


def _data(theirs: Theirs) -> list[Line]:
    get, lines = theirs.value, list[Line]()
    for section, key in (("queries", "data.train_files"), ("evaluation", "data.val_files")):
        file, several = _files(get(key)), isinstance(get(key), list) and len(get(key)) > 1
        note = f"{FILL_IN}: one file here; join all of them" if several else ""
        if file is None:
            note = f"{FILL_IN}: {theirs.given.get(key) or 'a Parquet file'}"
            file = f"{section}.parquet"
        lines.append(line(f"{section}.path", file, key, note=note))
    kwargs = [key for key in theirs.given if key.startswith("data.apply_chat_template_kwargs.")]
    if kwargs:
        values = {key.rpartition(".")[2]: get(key) for key in kwargs}
        lines.append(line("queries.chat_template_kwargs", values, *kwargs))
    _, rows = rows_of(_files(get("data.val_files")))
    return lines + [line("evaluation.num_queries", rows, "data.val_files")] * bool(rows)


def _reward(theirs: Theirs) -> Line:
    get, path = theirs.value, theirs.first("custom_reward_function.path", "reward.custom_reward_function.path")
    if get(path):
        name = path.replace(".path", ".name")
        function = f"{get(path)}:{get(name) or 'compute_score'}"
        return line("reward", [{"function": function}], path, *[name] * bool(get(name)))
    is_gsm8k = "gsm8k" in str(theirs.given.get("data.train_files"))
    unknown = f"{FILL_IN}: verl takes a score by data_source; math compares numbers and formulas"
    return line("reward", [{"function": "math"}], note="proposed for verl's score of GSM8K" if is_gsm8k else unknown)


def _said(theirs: Theirs, loss: str) -> dict[str, str]:
    said = {}
    if loss not in _LOSSES:
        said[f"{ACTOR}.policy_loss.loss_mode"] = "not here: it has no counterpart; token ratios are clipped"
    if isinstance(theirs.given.get("data.train_files"), Computed):
        said["data.train_files"] = f"not here: the shell sets it; {FILL_IN} queries.path"
    if (theirs.value("data.train_max_samples") or -1) < 0:
        said["data.train_max_samples"] = "implied: all rows"
    return said
