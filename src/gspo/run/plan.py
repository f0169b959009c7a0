"""`gspo plan`: what a recipe needs on GPUs that need not be here, from the model's configuration alone."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
_LAUNCHES, _LAUNCH_SECONDS = 15, 8e-6  # kernels that a layer starts for a token, and what one takes to start
_NETWORK = 50.0  # GB/s of a GPU to other hosts
_WIDTH = 2  # bytes of a number in bfloat16
_NUMBERS = [2**power for power in range(13)]  # of GPUs
_LEVERS = ("actor.gradient_checkpointing=true", "rollout.max_rows=64", "rollout.max_rows=8")


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


def gpus_of(text: str) -> Gpus:
    """Read such as 8xH100-80GB, or 8xH100 where there is one of that name; UserError for what is none."""
    number, _, name = text.partition("x") if re.match(r"\d+x", text) else ("1", "", text)
    known = {card.lower(): card for card in CARDS}
    close = [card for lower, card in known.items() if lower.rpartition("-")[0] == name.lower()]
    found = known.get(name.lower()) or (close[0] if len(close) == 1 else None)
    if found is None or not int(number):
        what = "there is no such GPU" if int(number) else "a plan needs a GPU at least"
        fix = f"write such as 8xH100-80GB; there are {', '.join(CARDS)}"
        raise UserError(f"{text!r}: {what}", where="--on", fix=fix)
    return Gpus(number=int(number), name=found)


def plan(recipe: Recipe, on: str) -> Iterator[str]:
    """Yield what the recipe would need on these GPUs, from config.json alone: no weights, data, tokenizer or GPU."""
    gpus = gpus_of(on)  # a mistake shows before transformers is loaded
    quiet_transformers()
    config = load_config(recipe.model, is_whole=False)
    yield f"recipe      {recipe.name}, {recipe.steps} steps"
    yield from plan_lines(recipe, config, gpus, recipe.queries.max_prompt_tokens or PROMPT_TOKENS)


def plan_lines(recipe: Recipe, config: Any, gpus: Gpus, prompt_tokens: int) -> Iterator[str]:
    """Yield the lines of a plan, for prompts of so many tokens, and responses as long as they may ever be."""
    recipe = recipe.at_longest
    card, work = gpus.card, work_of(recipe, config, prompt_tokens, _WIDTH)
    active = f", {_billions(work.active)} of them for a token" if work.active < work.parameters else ""
    yield f"model       {config.model_type}: {_billions(work.parameters)} parameters{active}"
    each = f"{card.memory:g} GiB, {card.teraflops:g} TFLOP/s, {card.bandwidth:,.0f} GB/s each"
    yield f"on          {gpus.number} × {gpus.name}: {each}, by its data sheet; gspo was never measured on it"
    yield f"lengths     prompts of {prompt_tokens:,} tokens, responses of {recipe.rollout.max_new_tokens:,}"
    num_servers = servers_of(recipe, config, work, gpus)
    num_ranks = gpus.number - num_servers
    if num_ranks < 1:
        yield f"note        servers take {num_servers} of {gpus.number} GPUs, and none is left to train on"
        return
    beside = f", and {num_servers} GPUs for servers of {recipe.rollout.engine}" if num_servers else ""
    yield f"processes   {num_ranks}, one for each GPU that trains{beside}"
    memory = _memory(recipe, config, work, num_ranks)
    yield from _picture(memory, gpus)
    if num_servers:
        size, tokens = _server_size(work, gpus), _cache_tokens(work, gpus)
        yield f"servers     {num_servers // size}, of {size} GPUs each; the cache of one holds {tokens:,.0f} tokens"
    changes = changes_to_fit(recipe, config, gpus, work, num_ranks)
    if changes is None:
        yield "change      no setting that gspo knows of makes it fit: take a smaller model, or more GPUs"
        if recipe.rollout.engine == "embedded" and num_ranks > 1:
            yield "            each of them holds the whole model while it samples; servers have GPUs of their own"
        return
    if changes:
        yield f"change      it fits with {' '.join(changes)}: what follows is with these"
    else:
        tokens = largest_micro_batch(recipe, config, gpus, work, num_ranks)
        yield f"micro-batch up to {tokens:,} tokens fit; the recipe has {recipe.actor.micro_batch_tokens:,}"
    changed = _changed(recipe, changes)
    fewer = [number for number in _NUMBERS if number < num_ranks]
    least = next((number for number in fewer if _fits(changed, config, gpus, work, number)), num_ranks)
    yield f"least       it fits where {least} × {gpus.name} or more train"
    sampling, training = seconds_of(changed, work, gpus, num_servers)
    step = _step(recipe, sampling, training, num_servers)
    sampled = recipe.rollout.queries_per_step * recipe.rollout.group_size * recipe.rollout.max_new_tokens
    yield f"time        a step about {in_words(step)}: {in_words(sampling)} sampling, {in_words(training)} training"
    yield f"            {recipe.steps} steps {in_words(recipe.steps * step)}; rewards and evaluations come on top"
    yield f"speed       {sampled / step / gpus.number:,.0f} tokens of responses a second and GPU"


def servers_of(recipe: Recipe, config: Any, work: Work, gpus: Gpus) -> int:
    """The GPUs of servers: those that the recipe names, else the fewest with which its steps are about shortest.

    Where none of the rest can train the model, they are half of all.
    """
    rollout, cluster = recipe.rollout, recipe.cluster
    if rollout.engine == "embedded":
        return 0
    devices = getattr(rollout, rollout.engine).devices
    if named := cluster.engines * cluster.gpus_per_engine or sum(1 + entry.count(",") for entry in devices):
        return named
    size = _server_size(work, gpus)
    numbers = range(size, gpus.number, size)
    least = _changed(recipe, changes_of(recipe, work)[-1])
    able = [n for n in numbers if _fits(least, config, gpus, work, gpus.number - n)]
    seconds = {n: _step(recipe, *seconds_of(recipe, work, gpus, n), n) for n in able}
    close = 1.05 * min(seconds.values(), default=0.0)
    return next((n for n in able if seconds[n] <= close), max(gpus.number // 2, size))


def _server_size(work: Work, gpus: Gpus) -> int:
    """The GPUs that a server's weights need, with as much room again for its cache."""
    return 2 ** max(0, math.ceil(math.log2(2 * work.width * work.parameters / gpus.room)))


def seconds_of(recipe: Recipe, work: Work, gpus: Gpus, num_servers: int) -> tuple[float, float]:
    """The seconds that a step samples, and those that it trains, where responses are as long as they may be."""
    rollout, card, num_ranks = recipe.rollout, gpus.card, gpus.number - num_servers
    one = Speed(operations=card.teraflops * 1e12 * _COMPUTING, reading=card.bandwidth * 1e9 * _READING)
    link = 1e9 * (card.link if num_ranks <= PER_HOST else min(card.link, _NETWORK))
    training = training_seconds(recipe, work, one, num_ranks, link)
    if not num_servers:
        sampler = replace(one, launch=_LAUNCHES * _LAUNCH_SECONDS)
        return sampling_seconds(rollout.queries_per_step / gpus.number, rollout, work, sampler), training
    size = _server_size(work, gpus)
    server = Speed(operations=size * one.operations, reading=size * one.reading)  # which replays CUDA graphs
    num_queries = rollout.queries_per_step / max(1, num_servers // size)
    most_rows = _cache_tokens(work, gpus) / (work.prompt_tokens + rollout.max_new_tokens)
    return sampling_seconds(num_queries, rollout, work, server, most_rows), training


def _cache_tokens(work: Work, gpus: Gpus) -> float:
    """The tokens that a server's cache holds beside the weights."""
    return (_server_size(work, gpus) * gpus.room - work.width * work.parameters) / work.cached


def _step(recipe: Recipe, sampling: float, training: float, num_servers: int) -> float:
    """The seconds of a step: servers sample ahead while others train."""
    is_ahead = num_servers and recipe.rollout.at_publish != "none"
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


def changes_of(recipe: Recipe, work: Work) -> list[list[str]]:
    """The changes of a recipe that save memory, as words of a command line: from none on, the cheapest first."""
    longest = int(work.prompt_tokens) + recipe.rollout.max_new_tokens
    halves = [recipe.actor.micro_batch_tokens // 2**power for power in range(1, 8)]
    smaller = [[f"actor.micro_batch_tokens={tokens}"] for tokens in (*filter(longest.__lt__, halves), longest)]
    return [[*size, *_LEVERS[:number]] for number in range(len(_LEVERS) + 1) for size in ([], *smaller)]


def changes_to_fit(recipe: Recipe, config: Any, gpus: Gpus, work: Work, num_ranks: int) -> list[str] | None:
    """The first of these changes with which the recipe fits on the GPUs that train; None where none does.

    At last an adapter in place of all weights, which is another run.
    """
    changes = changes_of(recipe, work)
    for words in (*changes, [*changes[-1], "model.lora={}"]):
        with suppress(UserError):  # not every model can have an adapter
            if _fits(_changed(recipe, words), config, gpus, work, num_ranks):
                return words
    return None


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
