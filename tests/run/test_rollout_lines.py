"""What is written of each rollout, and of each of its tokens."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.report.steps import Trained, after_update, batch, report, trained
from tests.samples import changed
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gspo.report.samples import cut_into_tokens, cut_prompt
from gspo.run.recorder import rollout_lines
from gspo.types import Batch, Failure, Query, Score

WORDS = {4: "", 5: "ab", 6: " c", 7: "€"}
BACKEND = Tokenizer(models.WordLevel({"?": 1, **{word: token for token, word in WORDS.items()}}))
BACKEND.decoder = decoders.Fuse()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=BACKEND)


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def step() -> Batch:
    """Two groups of two responses, each of its own tokens; the last one failed."""
    failed = Score(reward=None, parts={"f": None}, failure=Failure(kind="raised", message="f: no"))
    scores = [*(Score(reward=reward, parts={"f": reward}) for reward in (1.0, 0.0, 0.5)), failed]
    made = batch([[1, 3], [2, 2]], [[0.0] * 2] * 2, scores=scores, advantage=(0.7, -0.7, 0.0, 0.0))
    ids = [[4], [5, 6, 4], [7, 5], [6, 6]]
    queries = [
        Query(id=f"q:{number}", prompt="raw", text=f"rendered {number}", prompt_ids=(1,), columns={})
        for number in (0, 0, 1, 1)
    ]
    tokens, texts = list(map(torch.tensor, ids)), list(map(decode, ids))
    return changed(made, query=queries, token_ids=tokens, text=texts, versions=[((9, len(own)),) for own in ids])


def item(index: int, log_ratios: Sequence[float], **given: Any) -> Trained:
    made = trained(index, mini_batch=2, tokens=len(log_ratios), clipped=given.pop("clipped", 0), ratio=1.0, **given)
    return Trained(index, replace(made.stats, log_ratios=torch.tensor(log_ratios)))


def lines(items: Sequence[Trained] = (), made: Batch | None = None) -> list[dict[str, Any]]:
    after = after_update(made or step(), report(*items))
    return [dict(line) for line in rollout_lines(after.samples, TOKENIZER)]


def with_token_advantages(advantages: Sequence[float]) -> Batch:
    return changed(step(), token_advantages=[None, torch.tensor(advantages), None, None])


def test_there_is_a_line_a_rollout_in_the_order_of_the_batch() -> None:
    found = lines()
    assert [line["query"] for line in found] == ["q:0", "q:0", "q:1", "q:1"]
    assert [line["prompt"] for line in found] == ["rendered 0"] * 2 + ["rendered 1"] * 2  # what the model reads
    assert [line["completion"] for line in found] == ["", "ab c", "€ab", " c c"]
    assert [line["tokens"] for line in found] == [1, 3, 2, 2]
    assert [line["advantage"] for line in found] == [0.7, -0.7, 0.0, 0.0]
    assert [line["reward"] for line in found] == [1.0, 0.0, 0.5, None]
    assert [line["rewards"] for line in found] == [{"f": 1.0}, {"f": 0.0}, {"f": 0.5}, {"f": None}]
    assert [line["failure"] for line in found] == [None, None, None, "f: no"]
    assert {(line["finish_reason"], line["policy_version"]) for line in found} == {("stop", 9)}


@pytest.mark.parametrize(
    ("prompt", "text", "words"),
    [
        ("3 + 4?", "system 3 + 4?<|im_end|>", "3 + 4?"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "[a]b", "a"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": " why\nnot "}], "s[why\nnot]go", "why\nnot"),
        ([{"role": "user", "content": "be"}, *[{"role": "user", "content": "b"}] * 2], "be[b][b]", "b"),
        ("as it is ", "as it is ", None),
        ([{"role": "system", "content": "s"}], "s", None),
        ([{"role": "user", "content": None}], "None", None),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "[a]", None),
        ("a template has changed it", "A TEMPLATE", None),
    ],
    ids=str,
)
def test_a_line_says_where_in_the_prompt_the_users_last_words_are(prompt: Any, text: str, words: str | None) -> None:
    made, query = step(), Query(id="q", prompt=prompt, text=text, prompt_ids=(1,), columns={})
    line = lines(made=changed(made, query=[query] * 4))[0]
    before, found, behind = cut_prompt(line)
    assert before + found + behind == text
    assert found == (words or "") and ("prompt_words" in line) == bool(words)
    assert words is None or text.rfind(words) == len(before)


def test_what_the_update_saw_is_with_its_own_rollout_whatever_its_order() -> None:
    found = lines([item(1, [0.1, 0.2, 0.3], clipped=1), item(0, [-0.5], clipped=1)])
    assert [line["clipped"] for line in found] == [1, pytest.approx(1 / 3), None, None]
    assert [line["mini_batch"] for line in found] == [2, 2, None, None]
    assert [line["sequence_ratio"] for line in found] == [1.0, 1.0, None, None]
    assert [line["token_log_ratios"] for line in found] == [[-0.5], [0.1, 0.2, 0.3], None, None]


def test_the_numbers_of_a_token_have_four_significant_digits() -> None:
    torch.manual_seed(0)
    ratios, advantages = torch.randn(200) * 10.0 ** torch.randint(-9, 1, (200,)), torch.randn(200)
    ratios[:3] = torch.tensor([0.0, -0.0, 12.34567])
    made = batch([[200]], [[1.0]], advantage=(0.3,), token_advantages={0: advantages})
    made = after_update(made, report(item(0, ratios.tolist())))
    (line,) = rollout_lines(made.samples, TOKENIZER)
    for name, exact in (("token_log_ratios", ratios), ("token_advantages", advantages)):
        assert line[name] == [float(f"{number:.4g}") for number in exact.tolist()]
        assert json.loads(json.dumps(line[name])) == line[name]


def test_only_where_tokens_have_their_own_are_there_token_advantages() -> None:
    made = with_token_advantages([1.0, 0.5, -2.0])
    assert [line["token_advantages"] for line in lines(made=made)] == [None, [1.0, 0.5, -2.0], None, None]


def test_a_number_that_is_not_finite_is_null_and_the_others_are_there() -> None:
    assert lines([item(1, [math.inf, math.nan, -math.inf])])[1]["token_log_ratios"] == [None, None, None]
    made = with_token_advantages([1.23456, math.nan, -2.0])
    line = lines([item(1, [math.inf, -0.5, 0.0])], made)[1]
    assert (line["token_log_ratios"], line["token_advantages"]) == ([None, -0.5, 0.0], [1.235, None, -2.0])


def test_the_columns_are_those_that_can_be_read_beside_a_response() -> None:
    kept = {"answer": "5", "level": 3, "share": 0.5, "hard": True, "source": None, "long": "x" * 1000}
    columns = {**kept, "longer": "x" * 1001, "list": [1], "tree": {"a": 1}, "bytes": b"x", "metadata": object()}
    made = step()
    first, second = (replace(group.query, columns=own) for group, own in zip(made.groups, (columns, {}), strict=True))
    found = [line["columns"] for line in lines(made=changed(made, query=[first, first, second, second]))]
    assert found == [kept, kept, {}, {}] and list(found[0]) == list(kept)


def test_the_characters_of_the_tokens_add_up_to_the_completion_trained_or_not() -> None:
    found = lines([item(0, [0.0])])
    assert [line["token_characters"] for line in found] == [[0], [2, 2, 0], [1, 2], [2, 2]]
    for line in found:
        assert sum(line["token_characters"]) == len(line["completion"])
        assert len(line["token_characters"]) == line["tokens"]
    assert cut_into_tokens(found[1]) == ["ab", " c", ""]


def test_a_text_that_is_not_its_tokens_has_no_characters_but_its_ratios() -> None:
    made = step()
    other = changed(made, text=["", "something else", "", ""])
    line = lines([item(1, [0.0, 0.1, 0.2])], other)[1]
    assert line["token_characters"] is None and line["token_log_ratios"] == [0.0, 0.1, 0.2]


def test_without_the_tokens_texts_nothing_is_written_of_tokens() -> None:
    for line in rollout_lines(after_update(step(), report(item(0, [0.1]))).samples):
        assert [name for name in line if name.startswith("token_")] == []


def test_a_token_that_the_policy_did_not_write_has_no_number() -> None:
    made, mask = step(), torch.tensor([True, False, True])
    sample = replace(made.samples[1], loss_mask=mask, sampler_logprobs=torch.zeros(2))
    line = lines([item(1, [0.1, 0.2])], made.with_changed({made.samples[1]: sample}))[1]
    assert line["token_log_ratios"] == [0.1, None, 0.2] and len(line["token_characters"]) == 3
