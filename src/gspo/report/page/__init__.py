"""One HTML page of one run, or of several side by side: curves, every sample, and what the run was."""
