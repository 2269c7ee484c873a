"""NCCL by its C interface: raw pointers in, result codes turned into exceptions. Knows nothing of arrays or streams.

table              every NCCL function that is called: types, results, the version that brought it
library            where libnccl comes from: pynccl, CuPy, or a path
nccl_communicator  one rank's end of an NCCL communicator; no call blocks without limit
issuer             the one thread that issues for a device; threads for calls that may block
watchdog           keeps what is in flight, and ends what failed or came to nothing
"""
