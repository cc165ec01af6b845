"""A user's verifier that cannot be interrupted by its interpreter; imports nothing, as the workers import it."""

from __future__ import annotations


def endless(answer: str, response: str) -> float:
    return float(len(answer + response) < 9**9**9)
