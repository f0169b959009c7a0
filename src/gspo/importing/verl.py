"""What verl's configuration is here; verl.yaml has the keys that need no more than a word."""

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
_NORMS = {
    "token-mean": "mean",
    "seq-mean-token-mean": "own",
    "seq-mean-token-sum": "none",
    "seq-mean-token-sum-norm": "constant",
}
_LOSSES = {
    "gspo": "clip",
    "vanilla": "dual_clip",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "reinforce",
}
_ADVANTAGES = {"grpo": "group", "grpo_vectorized": "group", "gae": "gae", "gpg": "group_mean", "opo": "group_mean"}
_ADVANTAGES |= dict.fromkeys(("rloo", "rloo_vectorized"), "leave_one_out")
_ADVANTAGES |= dict.fromkeys(("reinforce_plus_plus", "reinforce_plus_plus_baseline"), "batch")
_ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2"}


def translate(theirs: Theirs) -> Draft:
    """The lines that need more than one key, or another number; and what verl's file cannot do."""
    get, sizes = theirs.value, ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    queries, mini = map(get, sizes)
    wanted = max(queries // mini, 1)
    batches = mini_batches(wanted, queries, sizes)
    updates = wanted * get(f"{ACTOR}.ppo_epochs")
    loss = get(f"{ACTOR}.policy_loss.loss_mode")
    lines = [*_run(theirs, batches.value * get(f"{ACTOR}.ppo_epochs")), batches, *_data(theirs), *_reward(theirs)]
    lines += [*_objective(theirs, loss), *_advantage(theirs), *_correction(theirs), *_lora(theirs)]
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
    kept = "filter" if get("data.filter_overlong_prompts") else "error"
    lines.append(line("queries.overlong", kept, "data.filter_overlong_prompts"))
    kwargs = [key for key in theirs.given if key.startswith("data.apply_chat_template_kwargs.")]
    if kwargs:
        values = {key.rpartition(".")[2]: get(key) for key in kwargs}
        lines.append(line("queries.chat_template_kwargs", values, *kwargs))
    for ours, key in (("checkpoint.every", "trainer.save_freq"), ("evaluation.every", "trainer.test_freq")):
        lines.append(line(ours, max(get(key), 0), key))
    _, rows = rows_of(_files(get("data.val_files")))
    limit = get("data.val_max_samples")
    lines += [line("evaluation.num_queries", limit, "data.val_max_samples")] if limit and limit > 0 else []
    lines += [line("evaluation.num_queries", rows, "data.val_files")] if rows and not (limit and limit > 0) else []
    val = f"{ROLLOUT}.val_kwargs"
    sampled = get(f"{val}.do_sample")
    how = (f"{val}.do_sample", *[f"{val}.temperature"] * bool(sampled))
    heat = get(f"{val}.temperature") if sampled else 0
    samples = get(f"{val}.n") if heat else 1
    return [*lines, line("evaluation.temperature", heat, *how), line("evaluation.samples", samples, f"{val}.n")]


def _reward(theirs: Theirs) -> list[Line]:
    get, buffer = theirs.value, "reward_model.reward_kwargs.overlong_buffer_cfg"
    lines, paths = list[Line](), ("custom_reward_function.path", "reward.custom_reward_function.path")
    path = theirs.first(*paths)
    if get(path):
        name = path.replace(".path", ".name")
        function = f"{get(path)}:{get(name) or 'compute_score'}"
        lines.append(line("reward", [{"function": function}], path, *[name] * bool(get(name))))
    elif "gsm8k" in str(theirs.given.get("data.train_files")):
        lines.append(line("reward", [{"function": "math"}], note="proposed for verl's score of GSM8K"))
    else:
        note = f"{FILL_IN}: verl takes a score by data_source; math compares numbers and formulas"
        lines.append(line("reward", [{"function": "math"}], note=note))
    if get(f"{buffer}.enable"):
        lines.append(line("rollout.overlong", "penalty", f"{buffer}.enable"))
        share = get(f"{buffer}.len") / get("data.max_response_length")
        lines.append(line("rollout.overlong_margin", share, f"{buffer}.len"))
    return lines


def _objective(theirs: Theirs, loss: str) -> list[Line]:
    get, mode = theirs.value, f"{ACTOR}.policy_loss.loss_mode"
    name = _LOSSES.get(loss, "clip")
    level = "sequence" if loss == "gspo" else "token"
    lines = [line("actor.surrogate", name, mode), line("actor.importance_sampling_level", level, mode)]
    agg = f"{ACTOR}.loss_agg_mode"
    if loss in ("gspo", "sapo"):  # verl sets it for these, whatever the file says
        lines.append(line("actor.length_norm", "own", mode, note="verl takes seq-mean-token-mean with it"))
    else:
        lines.append(line("actor.length_norm", _NORMS.get(get(agg), "mean"), agg))
    if name == "sapo":
        taus = (f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg")
        return [*lines, line("actor.sapo_temperature", [*map(get, taus)], *taus)]
    for end in ("low", "high"):
        far = loss == "cispo" and end == "low"  # of which verl's example has 10: no lower bound
        value = get(f"{ACTOR}.clip_ratio_{end}")
        lines.append(line(f"actor.clip_{end}", min(value, 1.0) if far else value, f"{ACTOR}.clip_ratio_{end}"))
    if name == "dual_clip":
        lines.append(line("actor.dual_clip", get(f"{ACTOR}.clip_ratio_c"), f"{ACTOR}.clip_ratio_c"))
    return lines


def _advantage(theirs: Theirs) -> list[Line]:
    get, key = theirs.value, "algorithm.adv_estimator"
    kind, origins = get(key), [key]
    name = _ADVANTAGES.get(kind, "group_mean")
    note = "" if kind in _ADVANTAGES else "the nearest: this estimator has no counterpart"
    if name == "group" and not get("algorithm.norm_adv_by_std_in_grpo"):
        name, origins = "group_mean", [key, "algorithm.norm_adv_by_std_in_grpo"]
    lines = [line("actor.advantage", name, *origins, note=note)]
    if name == "gae":
        for ours, theirs_ in (("gae_gamma", "algorithm.gamma"), ("gae_lambda", "algorithm.lam")):
            lines.append(line(f"critic.{ours}", get(theirs_), theirs_))
        lines += [line("critic.optimizer.lr", get("critic.optim.lr"), "critic.optim.lr")] * bool(get("critic.optim.lr"))
    return lines + _kl(theirs, name)


def _kl(theirs: Theirs, advantage: str) -> list[Line]:
    get, use = theirs.value, f"{ACTOR}.use_kl_loss"
    if get(use):
        coefficient, kind = f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"
        estimator = _ESTIMATORS.get(str(get(kind)), "k2")
        note = "" if str(get(kind)) in _ESTIMATORS else "the nearest with a gradient: k1 in the loss has none"
        lines = [line("actor.kl.coefficient", get(coefficient), use, coefficient)]
        return [*lines, line("actor.kl.place", "loss", use), line("actor.kl.estimator", estimator, kind, note=note)]
    if get("algorithm.use_kl_in_reward"):
        use, coefficient = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
        place = "loss" if advantage == "group" else "reward"
        note = "a group's deviation would blow it up in the reward" if place == "loss" else ""
        lines = [line("actor.kl.coefficient", get(coefficient), use, coefficient)]
        lines.append(line("actor.kl.place", place, use, note=note))
        return [*lines, line("actor.kl.estimator", "k2" if place == "loss" else "k1", "algorithm.kl_penalty")]
    return [line("actor.kl.coefficient", 0.0, use)]


def _correction(theirs: Theirs) -> list[Line]:
    get, key = theirs.value, "algorithm.rollout_correction.rollout_is"
    if not get(key):
        return []
    bound = f"{key}_threshold"
    lines = [line("actor.correction", "tis", key), line("actor.correction_high", get(bound), bound)]
    note = "the geometric mean here, the product there"
    return lines + [line("actor.correction_level", "sequence", key, note=note)] * (get(key) == "sequence")


def _lora(theirs: Theirs) -> list[Line]:
    rank, alpha = (theirs.first(f"{MODEL}.lora.{name}", f"{MODEL}.lora_{name}") for name in ("rank", "alpha"))
    if not theirs.value(rank):
        return []
    return [line("model.lora", {"rank": theirs.value(rank), "alpha": theirs.value(alpha)}, rank, alpha)]


def _said(theirs: Theirs, loss: str) -> dict[str, str]:
    said = {}
    if loss not in _LOSSES:
        said[f"{ACTOR}.policy_loss.loss_mode"] = "not here: it has no counterpart; token ratios are clipped"
    if isinstance(theirs.given.get("data.train_files"), Computed):
        said["data.train_files"] = f"not here: the shell sets it; {FILL_IN} queries.path"
    if (theirs.value("data.train_max_samples") or -1) < 0:
        said["data.train_max_samples"] = "implied: all rows"
    if theirs.value(f"{ROLLOUT}.top_k") not in (None, -1, 0):
        said[f"{ROLLOUT}.top_k"] = "not here: name it as rollout.top_k"
    return said
