"""A user's verifier that does what verifiers must not do; runs in verifier processes only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def misbehave(answer: str, response: str) -> float:
    """`response` says how; `answer` is a path for what needs one. Otherwise the response is the reward."""
    match response:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "die once":
            if not Path(answer).exists():
                Path(answer).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return 1.0
        case "hang":
            9**9**9
        case "sleep then touch":
            time.sleep(0.7)
            Path(answer).touch()
        case "allocate":
            return float(len(bytearray(int(answer) << 20)))
        case "process id":
            return float(os.getpid())
        case "exit":
            raise SystemExit
    return float(response)
