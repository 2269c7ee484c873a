"""NCCL by its C interface: raw pointers in, result codes turned into exceptions. Knows nothing of arrays or streams.

library            where libnccl comes from, and every function of it that is called
nccl_communicator  one rank's end of an NCCL communicator; no call blocks without limit
watchdog           keeps what is in flight, and ends what failed or timed out
"""
