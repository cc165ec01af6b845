"""Rewards from elsewhere: a function of the user, or a service."""

from __future__ import annotations

import functools
import http.client
import math
import numbers
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import msgspec

from gvm_stream.config import HttpSection, VerifierSection
from gvm_stream.errors import ConfigError
from gvm_stream.user_code import NotImportable, import_path
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable, VerifyItem

RETRIED = frozenset({408, 429})
"""Refusals that say "not now", besides all from 500 on."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
SHARE_OF_TIME = 0.9
"""Of the time an item may take, for requests; the rest is for the verdict to come back."""
LONGEST_REPLY = 1 << 20


def python(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """The reward that the user's function returns for (answer, response). Whatever is no finite number is no reward."""
    function = load_function(settings.function)
    return _reward(function(item.answer, item.response), f"verifier.function {settings.function} returned")


@functools.cache
def load_function(path: str) -> Callable[[str, str], object]:
    """Import `module:function`; the current folder comes after the import path. ConfigError if there is none."""
    try:
        function = import_path(path)
    except NotImportable as error:
        raise ConfigError(f"verifier.function = {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(f"verifier.function = {path!r} is of type {type(function).__name__}, expected a function")
    return function


def http_service(settings: VerifierSection, item: VerifyItem) -> Verdict:
    """The `reward` in the JSON reply to a POST of {"prompt", "response", "answer"}.

    Server errors, timeouts and broken connections are tried again; what is still no reward then is no verdict.
    """
    options = settings.http
    body = msgspec.json.encode({"prompt": item.prompt, "response": item.response, "answer": item.answer})
    end = time.monotonic() + SHARE_OF_TIME * settings.timeout_s
    failure = ""
    for attempt in range(options.retries + 1):
        pause = 0.0 if attempt == 0 else _pause_s(attempt)
        if time.monotonic() + pause >= end:
            return VerdictUnscorable(f"{options.url}: no time for another attempt after {failure}", "external")
        time.sleep(pause)
        reply = _post(options, body, end - time.monotonic())
        if isinstance(reply, bytes):
            return _read_reply(options.url, reply)
        failure, again = reply
        if not again:
            return VerdictUnscorable(f"{options.url}: {failure}", "external")
    return VerdictUnscorable(f"{options.url}: {failure} in {options.retries + 1} attempts", "external")


def _pause_s(attempt: int) -> float:
    """Doubles with every attempt; the jitter keeps workers that failed together from coming back together."""
    return min(FIRST_PAUSE_S * 2.0 ** (attempt - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)


def _post(options: HttpSection, body: bytes, most_s: float) -> bytes | tuple[str, bool]:
    """The reply, or (what went wrong, is it worth another attempt)."""
    request = urllib.request.Request(
        options.url, data=body, headers={"Content-Type": "application/json", "Accept": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=min(options.timeout_s, most_s)) as reply:
            read: bytes = reply.read(LONGEST_REPLY)
            return read
    except urllib.error.HTTPError as error:
        with error:
            return f"status {error.code}", error.code >= 500 or error.code in RETRIED
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}", True


class _Reply(msgspec.Struct):
    reward: bool | float


def _read_reply(url: str, reply: bytes) -> Verdict:
    try:
        return _reward(msgspec.json.decode(reply, type=_Reply).reward, f"{url} replied")
    except msgspec.DecodeError as error:
        return VerdictUnscorable(f'{url}: the reply is not JSON with a number "reward": {error}', "external")


def _reward(value: object, source: str) -> Verdict:
    """A finite real number as a reward."""
    if callable(scalar := getattr(value, "item", None)):  # of numpy or torch
        value = scalar()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return VerdictUnscorable(f"{source} {repr(value)[:60]}, expected a finite number", "external")
    return VerdictScored(float(value), rule=f"{source} {float(value):g}")
