"""What a job is, in words: the table of options, the command line, job files, the helps."""
