"""The states of the process's random number generators, as bytes: a resumed learner draws what it would have drawn."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import torch


class _States(msgspec.Struct):
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[bytes, int, int, float]
    """Key, position, and the spare normal number, if there is one."""
    cpu: bytes
    cuda: bytes | None


def capture(device: torch.device) -> bytes:
    """Of Python, numpy and torch; on a CUDA `device` its own, too."""
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None
    numpy = (np.asarray(key, "<u4").tobytes(), int(position), int(has_gauss), float(gauss))
    cpu = torch.get_rng_state().numpy().tobytes()
    return msgspec.msgpack.encode(_States(random.getstate(), numpy, cpu, cuda))


def restore(content: bytes, device: torch.device) -> None:
    states = msgspec.msgpack.decode(content, type=_States)
    random.setstate(states.python)
    key, position, has_gauss, gauss = states.numpy
    np.random.set_state(("MT19937", np.frombuffer(key, "<u4"), position, has_gauss, gauss))
    torch.set_rng_state(_tensor(states.cpu))
    if states.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor(states.cuda), device)


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
