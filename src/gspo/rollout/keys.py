"""What decides the random numbers of a response."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, kw_only=True)
class SamplingKey:
    """What decides, together with a query's id and a sample's number, all random numbers of a response.

    Example: SamplingKey(seed=0, step=12).response_keys(["gsm8k:7", "gsm8k:2"], 8) gives 16 keys.
    """

    seed: int
    step: int  # 0 for an evaluation

    def response_keys(self, query_ids: Sequence[str], num_samples: int) -> list[int]:
        """A number of 128 bits for each response, `num_samples` for the first query, then those of the second.

        A query that stands twice in the list goes on counting its samples, so that its two groups differ.
        """
        counts: Counter[str] = Counter()
        texts = []
        for query_id in query_ids:
            first = counts[query_id]
            texts += [f"{self.seed} {self.step} {first + number} {query_id}" for number in range(num_samples)]
            counts[query_id] += num_samples
        # A file's name, and so an id, may hold bytes that are no UTF-8.
        digests = [blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest() for text in texts]
        return [int.from_bytes(digest, "big") for digest in digests]

    def of_groups(self, query_ids: Sequence[str], num_samples: int) -> list[list[int]]:
        """The keys of `response_keys`, as a list for each group."""
        keys = self.response_keys(query_ids, num_samples)
        return [keys[start : start + num_samples] for start in range(0, len(keys), num_samples)]


def key_of_turn(key: int, turn: int) -> int:
    """Return the key of a turn of the response that has the key; the first turn, 0, has that itself."""
    return key if turn == 0 else int.from_bytes(blake2b(f"{key} {turn}".encode(), digest_size=16).digest(), "big")


def number_of(ids: Sequence[int]) -> int:
    """Return a number of 64 bits that token ids have, and others hardly."""
    return int.from_bytes(blake2b(repr([*ids]).encode(), digest_size=8).digest())
