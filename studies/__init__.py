"""Studies: questions put to the trainer, with the runs that answer them."""
