"""Handshake between processes that share a secret: each proves that it knows the secret, without sending it.

Each side sends a random challenge, and answers the challenge of the other side. Agents and the PMI server load as
little as possible, so this module imports no other module of the package.
"""

from __future__ import annotations

import hmac
import os


def nonce() -> str:
    """A random number as hexadecimal text, for one challenge or as the secret of one job."""
    return os.urandom(32).hex()


def proof(secret: bytes, *words: str) -> str:
    """The answer to a challenge, which only holders of the secret can compute.

    words: first the role of the side that answers, then everything that the answer confirms, including the challenge.
        Because of the role, a side cannot send an answer back to the side that gave it
    """
    # surrogatepass: JSON from an unknown process may contain surrogates, which UTF-8 cannot encode.
    return hmac.digest(secret, " ".join(words).encode("utf-8", "surrogatepass"), "sha256").hex()


def is_proof(answer: object, secret: bytes, *words: str) -> bool:
    """True if `answer` is `proof(secret, *words)`."""
    return hmac.compare_digest(str(answer).encode("utf-8", "surrogatepass"), proof(secret, *words).encode())
