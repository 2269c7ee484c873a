"""Runs a job: the event loop, its ranks, signals, standard input, the reaper above the engine, restarts."""
