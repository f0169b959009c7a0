"""What is written of each rollout of a step: what the model read, said and got, and token by token how it changed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from gspo.policy.item import Trained
from gspo.records import Batch, Rollout
from gspo.report.token_text import TokenText

_DECIMALS = 5  # of a number a token: 1e-5 nats is far below what a clip range tells apart


def rollout_lines(
    batch: Batch, trained: Sequence[Trained] = (), token_text: TokenText | None = None
) -> Iterator[Mapping[str, Any]]:
    """One a rollout of the batch, in its order; with `token_text`, what is known of each token too.

    Numbers of the update are null where the sequence took no part in it, its advantage being 0.
    """
    seen, index = {item.index: item for item in trained}, 0
    for group in batch.groups:
        for rollout in group.rollouts:
            score, item = batch.scores[index], seen.get(index)
            yield {
                "query": group.query.id,
                "prompt": group.query.text,
                "completion": rollout.text,
                "reward": score.reward,
                "rewards": dict(score.parts),
                "failure": score.failure.message if score.failure else None,
                "advantage": batch.advantages[index],
                "sequence_ratio": None if item is None else item.sequence_ratio,
                "clipped": None if item is None else item.num_clipped / item.num_tokens,
                "mini_batch": None if item is None else item.mini_batch,
                "tokens": len(rollout.response_ids),
                "finish_reason": rollout.finish_reason,
                "policy_version": rollout.policy_version,
                **({} if token_text is None else _of_tokens(batch, index, rollout, item, token_text)),
            }
            index += 1


def _of_tokens(
    batch: Batch, index: int, rollout: Rollout, item: Trained | None, token_text: TokenText
) -> dict[str, Any]:
    return {
        "token_characters": token_text.lengths(rollout.response_ids.tolist(), rollout.text),
        "token_log_ratios": None if item is None else _rounded(item.log_ratios),
        "token_advantages": _rounded(batch.token_advantages.get(index)),
    }


def _rounded(numbers: Float[Tensor, "T"] | None) -> list[float] | None:
    return None if numbers is None else [round(number, _DECIMALS) for number in numbers.tolist()]
