"""Collectives on GPU arrays of several ranks: over NCCL if all can use it, otherwise through the host transport.

Except for `cuda`, nothing here is loaded before a communicator first gets an array on a GPU, or is asked for NCCL.

    device_communicator   what a communicator calls: reads and makes the arrays of a call, orders streams, keeps buffers
    device_transport      the interface of transports, and two of them: in a world of one, and through host memory
    nccl_transport        moves arrays over NCCL, on a stream of its own
    negotiation           chooses the transport, on all ranks together
    cuda                  all uses of CuPy, except that `nccl.library` takes the NCCL library from CuPy
"""
