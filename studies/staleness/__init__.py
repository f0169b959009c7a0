"""What staleness costs: reward against rollout.max_staleness, for four ways of learning from stale responses."""
