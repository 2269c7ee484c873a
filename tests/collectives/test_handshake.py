"""Proofs that a process knows a secret."""

from __future__ import annotations

from collectives.handshake import is_proof, nonce, proof


def test_an_answer_that_no_bytes_can_stand_for_proves_nothing() -> None:
    challenge = nonce()
    assert is_proof(proof(b"secret", "agent", challenge), b"secret", "agent", challenge)
    for answer in ("\ud800", "é", "", None, 7):
        assert not is_proof(answer, b"secret", "agent", challenge)
    assert proof(b"secret", "agent", "\ud800") != proof(b"secret", "agent", "")
