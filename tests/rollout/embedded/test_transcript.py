"""Responses made of what was sampled: each its own tokens, up to its first stop token."""

import torch

from gspo.rollout.embedded.decoding import Transcript

TOKENS = [[5, 6, 7, 8], [5, 1, 7, 1], [9, 6, 1, 5], [5, 6, 7, 1], [1, 9, 9, 9], [9, 1, 1, 1]]


def logprob(response: int, position: int) -> float:
    return -(response + position / 8)


def sample(transcript: Transcript, rows: list[int], positions: list[int]) -> None:
    """One more token of each of these responses, at their own positions."""
    pairs = list(zip(rows, positions, strict=True))
    transcript.add(
        torch.tensor(rows),
        torch.tensor([TOKENS[row][position] for row, position in pairs]),
        torch.tensor([logprob(row, position) for row, position in pairs]),
    )


def check(transcript: Transcript) -> None:
    responses = list(transcript.responses([9, 1]))
    assert [ids.tolist() for ids, *_ in responses] == [[5, 6, 7, 8], [5, 1], [9], [5, 6, 7, 1], [1], [9]]
    assert [finish_reason for *_, finish_reason, _ in responses] == ["length", *["stop"] * 5]
    for number, (ids, logprobs, full, counts, _, experts) in enumerate(responses):
        assert counts == (len(ids),)
        assert logprobs.tolist() == [logprob(number, position) for position in range(len(ids))]
        assert full is None and experts is None


def test_a_response_ends_at_its_first_stop_token_whatever_was_sampled_after_it() -> None:
    transcript = Transcript(group_size=3)
    for position in range(4):
        sample(transcript, list(range(6)), [position] * 6)
    check(transcript)


def test_rows_that_are_dropped_and_rows_that_come_later_keep_their_own_tokens() -> None:
    transcript = Transcript(group_size=3)
    for position in range(2):  # 1, 2 and 4 end here
        sample(transcript, [0, 1, 2, 4], [position] * 4)
    sample(transcript, [5, 0, 3], [0, 2, 0])
    sample(transcript, [0, 3], [3, 1])
    for position in (2, 3):
        sample(transcript, [3], [position])
    check(transcript)


def test_of_nothing_sampled_there_are_no_responses() -> None:
    assert list(Transcript(group_size=3).responses([1])) == []
