"""What `benchmarks.ports` puts on the import path of the scripts that it runs."""
