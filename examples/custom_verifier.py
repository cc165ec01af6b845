"""A verifier of your own. Configure it with

[verifier]
kind = "python"
function = "examples.custom_verifier:word_count"
"""

from __future__ import annotations


def word_count(answer: str, response: str) -> float:
    """1 for a response with as many words as the gold answer says, less the further away it is."""
    wanted = int(answer)
    return max(0.0, 1.0 - abs(len(response.split()) - wanted) / wanted)
