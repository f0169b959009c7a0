"""Credit in a game of several turns: GSPO by trajectory against GSPO-token by turn."""
