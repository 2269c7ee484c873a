"""What `ddp` says to CUDA, through CuPy or through the libraries themselves; imported when a GPU is first used.

Every launch goes to CuPy's current stream, and nothing here makes the processor wait unless its name says so.
"""
