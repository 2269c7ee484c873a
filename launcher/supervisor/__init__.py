"""Runs a job: event loop, ranks, signals, standard input, the reaper above the engine, restarts, resizing."""
