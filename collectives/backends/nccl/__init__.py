"""NCCL through its C interface: takes arrays and streams as integers, and turns result codes into exceptions.

library            finds libnccl, and declares every function of it that is called
nccl_communicator  one rank's end of an NCCL communicator, whose calls have time limits
watchdog           keeps buffers in flight alive, and ends what failed or timed out
"""
