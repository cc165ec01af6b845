"""Errors a user can meet, named by the boundary they crossed.

GvmStreamError
├── ConfigError      a key, a value or a file of the configuration
├── DataError        a prompt source or one of its rows
├── ModelError       a checkpoint that cannot be loaded or saved
├── WireError        a frame or a message that is not of this protocol
├── StreamError      a peer or an address: refused, silent, in use
├── WeightsError     published weights that cannot be read or do not match
└── TrainingError    nothing left to train on, or numbers that are not numbers

Every message is one sentence (or a list of them) that says what failed, what was got, what was expected and where.
`gvm-stream` prints it without a traceback and exits with status 2 for ConfigError and DataError, 1 otherwise.
A bad *rollout* is a value (see `allocator.types.Outcome`), never an exception.
"""

from __future__ import annotations


class GvmStreamError(Exception):
    """Base of every error this package raises on purpose."""

    exit_status = 1


class ConfigError(GvmStreamError):
    exit_status = 2


class DataError(GvmStreamError):
    exit_status = 2


class ModelError(GvmStreamError):
    pass


class WireError(GvmStreamError):
    pass


class StreamError(GvmStreamError):
    pass


class WeightsError(GvmStreamError):
    pass


class TrainingError(GvmStreamError):
    pass
