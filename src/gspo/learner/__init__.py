"""The update: from groups with scores to new weights."""
