"""Collectives that autograd sees: `movements` and `reductions`, over a twin of the communicator; see `ddp.parallel`."""
