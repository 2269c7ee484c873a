"""What is shown and kept of a job: the console, log files, JSON events, and figures for ddp-top and Prometheus."""
