"""Collectives on CuPy arrays: over NCCL where every rank can, else through host memory and the host's own transport.

Nothing here is loaded before a communicator first meets an array on a GPU, or is asked for NCCL by name.

    door        what a communicator calls: the semantics of host arrays, for device arrays
    passage     the two edges that order a collective between streams, and what keeps its buffers alive
    by_nccl     the arrays move by NCCL, on a stream of their own
    staged      the arrays move through pinned host memory, in chunks that overlap
    alone       a world of one: copies on the device
    vote        which of these it is: all ranks decide together
    cuda        the one module that speaks to CuPy
"""
