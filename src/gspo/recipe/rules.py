"""The rules between a recipe's keys: tables of sentences, each with the condition under which it is true."""

from collections.abc import Mapping
from operator import attrgetter

from gspo.recipe.published import CORRECTIONS, ONLY, PUBLISHED
from gspo.recipe.sections import REPLACED_FILE, ModelConfig, PhaseCondition, RecipeKeys, ServerConfig, names_file

LOWEST_TEMPERATURE = 0.01  # vLLM samples at this one where a lower one is asked for
_DEFAULTS = RecipeKeys(name="defaults", steps=1, model=ModelConfig())


def refusals(recipe: RecipeKeys) -> list[str]:
    """A sentence for each combination that has no meaning: which keys, why, and what to set instead."""
    tables = (_refused, _refused_sources, _refused_turns, _refused_objectives, _refused_servers, _refused_phases)
    return [sentence for table in tables for sentence in _true_sentences(table(recipe))]


def ineffective_settings(recipe: RecipeKeys) -> list[str]:
    """A sentence for each setting that leaves the loss flat, costs time or memory, or is one of a part that is off."""
    notes = _true_sentences(_noted(recipe))
    unmet = [names for names, is_met in _needs(recipe).items() if not is_met]
    changed = [pair for pair in unmet if attrgetter(pair[0])(recipe) != attrgetter(pair[0])(_DEFAULTS)]
    return [*notes, *(f"{key} has no effect without {needed}" for key, needed in changed)]


def _refused(recipe: RecipeKeys) -> dict[str, object]:
    model, cold_start, queries, rollout = recipe.model, recipe.cold_start, recipe.queries, recipe.rollout
    rewards, actor = recipe.reward, recipe.actor
    return {
        """give exactly one of model.path (weights) and model.architecture (a new model)
        """: (model.path is None) == (model.architecture is None),
        """model.architecture needs a model_type, such as qwen3_moe
        """: model.architecture is not None and "model_type" not in model.architecture,
        """model.architecture needs model.tokenizer: a directory, a hub id, or fit
        """: model.architecture is not None and model.tokenizer is None,
        """model.kwargs is for model.path: the keys of a new model's configuration stand in model.architecture
        """: model.kwargs and model.architecture is not None,
        """model.lora is for model.path: a new model has nothing yet that an adapter could be added to
        """: model.lora is not None and model.architecture is not None,
        """model.lora trains nothing but the adapter, so model.frozen says nothing; leave it out
        """: model.lora is not None and model.frozen,
        """model.lora with actor.kl.refresh_steps: the reference is the model without what training adds; leave it out
        """: model.lora is not None and actor.kl.coefficient and actor.kl.refresh_steps is not None,
        """model.lora.quantize with model.lora.dora, whose norms are of whole weights; leave one out
        """: model.lora is not None and model.lora.quantize != "none" and model.lora.dora,
        """model.lora with critic.trunk: own would hold the model twice; set critic.trunk: shared
        """: model.lora is not None and actor.advantage == "gae" and recipe.critic.trunk == "own",
        """cold_start.steps > 0 needs exactly one of cold_start.path and cold_start.demonstrations
        """: cold_start.steps > 0 and (cold_start.path is None) == (cold_start.demonstrations is None),
        """queries.template must contain {prompt}
        """: queries.template is not None and "{prompt}" not in queries.template,
        f"""queries.config: {queries.config} is of a data set on the hub, and a file has none; leave it out
        """: queries.config is not None and queries.path is not None and names_file(queries.path),
        f"""actor.mini_batches ({actor.mini_batches}) must divide rollout.queries_per_step
        ({rollout.queries_per_step}): groups stay whole within a mini-batch
        """: rollout.queries_per_step % actor.mini_batches,
        """rollout.interrupt: false with rollout.engine: sglang, which cannot wait for responses; leave it out
        """: rollout.at_publish == "wait" and rollout.engine == "sglang",
        """rollout.group_size must be at least 2: an advantage compares responses (but for actor.surrogate: ppo)
        """: rollout.group_size < 2 and actor.advantage != "gae",
        """rollout.dynamic_sampling drops groups that actor.advantage: gae learns from; set dynamic_sampling: false
        """: rollout.dynamic_sampling and actor.advantage == "gae",
        """reward: every function has weight 0, which measures only: there is nothing to train on
        """: rewards and not any(reward.weight for reward in rewards),
        """early_stop.metric needs early_stop.patience (values without a new best), early_stop.goal, or both
        """: recipe.early_stop.metric and recipe.early_stop.patience is None and recipe.early_stop.goal is None,
        """checkpoint.best, early_stop.metric or phases.when: evaluation.num_queries is 0, so there is no evaluation
        to go by
        """: _goes_by_evaluation(recipe) and not (recipe.evaluation.num_queries or recipe.evaluation.suites),
    }


def _refused_sources(recipe: RecipeKeys) -> dict[str, object]:
    """The rules on several sources of queries, on what judges each, and on how often each is taken."""
    queries, rewards, names = recipe.queries, recipe.reward, recipe.queries.sources.keys()
    have_one = {name: bool(own.path) != bool(own.procedural) for name, own in queries.sources.items()}
    of_source = ("path", "procedural", "config", "split", "limit")
    of_file = [name for name, own in queries.sources.items() if own.config and own.path and names_file(own.path)]
    unknown = [f"queries.weights.{name}" for name in queries.weights if name not in names]
    unknown += [f"reward.{i}.sources: {name}" for i, r in enumerate(rewards) for name in r.sources if name not in names]
    unjudged = [name for name in names if not any(own.weight and name in (own.sources or names) for own in rewards)]
    all_sources = [*queries.sources.values()] or [queries]
    functions, weighed = {own.name for own in rewards}, {name for own in recipe.phases for name in own.reward_weights}
    return {
        """give queries.path or queries.procedural, not both
        """: queries.path and queries.procedural,
        f"""queries.sources.{", ".join(name for name in names if not have_one[name])}: give each a path or procedural
        """: not all(have_one.values()),
        """queries.sources stand in place of queries.path, procedural, config, split and limit, which each source has;
        leave those out (queries.path=null on a command line)
        """: names and any(getattr(queries, key) != getattr(_DEFAULTS.queries, key) for key in of_source),
        f"""queries.sources.{", ".join(of_file)}: config is of a data set on the hub, and a file has none; leave it out
        """: of_file,
        f"""{", ".join(unknown)}: queries.sources has no such name; there are: {", ".join(names)}
        """: unknown and names,
        f"""{", ".join(unknown)}: the recipe has no queries.sources; leave this out
        """: unknown and not names,
        """queries.weights: at least one source needs a weight above 0
        """: names and queries.weights and not any(queries.weights.values()),
        f"""reward: no function with a weight judges responses of queries.sources.{", ".join(unjudged)}; name it in
        the sources of one, or leave one a weight
        """: rewards and unjudged,
        """queries.sampler: difficulty with queries.sources: both say which queries come more often; leave one out
        """: names and queries.sampler == "difficulty",
        """queries.refresh: file looks at data files: give queries.path, or each of the sources a path, that is a file
        """: queries.refresh == REPLACED_FILE and not all(own.path and names_file(own.path) for own in all_sources),
        f"""queries.refresh: {queries.refresh} with queries.sources: its rows would be of no source; set refresh: file
        """: names and queries.refresh not in (None, REPLACED_FILE),
        """queries.refresh needs queries.max_prompt_tokens, for nobody knows how long the prompts to come are
        """: queries.refresh and queries.max_prompt_tokens is None,
        """queries.refresh with model.tokenizer: fit, which knows the words of the first rows only; name a tokenizer
        """: queries.refresh and recipe.model.tokenizer == "fit",
        """evaluation.suites: a suite has one source: give it queries.path or queries.procedural
        """: any(suite.queries.sources for suite in recipe.evaluation.suites),
        """evaluation.suites: a suite's questions stay as they are; leave out its queries.refresh
        """: any(suite.queries.refresh for suite in recipe.evaluation.suites),
        """evaluation.suites: a suite's rows have no source, so its reward has no sources; leave them out
        """: any(reward.sources for suite in recipe.evaluation.suites for reward in suite.reward),
        f"""phases.reward_weights: {", ".join(sorted(weighed - functions))}: reward has no such function; there are:
        {", ".join(sorted(functions)) or "none"}
        """: weighed - functions,
    }


def _refused_turns(recipe: RecipeKeys) -> dict[str, object]:
    """The rules on what stands around a response: tools, environments and agents, turns, segments, and a teacher."""
    rollout, rewards, teacher = recipe.rollout, recipe.reward, recipe.teacher
    all_rewards = [*rewards, *(reward for suite in recipe.evaluation.suites for reward in suite.reward)]
    names, by_turn = {reward.function for reward in all_rewards}, recipe.actor.turn_credit == "return_to_go"
    return {
        """rollout.segment_separator with rollout.tools, environment or agent: a response of several turns is not cut
        into segments; leave one out
        """: rollout.has_turns and rollout.segment_separator is not None,
        """rollout.agent has tools of its own, and nobody calls rollout.tools, mcp or environment; leave one out
        """: rollout.agent and (rollout.tools or rollout.mcp or rollout.environment),
        """rollout.agent writes its own messages: queries.system and template say nothing to it; leave them out (but for
        demonstrations of a cold start)
        """: rollout.agent and (recipe.queries.system or recipe.queries.template) and not recipe.cold_start.steps,
        """reward: environment is what rollout.environment gives in the end; name a class there
        """: rollout.environment is None and "environment" in names,
        """reward: agent is what rollout.agent returns in the end; name a program there
        """: rollout.agent is None and "agent" in names,
        """per: segment needs rollout.segment_separator, the text that ends a segment ("\\n" where each line is one)
        """: rollout.segment_separator is None and any(reward.per == "segment" for reward in rewards),
        """actor.turn_credit: return_to_go takes the mean return of the group's others from a turn's, and divides by no
        deviation, which would bias it: set actor.advantage: leave_one_out
        """: by_turn and recipe.actor.advantage != "leave_one_out",
        """actor.observation_loss trains on what is said to the policy, and here nothing is; set rollout.tools, mcp,
        environment or agent, and rollout.max_turns above 1, or leave it out
        """: recipe.actor.observation_loss and not (rollout.has_turns and rollout.max_turns > 1),
        """actor.turn_credit: return_to_go with a reward per: segment or token: both say which tokens earn a reward;
        leave one out
        """: by_turn and any(reward.weight and reward.per != "response" for reward in rewards),
        """teacher.prompt must contain {prompt}
        """: teacher.prompt is not None and "{prompt}" not in teacher.prompt,
        """teacher.prompt with rollout.agent or environment, which write a part of the prompt themselves: name another
        model in teacher.path, and leave prompt out
        """: teacher.prompt is not None and (rollout.agent or rollout.environment),
        """teacher.prompt with rollout.history: branch: of the contexts that it begins, the teacher would read the
        policy's prompt in place of its own; set rollout.history: append
        """: teacher.prompt is not None and (rollout.tools or rollout.mcp) and rollout.history == "branch",
        """give one of teacher.path and teacher.url
        """: teacher.path and teacher.url,
        """teacher.url needs teacher.model, the name by which the server knows it
        """: teacher.url and not teacher.model,
        f"""teacher.url: a server scores a text at temperature 1, and rollout.temperature is {rollout.temperature:g};
        set that to 1, or give a teacher.path
        """: teacher.url and rollout.temperature != 1,
        """teacher.advantage_weight: 0 with rollout.dynamic_sampling, which drops groups that the teacher would train
        on; set dynamic_sampling: false
        """: teacher.is_on and not teacher.advantage_weight and rollout.dynamic_sampling,
    }


def _refused_servers(recipe: RecipeKeys) -> dict[str, object]:
    rollout, actor, name, engines = recipe.rollout, recipe.actor, recipe.rollout.engine, recipe.cluster.engines
    if name == "embedded":
        return {
            "cluster.engines places servers, and rollout.engine is embedded; set vllm, or cluster.engines: 0": engines,
        }
    server: ServerConfig = getattr(rollout, name)
    shaping, lora = ", ".join(rollout.shaping), recipe.model.lora
    merging = {
        "without model.lora, whose adapter it is about": lora is None,
        "with model.lora.dora, which vLLM has no adapters for": lora is not None and lora.dora,
        "with urls: a server has to be started for adapters, which the run does with its own": server.urls,
        f"with weights: {server.weights}, which hands over whole weights alone": server.weights in ("ipc", "nccl"),
    }
    return {
        f"""rollout.{shaping} with rollout.engine: {name}: a server says how likely a token was in what it drew from,
        not in the whole distribution, which is what actor.old_logprobs: engine takes; set old_logprobs: recompute
        """: shaping and actor.old_logprobs == "engine",
        f"""rollout.{shaping} with rollout.engine: {name} and a teacher, whose advantage needs the likelihoods of the
        whole distribution from the engine; leave one out
        """: shaping and recipe.teacher.is_on,
        f"""rollout.{shaping} with rollout.engine: {name} and actor.kl.place: reward, which needs the likelihoods of the
        whole distribution from the engine; set kl.place: loss
        """: shaping and actor.kl.coefficient and actor.kl.place == "reward",
        f"""rollout.engine: sglang says how likely a token was before {shaping}; leave that out, or set engine: vllm
        """: shaping and name == "sglang",
        f"""rollout.sglang.weights: {server.weights} would need SGLang's own code in the trainer; set memory or files
        """: name == "sglang" and server.weights in ("ipc", "nccl"),
        **{
            f"rollout.vllm.adapters: true {why}; leave adapters out": is_so and name == "vllm" and rollout.vllm.adapters
            for why, is_so in merging.items()
        },
        """rollout.min_p with top_p or top_k: vLLM applies min_p first, gspo last, which gives other distributions
        """: rollout.min_p and (rollout.top_p < 1 or rollout.top_k),
        f"""rollout.temperature {rollout.temperature:g}: {name} takes 0.01 for anything below; set at least that
        """: name == "vllm" and rollout.temperature < LOWEST_TEMPERATURE,
        f"""rollout.{name}.weights: files needs weights_dir, a directory that trainer and servers see; others need none
        """: (server.weights == "files") != (server.weights_dir is not None),
        f"""rollout.{name}.urls names servers that run already: python, devices and options are theirs; leave them out
        (where a saved recipe has them: python=null, devices=[], options={{}})
        """: server.urls and (server.devices or server.options or server.python),
        f"""cluster.engines places servers; rollout.{name}.urls names servers that run already: give one of the two
        """: engines and server.urls,
        f"""cluster.engines: Ray gives a server its GPUs, cluster.gpus_per_engine; leave out rollout.{name}.devices
        """: engines and server.devices,
        f"""cluster.engines: Ray gives a server GPUs of its own, and rollout.{name}.weights: ipc stays within the
        trainer's; set nccl, or files with a weights_dir that all hosts share
        """: engines and server.weights == "ipc",
        f"""rollout.{name}.urls names a server twice
        """: len({*server.urls}) < len(server.urls),
    }


def _refused_phases(recipe: RecipeKeys) -> dict[str, object]:
    begins = [phase.from_step for phase in recipe.phases if phase.from_step is not None]
    sets_range = any(phase.actor.clip_low or phase.actor.clip_high for phase in recipe.phases)
    return {
        f"""phases begin one after the other: from_step is {", ".join(map(str, begins))}; give each of them a later step
        than the one before
        """: begins != sorted({*begins}),
        """phases set actor.clip_low or clip_high, and actor.clip_fraction sets them anew in each step; leave one out
        """: sets_range and recipe.actor.clip_fraction is not None,
        **{
            f"""phases.{index} changes nothing: give it a key beside from_step or when
            """: not phase.changed
            for index, phase in enumerate(recipe.phases)
        },
        **{
            f"""phases.{index}: give one of from_step and when
            """: (phase.from_step is None) == (phase.when is None)
            for index, phase in enumerate(recipe.phases)
        },
        **{
            f"""phases.{index}.when: give above, below or both, with above less than below
            """: phase.when is not None and not _has_values(phase.when)
            for index, phase in enumerate(recipe.phases)
        },
    }


def _refused_objectives(recipe: RecipeKeys) -> dict[str, object]:
    actor, per_token, name = recipe.actor, _per_token(recipe), "actor.reward_aggregation: normalize_then_sum"
    by_function = actor.reward_aggregation == "normalize_then_sum"
    surrogate, level, kl = actor.surrogate, actor.importance_sampling_level, actor.kl
    published = PUBLISHED[surrogate]
    has_level, takes_tokens = level in published.levels, level in published.levels and bool(per_token)
    kl_in_reward = kl.coefficient and kl.place == "reward"
    tunes_range, penalises = actor.clip_fraction is not None, recipe.rollout.overlong == "penalty"
    return {
        f"""actor.surrogate: {surrogate} has no level {level}: {ONLY.get(surrogate)};
        set importance_sampling_level: {" or ".join(published.levels)}
        """: not has_level,
        f"""{per_token} gives every token an advantage of its own, and the ratio of a sequence takes one a sequence;
        set actor.importance_sampling_level: sequence_token (GSPO-token) or token
        """: takes_tokens and level == "sequence",
        f"""{per_token} gives every token an advantage of its own; gmpo weighs whole sequences; use sapo or clip
        """: takes_tokens and surrogate == "gmpo",
        f"""{per_token}: the value model of gae learns one reward at the end of a response; set actor.advantage: group
        """: per_token.startswith("reward") and actor.advantage == "gae",
        **_refused_corrections(recipe),
        """actor.advantage: max_rl divides by the mean reward, which a penalty for length, a KL or a weight below 0 may
        make negative; set rollout.overlong: mask or keep, kl.place: loss, no such weight, or advantage: group_mean
        """: actor.advantage == "max_rl" and (penalises or kl_in_reward or any(r.weight < 0 for r in recipe.reward)),
        """actor.advantage: optimal_token_baseline is of undiscounted rewards; set actor.discount: 1
        """: actor.advantage == "optimal_token_baseline" and actor.discount != 1,
        f"""actor.clip_fraction: {surrogate} has no clip range on the ratio that could be set; leave it out
        """: tunes_range and not published.bounds_ratio,
        """actor.clip_fraction follows the ratio of the sequence; at level token (GRPO) each token has its own; set
        actor.clip_fraction, actor.clip_low and actor.clip_high to null: GRPO's published range
        """: tunes_range and published.bounds_ratio and level == "token",
        """actor.clip_fraction: tokens have advantages of their own here; set clip_low and clip_high, and leave it out
        """: tunes_range and per_token,
        """actor.clip_fraction with actor.mini_batches 1: every ratio is 1, none can be clipped; raise mini_batches
        """: tunes_range and actor.updates_per_step == 1,
        """actor.kl.place: reward with actor.advantage: group: where rewards are equal the deviation is the KL's alone
        and blows it up to ±1; set advantage: group_mean, leave_one_out, batch or gae, or kl.place: loss
        """: kl_in_reward and actor.advantage == "group",
        """actor.kl.estimator: k1 in the loss: its expected gradient is 0; use k2 (the KL's own), k3 or place: reward
        """: kl.coefficient and kl.place == "loss" and kl.estimator == "k1",
        f"""{name} divides as advantage: group does, not {actor.advantage}; set that, or reward_aggregation: sum
        """: by_function and actor.advantage != "group",
        f"""{name} takes one number a response of each function; {per_token} gives more; set reward_aggregation: sum
        """: by_function and per_token.startswith("reward"),
        f"""{name} with rollout.overlong: penalty divides the penalty by its deviation; set overlong: mask or keep
        """: by_function and penalises,
    }


def _refused_corrections(recipe: RecipeKeys) -> dict[str, object]:
    """The rules on how responses of another policy, or of the engine, are weighed."""
    actor, level, published = recipe.actor, recipe.actor.importance_sampling_level, PUBLISHED[recipe.actor.surrogate]
    surrogate, correction, low, high = actor.surrogate, actor.correction, actor.correction_low, actor.correction_high
    anchored = actor.old_logprobs == "recompute" and correction == "none"
    drops_tokens = correction in ("mis", "icepop", "kpop") and actor.correction_level == "token"
    return {
        """rollout.max_staleness with actor.old_logprobs: recompute and actor.correction: none takes responses for those
        of the policy that begins the step, which has sampled none of them; set old_logprobs: engine, correction:
        decoupled (weighs by π_old/π_engine), or max_staleness: 0 (to have it so on purpose, correction: ignore)
        """: recipe.rollout.max_staleness and anchored and not published.weighs_by_engine,
        f"""actor.correction: {correction} weighs by π_old/π_engine, which is 1 here; set actor.old_logprobs: recompute
        """: correction not in ("none", "ignore") and actor.old_logprobs == "engine" and not recipe.rollout.shaping,
        f"""actor.correction: {correction}: {surrogate} weighs by π_θ/π_engine already; set geometric_mask or none
        """: correction not in ("none", "geometric_mask") and published.weighs_by_engine,
        f"""actor.correction: {correction} is by {CORRECTIONS[correction].levels[0]}; leave out actor.correction_level
        """: actor.correction_level not in CORRECTIONS[correction].levels,
        f"""actor.correction: {correction} drops single tokens, and there is one ratio for the whole sequence;
        set correction_level: sequence (mis), correction: geometric_mask, or another level of the ratio
        """: drops_tokens and (level == "sequence" or surrogate == "gmpo"),
        """actor.correction: kpop has one bound, correction_high, in nats; leave out actor.correction_low
        """: correction == "kpop" and low is not None,
        f"""actor.correction_low {low} must be below correction_high {high}
        """: correction != "none" and low is not None and high is not None and low >= high,
    }


def _noted(recipe: RecipeKeys) -> dict[str, object]:
    rollout, actor, kl, evaluation = recipe.rollout, recipe.actor, recipe.actor.kl, recipe.evaluation
    level, updates, published = actor.importance_sampling_level, actor.updates_per_step, PUBLISHED[actor.surrogate]
    most_clipped, all_updates = (1 - 1 / updates) / 2, recipe.steps * updates
    clip_range, usual = (actor.clip_low, actor.clip_high), published.range(level)
    is_far = any(not 1 / 20 < end / published_end < 20 for end, published_end in zip(clip_range, usual, strict=True))
    written, usually = (f"{low:g}/{high:g}" for low, high in (clip_range, usual))
    last_phase = max((phase.from_step or 0 for phase in recipe.phases), default=0)
    longest_hold = max((phase.when.steps for phase in recipe.phases if phase.when), default=0)
    optimizer, norm, attention = actor.optimizer, actor.length_norm, recipe.model.attn_implementation
    return {
        """actor.routing_replay: policy with actor.old_logprobs: engine: π_old's likelihood is under the engine's
        experts, π_θ's under the trainer's, which cost a pass (old_logprobs: recompute gets both from that pass)
        """: actor.routing_replay == "policy" and actor.old_logprobs == "engine",
        """actor.mini_batches is 1: each rollout batch gets one update, so every importance ratio is 1 and nothing is
        ever clipped: surrogates that differ in the ratio only (GSPO, GSPO-token, GRPO) are the same
        """: updates == 1,
        f"""actor.surrogate: reinforce has no ratio: all but the first of {updates} mini-batches are stale
        """: actor.surrogate == "reinforce" and updates > 1,
        """actor.importance_sampling_level: sequence_token equals sequence: a response's tokens share an advantage here
        """: level == "sequence_token" and not _per_token(recipe),
        """actor.length_norm: turns is mean where each response has one turn: it needs rollout.tools, mcp, environment
        or agent
        """: norm == "turns" and not rollout.has_turns,
        f"""actor.turn_credit: return_to_go with length_norm: {norm}, which weighs a turn by the others that a
        response has: the gradient has no bias with length_norm: constant or none
        """: rollout.has_turns and actor.turn_credit == "return_to_go" and norm in ("own", "turns"),
        f"""actor.clip_fraction is out of reach: {updates} mini-batches clip about {most_clipped:.2g} at most
        """: actor.clip_fraction is not None and actor.clip_fraction > most_clipped,
        f"""actor.clip_low/high {written} is far from {usually}, which null takes and {actor.surrogate} was published
        with for the ratio of a {level}: a wider range never binds, and most ratios fall outside a narrower one
        """: is_far and actor.clip_fraction is None and published.form not in ("sapo", "reinforce"),
        f"""actor.kl.estimator: {kl.estimator} in the reward: only k1 there leads to the gradient of the KL
        """: kl.coefficient and kl.place == "reward" and kl.estimator != "k1",
        f"""actor.length_norm: {norm} sums a response's tokens: beside them the terms of KL, entropy and observations,
        which are means, are weaker by the length of the response over the divisor of length_norm: {norm}
        """: norm != "own" and (actor.entropy_bonus or actor.observation_loss or actor.kl_in_loss),
        f"""phases: the last begins at step {last_phase}, and the run ends after step {recipe.steps}
        """: last_phase > recipe.steps,
        f"""phases: a condition is to hold for {longest_hold} steps, and the run has {recipe.steps}
        """: longest_hold >= recipe.steps,
        f"""actor.optimizer.warmup_steps {optimizer.warmup_steps} is not over within the {all_updates} optimiser steps
        """: all_updates <= optimizer.warmup_steps,
        f"""actor.optimizer.lr {optimizer.lr:g} is far above what AdamW takes for a language model (1e-6 to 1e-3)
        """: optimizer.name == "adamw" and optimizer.lr > 0.1,
        f"""actor.optimizer.lr {optimizer.lr:g} is one for training all weights; with model.lora take about 10
        times as much: 1e-5 for billions of parameters, 1e-4 for fewer
        """: recipe.model.lora and optimizer.name == "adamw" and optimizer.lr < 5e-6,
        """actor.correction: ignore has no effect: it is about stale responses (rollout.max_staleness), and about π_old
        of the trainer (old_logprobs: recompute)
        """: actor.correction == "ignore" and (not rollout.max_staleness or actor.old_logprobs == "engine"),
        """checkpoint.best, early_stop.metric or phases.when: evaluations are before and after training only; set
        evaluation.every
        """: _goes_by_evaluation(recipe) and not evaluation.every,
        f"""model.attn_implementation: {attention}: sequences are packed with sdpa only, so this is slower
        """: attention not in (None, "sdpa"),
        f"""model.trust_remote_code: true runs the Python code of {recipe.model.path or recipe.model.tokenizer} with
        your rights
        """: recipe.model.trust_remote_code,
    }


def _needs(recipe: RecipeKeys) -> Mapping[tuple[str, str], object]:
    """The key, or section, that acts only beside another setting, that setting, and whether the recipe has it."""
    rollout, actor = recipe.rollout, recipe.actor
    changes_experts = actor.routing_replay != "policy" or actor.updates_per_step > 1
    return {
        ("actor.dual_clip", "actor.surrogate: dual_clip"): actor.surrogate == "dual_clip",
        ("actor.sapo_temperature", "actor.surrogate: sapo"): actor.surrogate == "sapo",
        ("actor.minirl_cap", "actor.surrogate: minirl"): actor.surrogate == "minirl",
        ("actor.turn_credit", "rollout.tools, mcp, environment or agent"): rollout.has_turns,
        ("actor.kl", "actor.kl.coefficient"): actor.kl.coefficient,
        **{
            (f"actor.correction_{name}", "an actor.correction that weighs"): actor.correction not in ("none", "ignore")
            for name in ("level", "low", "high")
        },
        ("actor.advantage_ddof", "actor.advantage: group or batch"): actor.advantage in ("group", "batch"),
        ("actor.routing_replay", "actor.mini_batches: the first update has π_old's own experts"): changes_experts,
        ("critic", "actor.advantage: gae, whose value model it is"): actor.advantage == "gae",
        ("queries.shuffle", "queries.sampler: order"): recipe.queries.sampler == "order",
        ("teacher", "teacher.path, url or prompt"): recipe.teacher.is_on,
        ("teacher.model", "teacher.url"): recipe.teacher.url,
        ("teacher.key_variable", "teacher.url"): recipe.teacher.url,
        ("rollout.vllm.adapters", "model.lora"): recipe.model.lora,
        ("cluster", "cluster.engines"): recipe.cluster.engines,
        ("rollout.vllm", "rollout.engine: vllm"): rollout.engine == "vllm",
        ("rollout.sglang", "rollout.engine: sglang"): rollout.engine == "sglang",
        **{
            (f"rollout.{name}", "rollout.tools or rollout.environment"): rollout.has_turns and rollout.agent is None
            for name in ("tool_seconds", "tool_characters")
        },
        **{(f"rollout.{name}", "rollout.agent"): rollout.agent for name in ("agent_seconds", "max_context")},
        **{
            (f"rollout.{name}", "rollout.tools, mcp, environment or agent"): rollout.has_turns
            for name in ("max_turns", "history")
        },
        ("rollout.overlong_margin", "rollout.overlong: penalty"): rollout.overlong == "penalty",
        ("cold_start", "cold_start.steps"): recipe.cold_start.steps,
        ("early_stop", "early_stop.metric"): recipe.early_stop.metric,
    }


def _has_values(condition: PhaseCondition) -> bool:
    """Tell whether there are values for which it holds, and others."""
    above, below = condition.above, condition.below
    return above != below and (above is None or below is None or above < below)


def _goes_by_evaluation(recipe: RecipeKeys) -> bool:
    metrics = [
        recipe.checkpoint.best,
        recipe.early_stop.metric,
        *(own.when.metric for own in recipe.phases if own.when),
    ]
    return any((metric or "").startswith("evaluation/") for metric in metrics)


def _true_sentences(table: Mapping[str, object]) -> list[str]:
    return [" ".join(sentence.split()) for sentence, is_true in table.items() if is_true]


def _per_token(recipe: RecipeKeys) -> str:
    """The first setting that gives the tokens of one response advantages of their own; empty where there is none."""
    for i, reward in enumerate(recipe.reward):
        if reward.weight and reward.per != "response":
            return f"reward.{i}.per: {reward.per}"
    if recipe.actor.turn_credit == "return_to_go":
        return "actor.turn_credit: return_to_go"
    if recipe.teacher.is_on:
        return "teacher"
    return f"actor.advantage: {own}" if (own := recipe.actor.advantage) in ("gae", "optimal_token_baseline") else ""
