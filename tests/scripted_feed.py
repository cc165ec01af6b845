"""In place of the learner's feed: an allocator that hands out given batches, in the same process, and can kill."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gvm_stream.learner.distributed import Ranks, SharedFeed
from gvm_stream.wire.messages import Batch, Checkpointed, Published, StepDone, Stop, ToAllocator, TrainGroup, Welcome


class Killed(BaseException):
    """As SIGKILL: nothing handles it."""


class ScriptedFeed:
    """From batch `next_step` on to the end of `batches`; whoever asks for batch `dies_at` does not live on."""

    def __init__(
        self, batches: Sequence[TrainGroup] = (), next_step: int = 0, settled: int = 0, dies_at: int | None = None
    ) -> None:
        self._batches, self._next_step, self._settled, self._dies_at = batches, next_step, settled, dies_at
        self.stop: Stop | None = None
        self.interrupted = False
        self.said: list[ToAllocator] = []
        self.on_working: Callable[[], None] = lambda: None

    def shared(self) -> SharedFeed:
        return SharedFeed(self, Ranks())  # type: ignore[arg-type]

    def join(self) -> Welcome:
        return Welcome(run="test", next_step=self._next_step, settled=self._settled, weights=None)

    def batch(self, step: int) -> Batch | None:
        assert step == self._next_step, "batches are asked for in order, each once"
        self._next_step += 1
        if step == self._dies_at:
            raise Killed
        return None if self.interrupted else Batch(step=step, groups=(self._batches[step],))

    def wait_for_stop(self) -> None:
        self.stop = Stop(reason="all steps are done", final=True)

    def settle(self, patience_s: float) -> None:
        pass

    def working(self) -> None:
        self.on_working()

    def send(self, message: ToAllocator) -> None:
        self.said.append(message)

    def post(self, message: ToAllocator) -> None:
        self.said.append(message)

    @property
    def published(self) -> list[Published]:
        return [message for message in self.said if isinstance(message, Published)]

    @property
    def done(self) -> list[StepDone]:
        return [message for message in self.said if isinstance(message, StepDone)]

    @property
    def checkpointed(self) -> list[tuple[int, ...]]:
        return [message.steps for message in self.said if isinstance(message, Checkpointed)]
