"""The agent, parent process of each rank: it starts the rank, forwards its output and signals, and reports to the launcher."""
