"""What conversations cost: against the same tokens in one turn, through the agents' endpoint, and of several contexts.

    python -m benchmarks.conversations --rounds 3      # about 3 minutes on one core
    python -m benchmarks.conversations --rounds 1 --model models/smollm2-135m    # a real one
    python -m benchmarks.conversations --trl .venv-trl/lib/python3.11/site-packages    # TRL's tools, too

8 × 8 conversations of 4 turns of 32 tokens each; an environment in its own process, as in a run, answers every turn
after 0, 50 or 500 ms. One turn that is as long has the waits behind it, one after the other. The last row is the
update's forward and backward pass for four contexts of one response that share a prefix of 512 tokens, with 64 more
each, against four rows that share nothing. The model is untrained and has about 1M parameters; with another one, the
answers come after 0 ms alone.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.decode import MODELS
from benchmarks.machine import load
from benchmarks.pairs import HEADER, row
from benchmarks.peer import trl_tools
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, load_policy, response_likelihood
from gspo.queries.render import render_all
from gspo.queries.row import Row
from gspo.recipe.sections import ModelConfig, QueriesConfig, RolloutConfig
from gspo.reward.tools import load_tools
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.rollout.single_turn import Generate, SingleTurn
from gspo.run.tools import with_open_ends
from gspo.types import Query, Sample

QUERIES, GROUP_SIZE, TURNS, TOKENS = 8, 8, 4, 32
SECONDS = (0.0, 0.05, 0.5)
ANSWER = "That is not it. Go on."
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRANCHES, PREFIX, WRITTEN = 4, 512, 64


class Waiting:
    """An environment that answers after a while."""

    async def reset(self, row: Mapping[str, Any]) -> None:
        """Take in how long that is."""
        self.seconds = float(row["seconds"])

    async def step(self, text: str) -> tuple[str, float, bool]:
        """Answer."""
        await asyncio.sleep(self.seconds)
        return ANSWER, 0.0, False


@cache
def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=None, verify=False, limits=httpx.Limits(max_connections=None))


async def play(row: Mapping[str, Any], *, base_url: str, api_key: str) -> float:
    """Play the same conversation as an agent does."""
    headers, messages = {"authorization": f"Bearer {api_key}"}, [{"role": "user", "content": row["prompt"]}]
    for _ in range(TURNS):
        body = {"model": "policy", "messages": messages, "max_tokens": TOKENS}
        reply = await _client().post(f"{base_url}/chat/completions", headers=headers, json=body)
        said = reply.raise_for_status().json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": ANSWER}]
        await asyncio.sleep(float(row["seconds"]))
    return 0.0


class FixedTurn(SingleTurn):
    """Turns of so many tokens: what the untrained policy writes ends none."""

    async def __call__(self, query: Query, generate: Generate) -> Sample:
        """The turn, as though it had ended."""
        return replace(await super().__call__(query, partial(generate, max_new_tokens=TOKENS)), finish_reason="stop")


def new_policy(path: str | None = None) -> Policy:
    """The model of a directory, or the untrained one with a tokenizer of one token a byte; nothing ends its turns."""
    if path is not None:
        real = load_policy(ModelConfig(path=path), AutoTokenizer.from_pretrained(path), seed=0)
        return replace(real, stop_ids=(-1,))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    architecture: Any = MODELS["Qwen3, 1.0M"]
    policy = load_policy(ModelConfig(architecture=dict(architecture), tokenizer="fit"), tokenizer, seed=0)
    return replace(policy, stop_ids=(-1,))


class Side:
    """Samples all conversations in one way."""

    def __init__(self, policy: Policy, seconds: float = 0.0, turns: int = TURNS, **keys: Any) -> None:
        room: dict[str, Any] = {
            "max_new_tokens": TURNS * TOKENS if "agent" in keys or not keys else 4096,
            "max_turns": TURNS,
        }
        self.settings = RolloutConfig(group_size=GROUP_SIZE, **room, **keys)
        texts = [f"Which number is it, of the {number} that there are?" for number in range(10, 10 + QUERIES)]
        rows = [Row(id=text, prompt=text, columns={"seconds": seconds}) for text in texts]
        queries = QueriesConfig()
        self.tools = load_tools(self.settings, policy.tokenizer, queries) if keys else None
        self.queries = with_open_ends(render_all(rows, policy.tokenizer, queries=queries), self.tools)
        self.sampler, self.step = Sampler(EmbeddedEngine(policy), policy, self.tools), 0
        self.num_written, self.waits = QUERIES * GROUP_SIZE * TURNS * TOKENS, 0.0 if keys else TURNS * seconds

    def __call__(self) -> None:
        """Sample; of one turn, wait as long as the longest chain of answers takes."""
        self.step += 1
        with patch("gspo.rollout.conversation.SingleTurn", FixedTurn):
            groups = self.sampler.sample(self.queries, self.settings, SamplingKey(seed=0, step=self.step))
        samples = [sample for group in groups for sample in group.samples]
        assert not (failed := [sample.failure for sample in samples if sample.failure is not None]), failed
        assert sum(sample.num_written for sample in samples) == self.num_written and not any(
            len(sample.starts) > 1 for sample in samples
        )
        time.sleep(self.waits)

    def close(self) -> None:
        """End its processes."""
        if self.tools is not None:
            self.tools.close()


def update(policy: Policy, sequences: list[TokenSequence]) -> None:
    """Pass forward and backward."""
    policy.model.zero_grad()
    response_likelihood(policy, sequences).logprobs.sum().backward()


def branches() -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Four rows of which no two begin alike, and four contexts of one response that share their prefix."""
    generator = torch.Generator().manual_seed(0)
    prefix, *others = torch.randint(256, (1 + BRANCHES, PREFIX), generator=generator).tolist()
    written = torch.randint(256, (BRANCHES, WRITTEN), generator=generator)
    rows = [TokenSequence(prompt_ids=tuple(p), response_ids=w) for p, w in zip(others, written, strict=True)]
    ids = torch.cat([torch.cat([torch.tensor(prefix), own]) for own in written])
    mask = (torch.arange(len(ids)) % (PREFIX + WRITTEN)) >= PREFIX
    starts = tuple(range(0, len(ids), PREFIX + WRITTEN))
    return rows, [TokenSequence(prompt_ids=tuple(prefix), response_ids=ids, loss_mask=mask, starts=starts)]


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", metavar="DIR", help="the packages of an environment that has TRL (`make bench`)")
    parser.add_argument("--model", metavar="DIR", help="a model to sample from instead of the untrained one")
    options = parser.parse_args()
    rounds: int = options.rounds
    torch.set_num_threads(1)
    policy = new_policy(options.model)
    inside: dict[str, Any] = {"environment": "benchmarks.conversations:Waiting"}
    print(f"{load()}; {torch.get_num_threads()} thread(s)\n{HEADER}", flush=True)
    for seconds in SECONDS[: 1 if options.model else None]:
        plain, played = Side(policy, seconds), Side(policy, seconds, **inside)
        row(f"4 turns, answers after {1000 * seconds:.0f} ms / one turn and the waits", plain, played, rounds)
        played.close()
    played, agent = Side(policy, **inside), Side(policy, agent="benchmarks.conversations:play")
    row("through the agents' endpoint / in process", played, agent, rounds)
    played.close()
    agent.close()
    rows, contexts = branches()
    name = f"update, {BRANCHES} contexts that share {PREFIX} tokens / {BRANCHES} rows"
    row(name, partial(update, policy, rows), partial(update, policy, contexts), 4 * rounds)
    if options.trl:
        played = Side(policy, **inside)
        texts = [str(query.prompt) for query in played.queries]
        shape: dict[str, Any] = {"group_size": GROUP_SIZE, "turns": TURNS, "tokens": TOKENS}
        theirs = trl_tools.conversations(new_policy(), texts, **shape, answer=ANSWER, packages=options.trl)
        row("4 turns / TRL's, with its tools", theirs, played, rounds)
        played.close()


if __name__ == "__main__":
    main()
