"""Strangers at the door of an allocator at work: each is counted or refused, and the run goes on without them."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import zmq

from gvm_stream.config import Config, StreamSection
from gvm_stream.config_file import agreed_values
from gvm_stream.wire import messages as m
from gvm_stream.wire.codec import decode_to_peer, encode
from gvm_stream.wire.link import identity_of, open_link
from gvm_stream.wire.sockets import connect_dealer, parse_address
from tests import chaos
from tests.strangers import STRANGERS, PickleBomb
from tests.stream_processes import ROOT
from tests.wire_samples import ROLLOUT, TO_ALLOCATOR

pytestmark = pytest.mark.stream

FLOOD = 10_000
PATIENCE_MS = 10_000


class Stranger:
    """A DEALER under any identity; what it sends is up to the test."""

    def __init__(self, stream: StreamSection, name: str, epoch: int = 1) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._watch = connect_dealer(
            self._context,
            stream.address,
            "a",
            stream=stream,
            role="producer",
            identity=identity_of("producer", name, epoch),
        )

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()
        self._socket.close(linger=0)
        self._context.term()

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def answer(self) -> m.ToPeer:
        assert self._socket.poll(PATIENCE_MS), "no answer"
        return decode_to_peer(self._socket.recv_multipart())

    def answer_to(self, message: m.ToAllocator) -> m.ToPeer:
        self.send(encode(message))
        return self.answer()


def hello(config: Config, name: str, epoch: int = 1, **changes: Any) -> m.Hello:  # noqa: ANN401 (fields of a struct)
    right = m.Hello(protocol=m.PROTOCOL, role="producer", name=name, epoch=epoch, agreed=agreed_values(config))
    return msgspec.structs.replace(right, **changes)


def refusal(answer: m.ToPeer) -> str:
    assert isinstance(answer, m.Refused), answer
    return answer.reason


def connect_and_babble(config: Config, bomb: PickleBomb) -> None:
    """Other protocols, half messages, and one that is too long."""
    address, limit = config.stream.address, config.stream.max_message_mib << 20
    bomb.throw_at(address)
    for content in STRANGERS.values():
        with socket.create_connection(parse_address(address, "a")) as connection, suppress(ConnectionError):
            connection.sendall(content)
    with Stranger(config.stream, "giant") as giant:
        giant.send(bytes(limit + 1))


def flood(config: Config, bomb: PickleBomb) -> int:
    """Messages that cannot be read; how many."""
    chance = random.Random(0)
    unreadable = [
        (bomb.message(),),
        (b"",),
        (b"\x80", b"\x80"),
        *((b"\xc1" + chance.randbytes(chance.randrange(300)),) for _ in range(100)),
        *((frame[: len(frame) // 2],) for frame in map(encode, TO_ALLOCATOR.values())),
        *((b"\xc1",) for _ in range(FLOOD)),
    ]
    with Stranger(config.stream, "loud") as loud:
        for frames in unreadable:
            loud.send(*frames)
        assert loud.answer_to(m.Heartbeat()) == m.Unknown()  # all before it has been read
    return len(unreadable)


def lie(config: Config) -> None:
    """Say hello as a process that has been started again since, as another one, and as one that does not fit."""
    with Stranger(config.stream, "p0") as old:
        assert "has been started again since" in refusal(old.answer_to(hello(config, "p0")))
        for name in ("rollouts", "ask", "step_done", "goodbye"):
            assert old.answer_to(TO_ALLOCATOR[name]) == m.Unknown()
    with Stranger(config.stream, "mallory") as mallory:
        forged = hello(config, "p0", epoch=2**62)
        assert "not of the process that its socket belongs to" in refusal(mallory.answer_to(forged))
        older = hello(config, "mallory", protocol=2)
        assert f"it speaks protocol 2, the allocator {m.PROTOCOL}" in refusal(mallory.answer_to(older))
        other = hello(config, "mallory", agreed={})
        assert "they must be the same" in refusal(mallory.answer_to(other))


def make_believe(config: Config) -> None:
    """A producer that is let in, and reports three rollouts that it was never asked for."""
    with Stranger(config.stream, "braggart") as braggart:
        assert isinstance(braggart.answer_to(hello(config, "braggart")), m.Welcome)
        rollouts = m.Rollouts(seq=1, rollouts=(msgspec.structs.replace(ROLLOUT, work=10**9),) * 3)
        braggart.send(encode(TO_ALLOCATOR["step_done"]))
        assert braggart.answer_to(rollouts) == m.Received(seq=1)
        braggart.send(encode(m.Goodbye(reason="enough")))


def status_in_words(config: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "gvm_stream", "status", "--config", str(config), "--json"],
        capture_output=True,
        cwd=ROOT,
        check=True,
    )
    content: dict[str, Any] = json.loads(done.stdout)
    return content


async def test_an_allocator_at_work_counts_what_strangers_send_and_goes_on(tmp_path: Path) -> None:
    config = chaos.write_config(tmp_path, rollouts=2048, **{"stream.max_message_mib": "1"})
    bomb = PickleBomb(tmp_path / "marker")
    with trio.fail_after(120):
        async with (
            chaos.cluster(tmp_path, producers=1) as running,
            open_link(config.stream, role="observer", name="test", agreed={}, patience_s=60) as link,
        ):
            while not (status := await link.status()).rollouts:  # noqa: ASYNC110 (another process)
                await trio.sleep(0.05)
            unusable = await trio.to_thread.run_sync(flood, config, bomb)
            await trio.to_thread.run_sync(lie, config)
            await trio.to_thread.run_sync(make_believe, config)
            status = await link.status()
            unusable += 4  # the step of a producer, and three rollouts that nobody had asked for
            assert (status.refused, status.conserved) == (unusable, True)
            words = await trio.to_thread.run_sync(status_in_words, tmp_path / "config.json")
            assert words["refused"] == unusable
            await trio.to_thread.run_sync(connect_and_babble, config, bomb)
            assert [await running.wait(name) for name in running.names] == [0, 0, 0]
    bomb.assert_harmless()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    outcome = chaos.account(config, tmp_path, report, Counter(), 0)
    assert (outcome.trained, outcome.lost, outcome.duplicated, outcome.conserved) == (outcome.planned, 0, 0, True)
