"""The backends, which move arrays between ranks: each is a `Transport` of host arrays, found by its module's name.

A module of this package is a backend if it has `join(expected, timeout, checks)`. It returns this rank's transport of
all ranks, and its `Membership` in their world, or None if no other rank waits for its exit.
"""
