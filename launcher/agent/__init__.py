"""The agent, parent process of each rank: starts it, forwards its output and signals, and reports to the launcher."""
