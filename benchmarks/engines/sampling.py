"""The embedded engine, vLLM and transformers' `generate` on the same model, prompts and lengths."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import decode
from benchmarks.decode import WORDS, seconds_of, spread
from benchmarks.engines.start import PROMPT_TOKENS
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Group, Query

GROUP_SIZE = 8
HEAD = ["sequences × tokens", "embedded, s", "vLLM, s", "`generate`, s"]
HEAD += ["vLLM / embedded", "`generate` / embedded", "`generate` / vLLM"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is sampled: responses of one length, in groups of 8."""

    sequences: int
    tokens: int  # of each response

    @property
    def name(self) -> str:
        """For a table."""
        return f"{self.sequences} × {self.tokens}"

    @property
    def settings(self) -> RolloutConfig:
        """As a recipe has them."""
        return RolloutConfig(max_new_tokens=self.tokens, group_size=GROUP_SIZE)

    def queries(self, policy: Policy) -> list[Query]:
        """Prompts of one length, each of other tokens."""
        words = policy.tokenizer(WORDS).input_ids * PROMPT_TOKENS
        return [
            Query(id=str(n), prompt="", text="", prompt_ids=tuple(words[n : n + PROMPT_TOKENS]), columns={})
            for n in range(self.sequences // GROUP_SIZE)
        ]


WORKS = [Work(sequences=sequences, tokens=tokens) for sequences in (64, 256) for tokens in (64, 256)]


def new_policy(model: Mapping[str, Any] | Path) -> Policy:
    """A policy whose responses are never ended by a token, so that all sides do the same work."""
    policy = decode.policy_of(model)
    policy.model.generation_config.eos_token_id = None
    return replace(policy, stop_ids=())


def table_row(work: Work, policy: Policy, server: Sampler, rounds: int) -> list[str]:
    """Seconds of each side, and ratios round by round; a first round warms up."""
    queries = work.queries(policy)
    # The embedded engine looks for a stop token in every step, as it does in a run; this one is none.
    watched = replace(policy, stop_ids=(-1,))
    embedded = Sampler(EmbeddedEngine(watched), watched)
    published = decode.as_published(policy)
    prompts = torch.tensor([query.prompt_ids for query in queries]).repeat_interleave(GROUP_SIZE, dim=0)
    asked = decode.Workload(num_prompts=len(queries), prompt_tokens=PROMPT_TOKENS, new_tokens=work.tokens, ends=False)

    def by(sampler: Sampler, seed: int) -> None:
        check_lengths(work, sampler.sample(queries, work.settings, SamplingKey(seed=seed, step=1)))

    sides = [
        lambda seed: by(embedded, seed),
        lambda seed: by(server, seed),
        lambda seed: decode.generate(published, prompts, asked, None, seed),
    ]
    seconds: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for place in _rotated(range(len(sides)), number):  # nobody always follows the same one
            taken = seconds_of(sides[place], number)
            if number:
                seconds[place].append(taken)
    ours, vllm, plain = seconds
    pairs = ((vllm, ours), (plain, ours), (plain, vllm))
    ratios = [[one / two for one, two in zip(*pair, strict=True)] for pair in pairs]
    return [work.name, *map(spread, (*seconds, *ratios))]


def check_lengths(work: Work, groups: Sequence[Group]) -> None:
    """End the benchmark where not every response has its full length."""
    lengths = [sample.num_tokens for group in groups for sample in group.samples]
    if lengths != [work.tokens] * work.sequences:
        sys.exit(f"{work.name}: responses have {sorted(set(lengths))} tokens: the sides do not do the same work")


def _rotated(places: Sequence[int], by: int) -> list[int]:
    start = by % len(places)
    return [*places[start:], *places[:start]]
