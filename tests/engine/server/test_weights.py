"""The policy's weights on their way: under a saved model's names, layer by layer, and gone once they are there."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gspo.engine.server.weights import weight_files
from gspo.errors import DivergedError
from gspo.model.policy import Policy
from gspo.model.weights import weights_by_layer

NewPolicy = Callable[..., Policy]
FAMILIES = ["qwen3", "llama", "qwen3_moe", "olmoe", "qwen2_moe", "gemma2", "gpt2", "gpt_oss"]
MEMORY = "/memfd:gspo-weights"


def saved_tensors(policy: Policy, directory: Path) -> dict[str, torch.Tensor]:
    policy.model.save_pretrained(directory)
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def read(paths: list[str]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            new = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        assert not found.keys() & new.keys()
        found |= new
    return found


def open_memories() -> int:
    links = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(str(link).startswith(MEMORY) for link in links)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_tensors_are_those_of_a_saved_model(
    family: str, tied: bool, dtype: str, new_policy: NewPolicy, tmp_path: Path
) -> None:
    policy = new_policy(family, dtype, tie_word_embeddings=tied)
    expected = saved_tensors(policy, tmp_path / "saved")
    with weight_files(policy) as memory, weight_files(policy, str(tmp_path / "files")) as files:
        for found in (read(memory), read(files)):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert all(found[name].dtype == expected[name].dtype for name in expected)


def test_a_layer_has_a_file_and_none_is_left(new_policy: NewPolicy, tmp_path: Path) -> None:
    policy = new_policy(num_hidden_layers=3, tie_word_embeddings=True)
    assert open_memories() == 0
    with weight_files(policy) as memory, weight_files(policy, str(tmp_path)) as files:
        assert len(memory) == len(files) == 5  # the embedding, the layers, the last norm
        assert open_memories() == len(list(tmp_path.rglob("*.safetensors"))) == 5
    assert open_memories() == 0 and list(tmp_path.iterdir()) == []
    assert not any(Path(path).exists() for path in memory)


def test_nothing_is_left_where_it_fails_in_between(new_policy: NewPolicy, tmp_path: Path) -> None:
    policy = new_policy()
    with pytest.raises(ValueError, match="by the server"), weight_files(policy), weight_files(policy, str(tmp_path)):
        raise ValueError("by the server")
    with torch.no_grad():
        list(policy.model.parameters())[-1].view(-1)[0] = torch.inf
    with pytest.raises(DivergedError), weight_files(policy):
        pass
    with pytest.raises(DivergedError), weight_files(policy, str(tmp_path)):
        pass
    assert open_memories() == 0 and list(tmp_path.iterdir()) == []


def test_scrambled_weights_have_the_same_shapes_and_no_tensor_of_the_policy(new_policy: NewPolicy) -> None:
    policy = new_policy("qwen3_moe")
    own = {name: tensor for layer in weights_by_layer(policy) for name, tensor in layer.items()}
    scrambled = {name: tensor for layer in weights_by_layer(policy, scrambled=True) for name, tensor in layer.items()}
    assert {name: (t.shape, t.dtype) for name, t in own.items()} == {
        name: (t.shape, t.dtype) for name, t in scrambled.items()
    }
    assert not any(torch.equal(own[name], scrambled[name]) for name in own)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_trainers_memory_grows_by_no_more_than_a_layer(family: str, new_policy: NewPolicy) -> None:
    width = {"qwen3": {"intermediate_size": 8192}, "qwen3_moe": {"moe_intermediate_size": 2048}}[family]
    policy = new_policy(family, hidden_size=256, num_hidden_layers=8, **width)
    layers = [sum(tensor.nbytes for tensor in layer.values()) for layer in weights_by_layer(policy)]
    assert max(layers) > 20e6 and sum(layers) > 7 * max(layers)
    before = reset_peak()
    with weight_files(policy) as paths:
        grown = peak() - before
    assert len(paths) == len(layers) and grown < max(layers) + 16e6


def reset_peak() -> float:
    """Bytes that this process holds now; `peak` is from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> float:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return 1024.0 * int(found[1])
