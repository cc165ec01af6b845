"""Calculus that the grammar does not read, left to math-verify: integrals, limits, derivatives."""

from __future__ import annotations

import re

_CALCULUS = re.compile(r"\\(?:i{0,3}nt|oint|lim|partial|mathrm\{d\})(?![a-zA-Z])|\\frac\{d")
_SIGNS = re.compile(r"\\[a-zA-Z]+|[0-9a-zA-Z]")
LONGEST = 300


def same_by_library(gold: str, answer: str) -> bool | None:
    """Equal by math-verify; None if that is not asked.

    It is asked only if both texts hold the same commands, letters and digits: the library drops what it does not know
    and evaluates what it can, so it may say that an order does not matter, but not that two different integrals agree.
    """
    if not (_CALCULUS.search(gold) and _CALCULUS.search(answer)) or max(len(gold), len(answer)) > LONGEST:
        return None
    if sorted(_SIGNS.findall(gold)) != sorted(_SIGNS.findall(answer)):
        return False
    from math_verify import parse, verify

    right, got = (parse(f"${text}$", parsing_timeout=None, raise_on_error=True) for text in (gold, answer))
    if not any(not isinstance(read, str) for read in right):
        return None
    return bool(verify(right, got, timeout_seconds=None, raise_on_error=True))
