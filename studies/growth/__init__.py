"""A run that grows: harder questions and longer responses in phases, against all of them from the start."""
