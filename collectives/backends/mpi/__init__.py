"""Ranks as MPI processes."""
