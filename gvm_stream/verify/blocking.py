"""The verifier pool for code that is not asynchronous, in any thread of any process.

with BlockingVerifier(settings) as verifier:
    verdicts = verifier.verify(items)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from anyio.from_thread import BlockingPortal, start_blocking_portal

from gvm_stream.config import VerifierSection
from gvm_stream.verify.pool import PoolStats, VerifierPool
from gvm_stream.verify.verdict import Verdict, VerifyItem


class BlockingVerifier:
    """A pool with an event loop in a thread of its own. `verify` may be called by several threads at once.

    It belongs to the process that entered it: a forked child makes its own.
    """

    def __init__(self, settings: VerifierSection) -> None:
        self._settings = settings
        self._open = ExitStack()

    def __enter__(self) -> BlockingVerifier:
        with ExitStack() as opening:
            self._portal: BlockingPortal = opening.enter_context(start_blocking_portal())
            pool = self._portal.call(VerifierPool, self._settings)
            self._pool: VerifierPool = opening.enter_context(self._portal.wrap_async_context_manager(pool))
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def stats(self) -> PoolStats:
        return self._pool.stats

    def verify(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One verdict per item, in their order; returns when all are known."""
        return self._portal.call(self._pool.verify, items)
