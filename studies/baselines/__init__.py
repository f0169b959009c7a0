"""GSPO against GRPO and the objectives after it, on a real language model: SmolLM2-135M-Instruct, two tasks."""
