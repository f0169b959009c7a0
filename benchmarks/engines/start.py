"""A vLLM server with a policy's weights, started as a run starts it."""

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gspo.engine.make import make_engine
from gspo.engine.server.engine import ServerEngine
from gspo.model.policy import Policy
from gspo.recipe.load import make_recipe
from gspo.recipe.schema import Recipe

PROMPT_TOKENS = 24
MOST_TOKENS = 256  # of a response, in all that is measured


@contextmanager
def vllm_engine(policy: Policy, python: str) -> Iterator[ServerEngine]:
    """An engine that is ready to sample; its server ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_engine(
            _recipe(python), policy, directory=Path(folder), longest_sequence=PROMPT_TOKENS + MOST_TOKENS
        )
        with closing(made) as engine:
            assert isinstance(engine, ServerEngine)
            engine.publish(0)
            yield engine


def _recipe(python: str) -> Recipe:
    """Of which only the engine counts: the model is given."""
    rollout = {"engine": "vllm", "vllm": {"python": python}, "max_new_tokens": MOST_TOKENS}
    return make_recipe({"name": "engines", "steps": 1, "model": {"path": "given"}, "rollout": rollout})
