"""A job that runs: the loop, the ranks in it, signals, standard input, the guard above it, restarts."""
