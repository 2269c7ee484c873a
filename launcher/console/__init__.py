"""What is shown and kept of a job: the console, log files, JSON events, the status line."""
