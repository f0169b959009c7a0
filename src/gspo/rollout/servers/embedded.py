"""The embedded engine as a server of its own (gspo.rollout.embedded.server): its command line, requests and answers."""

import base64
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspo.model.routing import Routing
from gspo.recipe.sections import AtPublish, ModelConfig, ServerConfig
from gspo.rollout.servers.api import Asked, BadAnswerError, Generated, Request


class EmbeddedApi:
    """A process that decodes with a copy of the policy's weights, by the same code as the trainer's own."""

    name = "embedded"
    about_path = label_path = "/about"

    def __init__(
        self,
        settings: ServerConfig,
        *,
        max_rows: int,
        model: ModelConfig,
        stop_tokens: Sequence[str],
        routing: Routing | None,
        at_publish: AtPublish,
    ) -> None:
        self._max_rows, self._model, self._routing, self._at_publish = max_rows, model, routing, at_publish
        if settings.devices:  # a process sees its own only, and numbers them anew
            self._model = model.model_copy(update={"device": model.device.split(":")[0]})
        self._stop_tokens = list(stop_tokens)
        self._seconds = settings.request_seconds if at_publish == "wait" else None

    def command(self, *, model: Path, address: str, port: int, max_length: int, dtype: str, kind: str) -> list[str]:
        """What starts a process with the recipe's model; its weights are replaced before anything is sampled."""
        settings = self._model.model_copy(update={"dtype": dtype}).model_dump(mode="json")
        about: dict[str, Any] = {
            "model": settings,
            "stop_tokens": self._stop_tokens,
            "tokenizer": str(model),
            "max_rows": self._max_rows,
            "address": address,
            "port": port,
        }
        return [sys.executable, "-m", "gspo.rollout.embedded.server", json.dumps(about)]

    def environment(self, key: str) -> Mapping[str, str]:
        """The key."""
        return {"GSPO_ENGINE_KEY": key}

    def check(self, about: Any, *, max_length: int) -> Mapping[str, str]:
        """The version and the dtype."""
        return {"engine version": about["version"], "engine dtype": about["dtype"]}

    def publish(self, paths: Sequence[str], label: str) -> list[Request]:
        """Between two tokens, or once the responses under way have ended."""
        body = {"paths": list(paths), "label": label, "at_publish": self._at_publish}
        return [Request(path="/weights", body=body, seconds=self._seconds)]

    def sample(self, asked: Asked, label: str) -> Request:
        """One request for the group, with each response's own random numbers."""
        body = {
            "prompt_ids": list(asked.prompt_ids),
            "keys": list(asked.keys),
            "stop_ids": list(asked.stop_ids),
            "settings": asked.settings.model_dump(mode="json"),
            "wants_experts": asked.wants_experts,
            "goes_first": asked.goes_first,
        }
        return Request(path="/sample", body=body)

    def read(self, answer: Any, asked: Asked) -> list[Generated]:
        """The responses in their order; BadAnswerError where their numbers are none."""
        if not all(math.isfinite(number) for sample in answer for number in sample["logprobs"]):
            raise BadAnswerError("a log-likelihood is not finite: the weights may not be")
        return [
            Generated(
                token_ids=sample["token_ids"],
                logprobs=sample["logprobs"],
                full_logprobs=sample["full_logprobs"],
                finish_reason=sample["finish_reason"],
                labels=[(label, count) for label, count in sample["labels"]],
                experts=None if sample["experts"] is None else self._experts(sample["experts"]),
            )
            for sample in answer
        ]

    def _experts(self, text: str) -> np.ndarray:
        assert self._routing is not None
        flat = np.frombuffer(base64.b64decode(text), dtype="<i4")
        return flat.reshape(-1, self._routing.num_layers, self._routing.top_k)
