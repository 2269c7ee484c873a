"""The process beside each rank: it starts the rank, forwards its output and signals, and reports to the launcher."""
