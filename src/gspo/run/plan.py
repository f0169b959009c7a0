"""`gspo plan`: what a recipe needs on GPUs that need not be here, from the model's configuration alone."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from gspo.errors import UserError
from gspo.model.inputs import quiet_transformers
from gspo.model.load import empty_model, load_config
from gspo.model.shape import active_parameters, heads_of
from gspo.recipe.load import make_recipe, overridden
from gspo.recipe.schema import Recipe
from gspo.run.memory import Memory, memory_of
from gspo.run.minutes import in_words, operations

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
    "B200-180GB": Card(memory=180, teraflops=2250, bandwidth=7700, link=900),
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
    card, work = gpus.card, work_of(recipe, config, prompt_tokens)
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
        size = _server_size(work, gpus)
        tokens = num_servers / size * (size * gpus.room - _WIDTH * work.parameters) / work.cached
        yield f"servers     {num_servers // size}, of {size} GPUs each; their caches hold {tokens:,.0f} tokens in all"
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


@dataclass(frozen=True, kw_only=True)
class Work:
    """The sizes that a step's time goes by.

    Example: of Qwen3-30B-A3B, parameters = 30.5e9, active = 3.3e9 and in_experts = 29e9.
    """

    parameters: int
    active: int  # of which a token's products are made
    in_experts: int
    chosen: float  # the part of its experts that a token goes through; 1 without experts
    layers: int
    cached: int  # bytes of a token's keys and values
    prompt_tokens: int


def work_of(recipe: Recipe, config: Any, prompt_tokens: int) -> Work:
    """The sizes of the recipe's model, which is made without weights."""
    model, text = empty_model(recipe.model, deepcopy(config)), config.get_text_config()
    active, in_experts = active_parameters(model, text)
    _, keys, size = heads_of(text)
    total = sum(parameter.numel() for parameter in model.parameters())
    return Work(
        parameters=total,
        active=active,
        in_experts=in_experts,
        chosen=1 - (total - active) / in_experts if in_experts else 1.0,
        layers=text.num_hidden_layers,
        cached=_WIDTH * 2 * text.num_hidden_layers * keys * size,
        prompt_tokens=prompt_tokens,
    )


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
    return 2 ** max(0, math.ceil(math.log2(2 * _WIDTH * work.parameters / gpus.room)))


def seconds_of(recipe: Recipe, work: Work, gpus: Gpus, num_servers: int) -> tuple[float, float]:
    """The seconds that a step samples, and those that it trains, where responses are as long as they may be."""
    return _sampling(recipe, work, gpus, num_servers), _training(recipe, work, gpus, gpus.number - num_servers)


def _step(recipe: Recipe, sampling: float, training: float, num_servers: int) -> float:
    """The seconds of a step: servers sample ahead while others train."""
    is_ahead = num_servers and recipe.rollout.at_publish != "none"
    return max(sampling, training) if is_ahead else sampling + training


def _sampling(recipe: Recipe, work: Work, gpus: Gpus, num_servers: int) -> float:
    """The longest for each token of a round: reading weights and cache, the products, starting the kernels."""
    rollout, card = recipe.rollout, gpus.card
    size = _server_size(work, gpus) if num_servers else 1
    rows = math.ceil(rollout.queries_per_step * rollout.group_size / max(1, (num_servers or gpus.number) // size))
    length = work.prompt_tokens + rollout.max_new_tokens
    most = (size * gpus.room - _WIDTH * work.parameters) / (work.cached * length) if num_servers else rollout.max_rows
    at_once = max(1, min(rows, int(most)))
    reached = 1 - (1 - work.chosen) ** at_once  # of the experts
    read = _WIDTH * (work.parameters - work.in_experts * (1 - reached))
    read += at_once * work.cached * (length + work.prompt_tokens) / 2
    reading = read / (size * card.bandwidth * 1e9 * _READING)
    computing = 2 * work.active * at_once / (size * card.teraflops * 1e12 * _COMPUTING)
    launching = 0.0 if num_servers else work.layers * _LAUNCHES * _LAUNCH_SECONDS  # servers replay CUDA graphs
    return math.ceil(rows / at_once) * rollout.max_new_tokens * max(reading, computing, launching)


def _training(recipe: Recipe, work: Work, gpus: Gpus, num_ranks: int) -> float:
    """The longer of the products, and of gathering weights and adding up gradients for each micro-batch."""
    rollout, actor, card = recipe.rollout, recipe.actor, gpus.card
    tokens = rollout.queries_per_step * (rollout.group_size * rollout.max_new_tokens + work.prompt_tokens)
    computing = operations(recipe) * work.active * tokens / (num_ranks * card.teraflops * 1e12 * _COMPUTING)
    if num_ranks == 1 or recipe.trainer.sharding == "none":
        return computing
    micro_batches = math.ceil(tokens / actor.mini_batches / num_ranks / actor.micro_batch_tokens)
    link = card.link if num_ranks <= PER_HOST else min(card.link, _NETWORK)
    moved = (2 * _WIDTH + 4) * work.parameters * actor.updates_per_step * micro_batches
    return max(computing, moved / (link * 1e9))


def _memory(recipe: Recipe, config: Any, work: Work, num_ranks: int) -> Memory:
    device = torch.device("cuda")
    return memory_of(recipe, config, prompt_tokens=work.prompt_tokens, device=device, num_ranks=num_ranks)


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
    longest = work.prompt_tokens + recipe.rollout.max_new_tokens
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
