"""What went wrong in a job and why: failures, liveness of ranks, hangs, and the report of a failure."""
