"""The translation of AReaL's configuration; areal.yaml has the keys that need no more than a word."""

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
    """The lines that need arithmetic or a well-known data set; and what AReaL's file cannot do."""
    get = theirs.value
    level, updates = get("actor.importance_sampling_level"), get("actor.ppo_n_minibatches")
    recomputes = bool(get("actor.recompute_logprob") or get("actor.use_decoupled_loss"))
    can_clip = not recomputes or get("actor.use_sapo_loss")
    notes = [] if can_clip else ratio_notes(level, updates, get("train_dataset.batch_size"))
    lines = [model_line(theirs, "actor.path"), *_run(theirs), *_data(theirs)]
    return Draft(lines=tuple(lines), said=_said(theirs), notes=tuple(notes))


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
    _, rows = rows_of(get("valid_dataset.path"))
    return lines + [line("evaluation.num_queries", rows, "valid_dataset.path")] * bool(rows)


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
    if not any(key.startswith("critic.") for key in theirs.given):
        for key in ("actor.discount", "actor.gae_lambda"):
            said |= {} if get(key) == 1 else {key: "not here: without a value model no reward is discounted by token"}
    else:
        norms = [key for key in theirs.given if key.startswith("actor.reward_norm.")]
        said |= dict.fromkeys(norms, "not here: with a value model rewards are not normalised")
    if not any(get(f"evaluator.freq_{unit}") for unit in ("epochs", "steps", "secs")):
        said["valid_dataset.path"] = "implied: no evaluator.freq_… is set, so it is never used"
    if get("actor.eps_clip") == 0:
        said["actor.eps_clip"] = "not here: a clip range is above 0; the published one is taken"
    return said
