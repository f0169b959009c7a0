"""The models that accompany the policy in reinforcement learning: a reference it stays near, a critic."""

from typing import Any

from safetensors import SafetensorError

from gspo.checkpoint.files import move_into_place, remove
from gspo.checkpoint.snapshot import digest_of
from gspo.errors import UserError
from gspo.policy.critic import Critic
from gspo.policy.model import Policy
from gspo.run import Run


def begin_companions(run: Run) -> None:
    """Give reference and critic the policy's weights as reinforcement learning begins, or those a checkpoint names.

    UserError where the reference that a resumed run was made with is gone or is another.
    """
    recipe, parts = run.recipe, run.parts
    if parts.reference is not None and recipe.actor.kl.reference is None:
        _settle_reference(run, parts.reference)
    if recipe.actor.advantage != "gae":
        return
    num_updates = recipe.steps * recipe.actor.mini_batches
    run.critic = Critic(recipe.critic, parts.policy, parts.value_trunk, total_steps=num_updates)
    if run.critic_state:
        run.critic.restore(run.critic_state)
        run.critic_state = {}


def _settle_reference(run: Run, reference: Policy) -> None:
    """Its weights are in the run's directory, once; checkpoints know their digest."""
    path = run.directory.path / "reference"
    if run.progress.reference_sha256 is None:
        if path.exists():  # of a beginning that no checkpoint knows
            remove(path)
        reference.model.load_state_dict(run.parts.policy.model.state_dict())
        unfinished = path.with_name("unfinished_reference")
        reference.save(unfinished)
        move_into_place(unfinished, path)
        run.progress.reference_sha256 = digest_of(reference.weights())
        return
    try:
        _load(reference, path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the reference model cannot be read: {error}", where=str(path), mend=_MEND) from None
    if digest_of(reference.weights()) != run.progress.reference_sha256:
        raise UserError("the reference model is not the one the run began with", where=str(path), mend=_MEND)


_MEND = "restore it from a copy: every update so far was made against it"


def _load(reference: Policy, path: Any) -> None:
    from transformers import AutoModelForCausalLM

    dtype = next(reference.model.parameters()).dtype
    saved = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    reference.model.load_state_dict(saved.state_dict())
