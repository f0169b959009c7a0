"""TRL's conversations with a tool, on a policy of gspo's: what its GRPOTrainer does before the update."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gspo.model.policy import Policy

_CALL = [{"type": "function", "function": {"name": "look", "arguments": {"word": "x"}}}]
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"


def conversations(
    policy: Policy, texts: Sequence[str], *, group_size: int, turns: int, tokens: int, answer: str, packages: str
) -> Callable[[], None]:
    """What plays a group for each text; every turn has so many tokens, and calls a tool.

    `packages` is a directory that has trl, accelerate and datasets. TRL takes no likelihoods while it samples.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.append(packages)
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    def look(word: str) -> str:
        """Look up a word.

        Args:
            word: The word.
        """
        return answer

    vars(grpo_trainer)["parse_response"] = lambda *_, **__: {"role": "assistant", "content": "x", "tool_calls": _CALL}
    tokenizer: Any = policy.tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", "{{ m.content }}" + _CALLS)
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"content": {"content": "text"}},
    }
    prompts = [[{"role": "user", "content": text}] for text in texts]
    options = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "output_dir": "/tmp/trl"}
    trainer = GRPOTrainer(
        model=policy.model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            **options,
            per_device_train_batch_size=len(texts) * group_size,
            num_generations=group_size,
            max_completion_length=4096,
            max_tool_calling_iterations=turns - 1,
        ),
        tools=[look],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    )
    for name, value in (("max_new_tokens", tokens), ("min_new_tokens", tokens), ("eos_token_id", None)):
        setattr(trainer.generation_config, name, value)
    num = len(texts) * group_size
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"look": look}] * num, [{}] * num

    def play() -> None:
        own = [[*prompt] for prompt in prompts for _ in range(group_size)]
        masks = trainer._generate(own)[2]
        assert sum(map(sum, masks)) == num * turns * tokens

    return play
