"""What AReaL's configuration is here; areal.yaml has the keys that need no more than a word."""

from gspo.importing.draft import (
    FILL_IN,
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


def translate(theirs: Theirs) -> Draft:
    """The lines that need more than one key, or another number; and what AReaL's file cannot do."""
    get = theirs.value
    level, updates = get("actor.importance_sampling_level"), get("actor.ppo_n_minibatches")
    recomputes = bool(get("actor.recompute_logprob") or get("actor.use_decoupled_loss"))
    lines = [*_run(theirs), *_data(theirs), *_objective(theirs), *_advantage(theirs), *_correction(theirs)]
    optimizer = "actor.optimizer"
    betas = (f"{optimizer}.beta1", f"{optimizer}.beta2")
    lines.append(model_line(theirs, "actor.path"))
    lines.append(line(f"{optimizer}.betas", [get(betas[0]), get(betas[1])], *betas))
    lines.append(line(f"{optimizer}.name", _optimizer(get(f"{optimizer}.type")), f"{optimizer}.type"))
    if get("actor.use_lora"):
        names = {"rank": "actor.lora_rank", "alpha": "actor.lora_alpha", "targets": "actor.target_modules"}
        given = {name: get(key) for name, key in names.items() if get(key) not in (None, [], ["all-linear"])}
        lines.append(line("model.lora", given, "actor.use_lora", *(names[name] for name in given)))
    notes = (
        ratio_notes(level, updates, get("train_dataset.batch_size"))
        if recomputes and not get("actor.use_sapo_loss")
        else []
    )
    return Draft(lines=tuple(lines), said=_said(theirs), notes=tuple(notes))


def _optimizer(kind: str | None) -> str:
    return "torch.optim.SGD" if kind == "sgd" else "adamw"


def _run(theirs: Theirs) -> list[Line]:
    get = theirs.value
    names, queries = ("experiment_name", "trial_name"), get("train_dataset.batch_size")
    rows, _ = rows_of(get("train_dataset.path"))
    updates, ends = (
        get("actor.ppo_n_minibatches"),
        ("total_train_epochs", *["total_train_steps"] * bool(get("total_train_steps"))),
    )
    steps = steps_line(
        most=get(ends[-1]) if ends[1:] else None, epochs=get(ends[0]), rows=rows, queries=queries, origins=ends
    )
    lines = [line("name", slug(*map(get, names)), *names), steps]
    for key, timer in (("checkpoint.every", "saver"), ("evaluation.every", "evaluator")):
        epochs, every = get(f"{timer}.freq_epochs"), get(f"{timer}.freq_steps")
        if every or (epochs and rows):
            origin = f"{timer}.freq_steps" if every else f"{timer}.freq_epochs"
            lines.append(line(key, every or epochs * (rows // queries), origin))
    warmup = "actor.optimizer.warmup_steps_proportion"
    share = int(get(warmup) * steps.value) * updates
    lines.append(line("actor.optimizer.warmup_steps", share, warmup, note=f"of {steps.value} steps"))
    return [*lines, mini_batches(updates, queries, ("actor.ppo_n_minibatches",))]


def _data(theirs: Theirs) -> list[Line]:
    get, gsm8k = theirs.value, "gsm8k" in str(theirs.value("train_dataset.path"))
    path, sets = get("train_dataset.path"), ("train_dataset.path",)
    filled = "" if path else f"{FILL_IN}: the entry script names the data"
    lines = [line("queries.path", path or "queries.jsonl", *sets, note=filled)]
    if get("train_dataset.max_length"):
        lines.append(line("queries.overlong", "filter", "train_dataset.max_length"))
    if gsm8k:
        sentence = "{prompt}\nPlease put your final answer within \\boxed{}."
        note = "their data set of GSM8K adds the sentence"
        lines += [line("queries.config", "main", *sets)]
        lines += [line("queries.template", sentence, *sets, note=note)]
    why = "proposed for gsm8k_reward_fn" if gsm8k else f"{FILL_IN}: the entry script, such as gsm8k_rl.py, names it"
    reward = [{"function": "math" if gsm8k else "rewards.py:reward_fn"}]
    scaled = "actor.reward_scaling"
    if get("actor.reward_norm.std_level") is None and get("actor.adv_norm.std_level") is None and get(scaled) != 1:
        reward[0]["weight"] = get(scaled)
        lines.append(line("reward", reward, scaled, note=why))
    else:
        lines.append(line("reward", reward, note=why))
    return lines + _evaluation(theirs)


def _evaluation(theirs: Theirs) -> list[Line]:
    get, path = theirs.value, theirs.value("valid_dataset.path")
    timers = [f"evaluator.freq_{unit}" for unit in ("epochs", "steps", "secs")]
    if not path or not any(map(get, timers)):
        return [line("evaluation.num_queries", 0, note="no evaluator.freq_… and valid_dataset.path in the file")]
    _, rows = rows_of(path)
    lines = [line("evaluation.path", path, "valid_dataset.path")]
    lines += [line("evaluation.num_queries", rows, "valid_dataset.path")] if rows else []
    own = get("eval_gconfig.temperature")
    key, note = (
        ("eval_gconfig.temperature", "") if own is not None else ("gconfig.temperature", "gsm8k_rl.py takes 0.6")
    )
    lines.append(line("evaluation.temperature", get(key), key, note=note))
    samples = "eval_gconfig.n_samples"
    return lines + [line("evaluation.samples", get(samples), samples)] * bool(get(samples))


def _objective(theirs: Theirs) -> list[Line]:
    get = theirs.value
    name, origins = "clip", tuple[str, ...]()
    for surrogate, key in (
        ("cispo", "actor.use_cispo_loss"),
        ("sapo", "actor.use_sapo_loss"),
        ("dual_clip", "actor.c_clip"),
    ):
        name, origins = (surrogate, (key,)) if get(key) else (name, origins)
    lines = [line("actor.surrogate", name, *origins, note="" if origins else "AReaL's own loss")]
    lines.append(line("actor.length_norm", "mean", note="AReaL divides by the tokens of the mini-batch"))
    if name == "dual_clip":
        lines.append(line("actor.dual_clip", get("actor.c_clip"), "actor.c_clip"))
    if name == "sapo":
        taus = ("actor.sapo_tau_pos", "actor.sapo_tau_neg")
        return [*lines, line("actor.sapo_temperature", [*map(get, taus)], *taus)]
    if get("actor.eps_clip"):
        high = "actor.eps_clip" if get("actor.eps_clip_higher") is None else "actor.eps_clip_higher"
        lines.append(line("actor.clip_low", get("actor.eps_clip"), "actor.eps_clip"))
        lines.append(line("actor.clip_high", get(high), high))
    return lines


def _advantage(theirs: Theirs) -> list[Line]:
    get, norm = theirs.value, "actor.reward_norm"
    levels = (get(f"{norm}.mean_level"), get(f"{norm}.std_level"))
    kinds = {("group", "group"): "group", ("group", None): "group_mean", ("group", "batch"): "batch"}
    name, note = kinds.get(levels, "batch"), "" if levels in kinds else "the nearest: here a group has its own mean"
    origins = [f"{norm}.{part}" for part in ("mean_level", "std_level") if get(f"{norm}.{part}")]
    if get(f"{norm}.mean_leave1out"):
        name, note, origins = "leave_one_out", "", [*origins, f"{norm}.mean_leave1out"]
    if any(key.startswith("critic.") for key in theirs.given):
        name, note, origins = "gae", "there is a critic", []
    lines = [line("actor.advantage", name, *origins, note=note)]
    if get(f"{norm}.std_unbiased") is False:
        lines.append(line("actor.advantage_ddof", 0, f"{norm}.std_unbiased"))
    if name == "gae":
        for ours, key in (("critic.gae_gamma", "actor.discount"), ("critic.gae_lambda", "actor.gae_lambda")):
            lines.append(line(ours, get(key), key))
    if get("actor.overlong_reward_penalty") and get("actor.overlong_tokens"):
        both, whole = ("actor.overlong_reward_penalty", "actor.overlong_tokens"), get("gconfig.max_new_tokens")
        lines.append(line("rollout.overlong", "penalty", *both[:1]))
        share = get("actor.overlong_tokens") / whole
        lines.append(line("rollout.overlong_margin", share, *both[1:], note=f"of {whole} tokens"))
    elif get("actor.mask_no_eos_with_zero"):
        lines.append(line("rollout.overlong", "mask", "actor.mask_no_eos_with_zero"))
    return lines + _kl(theirs, name)


def _kl(theirs: Theirs, advantage: str) -> list[Line]:
    get, has_reference = theirs.value, any(key.startswith("ref.") for key in theirs.given)
    if not (get("actor.kl_ctl") and has_reference):
        return [line("actor.kl.coefficient", 0.0, "actor.kl_ctl", note="" if has_reference else "no ref")]
    lines = [line("actor.kl.coefficient", get("actor.kl_ctl"), "actor.kl_ctl")]
    in_loss = advantage == "group"
    kind, note = (
        ("k2", "theirs is in the normalised reward; in the loss k2 has its gradient")
        if in_loss
        else (get("actor.kl_estimator"), "")
    )
    lines.append(line("actor.kl.place", "loss" if in_loss else "reward", "actor.kl_ctl"))
    return [*lines, line("actor.kl.estimator", kind, "actor.kl_estimator", note=note)]


def _correction(theirs: Theirs) -> list[Line]:
    """AReaL weighs by π_old/π_engine where a rejection sampling stands beside the decoupled loss."""
    get, sampling = theirs.value, "actor.rejection_sampling"
    who = tuple(key for key in ("actor.recompute_logprob", "actor.use_decoupled_loss") if get(key) is not None)
    recomputes = any(get(key) for key in who)
    lines = [line("actor.old_logprobs", "recompute" if recomputes else "engine", *who)]
    cap = theirs.first("actor.behav_imp_weight_cap", "actor.behave_imp_weight_cap")
    is_sampling = any(key.startswith(f"{sampling}.") for key in theirs.given)
    if get("actor.enable_kpop"):
        bound = "actor.kpop_phi"
        lines.append(line("actor.correction", "kpop", "actor.enable_kpop"))
        return lines + [line("actor.correction_high", get(bound), bound)] * bool(get(bound))
    if not get("actor.use_decoupled_loss") or not (is_sampling or get(cap)):
        return lines
    key = f"{sampling}.upper" if is_sampling else cap
    masks = get(f"{sampling}.action") != "clamp" and is_sampling
    by_sequence = get(f"{sampling}.level") == "sequence"
    can_mask = masks and (by_sequence or get("actor.importance_sampling_level") == "token")
    note = "theirs drops a token above the bound; here its weight is the bound" if masks and not can_mask else ""
    origins = tuple(name for name in theirs.given if name.startswith(f"{sampling}.") and name != key) or (key,)
    lines.append(line("actor.correction", "mis" if can_mask else "decoupled", *origins, note=note))
    if can_mask:
        low = get(f"{sampling}.lower")
        lines.append(line("actor.correction_low", low or 1e-9, note="" if low else "they have no lower bound"))
    lines += [line("actor.correction_level", "sequence", f"{sampling}.level")] * by_sequence
    high = get(key) or 5.0
    return [*lines, line("actor.correction_high", high, key)]


def _said(theirs: Theirs) -> dict[str, str]:
    get, said = theirs.value, dict[str, str]()
    divides = get("actor.reward_norm.std_level") or get("actor.adv_norm.std_level")
    for key in ("actor.reward_scaling", "actor.reward_bias"):
        why = "implied: of no effect, for a mean is taken off and a deviation divides" if divides else ""
        why = why or ("implied: of no effect, for a mean is taken off" if key.endswith("bias") else "")
        said |= {key: why} if why else {}
    if not rows_of(get("train_dataset.path"))[0]:
        for key in ("saver.freq_epochs", "evaluator.freq_epochs"):
            said[key] = "not here: no one can know the rows of an epoch; set checkpoint.every and evaluation.every"
    if get("actor.eps_clip") == 0:
        said["actor.eps_clip"] = "not here: a clip range is above 0; the published one is taken"
    return said
