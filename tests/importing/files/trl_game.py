# A program that trains on a game by TRL, with arguments of its own.
import argparse

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


class Game:
    def reset(self, **row):
        self.left = 3

    def move(self, number: int) -> str:
        """Take from the heap.

        Args:
            number: How many to take.
        """
        self.left -= number
        return f"{self.left} are left"

    def get_reward(self):
        return float(self.left == 0)


def reward_of(completions, **columns):
    return [1.0 for _ in completions]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-4B")
    args = parser.parse_args()
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Play."}]} for _ in range(100)])
    GRPOTrainer(
        model=args.model,
        train_dataset=rows,
        reward_funcs=reward_of,
        environment_factory=Game,
        args=GRPOConfig(
            chat_template_kwargs={"enable_thinking": False},
            max_completion_length=2048,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=1,
            report_to="none",
        ),
    ).train()


if __name__ == "__main__":
    main()
