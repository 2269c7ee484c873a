"""The flight recorder: each rank's last calls and the position of its Python code, readable from outside at any moment.

A rank that hangs cannot be asked. So every process keeps its last calls in shared memory, and others
(another rank, the launcher, `ddp-doctor`) read them there, even if the process is stopped or never releases the GIL.
"""
