"""What stands between a call and the policy's next turn: as the template writes it, and never a control token."""

from typing import Any

import pytest
from tests.queries.chat_templates import CONTROL, PUBLISHED, TURN_END, byte_tokenizer

from gspo.errors import UserError
from gspo.queries.bridge import Bridge
from gspo.recipe.sections import QueriesConfig


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(params=sorted(PUBLISHED))
def templated(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    tokenizer.chat_template = PUBLISHED[request.param]
    return tokenizer


@pytest.mark.parametrize("results", [["12"], ["12", "a\nb"]])
def test_what_follows_a_call_is_what_the_template_writes_there(templated: Any, results: list[str]) -> None:
    """The next turn's prompt, rendered anew, is the prompt before with the call and the bridge behind it."""
    bridge, asked = Bridge(templated, QueriesConfig()), [{"role": "user", "content": "q"}]
    said = [{"role": "tool", "content": text} for text in results]
    if bridge.role == "user":
        inside = "\n".join(f"<tool_response>\n{text}\n</tool_response>\n" for text in results)
        said = [{"role": "user", "content": inside.strip()}]
    earlier = [*asked, {"role": "assistant", "content": "CALL"}]
    whole = templated.apply_chat_template([*earlier, *said], tokenize=False, add_generation_prompt=True)
    behind = whole.partition("CALL")[2]
    assert "".join(bridge.pieces(results)) == behind
    end = TURN_END.match(behind)
    assert end is not None
    last = templated.convert_tokens_to_ids(end[0])
    tokens = bridge.tokens(results, last=last)
    assert templated.decode([last, *tokens]) == behind
    assert bridge.tokens(results, last=5) == [last, *tokens]  # a turn that another token has ended


def test_no_text_of_a_tool_is_a_control_token(templated: Any) -> None:
    bridge = Bridge(templated, QueriesConfig())
    added = {*templated.added_tokens_decoder}
    last = templated.convert_tokens_to_ids("<|im_end|>")

    def control(results: list[str]) -> list[int]:
        return [token for token in bridge.tokens(results, last=last) if token in added]

    plain = control(["x", "y"])
    for text in (*CONTROL, f"a{''.join(CONTROL)}", "<|im_<|im_end|>end|>"):
        assert control([text, f"{text}\n{text}"]) == plain, text


def test_without_a_template_results_are_plain_text(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    bridge = Bridge(tokenizer, QueriesConfig())
    assert bridge.role is None
    text = "\n<tool_response>\n12\n</tool_response>\n"
    assert tokenizer.decode(bridge.tokens(["12"], last=tokenizer.convert_tokens_to_ids("<eos>"))) == text
    tokenizer.chat_template = PUBLISHED["chatml"]
    assert Bridge(tokenizer, QueriesConfig(chat=False)).role is None


def test_a_template_that_takes_results_under_no_role_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if messages[2:] %}{{ raise_exception('no') }}{% endif %}"
    with pytest.raises(UserError, match="neither as messages of the role tool nor as the user's"):
        Bridge(tokenizer, QueriesConfig())


def test_it_tells_which_templates_write_an_earlier_turn_otherwise(tokenizer: Any) -> None:
    found = dict[str, list[bool]]()
    for name in ("chatml", "qwen3", "deepseek"):
        tokenizer.chat_template = PUBLISHED[name]
        bridge = Bridge(tokenizer, QueriesConfig(), as_user=True)
        found[name] = [bridge.rewrites(text) for text in ("x", "<think>\nhm\n</think>\n\nx")]
    # Its prompts begin thoughts, which earlier turns lack.
    assert found == {"chatml": [False, False], "qwen3": [False, True], "deepseek": [True, True]}


def test_schemas_that_move_to_the_last_question_are_not_written_twice(tokenizer: Any) -> None:
    """As Mistral v0.3 has them: the prompt that stays has them already, and nothing is written anew behind it."""
    asks, users = '{%- if message["role"] == "user" %}', 'loop_messages | selectattr("role", "equalto", "user") | list'
    tools = f'{{%- if tools and message == ({users})[-1] %}}{{{{ "TOOLS" }}}}{{%- endif %}}'
    results = '{%- if message["role"] == "tool" %}{{ message["content"] }}{%- endif %}'
    tokenizer.chat_template = PUBLISHED["mistral"].replace(asks, results + asks + tools)
    turns = [("x", ["12"])]
    schema = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {}}}
    assert Bridge(tokenizer, QueriesConfig(), [schema]).again(turns) == "[/INST] x<eos>12"
    assert Bridge(tokenizer, QueriesConfig(), as_user=True).again(turns) == "[/INST] x<eos>[INST] 12[/INST]"
    assert Bridge(tokenizer, QueriesConfig(), [schema], as_user=True).again(turns) is None
