"""The models that accompany the policy in reinforcement learning: a reference it stays near, a critic."""

from pathlib import Path

from safetensors import SafetensorError

from gspo.errors import UserError
from gspo.learner.critic import Critic
from gspo.model.policy import Policy
from gspo.run.checkpoint.snapshot import digest_of
from gspo.run.run import Run


def begin_companions(run: Run) -> None:
    """Give reference and critic the policy's weights as reinforcement learning begins, or those a checkpoint names.

    UserError where the reference that a resumed run was made with is gone or is another.
    """
    recipe, parts = run.recipe, run.parts
    if parts.reference is not None:
        _settle_reference(run, parts.reference)
    if recipe.actor.advantage != "gae":
        return
    num_updates = recipe.steps * recipe.actor.mini_batches
    run.critic = Critic(recipe.critic, parts.policy, parts.value_trunk, total_steps=num_updates)
    if run.critic_state:
        run.critic.restore(run.critic_state)
        run.critic_state = {}


def _settle_reference(run: Run, reference: Policy) -> None:
    """Weights taken from the policy are in the run's directory, once; checkpoints know the digest of any."""
    named, begun_with = run.recipe.actor.kl.reference, run.progress.reference_sha256
    if named is None and begun_with is None:
        reference.model.load_state_dict(run.parts.policy.model.state_dict())
        run.directory.save_reference(reference)
    elif named is None:
        _load(reference, run.directory.reference, trust_remote_code=run.recipe.model.trust_remote_code)
    digest = digest_of(reference.weights())
    if begun_with not in (None, digest):
        where = named or str(run.directory.reference)
        raise UserError("the reference model is not the one the run began with", where=where, fix=_MEND)
    run.progress.reference_sha256 = digest


_MEND = "restore it from a copy: every update so far was made against it"


def _load(reference: Policy, path: Path, *, trust_remote_code: bool) -> None:
    from transformers import AutoModelForCausalLM

    if not path.is_dir():
        raise UserError("the reference model is not there", where=str(path), fix=_MEND)
    dtype = next(reference.model.parameters()).dtype
    try:
        saved = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code)
        reference.model.load_state_dict(saved.state_dict())
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"the reference model cannot be read: {error}", where=str(path), fix=_MEND) from None
