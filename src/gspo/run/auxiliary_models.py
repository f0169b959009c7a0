"""The models beside the policy in reinforcement learning: a reference it stays near, a critic."""

from dataclasses import replace

from gspo.errors import UserError
from gspo.learner.critic import Critic
from gspo.run.checkpoint.checkpointer import digest_of
from gspo.run.progress import Progress
from gspo.run.run import Run


def make_critic(run: Run) -> Critic | None:
    """The value model, where the recipe has one, made from the policy's weights."""
    recipe, parts = run.recipe, run.parts
    if recipe.actor.advantage != "gae":
        return None
    num_updates = recipe.steps * recipe.actor.mini_batches
    return Critic(recipe.critic, parts.policy, parts.value_trunk, total_steps=num_updates)


def with_reference(run: Run, progress: Progress) -> Progress:
    """The progress with the digest of the reference's weights: the policy's as reinforcement learning starts.

    UserError where a resumed run would go on with another reference than it has had.
    """
    reference, named = run.parts.reference, run.recipe.actor.kl.reference
    if reference is None:
        return progress
    if named is None and progress.reference_sha256 is None:
        reference.model.load_state_dict(run.parts.policy.model.state_dict())
    digest = digest_of(reference.weights())
    if progress.reference_sha256 not in (None, digest):
        path = named or (str(run.directory.cold_start) if run.recipe.cold_start.steps else "model")
        fix = "restore it from a copy: every update so far was made against it"
        raise UserError("the reference model is not the one the run began with", where=path, fix=fix)
    return replace(progress, reference_sha256=digest)
