"""The numbers of a step, and what they say in words."""
