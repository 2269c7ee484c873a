"""What is seen of a job: the console, log files, events for programs, the status line."""
