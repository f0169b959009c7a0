"""GSPO against GRPO, with and without Routing Replay: the paper's figures 1 to 3, at a small scale with seeds."""
