"""The recipe: typed, frozen, checked."""
