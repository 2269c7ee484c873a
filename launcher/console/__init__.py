"""What is shown and kept of a job: the console, log files and JSON events."""
