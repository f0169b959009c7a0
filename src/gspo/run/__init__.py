"""The life of a run: preparing, resuming, collecting, recording, saving."""
