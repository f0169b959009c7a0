"""A program in vLLM's place, which starts at once: it samples from a digest of the weights that it was given.

Files beside its model's directory disturb it: while there is one named `hold` it answers no group, and where
there is one named `fail` then, it cannot.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

ASKED = "a group is asked for"  # what it writes to its log


def digest_of(paths: Sequence[str]) -> str:
    """Of the files' content."""
    return hashlib.sha256(b"".join(Path(path).read_bytes() for path in paths)).hexdigest()


def logprob_of(digest: str) -> float:
    """Of every token that is sampled with these weights."""
    return -int(digest[:8], 16) / 2**32


def _number(text: str) -> int:
    return hashlib.sha256(text.encode()).digest()[0]


class SmallServer(ThreadingHTTPServer):
    """Takes vLLM's command line."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.options = {name: value for name, value in pairwise(arguments) if name.startswith("--")}
        self.folder = Path(self.options["--model"]).parent
        self.digest, self.label = "0" * 64, "default"
        super().__init__((self.options["--host"], int(self.options["--port"])), _Handler)

    def about(self) -> Any:
        """What it says of itself."""
        own = self.options
        config: dict[str, dict[str, Any] | None] = {
            "model_config": {
                "dtype": f"torch.{own['--dtype']}",
                "logprobs_mode": own["--logprobs-mode"],
                "max_model_len": int(own["--max-model-len"]),
                "quantization": None,
                "logits_processors": None,
            },
            "cache_config": {"cache_dtype": "auto"},
            "scheduler_config": {"max_num_seqs": int(own["--max-num-seqs"]), "policy": own.get("--scheduling-policy")},
            "parallel_config": {"worker_extension_cls": own["--worker-extension-cls"]},
            "speculative_config": None,
        }
        return {"vllm_config": config, "system_env": {"vllm_version": "small"}}

    def generate(self, body: Any) -> Any:
        """Completions that end at their longest; None where it fails."""
        digest, label, parameters = self.digest, self.label, body["sampling_params"]
        if parameters["n"] > 1:
            print(ASKED, flush=True)
            while (self.folder / "hold").exists():
                time.sleep(0.01)
            if (self.folder / "fail").exists():
                return None
        choices: list[dict[str, Any]] = []
        for number in range(parameters["n"]):
            seed = f"{digest} {parameters['seed']} {number} {body['token_ids']}"
            ids = [3 + _number(f"{seed} {place}") % 7 for place in range(parameters["max_tokens"])]
            scored = [{"token_id": token, "logprob": logprob_of(digest)} for token in ids]
            spans = [{"version": label, "start": 0, "end": len(ids)}]
            choices.append({"index": number, "token_ids": ids, "finish_reason": "length", "weight_versions": spans})
            choices[-1]["logprobs"] = {"content": scored}
        return {"choices": choices}


class _Handler(BaseHTTPRequestHandler):
    server: SmallServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, label = self.path.split("?")[0], {"weight_version": self.server.label}
        self._answer({"/health": {}, "/server_info": self.server.about(), "/weight_info": label}.get(path))

    def do_POST(self) -> None:
        path, server = self.path.split("?")[0], self.server
        body, answer = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), {}
        if path == "/collective_rpc":
            server.digest = digest_of(body["args"][0])
        elif path == "/update_weight_version":
            server.label = body["new_version"]
        elif path == "/inference/v1/generate":
            answer = server.generate(body)
        self._answer(answer)

    def _answer(self, answer: Any) -> None:
        is_known = self.headers["Authorization"] == f"Bearer {os.environ['GSPO_ENGINE_KEY']}"
        text = json.dumps(answer).encode()
        self.send_response(401 if not is_known else 500 if answer is None else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    SmallServer(sys.argv[1:]).serve_forever()
