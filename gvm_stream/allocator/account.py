"""The token account: every generated token has exactly one fate, and the fates sum to what was generated."""

from __future__ import annotations

from collections import Counter

from gvm_stream.allocator.types import Fate


class TokenAccount:
    """Tokens and rollouts by fate. Tokens enter once, by `add`; `move` changes their fate, never their number."""

    def __init__(self) -> None:
        self.tokens: Counter[Fate] = Counter()
        self.rollouts: Counter[Fate] = Counter()

    def add(self, fate: Fate, tokens: int) -> None:
        """A rollout (or what there is of it) with `tokens` generated tokens ended as `fate`."""
        if tokens < 0:
            raise ValueError(f"a rollout cannot have {tokens} tokens")
        self.tokens[fate] += tokens
        self.rollouts[fate] += 1

    def extend(self, fate: Fate, tokens: int) -> None:
        """More tokens of a rollout that is in the account already."""
        self.tokens[fate] += tokens

    def move(self, source: Fate, target: Fate, tokens: int, rollouts: int = 1) -> None:
        """Change the fate of so many rollouts with `tokens` tokens in all."""
        if not 0 <= tokens <= self.tokens[source] or not 1 <= rollouts <= self.rollouts[source]:
            raise ValueError(
                f"cannot move {rollouts} rollouts of {tokens} tokens from {source}: it holds {self.rollouts[source]} "
                f"rollouts with {self.tokens[source]} tokens"
            )
        for counter, amount in ((self.tokens, tokens), (self.rollouts, rollouts)):
            counter[source] -= amount
            counter[target] += amount

    @property
    def generated(self) -> int:
        return sum(self.tokens.values())

    def table(self) -> dict[str, int]:
        """Fate -> tokens for every fate, and `generated`, their sum."""
        return {**{fate.value: self.tokens[fate] for fate in Fate}, "generated": self.generated}

    def state_dict(self) -> dict[str, dict[str, int]]:
        return {
            "tokens": {fate.value: n for fate, n in self.tokens.items()},
            "rollouts": {fate.value: n for fate, n in self.rollouts.items()},
        }

    def load_state_dict(self, state: dict[str, dict[str, int]]) -> None:
        self.tokens = Counter({Fate(name): n for name, n in state["tokens"].items()})
        self.rollouts = Counter({Fate(name): n for name, n in state["rollouts"].items()})

    def close(self) -> None:
        """No learner will ever take what is pending: it was made for nothing, as cancelled work is."""
        for counter in (self.tokens, self.rollouts):
            counter[Fate.CANCELLED] += counter.pop(Fate.PENDING, 0)
