"""A run's numbers and samples, sent to trackers by threads that training never waits for."""
