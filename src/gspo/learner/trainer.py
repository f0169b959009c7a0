"""What a run trains, on all ranks: rank 0 calls the trainer's verbs, and the others run them with it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from torch import Tensor

from gspo.engine.engine import Completion, Engine, Prompt, Sampling
from gspo.engine.make import make_engine
from gspo.errors import LostRankError, OtherRankError, Stopped, UserError
from gspo.interrupt import signal_heard
from gspo.learner import ranks
from gspo.learner.advantages import with_advantages
from gspo.learner.critic import Critic
from gspo.learner.forward_passes import compute_old_logprobs, score_with_models
from gspo.learner.micro_batching import Learner
from gspo.learner.models import Models, load_models
from gspo.learner.optimizer import Optimizer, StepReport
from gspo.learner.reference import RefreshedReference
from gspo.learner.sampling import completed
from gspo.learner.sft import fit
from gspo.learner.shares import OwnShare, Shares
from gspo.learner.state import restore_random_state, seed_everything, tensors_of
from gspo.learner.update import MiniBatchReport, update
from gspo.model.load import make_tokenizer
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.model.sharding import unsharded
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ActorConfig, RolloutConfig
from gspo.types import Batch

P = ParamSpec("P")
T = TypeVar("T")
Phase = Literal["cold start", "training"]


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings that may differ from one step of a run to the next.

    Example: StepSettings(number=13, rollout=recipe.rollout, actor=recipe.actor)
    """

    number: int  # of the step, from 1
    rollout: RolloutConfig  # with the temperature that the batch was drawn at
    actor: ActorConfig  # with the clip range of the step
    learning_rate_factor: float = 1.0  # of the schedule's rate


def by_all(method: Callable[Concatenate["Trainer", P], T]) -> Callable[Concatenate["Trainer", P], T]:
    """A verb: called on rank 0, it is run by all ranks. What it is called with travels pickled: ranks trust each other.

    No verb calls another. While one is under way, or has failed on some ranks alone, the trainer is busy.
    """

    @wraps(method)
    def call(trainer: "Trainer", *arguments: P.args, **keywords: P.kwargs) -> T:
        with trainer._lock:  # a thread has the ranks sample
            trainer._is_busy = trainer.num_ranks > 1
            try:
                ranks.tell("verb", method.__name__, arguments, keywords)
                result = method(trainer, *arguments, **keywords)
                trainer._is_busy = False
                return result
            except BaseException as error:
                trainer._is_busy = not ranks.is_of_all(error)
                raise

    return call


class Trainer:
    """Models, what trains them and, where ranks sample, their engines: each rank has its own part.

    Example, on rank 0: trainer.load(recipe, tokenizer); trainer.begin("training"); trainer.step(batch, settings)
    """

    recipe: Recipe
    policy: Policy
    reference: Policy | None  # that a KL term measures from; with weights of its own only where the recipe names some
    _teacher: Policy | None
    _optimizer: Optimizer
    _learner: Learner
    _engine: Engine

    def __init__(self) -> None:
        self.num_ranks = ranks.num_ranks()
        self._is_busy = False
        self.stage: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()  # times a stage
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._value_trunk: Policy | None = None  # what a critic of its own is made of
        self._parts: dict[str, Optimizer | Critic | RefreshedReference] = {}  # by what checkpoints name them
        self._shares = Shares()
        self._held = ExitStack()  # from `publish` on, each rank has the whole model
        self._published: int | None = None
        self._whole_at = 0  # the policy's version when all of the state belonged together

    @property
    def is_busy(self) -> bool:
        """Tell whether ranks cannot do anything together any more; what they sample for a thread is waited for."""
        with self._lock:
            return self._is_busy

    @property
    def is_whole(self) -> bool:
        """Tell whether no optimiser step was made since `note_whole`."""
        return self.policy_version == self._whole_at

    def note_whole(self) -> None:
        """The run's record of the steps, and what trains them, belong together."""
        self._whole_at = self.policy_version

    @property
    def num_tokens(self) -> int:
        """The number of tokens that this rank's engine has sampled so far."""
        return self._engine.num_tokens

    @property
    def policy_version(self) -> int:
        """The number of updates that were made or skipped in this phase."""
        return self._optimizer.steps_taken

    def load(
        self, recipe: Recipe, tokenizer: Any, *, weights: Path | None = None, reference_weights: Path | None = None
    ) -> None:
        """Load the recipe's models, on every rank, as `load_models` has it."""
        self._tokenizer = tokenizer
        # Python code of a model directory has no name that another rank could unpickle it by.
        sent = tokenizer if recipe.model.tokenizer == "fit" else None
        self._load(recipe, sent, weights=weights, reference_weights=reference_weights)

    @by_all
    def _load(self, recipe: Recipe, tokenizer: Any, **weights: Path | None) -> None:
        self.recipe = recipe

        def load() -> Models:
            self._tokenizer = self._tokenizer or tokenizer or make_tokenizer(recipe.model, ())
            return load_models(recipe, self._tokenizer, **weights)

        models = ranks.on_all(load, UserError)
        self.policy, self.reference, self._value_trunk = models.policy, models.reference, models.value_trunk
        self._teacher = models.teacher

    @by_all
    def begin(self, phase: Phase, saved: Path | None = None, *, copy_reference: bool = False) -> None:
        """Begin a phase, or put everything back to where a checkpoint has it.

        With `copy_reference`, the reference takes the policy's present weights.
        """
        self._share_again()
        self._parts = {}
        self.__dict__.pop("_optimizer", None)  # the cold start's, whose memory the next may need
        make = self._training_parts if phase == "training" else self._cold_parts
        self._parts = ranks.on_all(make)
        if saved is None:
            seed_everything(self.recipe.seed)  # of its own, for the phase before may have been another process's
        else:
            for name, part in self._parts.items():
                if state := tensors_of(saved, name):  # the last checkpoint of a cold start has none
                    part.restore(state)
            restore_random_state(tensors_of(saved, "random"))
        if copy_reference and self.reference is not None:
            self.reference.take_weights(self.policy)

    @by_all
    def end_cold_start(self) -> None:
        """Give up the optimiser of the cold start: training has its own."""
        self._optimizer.close()
        self._parts = {}

    @by_all
    def fit(self, rows: Sequence[TokenSequence]) -> tuple[float, StepReport]:
        """Make a supervised step on these demonstrations; its loss, in nats a token."""
        self._share_again()
        self.note_whole()
        tokens = self.recipe.actor.micro_batch_tokens
        return fit(self.policy, self._optimizer, rows, micro_batch_tokens=tokens, check_stop=self._check_stop)

    @by_all
    def step(self, batch: Batch, settings: StepSettings) -> tuple[Batch, tuple[MiniBatchReport, ...]]:
        """Train on a scored batch, mini-batch by mini-batch; the batch with all that was computed of it.

        A signal stops it before the first optimiser step: after that the policy is another, and it runs to its end.
        """
        self._share_again()
        self.note_whole()
        recipe, reports, rollout, actor = self.recipe, list[MiniBatchReport](), settings.rollout, settings.actor
        learner = replace(
            self._learner, actor=actor, temperature=rollout.temperature, max_tokens=rollout.max_new_tokens
        )
        self._optimizer.factor = settings.learning_rate_factor
        with self.stage("appraisal"):
            batch = score_with_models(batch, learner, self.reference, self._teacher)
        with self.stage("advantage"):
            batch = with_advantages(batch, actor, sampling=rollout, critic=recipe.critic, teacher=recipe.teacher)
        with self.stage("likelihood"):
            batch = compute_old_logprobs(batch, learner)
        with self.stage("update"):
            for report, trained in update(learner, batch):
                batch, reports = trained, [*reports, report]
        if isinstance(refreshed := self._parts.get("reference"), RefreshedReference):
            refreshed.step(settings.number)
        return batch, tuple(reports)

    @by_all
    def weights(self, of: Literal["policy", "reference"] = "policy") -> dict[str, Tensor]:
        """A copy on the CPU of all tensors that a model saves, by name: on rank 0."""
        self._share_again()
        model = self.policy if of == "policy" else self.reference
        assert model is not None
        return model.weights(is_first=ranks.rank() == 0)

    @by_all
    def copy_shares(self) -> OwnShare:
        """Copies of the weights, and of rank 0's share of what trains them; each rank is ready to write its own."""
        self._share_again()
        return self._shares.copied(self.policy, {name: part.state() for name, part in self._parts.items()})

    @by_all
    def make_engines(self) -> Mapping[str, str]:
        """Make an embedded engine on every rank; what it says of itself."""
        with unsharded(self.policy.model):  # which the engine proves what it describes with
            self._engine = make_engine(self.recipe, self.policy)
            return self._engine.describe()

    @by_all
    def publish(self, version: int) -> None:
        """Have the whole model on every rank, for the engines to sample with, until it is trained again."""
        if version != self._published:
            self._share_again()
            self._held.enter_context(unsharded(self.policy.model))
            self._engine.publish(version)
            self._published = version

    @by_all
    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, strings: Sequence[str]) -> list[Completion]:
        """Continue the prompts, each rank some of their groups, until any of the strings is complete."""
        return completed(self._engine, self.policy.tokenizer, prompts, sampling, strings)

    @by_all
    def check_stop(self) -> None:
        """Raise Stopped where any rank has heard a signal."""
        ranks.stop_all(signal_heard())

    def call_others(self, layer: str | None) -> None:
        """Have the other ranks take part in what rank 0, alone, does next with the policy (`Policy.take_part`)."""
        try:
            ranks.tell("layer", layer)
        except BaseException:
            self._is_busy = True  # for good
            raise

    def end(self, outcome: object) -> None:
        """End the other ranks, with what `serve` returns there."""
        ranks.tell("ended", outcome)

    def serve(self) -> Any:
        """Do what rank 0 says until it ends, on another rank; return what it has ended with."""
        own: Exception | None = None  # which this rank has to say, where rank 0 ends because of it
        while True:
            kind, content = ranks.told()
            if kind == "ended":
                self._shares.wait()
                return content[0]
            if kind == "failed":
                raise own or content[0]
            try:
                if kind == "layer":
                    self.policy.take_part(*content)
                else:
                    name, arguments, keywords = content
                    getattr(Trainer, name).__wrapped__(self, *arguments, **keywords)
            except BaseException as error:
                if not ranks.is_of_all(error):
                    raise
                own = error if isinstance(error, Exception) else own

    def _share_again(self) -> None:
        self._held.close()
        self._published = None

    def _cold_parts(self) -> dict[str, Optimizer | Critic | RefreshedReference]:
        settings = self.recipe.cold_start
        options: dict[str, Any] = {"total_steps": settings.steps, "where": "cold_start.optimizer"}
        self._optimizer = Optimizer(self.policy.model, settings.optimizer, **options)
        return {"optimizer": self._optimizer}

    def _training_parts(self) -> dict[str, Optimizer | Critic | RefreshedReference]:
        """Return what reinforcement learning changes, beside the policy itself."""
        recipe, policy = self.recipe, self.policy
        num_updates, critic = recipe.steps * recipe.actor.updates_per_step, None
        self._optimizer = Optimizer(policy.model, recipe.actor.optimizer, total_steps=num_updates)
        parts: dict[str, Optimizer | Critic | RefreshedReference] = {"optimizer": self._optimizer}
        if recipe.actor.advantage == "gae":
            parts["critic"] = critic = Critic(recipe.critic, policy, self._value_trunk, total_steps=num_updates)
        if self.reference is not None and recipe.actor.kl.refresh_steps:
            parts["reference"] = RefreshedReference(recipe.actor.kl, self.reference, policy)
        self._learner = Learner(
            policy=policy,
            optimizer=self._optimizer,
            actor=recipe.actor,
            temperature=recipe.rollout.temperature,
            max_tokens=recipe.rollout.max_new_tokens,
            critic=critic,
            check_stop=self._check_stop,
        )
        return parts

    def _check_stop(self) -> None:
        """Raise Stopped on all ranks where any has heard a signal, as long as nothing is lost by it."""
        if self.is_whole:
            ranks.stop_all(signal_heard())


@contextmanager
def trainer_of_rank_0() -> Iterator[Trainer]:
    """Make the trainer of rank 0, which ends the other ranks (`Trainer.end`); after an error they end in silence."""
    trainer = Trainer()
    try:
        yield trainer
    except BaseException as error:
        is_at_once = isinstance(error, KeyboardInterrupt) and not isinstance(error, Stopped)
        if not (is_at_once or isinstance(error, LostRankError) or trainer.is_busy):
            ranks.tell("failed", error if isinstance(error, Stopped) else OtherRankError(str(error)))
        raise
