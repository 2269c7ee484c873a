"""The backends, which move arrays between ranks, and the transports that they use.

A module of this package is a backend if it has `join(expected, timeout, checks)`. The module's name is the backend's
name. `join` returns two things: the `Transport` of host arrays that connects this rank with all ranks; and this rank's
`Membership` in the world, by which it leaves at exit, or None if there is nothing to leave.
"""
