"""What it costs to record and to replay experts: a rollout and an update with and without, taking turns.

python -m benchmarks.routing [--rounds 7]
"""

from dataclasses import replace
from functools import partial

from benchmarks.pairs import GROUP_SIZE, HEADER, QUERIES, row, small_run
from benchmarks.samples import scored
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.learner.advantages import with_advantages
from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.micro_batching import Learner
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import update
from gspo.model.policy import Policy
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Batch


def main() -> None:
    """Print the medians of the ratios, as rows of a table."""
    rounds, recipe, policy, queries = small_run(__doc__)
    unwatched = replace(policy, routing=None)
    settings = recipe.rollout.model_copy(update={"group_size": GROUP_SIZE})

    def roll_out(policy: Policy) -> Batch:
        key = SamplingKey(seed=1, step=1)
        groups = Sampler(EmbeddedEngine(policy), policy).sample(queries, settings, key, record_experts=True)
        return with_advantages(scored(groups, [float(n % 2) for n in range(QUERIES * GROUP_SIZE)]))

    batch = roll_out(policy)
    weights = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}

    def train(policy: Policy, **changes: object) -> None:
        policy.model.load_state_dict(weights)
        actor = recipe.actor.model_copy(update={"old_logprobs": "recompute", **changes})
        optimizer = Optimizer(policy.model, actor.optimizer, total_steps=actor.mini_batches)
        learner = Learner(policy=policy, optimizer=optimizer, actor=actor, temperature=1.0)
        list(update(learner, compute_old_logprobs(batch, learner)))
        optimizer.close()

    print(HEADER)
    row("rollout that records", lambda: roll_out(unwatched), lambda: roll_out(policy), rounds)
    row("update that records", lambda: train(unwatched), lambda: train(policy), rounds)
    row(
        "update that replays π_old's", lambda: train(unwatched), partial(train, policy, routing_replay="policy"), rounds
    )
    one = {"mini_batches": 1}
    row("one mini-batch: 8 of 256 read twice", partial(train, unwatched, **one), partial(train, policy, **one), rounds)


if __name__ == "__main__":
    main()
