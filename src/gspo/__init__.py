"""Group Sequence Policy Optimization."""
