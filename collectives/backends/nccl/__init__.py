"""NCCL by its C interface: raw pointers in, result codes turned into exceptions. Knows nothing of arrays or streams.

table              every NCCL function that is called: types, results, the version that brought it
library            where libnccl comes from: pynccl, CuPy, or a path
nccl_communicator  one rank's end of an NCCL communicator; no call blocks without limit
limits             calls that may block for ever, in a thread that can be left behind
issuer             the one thread that issues for all communicators of a device
watchdog           keeps what is in flight, and ends what failed or came to nothing
"""
