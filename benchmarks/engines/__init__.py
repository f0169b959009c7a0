"""The engines side by side, gspo's own cost on top of a server, and what it takes to publish weights."""
