"""Apple's GPUs are not supported. A script that asks for them gets the answer False."""

__all__ = ["is_available", "is_built"]


def is_available() -> bool:
    """Returns False."""
    return False


def is_built() -> bool:
    """Returns False."""
    return False
