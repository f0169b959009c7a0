"""Recipes made of the configurations of other libraries: AReaL, verl and TRL."""
