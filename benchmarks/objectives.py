"""What objectives and diagnostics cost besides GSPO's own update: a step's learning with and without, taking turns.

python -m benchmarks.objectives [--rounds 7]
"""

from functools import partial
from typing import Any

from benchmarks.pairs import GROUP_SIZE, HEADER, QUERIES, row, small_run
from benchmarks.samples import scored
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.learner.advantages import with_advantages
from gspo.learner.critic import Critic
from gspo.learner.forward_passes import compute_old_logprobs, score_with_models
from gspo.learner.micro_batching import Learner
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import update
from gspo.model.policy import load_policy
from gspo.recipe.sections import CriticConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler


def main() -> None:
    """Print the medians of the ratios, as rows of a table."""
    rounds, recipe, policy, queries = small_run(__doc__)
    other = load_policy(recipe.model, policy.tokenizer, seed=1)
    settings = recipe.rollout.model_copy(update={"group_size": GROUP_SIZE})
    groups = Sampler(EmbeddedEngine(policy), policy).sample(queries, settings, SamplingKey(seed=1, step=1))
    sampled = scored(groups, [float(n % 2) for n in range(QUERIES * GROUP_SIZE)])
    weights = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}

    def learn(trunk: str | None = None, *, reference: bool = False, **changes: Any) -> None:
        policy.model.load_state_dict(weights)
        actor = recipe.actor.model_copy(update={"gradient_noise": False, **changes})
        critic = None
        if trunk is not None:
            settings = CriticConfig.model_validate({"trunk": trunk})
            critic = Critic(settings, policy, other if trunk == "own" else None, total_steps=actor.mini_batches)
        optimizer = Optimizer(policy.model, actor.optimizer, total_steps=actor.mini_batches)
        learner = Learner(policy=policy, optimizer=optimizer, actor=actor, temperature=1.0, critic=critic)
        batch = score_with_models(sampled, learner, other if reference else None)
        batch = compute_old_logprobs(with_advantages(batch, actor), learner)
        list(update(learner, batch))
        optimizer.close()

    kl = recipe.actor.kl.model_copy(update={"coefficient": 0.01})
    print(HEADER)
    row("`actor.gradient_noise`", learn, partial(learn, gradient_noise=True), rounds)
    row("`actor.entropy_bonus`", learn, partial(learn, entropy_bonus=0.01), rounds)
    row("`actor.kl` in the loss, with its reference", learn, partial(learn, reference=True, kl=kl), rounds)
    ppo: dict[str, Any] = {"importance_sampling_level": "token", "advantage": "gae", "clip_low": 0.2, "clip_high": 0.2}
    row("`surrogate: ppo`, shared trunk", learn, partial(learn, "shared", **ppo), rounds)
    row("`surrogate: ppo`, a trunk of its own", learn, partial(learn, "own", **ppo), rounds)


if __name__ == "__main__":
    main()
