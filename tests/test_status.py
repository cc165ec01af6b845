"""`gvm-stream status`: what it prints, and what becomes of it where nobody answers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial

import msgspec
import pytest
import trio
from rich.console import Console

from gvm_stream import terminal
from gvm_stream.cli import main
from gvm_stream.config import StreamSection
from gvm_stream.errors import ConfigError
from gvm_stream.status import ask, observer, picture
from gvm_stream.watching import stream_of
from gvm_stream.wire.link import open_link
from gvm_stream.wire.messages import Hello, Refused, Status, StatusRequest, ToPeer, Wait, Welcome
from tests.doubles import ScriptedAllocator, local_stream, scripted_allocator
from tests.status_samples import new_run, peer, status
from tests.stream_processes import CONFIG

WELCOME = Welcome(run="arithmetic", next_step=34, settled=34, weights=None)


def printed(sample: Status, width: int = 80) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(picture(sample))
    return capture.get()


async def asked(
    stream: StreamSection, *arguments: str, answers: tuple[ToPeer, ...]
) -> subprocess.CompletedProcess[str]:
    """`gvm-stream status` against an allocator that says these things, one to a message."""

    async def answer(allocator: ScriptedAllocator) -> None:
        for message in answers:
            await allocator.receive()
            allocator.say(message)

    done: list[subprocess.CompletedProcess[str]] = []
    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(answer, allocator)
        done.append(await trio.to_thread.run_sync(partial(status_command, stream.address, *arguments)))
        nursery.cancel_scope.cancel()
    return done[0]


def status_command(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gvm_stream", "status", "--address", address, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "FORCE_COLOR": ""},
        check=False,
    )


async def test_the_command_asks_as_an_observer_and_prints_without_colour_where_there_is_no_terminal() -> None:
    done = await asked(local_stream(), answers=(WELCOME, status()))
    assert done.returncode == 0, done.stderr
    assert "run arithmetic: training" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


async def test_json_is_the_message_itself() -> None:
    done = await asked(local_stream(), "--json", answers=(WELCOME, status()))
    assert msgspec.json.decode(done.stdout, type=Status) == status()


async def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    done = await asked(local_stream(), "--json", answers=(WELCOME, status(price=math.nan)))
    assert json.loads(done.stdout)["price"] is None


async def test_a_refusal_is_one_sentence() -> None:
    done = await asked(local_stream(), answers=(Refused(reason="it speaks protocol 2, the allocator 3"),))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith("it speaks protocol 2, the allocator 3\n")


def test_nobody_there_is_one_sentence_with_the_address() -> None:
    address = local_stream().address
    done = status_command(address)
    assert done.returncode == 1
    assert done.stderr == f"error: no allocator has answered at {address} within 5 s\n"


@pytest.mark.parametrize("command", ["status", "top"])
def test_an_address_that_is_none_is_a_wrong_configuration(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--address", "localhost"]) == 2
    assert 'stream.address = "localhost" must look like tcp://HOST:PORT' in capsys.readouterr().err


async def test_the_question_is_hello_then_status() -> None:
    stream, asked_for = local_stream(), []

    async def answer(allocator: ScriptedAllocator) -> None:
        for message in (WELCOME, status()):
            asked_for.append(await allocator.receive())
            allocator.say(message)

    async with scripted_allocator(stream) as allocator, trio.open_nursery() as nursery:
        nursery.start_soon(answer, allocator)
        async with open_link(stream, role="observer", name=observer("x"), agreed={}, patience_s=5) as link:
            assert await ask(link, stream.address) == status()
    hello, request = asked_for
    assert isinstance(hello, Hello)
    assert hello.role == "observer"
    assert isinstance(request, StatusRequest)


@pytest.mark.parametrize("sample", [status(), new_run()], ids=["training", "new"])
def test_every_picture_fits_80_columns(sample: Status) -> None:
    assert max(map(len, printed(sample).splitlines())) <= 80


def test_long_names_and_waits_stay_within_80_columns_and_nothing_that_is_waited_for_is_lost() -> None:
    what = "producer " + "x" * 60 + " to return 128 rollouts that made no progress"
    sample = status(
        peers=(peer("producer", "x" * 70, version=12_345, versions_behind=12, in_flight=1024, credits=1024),),
        waits=(Wait(who="run", what=what, seconds=86_400 * 3),),
    )
    text = printed(sample)
    assert max(map(len, text.splitlines())) <= 80
    assert "".join(what.split()) in "".join(text.split())


def test_processes_in_trouble_come_first_and_say_what_is_wrong() -> None:
    peers = (
        peer("producer", "well"),
        peer("producer", "behind", version=30, versions_behind=4),
        peer("producer", "gone", connected=False),
    )
    rows = [row for row in printed(status(peers=peers)).splitlines() if row.startswith("producer")]
    assert [row.split()[1] for row in rows] == ["gone", "behind", "well"]
    assert "cut off" in rows[0]
    assert "30 (-4)" in rows[1]


def test_the_run_itself_is_the_first_to_wait_then_the_longest() -> None:
    waits = [Wait(who=f"producer p{i}", what="work", seconds=i) for i in range(3)]
    text = printed(status(waits=(*waits, Wait(who="run", what="rollouts", seconds=0.5))))
    found = [line.split("  ")[0] for line in text.partition("waits\n")[2].splitlines()]
    assert found == ["run", "producer p2", "producer p1", "producer p0"]


def test_tokens_show_where_they_went_largest_first() -> None:
    text = printed(status(tokens={"generated": 1000, "trained": 250, "zero_signal": 750, "stale": 0}))
    rows = [line.split() for line in text.splitlines() if line.endswith(("250", "750"))]
    assert [(row[0], row[-2]) for row in rows] == [("zero", "75%"), ("trained", "25%")]
    assert "stale" not in text


def test_a_broken_account_and_faults_are_said() -> None:
    assert "conserved" in printed(status())
    text = printed(status(conserved=False, expired=3, duplicates=2, refused=1))
    assert "NOT CONSERVED; 3 expired, 2 reported twice, 1 refused" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (9.96, "10 s"), (59.4, "59 s"), (61, "1 min 01 s"), (3_660, "1 h 01 min"), (90_000, "1 d 01 h")],
)
def test_durations_are_in_units_that_people_read(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


def test_rates_are_differences_by_the_runs_clock_and_begin_anew_when_it_goes_back() -> None:
    rates, found = terminal.Rates(), []
    for seconds, tokens in ((0, 0), (1, 500), (4, 2000), (2, 1000), (3, 1100)):
        rates.see(status(seconds=seconds, rollouts=seconds, tokens={"generated": tokens}))
        found.append(rates.per_second)
    assert found == [None, (500, 1), (500, 1), None, (100, 1)]


def test_sparklines_scale_to_what_they_show_and_leave_gaps() -> None:
    assert terminal.sparkline([0, 0.5, math.nan, 1], 10) == "▁▅ █"
    assert terminal.sparkline([100, 1, 2], 2) == "▁█"
    assert terminal.sparkline([2, 2], 8) == "▄▄"
    assert terminal.sparkline([math.nan], 8) == ""


def test_the_allocator_is_found_by_configuration_or_address_with_overrides() -> None:
    assert stream_of(None, None, []).address == StreamSection().address
    found = stream_of(None, "tcp://h:1", ["--stream.silence_s=99"])
    assert (found.address, found.silence_s) == ("tcp://h:1", 99)
    assert stream_of(CONFIG, None, ["--stream.address=tcp://h:2"]).address == "tcp://h:2"
    with pytest.raises(ConfigError, match="not both"):
        stream_of(CONFIG, "tcp://h:1", [])
