"""The reward of verl_gsm8k.yaml. It is called as verl calls it, so the function of a verl run stays as it is."""

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 where the last number behind #### is the ground truth."""
    numbers = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return float(bool(numbers) and numbers[-1].replace(",", "") == ground_truth)
