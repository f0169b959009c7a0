"""Memory, bytes and time of an update of Qwen3-30B-A3B on 8, 64 and 512 GPUs: computed by a cost model, not measured.

    python -m benchmarks.cluster

What is assumed is printed above the table.
"""

import argparse
import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Model:
    """The numbers of a mixture of experts that its cost depends on: those of Qwen3-30B-A3B's config.json."""

    layers: int = 48
    hidden: int = 2048
    attention: int = 32 * 128  # query heads x head dimension
    key_value: int = 4 * 128
    experts: int = 128
    active: int = 8
    width: int = 768  # of an expert
    vocabulary: int = 151_936

    def layer(self, experts: int) -> int:
        """The weights of a layer with so many experts."""
        attention = self.hidden * (2 * self.attention + 2 * self.key_value)
        return attention + self.hidden * self.experts + experts * 3 * self.hidden * self.width

    @property
    def outside(self) -> int:
        """The weights of the embedding and the head, which is a matrix of its own."""
        return 2 * self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights but the norms."""
        return self.layers * self.layer(self.experts) + self.outside

    def flops(self, tokens: int, length: int) -> float:
        """Forward and backward over sequences of that length, with each layer's forward pass made again."""
        maps = 2 * tokens * self.layers * self.layer(self.active)
        pairs = 4 * tokens * self.layers * self.attention * (length / 2)
        head = 2 * tokens * self.vocabulary * self.hidden
        return 4 * (maps + pairs) + 3 * head


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """The step, and the hardware."""

    responses: int = 512
    length: int = 4096  # tokens of a response
    mini_batches: int = 4
    micro_batch: int = 16_384  # tokens of a pass
    flops: float = 0.4 * 989e12  # a second and GPU: 40 % of an H100's peak in bfloat16
    within: float = 300e9  # bytes a second and GPU, between the GPUs of a host of 8
    between: float = 40e9  # between hosts


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an update takes on each of so many GPUs."""

    tokens: int  # of a rank's mini-batch
    passes: int  # of them
    sent: float  # bytes
    computes: float  # seconds
    talks: float


def update(model: Model, assumed: Assumed, number: int) -> Update:
    """The time that a step's update computes and talks."""
    tokens = assumed.responses * assumed.length // assumed.mini_batches // number
    passes = max(1, math.ceil(tokens / assumed.micro_batch))
    # Gathered twice in bfloat16, and the gradients scattered once in float32.
    sent = assumed.mini_batches * passes * (2 + 2 + 4) * model.parameters * (number - 1) / number
    return Update(
        tokens=tokens,
        passes=passes,
        sent=sent,
        computes=assumed.mini_batches * model.flops(tokens, assumed.length) / assumed.flops,
        talks=sent / (assumed.within if number <= 8 else assumed.between),
    )


def row(model: Model, assumed: Assumed, number: int) -> str:
    """The table's row of so many GPUs."""
    own = update(model, assumed, number)
    held, computes, talks = min(own.tokens, assumed.micro_batch), own.computes, own.talks
    unit = max(model.layer(model.experts), model.outside)
    # Masters, gradients and two moments in float32; a unit in bfloat16 and the next; its gradient in both.
    state, units = 16 * model.parameters / number, 2 * 2 * unit + (2 + 4) * unit
    activations = held * model.hidden * 2 * model.layers + held * 2 * (
        4 * model.attention + model.active * 3 * model.width
    )
    memory = f"{state / 2**30:.1f} | {(state + units + activations) / 2**30:.1f}"
    times = f"{computes:.1f} | {talks:.1f} | {max(computes, talks):.1f}–{computes + talks:.1f}"
    return f"| {number} | {memory} | {own.passes} | {own.sent / 2**30:.0f} | {times} |"


def main() -> None:
    """Print what is assumed, and the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    model, assumed = Model(), Assumed()
    print(f"{model.parameters / 1e9:.1f}e9 parameters, sharding: full, bfloat16, gradient checkpointing; {assumed}\n")
    head = "GPUs | state, GiB a rank | with a unit and activations | passes a mini-batch | sent by a rank, GiB a step"
    print(f"| {head} | computing, s | talking, s | a step's update, s |\n|---|---|---|---|---|---|---|---|")
    for number in (8, 64, 512):
        print(row(model, assumed, number))


if __name__ == "__main__":
    main()
