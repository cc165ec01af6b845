"""Whether a process may take part, and where a learner begins. Pure."""

from __future__ import annotations

from gvm_stream.allocator.run_state import RunState
from gvm_stream.errors import StreamError
from gvm_stream.wire.link import identity_of
from gvm_stream.wire.messages import PROTOCOL, Hello


def check_hello(identity: bytes, hello: Hello, agreed: dict[str, str]) -> None:
    """Raise StreamError, naming the reason, for a process that may not join. `agreed`: the allocator's own values."""
    if hello.protocol != PROTOCOL:
        raise StreamError(
            f"it speaks protocol {hello.protocol}, the allocator {PROTOCOL}: use the same gvm-stream everywhere"
        )
    if identity != identity_of(hello.role, hello.name, hello.epoch):
        raise StreamError("its hello is not of the process that its socket belongs to")
    if hello.role == "observer":
        return
    for key, ours in agreed.items():
        theirs = hello.agreed.get(key, "nothing")
        if theirs != ours:
            raise StreamError(
                f"its configuration has {key} = {theirs}, the allocator's has {ours}: they must be the same"
            )


def first_batch(hello: Hello, state: RunState) -> int:
    """The batch that a learner gets first: it has those before it in a checkpoint, or in memory.

    Raises StreamError if it has not been through, and cannot be given, all batches up to the settled ones.
    """
    settled, covered = state.allocator.settled_steps, state.covered
    if hello.step is not None:  # it goes on, after the allocator or the connection was gone; a step may be unreported
        if covered <= hello.step <= settled + 1:
            return hello.step
        raise StreamError(
            f"it has been through {hello.step} batches, the allocator stands after {settled}: they are not of the same "
            "history; start the learner again with --resume"
        )
    fitting = [step for step in (0, *hello.checkpoints) if covered <= step <= settled]
    if fitting:
        return max(fitting)
    raise StreamError(
        f"the learner has checkpoints after batches {sorted(hello.checkpoints)}, the allocator stands after {settled} "
        f"and can give batches from {covered} on again: none of the checkpoints goes with that"
    )
