"""Offline, one thread, shapes checked where that is switched on, and models so small that a test takes milliseconds."""

import copy
import dataclasses
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests import shapes
from tests.needs import require

if TYPE_CHECKING:
    from gspo.model.packing import TokenSequence
    from gspo.model.policy import Policy
    from gspo.recipe.sections import ActorConfig
    from gspo.types import Batch, Query

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of a thousand processes would compile all that it imports
torch.set_num_threads(1)
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    signal.signal(number, handler)  # under nohup, and in a shell's background job, they come ignored, and stay so
shapes.install()  # gspo may only be imported after this line

TEXTS = ("a cat sat on the mat", "1 + 2 = 3", "<think>\n7 - 4 is 3\n</think> so: 3!")
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # untrained models are otherwise so flat that a wrong context would go unnoticed
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "gemma2": {"sliding_window": 4, "final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm": {},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}


# Few tests, and minutes each: last, one process would work on them while the others have nothing to do. Those that
# compute and those that wait take turns.
LONG_FILES = (
    "test_vllm_process.py",
    "test_ray.py",
    "test_slurm.py",
    "test_servers.py",
    "test_beside.py",
    "test_several_processes.py",
    "test_rank_messages.py",
    "test_vllm_experts.py",
    "test_engines_end_to_end.py",
    "test_resume_auxiliary_models.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a browser and what is nightly; the long files come first, then those of many tests."""
    lines = Path(__file__).with_name("nightly.txt").read_text(encoding="utf-8").splitlines()
    nightly = [line.split(" & ") for line in lines if line and not line.startswith("#")]
    sizes = Counter(item.path for item in items)
    order = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: (order.get(item.path.name, len(order)), -sizes[item.path]))
    for item in items:
        if item.path.name.startswith("test_browser_"):
            item.add_marker("browser")
        if any(all(part in item.nodeid for part in parts) for parts in nightly):
            item.add_marker("nightly")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked by `needs`, before its fixtures are made."""
    for mark in item.iter_markers("needs"):
        require(*mark.args)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were skipped for which reason."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def fitted_tokenizer() -> Any:
    """One token a digit, word or mark of TEXTS."""
    from gspo.model.load import fit_tokenizer

    return fit_tokenizer(TEXTS)


@pytest.fixture(params=FAMILIES)
def each_family(request: pytest.FixtureRequest) -> str:
    """The name of a family, all of them in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def loaded_policy(fitted_tokenizer: Any) -> "Callable[..., Policy]":
    """A policy of a family, the same new weights at every call or saved ones; other keys go to its configuration."""
    from gspo.model.policy import load_policy
    from gspo.recipe.sections import ModelConfig

    def build(
        family: str = "qwen3", dtype: Any = "float32", seed: int = 0, *, weights: Path | None = None, **changes: Any
    ) -> "Policy":
        architecture = {"model_type": family, **SHAPE, **FAMILIES.get(family, {}), **changes}
        recipe = ModelConfig(architecture=architecture, tokenizer="fit", dtype=dtype, device="cpu")
        return load_policy(recipe, fitted_tokenizer, seed=seed, weights=weights)

    return build


@pytest.fixture(scope="session")
def new_policy(loaded_policy: "Callable[..., Policy]") -> "Callable[..., Policy]":
    """The same as `loaded_policy`, of which each is loaded and proven once and then copied, which is much faster."""
    known: dict[str, tuple[Policy, torch.Tensor]] = {}

    def build(
        family: str = "qwen3", dtype: Any = "float32", seed: int = 0, *, weights: Path | None = None, **changes: Any
    ) -> "Policy":
        if weights is not None:
            return loaded_policy(family, dtype, seed, weights=weights, **changes)
        key = repr((family, dtype, seed, sorted(changes.items())))
        if key not in known:
            known[key] = loaded_policy(family, dtype, seed, **changes), torch.get_rng_state()
        policy, random_state = known[key]
        torch.set_rng_state(random_state)  # as loading leaves it
        return copied(policy)

    return build


def copied(policy: "Policy") -> "Policy":
    """Another policy of the same weights; they share the tokenizer."""
    from gspo.model.routing import Routing

    twin = copy.deepcopy(policy, {id(policy.tokenizer): policy.tokenizer})
    if (routing := policy.routing) is None:
        return twin
    # What watches a router is a closure over the original: it is taken off the copy, which gets one of its own.
    routers = [module for module in twin.model.modules() if "watched" in getattr(module.forward, "__qualname__", "")]
    assert len(routers) == routing.num_layers
    for router in routers:
        del router.forward
    numbers = {name: getattr(routing, name) for name in ("num_experts", "top_k", "gives_probabilities")}
    return dataclasses.replace(twin, routing=Routing(routers, **numbers))


@pytest.fixture(scope="session")
def plain_logprobs() -> "Callable[..., torch.Tensor]":
    """Log-likelihoods [N] from the model's own forward pass, one sequence at a time, without padding or cache."""

    def compute(policy: "Policy", sequences: "Sequence[TokenSequence]", temperature: float = 1.0) -> torch.Tensor:
        found = []
        for sequence in sequences:
            ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
            table = (policy.model(input_ids=ids, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
            start = len(sequence.prompt_ids)
            found += [table[start + t - 1, token] for t, token in enumerate(sequence.response_ids)]
        return torch.stack(found)

    return compute


@pytest.fixture(scope="session")
def ragged_sequences() -> "Callable[..., list[TokenSequence]]":
    """Random token sequences of unequal lengths; the first response has one token."""
    from gspo.model.packing import TokenSequence

    def build(number: int, *, vocabulary: int, seed: int = 0, longest: int = 20) -> "list[TokenSequence]":
        rng = random.Random(seed)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(rng.randrange(3, vocabulary) for _ in range(count))

        lengths = [1, *(rng.randint(1, longest) for _ in range(number - 1))]
        return [
            TokenSequence(prompt_ids=tokens(rng.randint(1, 9)), response_ids=torch.tensor(tokens(n))) for n in lengths
        ]

    return build


@pytest.fixture(scope="session")
def query_of() -> "Callable[[Sequence[int]], Query]":
    """A query of which only the tokens matter."""
    from tests import samples

    return samples.query_of


@pytest.fixture(scope="session")
def batch_of(query_of: Any) -> "Callable[..., Batch]":
    """A scored batch: one group for each list of rewards, with random prompts and responses."""
    from tests.samples import advantaged, sample_of

    from gspo.types import Group, Sample

    def build(rewards: Sequence[Sequence[float | None]], *, vocabulary: int, seed: int = 0) -> "Batch":
        rng = random.Random(seed)

        def sample(query: "Query") -> Sample:
            return sample_of(query, [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 12))])

        groups = []
        for number, group in enumerate(rewards):
            query = query_of([rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 6))], number)
            groups.append(Group(samples=tuple(sample(query) for _ in group)))
        return advantaged(groups, [reward for group in rewards for reward in group])

    return build


@pytest.fixture(scope="session")
def actor_of() -> "Callable[..., ActorConfig]":
    """The actor's settings, with one micro-batch of everything where nothing else is said."""
    from gspo.recipe.sections import ActorConfig

    def build(**settings: Any) -> "ActorConfig":
        return ActorConfig(**{"micro_batch_tokens": 10**6, "mini_batches": 1, "gradient_noise": False, **settings})

    return build


@pytest.fixture
def recording_optimizer() -> Any:
    """An Optimizer class whose steps note the accumulated gradients (.gradients) and change no weight."""
    from gspo.learner.optimizer import Optimizer, StepReport
    from gspo.recipe.sections import OptimizerConfig

    class RecordingOptimizer(Optimizer):
        gradients: list[torch.Tensor]  # one flat vector a step, over all optimisers of this class

        def __init__(self, model: Any, settings: OptimizerConfig | None = None, *, total_steps: int = 1) -> None:
            super().__init__(model, settings or OptimizerConfig(), total_steps=total_steps)
            self.model = model

        def step(self, *, loss_is_finite: bool = True) -> StepReport:
            self.gradients.append(flat_gradient(self.model))
            self.model.zero_grad()
            return StepReport(grad_norm=0.0, learning_rate=0.0, applied=True)

    RecordingOptimizer.gradients = []
    return RecordingOptimizer


@pytest.fixture(scope="session")
def gradient_of() -> Callable[[Any], torch.Tensor]:
    """All gradients of a model as one vector, which are then cleared."""

    def take(model: Any) -> torch.Tensor:
        gradient = flat_gradient(model)
        model.zero_grad()
        return gradient

    return take


def flat_gradient(model: Any) -> torch.Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts])


@pytest.fixture
def tokens_read() -> Callable[[Any], list[tuple[int, ...]]]:
    """The shapes [rows, tokens] of everything that passes through a policy's embedding from now on."""

    def watch(policy: Any) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        embedding = policy.model.get_input_embeddings()
        embedding.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
        return shapes

    return watch


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test is in a directory of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def format_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward `format` is called here: a process takes a third of a tiny run, and tests/test_train.py has one."""
    from gspo.reward import functions

    made = functions._made

    def in_this_process(reward: Any, *arguments: Any, in_processes: bool, **keywords: Any) -> Any:
        return made(reward, *arguments, in_processes=in_processes and reward.function != "format", **keywords)

    monkeypatch.setattr(functions, "_made", in_this_process)
