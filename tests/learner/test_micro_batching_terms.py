"""No cut of a mini-batch changes the gradient of any surrogate, length norm, correction, KL, entropy or value loss."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.samples import accumulated, sample_from, sequence_of

from gspo.learner.critic import Critic
from gspo.learner.loss import Denominators
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.objective import correction_weights, kl_estimate, surrogate, value_loss
from gspo.recipe.published import PUBLISHED
from gspo.recipe.sections import ActorConfig, CriticConfig
from gspo.types import Sample

# Of the whole mini-batch, which has more sequences than are trained here, and other lengths.
GROUP_TOKENS = [6.5] * 4 + [3.0] + [5.5] * 4


def whole(samples: list[Sample], actor: ActorConfig) -> Denominators:
    tokens = {"mean": [6.7] * len(samples), "constant": [23.0] * len(samples), "group": GROUP_TOKENS}
    given = tokens.get(actor.length_norm, [])
    return Denominators(num_sequences=NUM_SEQUENCES, tokens=dict(zip(samples, given, strict=False)))


NUM_SEQUENCES = 17
CUTS = (1, 40, 10**6)
SEQUENCE_CLIP = {"clip_low": 0.03, "clip_high": 0.04}
TOKEN_CLIP = {"clip_low": 0.06, "clip_high": 0.07}
CASES: dict[str, dict[str, Any]] = {
    **{f"{name} {level}": {"surrogate": name, "importance_sampling_level": level}
       for name, published in PUBLISHED.items() for level in published.levels},
    "group's length": {"surrogate": "clip", "length_norm": "group"},
    "mean length": {"surrogate": "clip", "length_norm": "mean"},
    "constant length": {"surrogate": "clip", "length_norm": "constant"},
    "no length": {"surrogate": "gmpo", "length_norm": "none"},
    "k1": {"kl": {"coefficient": 0.7, "estimator": "k1"}},
    "k2": {"kl": {"coefficient": 0.7, "estimator": "k2"}},
    "k3": {"kl": {"coefficient": 0.7, "estimator": "k3"}, "surrogate": "dapo"},
    "entropy": {"entropy_bonus": 0.3},
    "no entropy": {"entropy_bonus": -0.3, "surrogate": "cispo"},
    "tis": {"correction": "tis", "correction_high": 1.05},
    "tis of a sequence": {"correction": "tis", "correction_high": 1.05, "correction_level": "sequence"},
    "mis": {"correction": "mis", "correction_low": 0.95, "correction_high": 1.05, "surrogate": "dapo"},
    "icepop": {"correction": "icepop", "correction_low": 0.9, "correction_high": 1.1, "surrogate": "cispo"},
    "kpop": {"correction": "kpop", "correction_high": 1e-3, "surrogate": "dapo"},
    "geometric mask": {"correction": "geometric_mask", "correction_low": 0.95, "correction_high": 1.05},
    "decoupled": {"correction": "decoupled", "importance_sampling_level": "token"},
    "opsm": {"opsm_delta": 0.01},
    "minirl cap": {"surrogate": "minirl", "minirl_cap": 0.9},
    "everything": {
        "surrogate": "dual_clip",
        "length_norm": "mean",
        "kl": {"coefficient": 0.7},
        "entropy_bonus": 0.3,
        "correction": "icepop",
        "correction_low": 0.9,
        "correction_high": 1.1,
        "opsm_delta": 0.01,
    },
}  # fmt: skip


def grouped_sequences(vocabulary: int) -> list[TokenSequence]:
    """Groups of one prompt and ragged responses, a sequence alone."""
    rng = random.Random(4)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocabulary) for _ in range(count))

    found = []
    for prompt, lengths in ((13, (1, 9, 4, 12)), (5, (3,)), (6, (11, 2, 1, 8))):
        prompt_ids = tokens(prompt)
        found += [TokenSequence(prompt_ids=prompt_ids, response_ids=torch.tensor(tokens(n))) for n in lengths]
    return found


def new_items(policy: Policy, plain_logprobs: Any, *, per_token: bool) -> list[Sample]:
    """Everything that is known of a sequence, off from the policy by noise of a sequence's and a token's own."""
    sequences = grouped_sequences(len(policy.tokenizer))
    with torch.no_grad():
        logprobs = plain_logprobs(policy, sequences)
    generator, lengths = torch.Generator().manual_seed(2), [len(s.response_ids) for s in sequences]

    def near(centre: torch.Tensor, size: float) -> tuple[torch.Tensor, ...]:
        shifts = torch.randn(len(lengths), generator=generator).repeat_interleave(torch.tensor(lengths))
        return (centre + size * (shifts + torch.randn(centre.shape, generator=generator))).split(lengths)

    old = near(logprobs, 0.06)
    engine, reference = near(torch.cat(old), 0.05), near(logprobs, 0.3)
    by_token, values, returns = (near(torch.zeros_like(logprobs), 0.5) for _ in range(3))
    advantages = torch.randn(len(lengths), generator=generator).tolist()
    return [
        sample_from(
            sequence,
            advantage=advantages[n],
            # some have one a token, the others one for all
            token_advantages=by_token[n] if per_token and n % 3 else None,
            old_logprobs=old[n],
            sampler_logprobs=engine[n],
            reference_logprobs=reference[n],
            values=values[n],
            returns=returns[n],
        )
        for n, sequence in enumerate(sequences)
    ]


def plain_loss(table: torch.Tensor, items: list[Sample], actor: ActorConfig) -> torch.Tensor:
    """The mini-batch's loss in one piece, from all its tokens' distributions (log π [N, V])."""
    lengths = [item.num_tokens for item in items]

    def packed(name: str) -> torch.Tensor:
        return torch.cat([getattr(item, name) for item in items])

    targets = torch.cat([item.token_ids for item in items])
    logprobs, old, engine = (
        table[torch.arange(len(targets)), targets],
        packed("old_logprobs"),
        packed("sampler_logprobs"),
    )
    advantages = torch.tensor([item.advantage for item in items])
    if any(item.token_advantages is not None for item in items):
        advantages = advantages.repeat_interleave(torch.tensor(lengths))
        for own, item in zip(advantages.split(lengths), items, strict=True):
            own.copy_(own if item.token_advantages is None else item.token_advantages)
    weights = None
    if actor.correction != "none":
        bounds = (actor.correction_low, actor.correction_high)
        level = actor.correction_level
        weights = correction_weights(old, engine, torch.tensor(lengths), actor.correction, bounds, level=level)
    divisors: dict[str, Any] = {"mean": 6.7, "group": torch.tensor(GROUP_TOKENS), "constant": 23.0}
    result = surrogate(
        logprobs,
        old,
        advantages,
        torch.tensor(lengths),
        level=actor.importance_sampling_level,
        clip_low=actor.clip_low,
        clip_high=actor.clip_high,
        name=actor.surrogate,
        length_norm=actor.length_norm,
        tokens_per_sequence=divisors.get(actor.length_norm),
        sampler_logprobs=engine,
        weights=weights,
        opsm_delta=actor.opsm_delta,
        minirl_cap=actor.minirl_cap,
    )
    assert actor.opsm_delta is None or result.masked.any()
    loss = -result.per_sequence.sum()
    gaps = (logprobs - packed("reference_logprobs")).split(lengths)
    estimates = {"k1": lambda l: l, "k2": lambda l: l**2 / 2, "k3": lambda l: (-l).exp() - 1 + l}  # noqa: E741
    for own, gap in zip(table.split(lengths), gaps, strict=True):
        loss = loss + actor.kl.coefficient * estimates[actor.kl.estimator](gap).mean()
        loss = loss + actor.entropy_bonus * (own.exp() * own).sum(1).mean()
    return loss / NUM_SEQUENCES


def tables(policy: Policy, items: list[Sample]) -> Iterator[torch.Tensor]:
    """log π of every symbol at each response token, one sequence at a time, by the model's own forward pass."""
    for item in items:
        prompt, response = item.query.prompt_ids, item.token_ids.tolist()
        logits = policy.model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].float()
        yield logits[len(prompt) - 1 : -1].log_softmax(-1)


def settings_of(case: str) -> dict[str, Any]:
    changes = CASES[case]
    name = changes.get("surrogate", "clip")
    level = changes.get("importance_sampling_level", PUBLISHED[name].level)
    own = {} if name in ("cispo", "dppo") else TOKEN_CLIP if level == "token" else SEQUENCE_CLIP
    return {**own, **({"clip_low": 0.004, "clip_high": 0.004} if name == "dppo" else {}), **changes}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_whole_mini_batch_however_it_is_cut(
    case: str, new_policy: Callable[..., Policy], plain_logprobs: Any, actor_of: Any, gradient_of: Any
) -> None:
    policy, settings = new_policy("qwen3"), settings_of(case)
    items = new_items(policy, plain_logprobs, per_token=settings.get("surrogate") == "ppo")
    loss = plain_loss(torch.cat(list(tables(policy, items))), items, actor_of(**settings))
    loss.backward()
    expected = gradient_of(policy.model)
    seen = []
    for micro_batch_tokens in CUTS:
        actor = actor_of(**settings, micro_batch_tokens=micro_batch_tokens)
        seen.append(accumulated(policy, items, actor, whole(items, actor)))
        assert (gradient_of(policy.model) - expected).norm() <= 1e-5 * expected.norm()
    (first, first_stats), *others = seen
    if "kl" in settings:
        gaps = [
            new - known
            for new, known in zip(
                plain_logprobs(policy, list(map(sequence_of, items))).split([i.num_tokens for i in items]),
                [i.reference_logprobs for i in items],
                strict=True,
            )
        ]
        estimate = actor_of(**settings).kl.estimator
        own = sum(float(kl_estimate(gap.detach(), 0 * gap.detach(), estimate).mean()) for gap in gaps)
        assert first.kl == pytest.approx(own / NUM_SEQUENCES, rel=1e-4)
    for report, stats in others:
        assert report.loss == pytest.approx(first.loss, rel=1e-4, abs=1e-7)
        assert report.kl == pytest.approx(first.kl, rel=1e-4, abs=1e-7)
        counts = [[(own.num_clipped, own.num_masked) for own in every] for every in (first_stats, stats)]
        assert counts[0] == counts[1]
    if settings.get("correction") in ("mis", "icepop", "geometric_mask"):
        assert 0 < sum(own.num_masked for own in first_stats) < sum(item.num_tokens for item in items)


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_the_value_losss_gradient_is_that_of_the_whole_mini_batch_however_it_is_cut(
    trunk: Any, new_policy: Callable[..., Policy], plain_logprobs: Any, actor_of: Any, gradient_of: Any
) -> None:
    policy, second = new_policy("qwen3"), new_policy("qwen3", seed=1)
    items = new_items(policy, plain_logprobs, per_token=True)
    settings = CriticConfig(trunk=trunk, clip=0.3, coefficient=0.4)
    critic = Critic(settings, policy, second if trunk == "own" else None, total_steps=1)
    torch.nn.init.normal_(critic._head.weight)
    models = [policy.model, *([second.model] if trunk == "own" else []), critic._head]
    total = plain_loss(torch.cat(list(tables(policy, items))), items, actor_of(surrogate="ppo", **TOKEN_CLIP))
    for item in items:
        ids = torch.tensor([[*item.query.prompt_ids, *item.token_ids.tolist()]])
        reader: Any = second if trunk == "own" else policy
        states = reader.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        values = critic._head(states[len(item.query.prompt_ids) - 1 : -1])[:, 0]
        assert item.values is not None and item.returns is not None
        errors = value_loss(values, item.values, item.returns, 0.3).mean()
        total = total + (0.4 if trunk == "shared" else 1.0) * errors / NUM_SEQUENCES
    total.backward()
    expected = [gradient_of(model) for model in models]
    for micro_batch_tokens in CUTS:
        actor = actor_of(surrogate="ppo", micro_batch_tokens=micro_batch_tokens, **TOKEN_CLIP)
        accumulated(policy, items, actor, whole(items, actor), critic=critic)
        for model, wanted in zip(models, expected, strict=True):
            assert wanted.norm() > 0 and (gradient_of(model) - wanted).norm() <= 1e-5 * wanted.norm()
