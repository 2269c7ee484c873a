"""The agent: parent process of a rank. It starts the rank, forwards its output, sends it signals, and reports on it."""
