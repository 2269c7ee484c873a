"""Apple's GPUs, which are not supported: scripts that ask for them learn so."""

__all__ = ["is_available", "is_built"]


def is_available() -> bool:
    """False."""
    return False


def is_built() -> bool:
    """False."""
    return False
