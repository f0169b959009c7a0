"""Which queries to sample: in order, those answered now and then more often, or only groups that teach."""
