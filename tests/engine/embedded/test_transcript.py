"""Completions made of what was sampled: each its own tokens, up to its first stop token."""

import torch

from gspo.engine.embedded.transcript import Transcript

TOKENS = [[5, 6, 7, 8], [5, 1, 7, 1], [9, 6, 1, 5], [5, 6, 7, 1], [1, 9, 9, 9], [9, 1, 1, 1]]


def logprob(number: int, position: int) -> float:
    return -(number + position / 8)


def sample(transcript: Transcript, rows: list[int], positions: list[int]) -> None:
    """One more token of each of these completions, at their own positions."""
    pairs = list(zip(rows, positions, strict=True))
    transcript.add(
        torch.tensor(rows),
        torch.tensor([TOKENS[row][position] for row, position in pairs]),
        torch.tensor([logprob(row, position) for row, position in pairs]),
    )


def check(transcript: Transcript) -> None:
    completions = list(transcript.completions(range(6), [9, 1], {}))
    assert [own.token_ids.tolist() for own in completions] == [[5, 6, 7, 8], [5, 1], [9], [5, 6, 7, 1], [1], [9]]
    assert [own.finish_reason for own in completions] == ["length", *["stop"] * 5]
    for number, own in enumerate(completions):
        length = len(own.token_ids)
        assert own.versions == ((0, length),)
        assert own.logprobs.tolist() == [logprob(number, position) for position in range(length)]
        assert own.full_logprobs is None and own.experts is None


def test_a_completion_ends_at_its_first_stop_token_whatever_was_sampled_after_it() -> None:
    transcript = Transcript()
    for position in range(4):
        sample(transcript, list(range(6)), [position] * 6)
    check(transcript)


def test_rows_that_are_dropped_and_rows_that_come_later_keep_their_own_tokens() -> None:
    transcript = Transcript()
    for position in range(2):  # 1, 2 and 4 end here
        sample(transcript, [0, 1, 2, 4], [position] * 4)
    sample(transcript, [5, 0, 3], [0, 2, 0])
    sample(transcript, [0, 3], [3, 1])
    for position in (2, 3):
        sample(transcript, [3], [position])
    check(transcript)


def test_those_alone_are_made_that_are_asked_for_and_a_text_ends_one_before_its_stop_token() -> None:
    transcript = Transcript()
    for position in range(4):
        sample(transcript, list(range(6)), [position] * 6)
    assert list(transcript.completions([], [9, 1], {})) == []
    first, second, third = transcript.completions([0, 3, 5], [9, 1], {0: 2, 3: 1})
    assert [own.token_ids.tolist() for own in (first, second, third)] == [[5, 6], [5], [9]]
    assert first.finish_reason == second.finish_reason == "stop" and first.logprobs.tolist() == [0.0, -1 / 8]


def test_completions_are_the_same_however_often_some_are_asked_for_on_the_way() -> None:
    once, often = Transcript(), Transcript()
    for position in range(4):
        for transcript in (once, often):
            sample(transcript, [5, 0, 3, 1], [position] * 4)
            if position == 2:
                transcript.change_weights(7, is_next_drawn=False)
        assert len(often.completions([position % 2 * 5], [], {})[0].token_ids) == position + 1
        assert often.tokens_of(torch.tensor([3]))[0] == TOKENS[3][: position + 1]
    for own, other in zip(*(each.completions([0, 1, 3, 5], [], {5: 2}) for each in (once, often)), strict=True):
        assert own.token_ids.tolist() == other.token_ids.tolist() and own.logprobs.tolist() == other.logprobs.tolist()
        assert own.versions == other.versions == (((0, 2),) if len(own.token_ids) == 2 else ((0, 3), (7, 1)))
