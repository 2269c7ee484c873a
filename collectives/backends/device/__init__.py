"""Collectives on CuPy arrays: over NCCL where every rank can, else through host memory and the host's own transport.

Nothing here but `cuda` is loaded before a communicator first meets an array on a GPU, or is asked for NCCL by name.

    device_communicator   what a communicator calls: the semantics of host arrays, for device arrays
    device_work           a collective under way: its events between streams, its buffers, the user's hold on it
    device_transport      what moves the arrays: the protocol, and the copies of a world of one
    nccl_transport        ... by NCCL, on a stream of their own
    host_staged           ... through pinned host memory, in chunks that overlap
    negotiation           which of these it is: all ranks decide together
    cuda                  the one module that speaks to CuPy
"""
