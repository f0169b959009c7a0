"""How biased the gradients of objectives for several turns are: computed exactly, over every group of three responses.

    python -m benchmarks.turn_credit

A policy of twelve numbers plays up to three turns. In each it says something brief (1 token) or long (4 tokens), and
then stops or goes on; each choice earns something at once. An objective's expected gradient is compared with that of
the expected sum of rewards, up to a factor. `bias` is the norm of what is left, relative to that of the gradient. The
last two columns are the slopes towards going on, and towards being brief, in the first turn: 1 is right.
"""

import itertools
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.objective import group_advantages, surrogate, turn_advantages
from gspo.objective.advantage import discounted_sums
from gspo.recipe.published import Advantage, LengthNorm

GROUP, TURNS = 3, 3
TOKENS = torch.tensor([1, 4, 1, 4])  # of the choices: brief and long that stop, brief and long that go on
GOES_ON = (False, False, True, True)
REWARDS = torch.tensor(
    [[0.2, 0.5, 0.1, 0.0], [0.6, 0.3, -0.1, 0.4], [0.1, 0.9, 0.0, 0.2]], dtype=torch.float64
)  # of each choice in each turn
LOGITS = torch.tensor([[0.1, -0.3, 0.4, 0.2], [0.0, 0.5, -0.2, 0.3], [0.3, -0.1, 0.0, 0.1]], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Every group that there can be, packed one after another: K turns of B responses, N tokens."""

    turns: Tensor  # [K] the number of the turn
    choices: Tensor  # [K]
    num_turns: Tensor  # [B]
    group_ids: Tensor  # [B]


def every_response() -> list[tuple[int, ...]]:
    """The choices of each response that there can be."""
    found, open_ones = list[tuple[int, ...]](), [tuple[int, ...]()]
    for turn in range(TURNS):
        longer = [(*before, choice) for before in open_ones for choice in range(len(TOKENS))]
        found += [own for own in longer if not GOES_ON[own[-1]] or turn == TURNS - 1]
        open_ones = [own for own in longer if GOES_ON[own[-1]]]
    return found


def every_group() -> Groups:
    """All groups of GROUP responses."""
    groups = [*itertools.product(every_response(), repeat=GROUP)]
    responses = [own for group in groups for own in group]
    return Groups(
        turns=torch.tensor([turn for own in responses for turn in range(len(own))]),
        choices=torch.tensor([choice for own in responses for choice in own]),
        num_turns=torch.tensor([len(own) for own in responses]),
        group_ids=torch.arange(len(groups)).repeat_interleave(GROUP),
    )


def true_gradient() -> Float[Tensor, "turns choices"]:
    """The gradient of the expected sum of a response's rewards, by all responses."""
    logits = LOGITS.clone().requires_grad_()
    logprobs, value = logits.log_softmax(1), torch.zeros((), dtype=torch.float64)
    for own in every_response():
        places = [*enumerate(own)]
        chance = torch.stack([logprobs[place] for place in places]).sum().exp()
        value = value + chance * sum(float(REWARDS[place]) for place in places)
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


def expected_gradient(groups: Groups, credit: str, norm: LengthNorm) -> Float[Tensor, "turns choices"]:
    """The expected gradient of GSPO-token on the policy, by its own code for advantages and surrogate."""
    logits = LOGITS.clone().requires_grad_()
    by_turn = logits.log_softmax(1)[groups.turns, groups.choices]
    sequences = torch.arange(len(groups.num_turns)).repeat_interleave(groups.num_turns)
    chances = torch.zeros(len(groups.num_turns), dtype=torch.float64).index_add(0, sequences, by_turn.detach())
    weights = chances.view(-1, GROUP).sum(1).exp()[groups.group_ids]

    tokens = TOKENS[groups.choices]  # of each turn
    lengths = torch.zeros_like(groups.num_turns).index_add(0, sequences, tokens)
    is_first = torch.zeros(int(tokens.sum()), dtype=torch.bool)
    is_first[tokens.cumsum(0) - tokens] = True
    logprobs = torch.zeros(len(is_first), dtype=torch.float64).masked_scatter(is_first, by_turn)  # others are certain
    advantages = of_turns(groups, sequences, credit).repeat_interleave(tokens)
    divisors = groups.num_turns * 2.5 if norm == "turns" else torch.full_like(weights, 12.0)  # any numbers: factors
    result = surrogate(
        logprobs,
        logprobs.detach(),
        advantages,
        lengths,
        level="sequence_token",
        length_norm=norm,
        tokens_per_sequence=divisors,
    )
    (gradient,) = torch.autograd.grad((weights * result.per_sequence).sum() / GROUP, logits)
    return gradient


def of_turns(groups: Groups, sequences: Tensor, credit: str) -> Float[Tensor, "K"]:
    """The advantage of each turn."""
    rewards = REWARDS[groups.turns, groups.choices]
    if credit == "return_to_go":
        return turn_advantages(rewards, groups.num_turns, groups.group_ids)
    if credit == "normalised by turn":
        returns = discounted_sums(rewards, groups.num_turns, torch.ones_like(rewards))
        return group_advantages(returns, groups.group_ids[sequences] * TURNS + groups.turns)
    totals = torch.zeros(len(groups.num_turns), dtype=torch.float64).index_add(0, sequences, rewards)
    kind: Advantage = "leave_one_out" if credit == "trajectory" else "group"
    return group_advantages(totals, groups.group_ids, kind=kind)[sequences]


def bias_of(gradient: Tensor, true: Tensor) -> float:
    """The part of a gradient that no multiple of the true one is, relative to that multiple."""
    factor = (gradient * true).sum() / true.square().sum()
    return float((gradient - factor * true).norm() / (factor * true).norm())


ROWS: tuple[tuple[str, LengthNorm], ...] = (
    ("return_to_go", "constant"),
    ("trajectory", "constant"),
    ("trajectory, divided by the deviation", "constant"),
    ("normalised by turn", "constant"),
    ("return_to_go", "turns"),
    ("return_to_go", "own"),
    ("trajectory", "own"),
    ("trajectory, divided by the deviation", "own"),
)


def main() -> None:
    """Print a row for each objective."""
    groups, true = every_group(), true_gradient()
    print("| credit | length_norm | bias | going on in turn 1 | being brief in turn 1 |\n|---|---|---:|---:|---:|")
    for credit, norm in ROWS:
        gradient = expected_gradient(groups, credit, norm)
        scaled = gradient * true.square().sum() / (gradient * true).sum()
        going_on, brief = (float(scaled[0, own].sum() / true[0, own].sum()) for own in ([2, 3], [0, 2]))
        print(f"| {credit} | `{norm}` | {bias_of(gradient, true):.1e} | {going_on:.2f} | {brief:.2f} |")


if __name__ == "__main__":
    main()
