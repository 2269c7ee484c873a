"""The backends, which move arrays between ranks: each is a `Transport` of host arrays, found by its module's name.

A module of this package is a backend if it has `join(expected, timeout, checks)`. This function returns two things: the
transport that connects this rank with all ranks; and this rank's `Membership` in the world, or None if no other rank
waits for this rank's exit.
"""
