"""From what the spool has to the state of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from gvm_stream.allocator.journal import decode_entry
from gvm_stream.allocator.run_state import RunState
from gvm_stream.errors import StreamError

log = logging.getLogger(__name__)


def recover(state: RunState, snapshot: bytes | None, journal: Sequence[bytes]) -> None:
    """Load the snapshot, then repeat what has happened since. Raises StreamError if it does not fit this run."""
    if snapshot is not None:
        try:
            saved = msgspec.msgpack.decode(snapshot, type=dict[str, Any], strict=False)
        except msgspec.MsgspecError as error:
            raise StreamError(f"the saved state of the allocator cannot be read: {error}") from error
        state.load_state_dict(saved)
    for number, data in enumerate(journal, 1):
        try:
            state.apply(decode_entry(data))
        except msgspec.MsgspecError as error:
            raise StreamError(f"entry {number} of the journal cannot be read: {error}") from error
        except ValueError as error:
            raise StreamError(f"entry {number} of the journal does not fit the state: {error}") from error
    log.info(
        "continuing after batch %d, %d entries of the journal repeated", state.allocator.settled_steps, len(journal)
    )
