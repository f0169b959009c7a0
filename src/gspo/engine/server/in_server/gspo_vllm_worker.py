"""What gspo adds to a vLLM server, and the only file of gspo that is imported there (vLLM 0.32, V1 engine).

`--worker-extension-cls gspo_vllm_worker.Worker` gives every worker the method `load_policy`, and `--middleware
gspo_vllm_worker.RequireKey` guards all paths: vLLM's own key leaves those open that pause it or change its weights.
"""

import hmac
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo_supervise import end_with_supervisor

KEY = "GSPO_ENGINE_KEY"  # the environment variable

threading.Thread(target=end_with_supervisor, daemon=True).start()


class Worker:
    """A class that is mixed into vLLM's worker."""

    def load_policy(self, paths: list[str]) -> int:
        """Replace all weights by those of safetensors files; how many tensors they have.

        ValueError where they are not those of this model, before anything is touched: vLLM itself keeps the old
        values of a tensor that is missing, without an error.
        """
        entries = {name: entry for path in paths for name, entry in _header(path).items()}
        expected = getattr(self, "_gspo_entries", entries)
        if differing := sorted(n for n in entries.keys() | expected.keys() if entries.get(n) != expected.get(n)):
            raise ValueError(f"{len(differing)} tensors differ in name or shape from before: {differing[:3]}")
        _load(self, paths)
        self._gspo_entries = entries
        return len(entries)


def _header(path: str) -> dict[str, list[int]]:
    """Name -> shape of the tensors of a safetensors file."""
    with Path(path).open("rb") as file:
        entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: entry["shape"] for name, entry in entries.items() if name != "__metadata__"}


def _tensors(paths: list[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)


def _load(worker: Any, paths: list[str]) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.platforms import current_platform

    model, is_cpu = worker.model_runner.get_model(), current_platform.is_cpu()
    with torch.inference_mode(), set_current_vllm_config(worker.vllm_config):
        if is_cpu:
            _pack_experts_again()
        initialize_layerwise_reload(model)
        model.load_weights(_tensors(paths))
        finalize_layerwise_reload(model, worker.model_config)
        for layer in model.modules() if is_cpu else ():
            # A head or an embedding keeps its weight beside a packed copy, which vLLM leaves as it was.
            if hasattr(layer, "cpu_linear") and getattr(layer, "weight", None) is not None and layer.weight.numel():
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _pack_experts_again() -> None:
    """Pack a mixture's experts after every load: on a CPU vLLM does so after the first, and keeps those."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    set_up = Method._setup_kernel
    if getattr(set_up, "packs_again", False):
        return

    def set_up_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_first = self.moe_kernel is None
        set_up(self, layer, w13, w2)
        if not is_first:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    set_up_and_pack.packs_again = True  # type: ignore[attr-defined]
    Method._setup_kernel = set_up_and_pack


class RequireKey:
    """A middleware that answers 401 to whoever does not name the key, whatever the path but /health."""

    def __init__(self, app: Any) -> None:
        self._app, self._wanted = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or answer it here."""
        if scope["type"] != "lifespan" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b'{"error": "wrong or missing key"}'})
                return
        await self._app(scope, receive, send)
