"""Advantages: rewards compared within a group, or with a value model's values."""

from typing import get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.objective.ratio import check_name, check_packed, sequence_mean, sequence_of_token
from gspo.recipe.published import Advantage

# Rewards of a group that differ by less than these count as equal: their difference is rounding.
EQUAL = 2e-6  # relative to the largest
EQUAL_NEAR_ZERO = 2e-7  # absolute, for sums whose terms cancel


def group_advantages(
    rewards: Float[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    *,
    kind: Advantage = "group",
    ddof: int = 1,
) -> Float[Tensor, "B"]:
    """The advantage of each response: its reward compared with those of its group (arXiv 2507.18071, Eq. 7).

    `group`: (r - mean)/std of the group. `group_mean`: r - mean (Dr. GRPO, arXiv 2503.20783). `leave_one_out`: r - the
    mean of the others (RLOO, 2402.14740). `batch`: (r - the group's mean)/std of all rewards (2508.08221). `max_rl`:
    (r - mean)/mean, for rewards of 0 or more (MaxRL, 2602.02710). A variance is divided by n - ddof; the paper leaves
    the divisor open. The advantage is exactly 0 for a lone reward and where all rewards of a group differ by less than
    `EQUAL` of the largest, or by less than `EQUAL_NEAR_ZERO`. A NaN reward means "not scored": it does not count in its
    group, and its advantage is 0. Raises ValueError for another kind, for shapes that do not fit, and for a negative
    reward with max_rl.
    """
    if rewards.dim() != 1:
        raise ValueError(f"rewards have the shape {list(rewards.shape)}: one a response, [B], and group_ids as many")
    lengths = torch.ones(len(rewards), dtype=torch.long, device=rewards.device)
    return token_advantages(rewards, lengths, group_ids, kind=kind, ddof=ddof)


def normalize_then_sum(
    rewards: Float[Tensor, "K B"], weights: Float[Tensor, "K"], group_ids: Int[Tensor, "B"], *, ddof: int = 1
) -> Float[Tensor, "B"]:
    """The advantages of responses with K rewards each, none of which can outweigh the others (GDPO, arXiv 2601.05242).

    A_k = (r_k - mean)/std of the group; A = Σ_k w_k A_k; the advantage is A divided by its standard deviation over the
    batch, whose mean is 0 as the groups' are. A NaN reward does not apply: it counts in no mean, and adds 0. A response
    of NaN alone is not scored. Departure: where rewards, or the A of a group, count as equal (`group_advantages`), A_k,
    or the advantage, is exactly 0, and nothing is added to a deviation. Raises ValueError as `group_advantages` does.
    """
    if rewards.dim() != 2 or weights.shape != rewards.shape[:1]:
        raise ValueError(f"rewards {list(rewards.shape)} are [K, B], and weights {list(weights.shape)} are [K]")
    total = torch.zeros(rewards.shape[1], dtype=rewards.dtype, device=rewards.device)
    for weight, row in zip(weights, rewards, strict=True):
        total += weight * group_advantages(row, group_ids, ddof=ddof)
    total[rewards.isnan().all(0)] = torch.nan
    return group_advantages(total, group_ids, kind="batch", ddof=ddof)


def token_advantages(
    rewards: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    *,
    kind: Advantage = "group",
    ddof: int = 1,
    places: Int[Tensor, "N"] | None = None,
    discount: float = 1.0,
) -> Float[Tensor, "N"]:
    """The advantage of each token, where tokens earn rewards: its reward to go, compared within the group.

    `rewards` has each reward at the token that earns it. A token's reward to go is the sum of its reward and of all
    later ones, each times discount^(places between them): a token may cause what comes after it, and nothing before it.
    It is compared with the rewards to go at the same place in the other responses of the group. A response that has
    ended before that place keeps its last reward to go, so rewards earned at the ends compare as in `group_advantages`.
    `places` [N] number the segments of a response and never fall within it; by default they are the positions of the
    tokens. `kind` and `ddof` are those of `group_advantages`; the variance is Σ_i 1/|y_i| Σ_t (difference)² /
    (n - ddof). A response with a NaN is not scored. Raises ValueError as `group_advantages` does.
    """
    if kind == "gae":
        raise ValueError("gae takes a value model: advantages_and_returns")
    if kind == "optimal_token_baseline":
        raise ValueError(f"{kind} takes the squared errors of the tokens: optimal_token_advantages")
    check_name("kind", kind, [name for name in get_args(Advantage) if name != "gae"])
    check_packed(lengths, rewards=rewards)
    if group_ids.shape != lengths.shape:
        raise ValueError(f"group_ids {list(group_ids.shape)} name the group of each of {len(lengths)} responses")
    places = positions(lengths, len(rewards)) if places is None else places
    sequences = sequence_of_token(lengths, len(rewards))
    scored = ~torch.isnan(sequence_mean(rewards, lengths))
    earned = torch.where(scored[sequences], rewards, 0.0)
    if kind == "max_rl":
        if bool((earned < -EQUAL_NEAR_ZERO).any()):
            raise ValueError("max_rl divides by the mean of a group's rewards: give rewards of 0 or more")
        earned = earned.clamp(min=0)
    steps = torch.diff(places, append=places[-1:]).clamp(min=0).to(earned.dtype)  # 0 within a place
    to_go = discounted_sums(earned, lengths, torch.as_tensor(discount, dtype=earned.dtype) ** steps)
    by_place = _by_place(to_go, sequences, places, len(lengths))
    _, members = torch.unique(group_ids, return_inverse=True)

    def difference(groups: Int[Tensor, "B"], *, leave_out: bool = False) -> Float[Tensor, "N"]:
        """Each reward to go minus the mean at its place over the group's scored responses (or over the others)."""
        weights = scored.to(to_go.dtype)
        totals, count = _total(weights[:, None] * by_place, groups), _total(weights, groups)
        if leave_out:
            totals, count = totals - by_place, count - 1
        mean = (totals / count.clamp(min=1)[:, None])[sequences, places]
        return torch.where(scored[sequences], to_go - mean, 0.0)

    advantages = difference(members, leave_out=kind == "leave_one_out")
    if kind == "max_rl":
        mean = torch.where(scored[sequences], to_go - advantages, 0.0)
        advantages = advantages / torch.where(mean > 0, mean, 1.0)
    if kind in ("group", "batch"):
        groups = members if kind == "group" else torch.zeros_like(members)
        squares = _total(sequence_mean(difference(groups) ** 2, lengths), groups)
        variance = squares / (_total(scored.to(to_go.dtype), groups) - ddof).clamp(min=1)
        advantages = advantages / torch.where(variance > 0, variance.sqrt(), 1.0)[sequences]
    return torch.where(_differ(by_place, scored, members)[sequences], advantages, 0.0)


def turn_advantages(
    rewards: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
    *,
    discount: float = 1.0,
) -> Float[Tensor, "N"]:
    """The advantage of each turn of B responses: its return minus that of the group's others which are as long.

    Â_{i,k} = R_{i,k} - mean_j R_{j,k} over the other responses j of the group that have a turn k, where R_{i,k} is the
    sum of the rewards of turn k and of later ones, each times discount^(turns between). The mean of none is 0. Since it
    says nothing of response i, E[Σ_k Â_{i,k} ∇log π(turn k)] is the gradient of E[Σ_k r_{i,k}] at discount 1; divided
    by the deviation of the returns at each turn it is not. A difference by less than `EQUAL` of the largest return at a
    turn is 0. A response with a NaN reward is not scored. Raises ValueError for shapes that do not fit.
    """
    returns, scored, cells = _returns(rewards, lengths, group_ids, discount)
    counted = scored.to(returns.dtype)
    others = _total(counted, cells) - counted
    baseline = (_total(counted * returns, cells) - counted * returns) / others.clamp(min=1)
    return _beyond_rounding(returns, baseline, scored, cells)


def optimal_token_advantages(
    rewards: Float[Tensor, "N"],
    squared_errors: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"],
    group_ids: Int[Tensor, "B"],
) -> Float[Tensor, "N"]:
    """The advantage of each token with the baseline of the least variance (arXiv 2602.07078): G_{i,t} - B_t.

    G_{i,t} is the sum of the rewards of token t and of later ones, B_t = Σ_i W_{i,t} G_{i,t} / Σ_i W_{i,t} over the
    group's responses that have a token t, W_{i,t} = Σ_{j ≤ t} (1 - 2π_j + Σ_v π_v²), where `squared_errors` has the
    summands, which stand for the squared length of each token's gradient. Departures: where all W are 0, B_t is the
    mean; a difference by less than `EQUAL` of the largest is 0, and a response with a NaN reward is not scored. Raises
    ValueError for shapes that do not fit.
    """
    check_packed(lengths, squared_errors=squared_errors)
    returns, scored, cells = _returns(rewards, lengths, group_ids, 1.0)
    errors = squared_errors.double()
    sums, starts = errors.cumsum(0), (lengths.cumsum(0) - lengths)[sequence_of_token(lengths, len(rewards))]
    weights = torch.where(scored, (sums - (sums - errors)[starts]).clamp(min=1e-30), 0.0)
    total = _total(weights, cells)
    baseline = _total(weights * returns, cells) / torch.where(total > 0, total, 1.0)
    return _beyond_rounding(returns, baseline.to(returns.dtype), scored, cells)


def _returns(
    rewards: Float[Tensor, "N"], lengths: Int[Tensor, "B"], group_ids: Int[Tensor, "B"], discount: float
) -> tuple[Float[Tensor, "N"], Bool[Tensor, "N"], Int[Tensor, "N"]]:
    """The rewards to go, whether their responses are scored, and an index for each place of each group."""
    check_packed(lengths, rewards=rewards)
    if group_ids.shape != lengths.shape:
        raise ValueError(f"group_ids {list(group_ids.shape)} name the group of each of {len(lengths)} responses")
    sequences, places = sequence_of_token(lengths, len(rewards)), positions(lengths, len(rewards))
    scored = ~torch.isnan(sequence_mean(rewards, lengths))[sequences]
    earned = torch.where(scored, rewards, 0.0)
    returns = discounted_sums(earned, lengths, torch.full_like(earned, discount))
    _, cells = torch.unique(torch.stack([group_ids[sequences], places]), dim=1, return_inverse=True)
    return returns, scored, cells


def _beyond_rounding(
    returns: Float[Tensor, "N"], baseline: Float[Tensor, "N"], scored: Bool[Tensor, "N"], cells: Int[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """The differences of the returns from the baseline; 0 where that is rounding, or not scored."""
    largest = returns.abs().new_zeros(int(cells.max()) + 1 if len(cells) else 0)
    largest = largest.scatter_reduce_(0, cells, returns.abs(), reduce="amax")[cells]
    difference = returns - baseline
    is_equal = difference.abs() <= (EQUAL * largest).clamp(min=EQUAL_NEAR_ZERO)
    return torch.where(is_equal | ~scored, 0.0, difference)


def _by_place(
    to_go: Float[Tensor, "N"], sequences: Int[Tensor, "N"], places: Int[Tensor, "N"], num_sequences: int
) -> Float[Tensor, "B P"]:
    """The reward to go of each response where it enters each place, or at its last place before that one."""
    if not len(to_go):
        return to_go.new_zeros(num_sequences, 0)
    num_places, tokens = int(places.max()) + 1, torch.arange(len(to_go), device=to_go.device)
    first = torch.full((num_sequences * num_places,), len(to_go), device=to_go.device)
    first.scatter_reduce_(0, sequences * num_places + places, tokens, reduce="amin")
    first = first.masked_fill(first == len(to_go), -1).view(num_sequences, num_places)
    return to_go[first.cummax(1).values.clamp(min=0)]


def _differ(by_place: Float[Tensor, "B P"], scored: Bool[Tensor, "B"], members: Int[Tensor, "B"]) -> Bool[Tensor, "B"]:
    """Tell whether the rewards of each response's group differ, at any place, by more than `EQUAL` of the largest.

    Without this bound the rounding between 0.1 + 0.2 and 0.3, or in a float32 verifier, would be scaled up to ±1.
    """
    num_groups, index = int(members.max()) + 1 if len(members) else 0, members[:, None].expand_as(by_place)

    def bound(reduce: str, neutral: float) -> Float[Tensor, "groups P"]:
        bounds = by_place.new_full((num_groups, by_place.shape[1]), neutral)
        values = torch.where(scored[:, None], by_place, neutral)
        return bounds.scatter_reduce_(0, index, values, reduce=reduce)

    lowest, highest = bound("amin", torch.inf), bound("amax", -torch.inf)
    different = highest - lowest > (EQUAL * torch.maximum(lowest.abs(), highest.abs())).clamp(min=EQUAL_NEAR_ZERO)
    return different.any(1)[members]


def _total(values: Float[Tensor, "B *rest"], groups: Int[Tensor, "B"]) -> Float[Tensor, "B *rest"]:
    """Return, for each response, the sum of the values over its group."""
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(num_groups, *values.shape[1:]).index_add_(0, groups, values)[groups]


def advantages_and_returns(
    rewards: Float[Tensor, "N"],
    values: Float[Tensor, "N"],
    lengths: Int[Tensor, "B"] | None = None,
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """GAE(γ, λ) of each token, and its return, which is the target of its value (arXiv 1506.02438, Eq. 16).

    δ_t = r_t + γ V_{t+1} - V_t, Â_t = Σ_k (γλ)^k δ_{t+k}; the return is Â_t + V_t. V_t is the value before token t. The
    value after the last token is 0, also for a response that was cut off. Without `lengths` there is one response.
    """
    lengths = torch.tensor([len(rewards)]) if lengths is None else lengths
    check_packed(lengths, rewards=rewards, values=values)
    following = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    following[(lengths.cumsum(0) - 1)[lengths > 0]] = 0
    errors = rewards + gamma * following - values
    advantages = discounted_sums(errors, lengths, torch.full_like(errors, gamma * lam))
    return advantages, advantages + values


def distillation_advantages(logprobs: Float[Tensor, "N"], teacher_logprobs: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """log π_teacher(y_t|…) - log π(y_t|…) of tokens that the policy π has sampled: on-policy distillation.

    Its policy gradient is the negative gradient of KL(π‖π_teacher) at each token, given the tokens before it:
    E[Â ∇log π] = -∇ Σ_v π_v log(π_v/π_teacher,v). What a token does to later ones is left out (discount 0), as in
    MiniLLM's single-step part (arXiv 2306.08543, Eq. 5) and in GKD on the student's own outputs (2306.13649).
    Raises ValueError where the shapes differ.
    """
    if logprobs.shape != teacher_logprobs.shape:
        shapes = f"{list(logprobs.shape)} and {list(teacher_logprobs.shape)}"
        raise ValueError(f"logprobs and teacher_logprobs are of the same tokens, not of shapes {shapes}")
    return teacher_logprobs - logprobs


def discounted_sums(
    values: Float[Tensor, "N"], lengths: Int[Tensor, "B"], discounts: Float[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """x_t = v_t + d_t x_{t+1} within each sequence, where d_t is the factor of the next token's sum."""
    if not len(values):
        return values.clone()
    sequences, position = sequence_of_token(lengths, len(values)), positions(lengths, len(values))
    # A row a position, a column a sequence: one operation a position, whatever the number of sequences.
    by_position, factors = values.new_zeros(2, int(lengths.max()), len(lengths))
    by_position[position, sequences], factors[position, sequences] = values, discounts
    rows = by_position.unbind(0)
    for row, following, factor in zip(rows[-2::-1], rows[:0:-1], factors.unbind(0)[-2::-1], strict=True):
        row.addcmul_(following, factor)
    return by_position[position, sequences]


def positions(lengths: Int[Tensor, "B"], num_tokens: int) -> Int[Tensor, "N"]:
    """The position of each packed token in its sequence, from 0."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(num_tokens, device=lengths.device) - starts[sequence_of_token(lengths, num_tokens)]


def whitened(advantages: Float[Tensor, "N"], counted: Bool[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Shift and, unless they are equal, scale: those that are counted get mean 0 and standard deviation 1.

    All are NaN where none is counted.
    """
    chosen = advantages[counted]
    std = chosen.std() if len(chosen) > 1 else chosen.new_zeros(())
    return (advantages - chosen.mean()) / torch.where(std > 0, std, 1.0)
