"""The function forms, one family a file: most call the method of the same name."""
