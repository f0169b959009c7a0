"""Every published surrogate learns a task so small that its policy is a table."""

from typing import Any

import pytest
import torch

from gspo.objective import advantages_and_returns, group_advantages, surrogate, value_loss
from gspo.recipe.published import PUBLISHED

SYMBOLS, LONGEST, RESPONSES, GROUP, STEPS, UPDATES = 4, 3, 32, 8, 20, 3
# Of a whole sequence's ratio: far wider than the papers', whose sequences have thousands of tokens, not three.
SEQUENCE_RANGE: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.15}
CASES = [(name, level) for name, published in PUBLISHED.items() for level in published.levels]


class Task:
    """Responses of one to three symbols from a table of logits; the reward is the share of them that are right."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.table = torch.zeros(LONGEST, SYMBOLS, requires_grad=True)
        self.values = torch.zeros(LONGEST, requires_grad=True)  # of each place, for PPO
        self.right = torch.randint(SYMBOLS, (LONGEST,), generator=self.generator)
        self.groups = torch.arange(RESPONSES) // GROUP

    def expected_reward(self) -> float:
        """Over all lengths, exactly."""
        chances = self.table.detach().softmax(1)[torch.arange(LONGEST), self.right]
        return sum(chances[:length].mean().item() for length in range(1, LONGEST + 1)) / LONGEST

    def sample(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lengths, and of every token its place and its symbol."""
        lengths = torch.randint(1, LONGEST + 1, (RESPONSES,), generator=self.generator)
        places = torch.cat([torch.arange(int(length)) for length in lengths])
        symbols = torch.multinomial(self.table.detach().softmax(1)[places], 1, generator=self.generator)[:, 0]
        return lengths, places, symbols

    def logprobs(self, places: torch.Tensor, symbols: torch.Tensor) -> torch.Tensor:
        return self.table.log_softmax(1)[places, symbols]


def trained(name: Any, level: Any, *, seed: int = 0) -> tuple[float, float]:
    """The expected reward before and after."""
    task, published = Task(seed), PUBLISHED[name]
    before = task.expected_reward()
    optimizer = torch.optim.Adam([task.table, task.values], lr=0.05)
    for _ in range(STEPS):
        lengths, places, symbols = task.sample()
        right = (symbols == task.right[places]).float()
        rewards = torch.stack([own.mean() for own in right.split(lengths.tolist())])
        old = task.logprobs(places, symbols).detach()
        old_values = task.values.detach()[places]
        if published.advantage == "gae":  # a reward a token, and a value a place
            pieces = [one.split(lengths.tolist()) for one in (right / lengths.repeat_interleave(lengths), old_values)]
            found = [advantages_and_returns(*own, gamma=1.0, lam=0.95) for own in zip(*pieces, strict=True)]
            advantages, returns = (torch.cat(parts) for parts in zip(*found, strict=True))
        else:
            advantages = group_advantages(rewards, task.groups, kind=published.advantage)
        for _ in range(UPDATES):
            result = surrogate(
                task.logprobs(places, symbols),
                old,
                advantages,
                lengths,
                level=level,
                name=name,
                tokens_per_sequence={"mean": lengths.float().mean().item()}.get(published.length_norm, float(LONGEST)),
                sampler_logprobs=old,
                **(SEQUENCE_RANGE if level != "token" else {}),
            )
            loss = -result.per_sequence.mean()
            if published.advantage == "gae":
                loss = loss + value_loss(task.values[places], old_values, returns, 0.2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return before, task.expected_reward()


@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_small_task_is_learned(name: str, level: str) -> None:
    before, after = trained(name, level)
    print(f"{name} {level}: {before:.2f} -> {after:.2f}")
    assert before == pytest.approx(1 / SYMBOLS)
    assert after > 0.7
