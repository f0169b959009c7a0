"""What besides the recipe decides a run's last bits: all of it is noted, and every difference is said."""

import dataclasses
import json
import platform
from collections.abc import Callable, Mapping

import torch

from gspo.learner.trainer import Trainer
from gspo.model.policy import Policy
from gspo.reward.functions import Reward, load_functions
from gspo.run.resume import environment, environment_changes

NewPolicy = Callable[..., Policy]
ENGINE = {"engine": "embedded"}


def trainer_of(policy: Policy) -> Trainer:
    trainer = Trainer()
    trainer.policy = policy
    return trainer


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [str(change) for change in environment_changes(then, now)]


def test_libraries_processor_and_threads_are_noted_as_text(new_policy: NewPolicy) -> None:
    found = environment(trainer_of(new_policy()), (), ENGINE, {})
    assert {"python", "gspo", "torch", "transformers", "safetensors", "numpy", "device", "threads"} <= found.keys()
    assert found["python"] == platform.python_version()
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["device"].startswith("cpu: ") and len(found["device"]) > 5
    assert json.loads(json.dumps(found)) == found
    assert differences(found, environment(trainer_of(new_policy(seed=1)), (), ENGINE, {})) == []


def test_what_python_gives_with_a_reward_is_part_of_its_code(new_policy: NewPolicy) -> None:
    trainer = trainer_of(new_policy())
    then, now = (
        environment(trainer, load_functions((), given), ENGINE, {})
        for given in (ENGINE.get, Reward(ENGINE.get, weight=0.5))
    )
    (line,) = differences(then, now)
    assert line.startswith("code of reward get was ") and line.endswith(", weight 0.5")


def test_another_number_of_threads_and_another_way_through_the_model_are_differences(new_policy: NewPolicy) -> None:
    trainer, threads = trainer_of(new_policy()), torch.get_num_threads()
    then = environment(trainer, (), ENGINE, {})
    torch.set_num_threads(threads + 1)
    try:
        now = environment(trainer, (), ENGINE, {})
        assert differences(then, now) == [f"threads was {threads}, is {threads + 1}"]
    finally:
        torch.set_num_threads(threads)
    padded = trainer_of(dataclasses.replace(trainer.policy, supports_packing=False))
    assert differences(then, environment(padded, (), ENGINE, {})) == ["packed attention was True, is False"]


def test_whatever_differs_comes_or_goes_is_said(new_policy: NewPolicy) -> None:
    now = environment(trainer_of(new_policy()), (), ENGINE, {})
    for name in (*now, "a library that is new"):
        then = {**now, name: "other"}
        assert differences(then, now) == [f"{name} was other, is {now.get(name)}"]
        assert differences(now, then) == [f"{name} was {now.get(name)}, is other"]
