"""What models other than the policy say of the rollouts: the reference's likelihoods, the critic's values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.learner.critic import Critic
from gspo.learner.cutting import cut
from gspo.model.likelihood import response_likelihood, response_states
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.schema import ActorConfig
from gspo.types import Appraisal, Group, Score

Say = Callable[[Sequence[TokenSequence]], Float[Tensor, "N"]]


def appraise(
    groups: Sequence[Group],
    scores: Sequence[Score],
    actor: ActorConfig,
    *,
    policy: Policy,
    reference: Policy | None,
    critic: Critic | None,
    temperature: float,
    check_stop: Callable[[], None] = lambda: None,
) -> Appraisal:
    """Reference log-likelihoods and values of every scored rollout, where the recipe has such models."""
    rollouts = [(group.query.prompt_ids, rollout) for group in groups for rollout in group.rollouts]
    replays = actor.routing_replay == "engine"  # as the update does, whose states a critic may share
    sequences = {
        index: TokenSequence(
            prompt_ids=prompt_ids,
            response_ids=rollout.response_ids,
            experts=rollout.experts if replays else None,
        )
        for index, (prompt_ids, rollout) in enumerate(rollouts)
        if scores[index].reward is not None
    }

    def likelihood(some: Sequence[TokenSequence]) -> Float[Tensor, "N"]:
        check_stop()
        assert reference is not None
        own = [replace(one, experts=None) for one in some]  # its routers choose for themselves
        return response_likelihood(reference, own, temperature=temperature).logprobs

    def values(some: Sequence[TokenSequence]) -> Float[Tensor, "N"]:
        check_stop()
        assert critic is not None
        return critic.values(some, response_states(policy, some).hidden if critic.needs_policy() else None)

    return Appraisal(
        reference_logprobs={} if reference is None else _by_rollout(likelihood, sequences, policy, actor),
        values={} if critic is None else _by_rollout(values, sequences, policy, actor),
    )


@torch.no_grad()
def _by_rollout(
    say: Say, sequences: Mapping[int, TokenSequence], policy: Policy, actor: ActorConfig
) -> dict[int, Float[Tensor, "T"]]:
    indices = list(sequences)
    found: dict[int, Tensor] = {}
    for part in cut(policy, list(sequences.values()), actor):
        chosen = [sequences[indices[place]] for place in part]
        pieces = say(chosen).cpu().split([len(one.response_ids) for one in chosen])
        found |= {indices[place]: piece.clone() for place, piece in zip(part, pieces, strict=True)}
    return found
