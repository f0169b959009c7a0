"""Responses made of what was sampled: each its own tokens, up to its first stop token."""

import torch

from gspo.rollout.embedded.transcript import Transcript

TOKENS = [[5, 6, 7, 8], [5, 1, 7, 1], [9, 6, 1, 5], [5, 6, 7, 1], [1, 9, 9, 9], [9, 1, 1, 1]]


def logprob(response: int, position: int) -> float:
    return -(response + position / 8)


def sample(transcript: Transcript, rows: list[int], positions: list[int]) -> None:
    """One more token of each of these responses, at their own positions."""
    pairs = list(zip(rows, positions, strict=True))
    transcript.add(
        torch.tensor([TOKENS[row][position] for row, position in pairs]),
        torch.tensor([logprob(row, position) for row, position in pairs]),
    )


def check(transcript: Transcript) -> None:
    found = transcript.responses(torch.tensor([9, 1]))
    assert [response.ids.tolist() for response in found] == [[5, 6, 7, 8], [5, 1], [9], [5, 6, 7, 1], [1], [9]]
    assert [response.finish_reason for response in found] == ["length", *["stop"] * 5]
    for number, response in enumerate(found):
        assert response.logprobs.tolist() == [logprob(number, position) for position in range(len(response.ids))]
        assert response.ids.device.type == response.logprobs.device.type == "cpu"


def test_a_response_ends_at_its_first_stop_token_whatever_was_sampled_after_it() -> None:
    transcript = Transcript(6, 4, torch.device("cpu"))
    for position in range(4):
        sample(transcript, list(range(6)), [position] * 6)
    transcript.write(torch.arange(6), torch.full((6,), 4))
    check(transcript)


def test_rows_that_are_dropped_and_rows_that_come_later_keep_their_own_tokens() -> None:
    transcript = Transcript(6, 4, torch.device("cpu"))
    for position in range(2):  # 1, 2 and 4 end here
        sample(transcript, [0, 1, 2, 4], [position] * 4)
    transcript.write(torch.tensor([0, 1, 2, 4]), torch.full((4,), 2))
    rows = [5, 0, 3]
    sample(transcript, rows, [0, 2, 0])
    transcript.write(torch.tensor(rows), torch.tensor([1, 3, 1]))
    sample(transcript, [0, 3], [3, 1])
    transcript.write(torch.tensor([0, 3]), torch.tensor([4, 2]))
    transcript.write(torch.tensor([0, 3]), torch.tensor([4, 2]))  # nothing new
    for position in (2, 3):
        sample(transcript, [3], [position])
    transcript.write(torch.tensor([3]), torch.tensor([4]))
    check(transcript)
