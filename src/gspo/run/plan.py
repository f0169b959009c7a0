"""`gspo plan`: what a recipe needs on GPUs that need not be here, from the model's configuration alone."""

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gspo.errors import UserError
from gspo.model.inputs import quiet_transformers
from gspo.model.load import load_config
from gspo.recipe.load import make_recipe, overridden
from gspo.recipe.schema import Recipe
from gspo.run.memory import Memory, memory_of
from gspo.run.minutes import Speed, Work, in_words, sampling_seconds, training_seconds, work_of

PROMPT_TOKENS = 512  # where neither the data nor queries.max_prompt_tokens say more
PER_HOST = 8
_USABLE = 0.9  # of a GPU's memory: the rest is for CUDA, libraries and gaps
_COMPUTING, _READING = 0.4, 0.6  # of a data sheet's operations and bytes a second: what good programs reach
_LAUNCHES, _LAUNCH_SECONDS = 59, 16e-6  # kernels of a layer and token, and what one takes to start: on an H200
_NETWORK = 50.0  # GB/s of a GPU to other hosts
_WIDTH = 2  # bytes of a number in bfloat16
_MOST = 4096  # GPUs
_UPDATE, _SAMPLING = "in the update", "while sampling"  # the stages of memory_of


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU by its maker's data sheet.

    Example: Card(memory=80, teraflops=989, bandwidth=3350, link=450) is an H100 in a host of eight.
    """

    memory: float  # GiB
    teraflops: float  # of dense products in bfloat16
    bandwidth: float  # GB/s of its memory
    link: float  # GB/s to the others of its host, in one direction


CARDS = {
    "B200-180GB": Card(memory=180, teraflops=2250, bandwidth=8000, link=900),
    "H200-141GB": Card(memory=141, teraflops=989, bandwidth=4800, link=450),
    "H100-80GB": Card(memory=80, teraflops=989, bandwidth=3350, link=450),
    "H100-PCIe-80GB": Card(memory=80, teraflops=756, bandwidth=2000, link=60),
    "H20-96GB": Card(memory=96, teraflops=148, bandwidth=4000, link=450),
    "A100-80GB": Card(memory=80, teraflops=312, bandwidth=2040, link=300),
    "A100-40GB": Card(memory=40, teraflops=312, bandwidth=1555, link=300),
    "L40S-48GB": Card(memory=45, teraflops=362, bandwidth=864, link=28),
    "A6000-48GB": Card(memory=48, teraflops=155, bandwidth=768, link=28),
    "A10-24GB": Card(memory=22.5, teraflops=125, bandwidth=600, link=28),
    "L4-24GB": Card(memory=22.5, teraflops=121, bandwidth=300, link=28),
    "RTX3090-24GB": Card(memory=24, teraflops=71, bandwidth=936, link=14),
    "RTX4090-24GB": Card(memory=24, teraflops=165, bandwidth=1008, link=14),
    "RTX5090-32GB": Card(memory=32, teraflops=210, bandwidth=1792, link=28),
    "MI300X-192GB": Card(memory=192, teraflops=1307, bandwidth=5300, link=448),
}


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of `--on`.

    Example: gpus_of("8xH100-80GB") == Gpus(number=8, name="H100-80GB")
    """

    number: int
    name: str

    @property
    def card(self) -> Card:
        """Return what one of them is."""
        return CARDS[self.name]

    @property
    def room(self) -> float:
        """The bytes of one that a run may fill."""
        return _USABLE * self.card.memory * 2**30


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of a plan, and the GPUs that they have together.

    Example: Servers(number=4, gpus=8); with the embedded engine, Servers(); elsewhere, at given addresses, gpus=0
    """

    number: int = 0
    gpus: int = 0


def gpus_of(text: str) -> Gpus:
    """Read such as 8xH100-80GB, or 8xH100 where there is one of that name; UserError for what is none."""
    number, _, name = text.lower().partition("x") if re.match(r"\d+x", text.lower()) else ("1", "", text.lower())
    known = {card.lower(): card for card in CARDS}
    close = [card for lower, card in known.items() if lower.rpartition("-")[0] == name]
    found = known.get(name) or (close[0] if len(close) == 1 else None)
    if found is None or not 0 < int(number) <= _MOST:
        what = "there is no such GPU" if found is None else f"a plan is for 1 to {_MOST:,} GPUs"
        fix = f"write such as 8xH100-80GB; there are {', '.join(CARDS)}"
        raise UserError(f"{text!r}: {what}", where="--on", fix=fix)
    return Gpus(number=int(number), name=found)


def plan(recipe: Recipe, on: str) -> Iterator[str]:
    """Yield what the recipe would need on these GPUs, from config.json alone: no weights, data, tokenizer or GPU."""
    gpus = gpus_of(on)  # a mistake shows before the configuration is read
    quiet_transformers()
    config = load_config(recipe.model, is_whole=False)
    yield f"recipe      {recipe.name}, {recipe.steps} steps"
    if recipe.model.architecture is not None and "vocab_size" not in recipe.model.architecture:
        size = f"{config.get_text_config().vocab_size:,} tokens, for the tokenizer is not read"
        yield f"note        the vocabulary is taken to be of {size}: give model.architecture.vocab_size"
    if not recipe.queries.max_prompt_tokens:
        yield f"note        prompts are taken to be of {PROMPT_TOKENS} tokens; gspo check --on takes those of the data"
    yield from plan_lines(recipe, config, gpus, recipe.queries.max_prompt_tokens or PROMPT_TOKENS)


def plan_lines(recipe: Recipe, config: Any, gpus: Gpus, prompt_tokens: int) -> Iterator[str]:
    """Yield the lines of a plan, for prompts of so many tokens, and responses as long as they may ever be."""
    recipe = recipe.at_longest
    card, work = gpus.card, work_of(recipe, config, prompt_tokens, _WIDTH)
    active = f", {_billions(work.active)} of them for a token" if work.active < work.parameters else ""
    yield f"model       {config.model_type}: {_billions(work.parameters)} parameters{active}"
    each = f"{card.memory:g} GiB, {card.teraflops:g} TFLOP/s, {card.bandwidth:,.0f} GB/s each"
    yield f"on          {gpus.number} × {gpus.name}: {each}, by its data sheet and not measured"
    yield f"lengths     prompts of {prompt_tokens:,} tokens, responses of {recipe.rollout.max_new_tokens:,}"
    servers = servers_of(recipe, config, work, gpus)
    num_ranks = gpus.number - servers.gpus
    if num_ranks < 1:
        yield f"note        servers take {servers.gpus} of {gpus.number} GPUs, and none is left to train on"
        return
    yield f"processes   {num_ranks}, one for each GPU that trains"
    if servers.gpus:
        tokens = _cache_tokens(work, gpus, servers)
        yield f"servers     {servers.number} on {servers.gpus} GPUs; the cache of one holds {tokens:,.0f} tokens"
        if tokens < _sequence(recipe, work):
            yield "note        a server's GPUs do not hold its weights and one response: give it more of them"
            return
    elif servers.number:
        yield f"servers     {servers.number} elsewhere: what they take to sample is not counted"
    yield from _picture(_memory(recipe, config, work, num_ranks), gpus)
    changes = changes_to_fit(recipe, config, gpus, work, num_ranks)
    if changes is None:
        yield "change      no setting that gspo knows of makes it fit: take a smaller model, or more GPUs"
        if not servers.number and num_ranks > 1:
            yield "            each of them holds the whole model while it samples; servers have GPUs of their own"
        return
    if changes:
        yield f"change      it fits with {' '.join(changes)}: what follows is with these"
    else:
        tokens = largest_micro_batch(recipe, config, gpus, work, num_ranks)
        yield f"micro-batch up to {tokens:,} tokens fit; the recipe has {recipe.actor.micro_batch_tokens:,}"
    changed = _changed(recipe, changes)
    least = min(numbers_that_fit(changed, config, gpus, work, num_ranks), default=num_ranks)
    yield f"least       it fits where {least} × {gpus.name} train{'s' * (least == 1)}"
    sampling, training = seconds_of(changed, work, gpus, servers)
    step = _step(recipe, sampling, training, servers)
    sampled = recipe.rollout.queries_per_step * recipe.rollout.group_size * recipe.rollout.max_new_tokens
    yield f"time        a step about {in_words(step)}: {in_words(sampling)} sampling, {in_words(training)} training"
    yield f"            {recipe.steps} steps {in_words(recipe.steps * step)}; rewards and evaluations come on top"
    yield f"speed       {sampled / step / gpus.number:,.0f} tokens of responses a second and GPU"


def servers_of(recipe: Recipe, config: Any, work: Work, gpus: Gpus) -> Servers:
    """The servers that the recipe names, else the fewest with which its steps are about shortest.

    Where none of the rest can train the model, they have half of all GPUs.
    """
    rollout, cluster = recipe.rollout, recipe.cluster
    if rollout.engine == "embedded":
        return Servers()
    named = getattr(rollout, rollout.engine)
    if named.urls:
        return Servers(number=len(named.urls))
    if cluster.engines:
        return Servers(number=cluster.engines, gpus=cluster.engines * cluster.gpus_per_engine)
    if named.devices:
        return Servers(number=len(named.devices), gpus=sum(1 + entry.count(",") for entry in named.devices))
    weights = work.width * work.parameters
    needed = weights + max(weights, _sequence(recipe, work) * work.cached)  # a cache as large as these, or larger
    size = 2 ** max(0, math.ceil(math.log2(needed / gpus.room)))
    smallest = _changed(recipe, _smaller_updates(recipe, work)[-1])
    able = numbers_that_fit(smallest, config, gpus, work, gpus.number - size)
    splits = [Servers(number=(gpus.number - ranks) // size, gpus=gpus.number - ranks) for ranks in reversed(able)]
    splits = [split for split in splits if split.gpus % size == 0]
    if not splits:
        return Servers(number=1, gpus=max(gpus.number // 2, size))
    steps = [_step(recipe, *seconds_of(recipe, work, gpus, split), split) for split in splits]
    return next(split for split, step in zip(splits, steps, strict=True) if step <= 1.05 * min(steps))


def seconds_of(recipe: Recipe, work: Work, gpus: Gpus, servers: Servers) -> tuple[float, float]:
    """The seconds that a step samples, and those that it trains, where responses are as long as they may be."""
    rollout, card, num_ranks = recipe.rollout, gpus.card, gpus.number - servers.gpus
    one = Speed(operations=card.teraflops * 1e12 * _COMPUTING, reading=card.bandwidth * 1e9 * _READING)
    link = 1e9 * (card.link if num_ranks <= PER_HOST else min(card.link, _NETWORK))
    training = training_seconds(recipe, work, one, num_ranks, link)
    if not servers.number:
        sampler = replace(one, launch=_LAUNCHES * _LAUNCH_SECONDS)
        return sampling_seconds(rollout.queries_per_step / gpus.number, rollout, work, sampler), training
    if not servers.gpus:
        return 0.0, training
    size = servers.gpus / servers.number
    server = Speed(operations=size * one.operations, reading=size * one.reading)  # which replays CUDA graphs
    most_rows = _cache_tokens(work, gpus, servers) / _sequence(recipe, work)
    return sampling_seconds(rollout.queries_per_step / servers.number, rollout, work, server, most_rows), training


def _sequence(recipe: Recipe, work: Work) -> float:
    """The tokens of a prompt and the longest response."""
    return work.prompt_tokens + recipe.rollout.max_new_tokens


def _cache_tokens(work: Work, gpus: Gpus, servers: Servers) -> float:
    """The tokens that a server's cache holds beside the weights."""
    return (servers.gpus / servers.number * gpus.room - work.width * work.parameters) / work.cached


def _step(recipe: Recipe, sampling: float, training: float, servers: Servers) -> float:
    """The seconds of a step: servers sample ahead while others train."""
    is_ahead = servers.number and recipe.rollout.at_publish != "none"
    return max(sampling, training) if is_ahead else sampling + training


def _memory(recipe: Recipe, config: Any, work: Work, num_ranks: int) -> Memory:
    device = torch.device("cuda")
    return memory_of(recipe, config, prompt_tokens=int(work.prompt_tokens), device=device, num_ranks=num_ranks)


def _picture(memory: Memory, gpus: Gpus) -> Iterator[str]:
    """Yield what fills the memory of a GPU that trains: a bar for each part of both stages."""
    widest = max(gpus.room, *(sum(parts.values()) for parts in memory.values()))
    for number, (stage, parts) in enumerate(memory.items()):
        needed = sum(parts.values())
        verdict = "it fits" if needed <= gpus.room else "TOO MUCH"
        yield f"{'' if number else 'memory':<12}{_gib(needed)} of {_gib(gpus.room)} {stage}: {verdict}"
        for part, size in sorted(parts.items(), key=lambda item: -item[1]):
            if size >= 2**27:
                yield f"              {part:<22}{_gib(size):>10}  {'█' * max(1, round(40 * size / widest))}"


def _smaller_updates(recipe: Recipe, work: Work) -> list[list[str]]:
    """The changes that save memory in the update, as words of a command line: from none on, the cheapest first."""
    longest, tokens = int(work.prompt_tokens) + recipe.rollout.max_new_tokens, recipe.actor.micro_batch_tokens
    smaller = filter(longest.__lt__, [tokens // 2**power for power in range(1, 8)])
    sizes = [[], *([f"actor.micro_batch_tokens={size}"] for size in (*smaller, longest))]
    levers = [[]] if recipe.actor.gradient_checkpointing else [[], ["actor.gradient_checkpointing=true"]]
    return [[*size, *lever] for lever in levers for size in sizes]


def changes_to_fit(recipe: Recipe, config: Any, gpus: Gpus, work: Work, num_ranks: int) -> list[str] | None:
    """The first changes of the update and of sampling with which both fit on the GPUs that train; None where none do.

    At last an adapter in place of all weights, which is another run.
    """
    # What is no smaller than the recipe's own fits where that does, and is not reached.
    rows = [[], ["rollout.max_rows=64"], ["rollout.max_rows=8"]]
    choices = {_UPDATE: _smaller_updates(recipe, work), _SAMPLING: rows}

    def found(stage: str, *more: str) -> list[str] | None:
        """The first of a stage's choices that fits."""
        for words in choices[stage]:
            memory = _memory(_changed(recipe, [*words, *more]), config, work, num_ranks)
            if sum(memory[stage].values()) <= gpus.room:
                return words
        return None

    for adapter in ([], ["model.lora={}"])[: 1 if recipe.model.lora else 2]:
        with suppress(UserError):  # not every model can have an adapter
            update = found(_UPDATE, *adapter)
            sampling = None if update is None else found(_SAMPLING, *adapter)
            if update is not None and sampling is not None:
                return [*update, *sampling, *adapter]
    return None


def numbers_that_fit(recipe: Recipe, config: Any, gpus: Gpus, work: Work, most: int) -> list[int]:
    """The numbers of GPUs, up to so many, on which the recipe trains.

    More GPUs have smaller shares. One alone may fit where a few do not: it gathers nothing.
    """
    fits, several = partial(_fits, recipe, config, gpus, work), range(2, most + 1)
    return [*([1] if most and fits(1) else []), *several[bisect_left(several, x=True, key=fits) :]]


def largest_micro_batch(recipe: Recipe, config: Any, gpus: Gpus, work: Work, num_ranks: int) -> int:
    """The most tokens of a micro-batch that fit, by doubling those of the recipe, which fit."""
    rollout, tokens = recipe.rollout, recipe.actor.micro_batch_tokens
    in_all = work.prompt_tokens + rollout.group_size * rollout.max_new_tokens
    of_a_rank = rollout.queries_per_step / recipe.actor.mini_batches / num_ranks * in_all
    while tokens < of_a_rank:
        doubled = _changed(recipe, [f"actor.micro_batch_tokens={2 * tokens}"])
        if not _fits(doubled, config, gpus, work, num_ranks):
            break
        tokens *= 2
    return tokens


def _changed(recipe: Recipe, words: Sequence[str]) -> Recipe:
    tree = recipe.model_dump(mode="json")
    for word in words:
        tree = overridden(tree, word)
    return make_recipe(tree) if words else recipe


def _fits(recipe: Recipe, config: Any, gpus: Gpus, work: Work, num_ranks: int) -> bool:
    stages = _memory(recipe, config, work, num_ranks).values()
    return all(sum(parts.values()) <= gpus.room for parts in stages)


def _billions(number: float) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
