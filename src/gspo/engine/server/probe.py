"""The proof that a server has the policy's weights: a few tokens that it samples, scored by the policy itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gspo.engine.engine import Completion, Prompt, Sampling
from gspo.engine.server.api import SampleRequest
from gspo.model.lora import adapter_of, without_effect
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood
from gspo.model.prove import MISFITS, computing_in

_PROMPT_LENGTHS = (3, 7, 11, 15)  # tokens
_NUM_TOKENS = 16  # of each response
LENGTH, NUM_RESPONSES = max(_PROMPT_LENGTHS) + _NUM_TOKENS, len(_PROMPT_LENGTHS)
_LEAST_SIGNAL = 6.0  # of what is missing, in standard deviations of rounding
_MOST_ROUNDING = 10.0  # times what the weights beneath an adapter show of it
_LEAST_PART = 0.01  # of an adapter's effect: a gap of that size is a part that a server has not got
# The largest mean gap, in nats a token, that rounding explains, by the coarser dtype of trainer and server, or so many
# times the gap between the policy and itself in the server's precision, if that is more. Weights of one layer that are
# not the policy's move it much further (docs/engines.md has both as measured).
_FACTOR = 3.0
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Return how far the server's log-likelihoods of its own tokens are from the policy's, in nats a token.

    Example: Gap(mean=2e-6, most=9e-6, tolerance=1e-4) of weights that are the policy's.
    """

    mean: float
    most: float  # of the tokens
    tolerance: float
    adapter: float = 1.0  # how much of the policy's adapter shows: 0 of a server without it, 2 where it is there twice
    parts: Mapping[str, float] = field(default_factory=dict)  # the same by kind of layer, where it is some that differ

    @property
    def is_closed(self) -> bool:
        """Tell whether it is what rounding leaves."""
        return self.mean <= self.tolerance and abs(self.adapter - 1) < 0.5  # NaN is not

    def __str__(self) -> str:
        gap = f"mean gap of log-likelihoods {self.mean:.2g} nats a token, tolerance {self.tolerance:g}"
        shown = {f" of {name}": part for name, part in self.parts.items()} or {"": self.adapter}
        return gap + "".join(
            f"; {round(part, 1) + 0:g} times the adapter{name}" for name, part in shown.items() if part != 1
        )


class Probe:
    """Requests of random prompts, the same for all of a run's proofs but for the responses' random numbers."""

    def __init__(self, policy: Policy, dtype: torch.dtype, temperature: float) -> None:
        self._policy, self._temperature = policy, temperature
        self.rounding: float | None = None  # the mean gap of a server with the weights beneath the policy's adapter
        coarser = max((dtype, policy.dtype), key=lambda each: TOLERANCE.get(each, 0.0))
        special = set(policy.tokenizer.all_special_ids)
        ids = [index for index in range(min(len(policy.tokenizer), len(policy.head.weight))) if index not in special]
        drawn = torch.randint(len(ids), (sum(_PROMPT_LENGTHS),), generator=torch.Generator().manual_seed(0)).tolist()
        prompts = torch.tensor(ids)[drawn].split(_PROMPT_LENGTHS)
        self._prompts = [tuple(prompt.tolist()) for prompt in prompts]
        own = _FACTOR * self._rounding(dtype) if dtype != policy.dtype else 0.0
        self._tolerance = max(TOLERANCE.get(coarser, TOLERANCE[torch.float32]), own)

    @torch.no_grad()
    def _rounding(self, dtype: torch.dtype) -> float:
        """The mean gap between the policy and itself in the server's precision; 0 where it cannot compute in that."""
        if self._policy.is_sharded:
            return 0.0
        model, rows = self._policy.model, [torch.tensor([[*prompt, *self._prompts[-1]]]) for prompt in self._prompts]

        def logprobs() -> Tensor:
            logits = [model(input_ids=row.to(self._policy.device), use_cache=False).logits[0, :-1] for row in rows]
            targets = torch.cat([row[0, 1:] for row in rows]).to(self._policy.device)
            scaled = torch.cat(logits).float() / self._temperature
            return scaled.log_softmax(-1).gather(1, targets[:, None])

        try:
            own = logprobs()
            with computing_in(dtype, model):
                return float((logprobs() - own).abs().mean())
        except MISFITS:
            return 0.0

    def requests(self, label: str, seed: int, base: str = "") -> list[SampleRequest]:
        """Return what the server is asked for with the weights of this label; no token ends a completion."""
        sampling = Sampling(temperature=self._temperature)
        return [
            SampleRequest(
                prompts=[Prompt(ids=ids, key=seed + number, max_new_tokens=_NUM_TOKENS)],
                sampling=sampling,
                versions={label: 0},
                base=base,
                goes_first=True,
            )
            for number, ids in enumerate(self._prompts)
        ]

    @torch.no_grad()
    def gap(self, completions: Sequence[Completion]) -> Gap:
        """The gap, from one forward pass over prompts and completions."""
        sequences = [
            TokenSequence(prompt_ids=prompt, response_ids=completion.token_ids)
            for prompt, completion in zip(self._prompts, completions, strict=True)
        ]
        server = torch.cat([completion.logprobs for completion in completions]).double()
        gaps = server - (trainer := self._logprobs(self._policy, sequences))
        gap = Gap(mean=float(gaps.abs().mean()), most=float(gaps.abs().max()), tolerance=self._tolerance)
        # Merged into weights of half precision, small steps are rounded away: what is missing then is no fault.
        is_exact = self._policy.dtype == torch.float32 or self.rounding is not None
        if not is_exact or (base := without_effect(self._policy.model)) is None:
            return gap
        effect = trainer - self._logprobs(replace(self._policy, adapter=base), sequences)
        gap = replace(gap, adapter=_share(gaps, effect))
        if self.rounding is None:
            return gap
        most = max(_MOST_ROUNDING * self.rounding, _LEAST_PART * float(effect.abs().mean()))
        gap = replace(gap, tolerance=min(most, self._tolerance))
        return replace(gap, parts=self._parts(gaps, trainer, sequences)) if gap.mean > gap.tolerance else gap

    def _parts(self, gaps: Tensor, trainer: Tensor, sequences: Sequence[TokenSequence]) -> dict[str, float]:
        """Return how much of the adapter shows in each kind of layer that differs, such as q_proj; {} where all do."""
        own, base = adapter_of(self._policy.model), without_effect(self._policy.model) or {}
        names: dict[str, list[str]] = {}
        for name in own:
            names.setdefault(name.partition(".lora_")[0].rpartition(".")[2], []).append(name)
        lacking = ({**own, **{name: base[name] for name in each}} for each in names.values())
        effects = [trainer - self._logprobs(replace(self._policy, adapter=each), sequences) for each in lacking]
        missing = torch.linalg.lstsq(torch.stack(effects, dim=1), gaps[:, None]).solution[:, 0].tolist()
        shown = {kind: 1 + part for kind, part in zip(names, missing, strict=True) if abs(part) > 0.5}
        return shown if len(shown) < len(names) else {}

    def _logprobs(self, policy: Policy, sequences: Sequence[TokenSequence]) -> Tensor:
        return response_likelihood(policy, sequences, temperature=self._temperature).logprobs.double().cpu()


def _share(gaps: Tensor, effect: Tensor) -> float:
    """Return the part of an adapter's effect that has reached the server, where that stands out from rounding.

    A small adapter is well within the tolerance of half precision, and so would a server be that has not got it. But
    what that lacks points the way of the effect, and rounding does not.
    """
    length = effect.norm()
    missing = float(gaps @ effect / length**2) if length else 0.0
    rest = (gaps - missing * effect).norm() / len(gaps) ** 0.5
    return 1 + missing if abs(missing) * length > _LEAST_SIGNAL * rest else 1.0
