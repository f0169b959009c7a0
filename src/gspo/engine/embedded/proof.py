"""The proof, before anything is sampled, that a model decodes as its plain passes compute, and by which means."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gspo.engine.embedded.decoding import Decoding, Means, Rows
from gspo.engine.embedded.fast_decode import fast_decoder
from gspo.engine.engine import Prompt, Sampling, Session
from gspo.errors import UserError
from gspo.model.lora import moved_adapter, with_adapter
from gspo.model.policy import Policy
from gspo.model.prove import computing_in, disagreement, probe_ids

# Parts of the names by which configurations declare how far layers reach, in tokens.
_REACHES = ("window", "chunk", "conv", "kernel", "block")
_MOST_REACH = {"cpu": 256, "cuda": 4096}  # longer ones would take too long to read
_NUM_TOKENS = {"cpu": 7, "cuda": 22}  # of the longest response: on a GPU rows are dropped, and join, after 16
_NUM_AGAIN = 2  # tokens that are said once more, behind what is kept
_proven: WeakKeyDictionary[nn.Module, Means] = WeakKeyDictionary()


@torch.no_grad()
def proven_means(policy: Policy) -> Means:
    """The fastest means by which given tokens have the likelihoods that a plain pass over each sequence gives them.

    The proof reads ragged prompts, repeats them for groups of two, decodes, drops rows that end and has others join.
    Then it goes on with each of them, from what is kept and from its middle, and says the last tokens anew.
    UserError where no means is right.
    """
    if policy.trunk in _proven:
        return _proven[policy.trunk]
    num_tokens = _NUM_TOKENS.get(policy.device.type, 7)
    lengths = _prompt_lengths(policy, num_tokens)
    rows = 2 * len(lengths)
    *prompts, ids = probe_ids(policy.trunk, sum(lengths) + rows * num_tokens).split([*lengths, rows * num_tokens])
    tokens = ids.view(rows, num_tokens)
    ends = torch.tensor([num_tokens if row % 3 else 2 for row in range(rows)], device=policy.device)

    def plain() -> Tensor:
        found = []
        for row, end in enumerate(ends.tolist()):
            whole = torch.cat([prompts[row // 2], tokens[row]])[None]  # later tokens must not change earlier ones
            hidden = policy.trunk(input_ids=whole, use_cache=False).last_hidden_state[0, lengths[row // 2] - 1 : -1]
            found.append(policy.head.logits(torch.cat([hidden[:end], hidden[-_NUM_AGAIN:]])))
        return torch.cat(found).log_softmax(-1).to(policy.dtype)

    # At half precision rounding alone has some routers choose other experts, and in float32 it does not.
    is_half = policy.dtype.itemsize < 4 and not policy.is_sharded
    tried = Means if fast_decoder(policy.trunk) else [*Means][1:]
    for means, is_widened in product(tried, (False, True)[: 1 + is_half]):
        decoding = _Dictated(
            policy=policy,
            prompts=_prompts([prompts[row // 2] for row in range(rows)], num_tokens),
            sampling=Sampling(),
            max_rows=rows - 2,  # the last prompt waits until there is room
            means=means,
            tokens=tokens,
            ends=ends,
        )
        widened = computing_in(torch.float32, policy.model) if is_widened else nullcontext()
        with widened, with_adapter(policy.model, moved_adapter(policy.model)):
            reason = disagreement(plain, decoding.likelihoods)
        if reason is None:
            _proven[policy.trunk] = means
            return means
    problem = f"{policy.architecture} cannot be sampled from token by token, not even without a cache: {reason}"
    raise UserError(problem, where="model.path", fix="take another model, or a rollout.engine that can run it")


@dataclass(kw_only=True, eq=False)
class _Dictated(Decoding):
    """Decoding in which the tokens are given, and their distributions kept."""

    tokens: Int[Tensor, "R T"]
    ends: Int[Tensor, "R"]  # after how many of its tokens a row ends
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by row and token

    def likelihoods(self) -> Float[Tensor, "N V"]:
        """Log-likelihoods of the whole vocabulary at each token, row by row, and of the last ones once more."""
        self.generate()
        longer = [
            replace(prompt, ids=(*prompt.ids, *own[:-_NUM_AGAIN]), max_new_tokens=_NUM_AGAIN)
            for prompt, own in zip(self.prompts, self.tokens.tolist(), strict=True)
        ]
        again, ends = self.tokens[:, -_NUM_AGAIN:], torch.full_like(self.ends, _NUM_AGAIN)
        after = replace(self, prompts=longer, max_rows=len(longer), tokens=again, ends=ends, logits={})
        after.generate()
        found = []
        for row, end in enumerate(self.ends.tolist()):
            found += [self.logits[row, place] for place in range(end)]
            found += [after.logits[row, place] for place in range(_NUM_AGAIN)]
        return torch.stack(found).log_softmax(-1).to(self.policy.dtype)

    def _sample(self, rows: Rows) -> Int[Tensor, "R"]:
        self.logits |= zip(zip(rows.index.tolist(), rows.sampled.tolist(), strict=True), rows.logits, strict=True)
        token = self.tokens[rows.index, rows.sampled]
        self.transcript.add(rows.index, token, rows.logits[:, 0])
        rows.sampled += 1
        rows.alive &= rows.sampled < self.ends[rows.index]
        return token


def _prompts(prompts: Sequence[Int[Tensor, "_"]], num_tokens: int) -> list[Prompt]:
    rows = enumerate(prompts)
    return [Prompt(ids=tuple(ids.tolist()), key=key, max_new_tokens=num_tokens, session=Session()) for key, ids in rows]


def _prompt_lengths(policy: Policy, num_tokens: int) -> list[int]:
    """A few tokens and, of each reach, just less, which a response then passes, and more."""
    most = min(_MOST_REACH.get(policy.device.type, 256), (policy.max_positions or 10**9) - num_tokens - 3)
    declared = vars(policy.model.config.get_text_config()).items()
    named = [value for name, value in declared if any(part in name for part in _REACHES)]
    reaches = sorted({value for value in named if isinstance(value, int) and 4 < value <= most})
    return [9, *(length for reach in reaches for length in (reach - 2, reach + 3)), 3, 3]
