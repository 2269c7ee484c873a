"""Collectives on CuPy arrays: over NCCL where every rank can, else through host memory and the host's own transport.

Nothing here but `cuda` is loaded before a communicator first meets an array on a GPU, or is asked for NCCL by name.

    device_communicator   what a communicator calls: reads and makes the arrays of a call, orders streams, keeps buffers
    device_transport      what moves the arrays: the protocol; copies of a world of one; through pinned host memory
    nccl_transport        ... by NCCL, on a stream of their own
    negotiation           which of these it is: all ranks decide together
    cuda                  the one module that speaks to CuPy
"""
