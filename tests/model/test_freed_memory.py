"""What passes free, the next ones get: the kernel need not clear new pages for it."""

import subprocess
import sys
from typing import Any

import pytest
from tests.needs import needs

_PAGES = """
import resource, sys
import torch
from gspo.model.freed_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
embedding = torch.nn.Embedding(50_000, 200)  # 40 MB, and so has its gradient
for step in range(16):
    if step == 6:  # by now the heap has found its size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    (embedding(torch.arange(64)) @ embedding.weight.T).logsumexp(-1).sum().backward()
    embedding.weight.grad = None
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@needs("glibc")  # other C libraries keep what they like
def test_passes_need_few_new_pages_for_gradients_that_earlier_ones_had() -> None:
    pages = []
    for how in ("given back", "kept"):
        command = [sys.executable, "-c", _PAGES, how]
        pages.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert pages[0] > 300  # of 4 KiB, or of 2 MiB where the kernel gives such
    assert pages[1] < pages[0] / 5


def test_every_policy_on_a_cpu_has_it(new_policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("gspo.model.policy.keep_freed_memory", lambda: calls.append("kept"))
    new_policy("llama")
    assert calls == ["kept"]
