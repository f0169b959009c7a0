"""The embedded engine in a process of its own, which decodes while the trainer updates; the trainer starts it.

    python -m gspo.rollout.embedded.server '{"model": …, "tokenizer": …, "max_rows": …, "port": …}'

One thread decodes, and does all else that concerns the weights between two tokens; each request has a thread that
waits for it.
"""

import base64
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from queue import SimpleQueue
from typing import Any

import torch
from safetensors import safe_open

from gspo.model.load import load_tokenizer
from gspo.model.parameters import live_tensors
from gspo.model.policy import Policy, load_policy
from gspo.recipe.sections import ModelConfig, RolloutConfig
from gspo.rollout.embedded.decoding import Decoding, Response
from gspo.rollout.embedded.proof import proven_means
from gspo.types import Experts

_SETTLE_SECONDS = 0.02  # the requests of a step's queries come one after the other
_ALIKE = ("settings", "stop_ids", "wants_experts")  # of what is decoded side by side


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """What a request asks for, and its answer."""

    path: str
    body: Any
    answer: Future[Any] = field(default_factory=Future)


class Decoder:
    """Answers calls with a policy of its own: groups are decoded many at a time, in the order in which they come."""

    def __init__(self, policy: Policy, *, max_rows: int) -> None:
        self._policy, self._max_rows = policy, max_rows
        self._label = ""  # of the weights
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._groups: list[Call] = []  # that wait to be sampled
        self._weights: list[Call] = []  # that wait for the end of the responses under way
        self._under_way: tuple[Decoding, list[str]] | None = None  # and the labels of the weights that it has had

    def ask(self, path: str, body: Any) -> Any:
        """The answer, for a thread that waits for it."""
        call = Call(path=path, body=body)
        self._calls.put(call)
        return call.answer.result()

    def run(self) -> None:
        """Decode, without end."""
        while True:
            self._take(self._calls.get())
            while self._groups:
                time.sleep(_SETTLE_SECONDS)
                self._look()
                self._sample(self._next_groups())

    def _look(self) -> None:
        while not self._calls.empty():
            self._take(self._calls.get())

    def _take(self, call: Call) -> None:
        """Do at once what cannot wait: weights, and the few tokens that prove them."""
        try:
            if call.path == "/sample" and not call.body["goes_first"]:
                self._groups.append(call)
            elif call.path == "/sample":
                self._sample([call], is_first=True)
            elif call.path == "/weights" and self._under_way is not None and call.body["at_publish"] == "wait":
                self._weights.append(call)
            elif call.path == "/weights":
                self._replace_weights(call)
            else:
                dtype = str(self._policy.dtype).removeprefix("torch.")
                call.answer.set_result({"version": torch.__version__, "dtype": dtype, "weight_version": self._label})
        except Exception as error:
            call.answer.set_exception(error)

    def _replace_weights(self, call: Call) -> None:
        tensors: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in live_tensors(self._policy.model):
            tensors.setdefault(id(tensor), (name, tensor))  # of tied ones the first
        missing, self._label = dict(tensors.values()), ""  # half replaced, they are nobody's
        try:
            with torch.no_grad():
                for path in call.body["paths"]:
                    with safe_open(path, framework="pt") as file:
                        for name in file.keys():  # noqa: SIM118 - it is no mapping
                            missing.pop(name).copy_(file.get_tensor(name))
            if missing:
                raise ValueError(f"{len(missing)} tensors are not given: {[*missing][:3]}")
            self._label = call.body["label"]
        finally:  # what is drawn with half of them must not pass for the old ones'
            if self._under_way is not None:
                decoding, labels = self._under_way
                decoding.change_weights(keep_cache=call.body["at_publish"] == "keep")
                labels.append(self._label)
        call.answer.set_result({})

    def _next_groups(self) -> list[Call]:
        """The first that wait and are sampled alike, as many as are decoded side by side."""
        first = self._groups[0].body
        alike = [call for call in self._groups if all(call.body[name] == first[name] for name in _ALIKE)]
        taken = alike[: max(1, self._max_rows // len(first["keys"]))]
        self._groups = [call for call in self._groups if call not in taken]
        return taken

    def _sample(self, calls: Sequence[Call], *, is_first: bool = False) -> None:
        """Decode these groups side by side; others' calls are looked at after each token, but not within a proof."""
        try:
            self._decode(calls, is_first=is_first)
        except Exception as error:  # such as too little memory
            traceback.print_exc()
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)
        if not is_first:
            self._under_way, waiting, self._weights = None, self._weights, []
            for call in waiting:
                self._take(call)

    def _decode(self, calls: Sequence[Call], *, is_first: bool) -> None:
        """Each call is answered as the last response of its group has ended."""
        bodies = [call.body for call in calls]
        policy, labels = replace(self._policy, stop_ids=tuple(bodies[0]["stop_ids"])), [self._label]

        def put(number: int, responses: Sequence[Response]) -> None:
            calls[number].answer.set_result([_as_json(response, labels) for response in responses])

        # Not validated again: an evaluation's temperature may be 0.
        settings = RolloutConfig.model_construct(**bodies[0]["settings"])
        decoding = Decoding(
            policy=policy,
            prompts=[body["prompt_ids"] for body in bodies],
            settings=settings,
            keys=[*chain.from_iterable(body["keys"] for body in bodies)],
            record_experts=bodies[0]["wants_experts"],
            check_stop=(lambda: None) if is_first else self._look,
            put=put,
            means=proven_means(policy),
        )
        if not is_first:
            self._under_way = (decoding, labels)
        with torch.inference_mode():
            decoding.generate()


def _as_json(response: Response, labels: Sequence[str]) -> dict[str, Any]:
    full = response.full_logprobs
    return {
        "token_ids": response.token_ids.tolist(),
        "logprobs": response.logprobs.tolist(),
        "full_logprobs": None if full is None else full.tolist(),
        "finish_reason": response.finish_reason,
        "labels": [(label, count) for label, count in zip(labels, response.counts, strict=True) if count],
        "experts": None if response.experts is None else _as_text(response.experts),
    }


def _as_text(experts: Experts) -> str:
    """All tokens' but the last one's, [N, L, K], as the bytes of integers of four bytes."""
    both = torch.cat([experts.prefix, experts.row]).to(torch.int32)
    return base64.b64encode(both.numpy().tobytes()).decode()


class _Requests(BaseHTTPRequestHandler):
    """A request, in a thread of its own."""

    protocol_version = "HTTP/1.1"
    decoder: Decoder
    key: str

    def do_POST(self) -> None:  # the names are http.server's
        with suppress(ConnectionError):  # the trainer does not wait for it any more
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = self._answer(text)
            content = answer.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    do_GET = do_POST  # noqa: N815

    def _answer(self, text: bytes) -> tuple[int, str]:
        if not compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {self.key}".encode()):
            return 401, "the key is another"
        if self.path == "/health":
            return 200, ""
        try:
            return 200, json.dumps(self.decoder.ask(self.path, json.loads(text or "null")))
        except Exception as error:
            return 500, f"{type(error).__name__}: {error}"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # a step's requests come at once


def main() -> None:
    """Load the model that the command line describes, listen, and decode."""
    settings = json.loads(sys.argv[1])
    model = ModelConfig.model_validate(settings["model"])
    tokenizer = load_tokenizer(settings["tokenizer"], trust_remote_code=model.trust_remote_code)
    policy = load_policy(model, tokenizer, seed=0, stop_tokens=settings["stop_tokens"])
    proven_means(policy)  # proven with these weights: the first that it gets are scrambled
    _Requests.decoder, _Requests.key = Decoder(policy, max_rows=settings["max_rows"]), os.environ["GSPO_ENGINE_KEY"]
    listener = _Listener((settings["address"], settings["port"]), _Requests)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    _Requests.decoder.run()


if __name__ == "__main__":
    main()
