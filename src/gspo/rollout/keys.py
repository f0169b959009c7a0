"""What decides the random numbers of a response."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, kw_only=True)
class SamplingKey:
    """The key that decides, with a query's id and a sample's number, all random numbers of a response.

    Example: SamplingKey(seed=0, step=12).of_groups(["gsm8k:7", "gsm8k:2"], 8) gives two lists of 8 keys.
    """

    seed: int
    step: int  # 0 for an evaluation

    def of_groups(self, query_ids: Sequence[str], num_samples: int) -> list[list[int]]:
        """A number of 128 bits for each response: a list of `num_samples` for each query.

        A query that stands twice in the list goes on counting its samples, so that its two groups differ.
        """
        counts, groups = Counter[str](), list[list[int]]()
        for query_id in query_ids:
            numbers = range(counts[query_id], counts[query_id] + num_samples)
            groups.append([_digest(f"{self.seed} {self.step} {number} {query_id}") for number in numbers])
            counts[query_id] += num_samples
        return groups


def key_of_turn(key: int, turn: int) -> int:
    """Return the key of a turn of the response that has the key; the first turn, 0, has that itself."""
    return key if turn == 0 else _digest(f"{key} {turn}")


def number_of(ids: Sequence[int]) -> int:
    """Return a number of 64 bits that token ids have, and others hardly."""
    return _digest(repr([*ids]), size=8)


def _digest(text: str, size: int = 16) -> int:
    # A file's name, and so an id, may hold bytes that are no UTF-8.
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=size).digest(), "big")
