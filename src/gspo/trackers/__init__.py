"""A run's numbers and samples, sent to trackers by processes that read what training writes and never hold it up."""
