"""Collectives on CuPy arrays: over NCCL where every rank can, else through host memory and the host's own transport.

Nothing here but `cuda` is loaded before a communicator first meets an array on a GPU, or is asked for NCCL by name.

    device_communicator   what a communicator calls: the semantics of host arrays, for device arrays; `device_ops` has
                          the collectives, which stand on `device_base`
    stream_handoff        the two edges that order a collective between streams, and its buffers
    device_transport      what moves the arrays: the protocol, and the copies of a world of one
    nccl_transport        ... by NCCL, on a stream of their own, and memory that it moves without copies
    host_staged           ... through pinned host memory, in chunks that overlap
    negotiation           which of these it is: all ranks decide together
    cuda                  the one module that speaks to CuPy
"""
