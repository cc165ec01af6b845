from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gvm_stream.logs import BURST, WINDOW_S, Format, ProcessLog, set_up_logging, set_version

log = logging.getLogger("gvm_stream.test")


@pytest.fixture(autouse=True)
def _root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # pytest's own are put back: force=True would close them
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(capsys)]


def test_a_line_for_people_says_who_and_at_which_version(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("producer-0", "producer")
    log.info("weights of %d bytes", 7)
    set_version(3)
    log.warning("late")
    first, second = lines(capsys)
    assert re.fullmatch(r"\d\d:\d\d:\d\d producer-0 I weights of 7 bytes", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d producer-0 v3 W late", second)


def test_a_line_of_json_has_the_same_in_fields(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("producer-0", "producer", form="json")
    log.info("first\nof two lines")
    set_version(3)
    log.warning("late")
    first, second = events(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {
        "level": "info",
        "process": "producer-0",
        "role": "producer",
        "version": None,
        "logger": "gvm_stream.test",
        "message": "first\nof two lines",
    }
    assert (second["level"], second["version"], second["message"]) == ("warning", 3, "late")


@pytest.mark.parametrize("form", ["human", "json"])
def test_an_exception_comes_with_its_traceback(form: Format, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("learner", "learner", form=form)
    try:
        raise ValueError("a NaN")
    except ValueError:
        log.exception("batch 3")
    text = capsys.readouterr().err
    assert "batch 3" in text
    assert "Traceback" in text
    assert "ValueError: a NaN" in text
    assert len(text.splitlines()) == 1 or form == "human"


def test_debugging_is_left_out_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("learner", "learner")
    log.debug("detail")
    assert lines(capsys) == []
    set_up_logging("learner", "learner", verbose=True)
    log.debug("detail")
    assert len(lines(capsys)) == 1


def test_repeats_are_counted_and_told_with_the_next_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr("time.time_ns", lambda: int(now * 1e9))
    set_up_logging("allocator", "allocator", form="json")

    def repeat(times: int) -> None:
        for i in range(times):
            log.warning("message %d refused", i)

    repeat(BURST + 90)
    log.warning("something else")
    assert [event["message"] for event in events(capsys)] == [
        *(f"message {i} refused" for i in range(BURST)),
        "something else",
    ]
    now += WINDOW_S
    repeat(1)
    (event,) = events(capsys)
    assert event["left_out"] == 90


def test_what_was_left_out_last_is_told_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("allocator", "allocator")
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler, ProcessLog)
    for _ in range(BURST + 5):
        log.warning("again")
    assert len(lines(capsys)) == BURST
    handler.close()
    (line,) = lines(capsys)
    assert line.endswith("W 5 lines that repeated others were left out")


def test_libraries_that_chatter_are_heard_from_warnings_on(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("learner", "learner")
    logging.getLogger("httpx").info("GET")
    logging.getLogger("httpx").warning("refused")
    assert [line.split(" W ")[-1] for line in lines(capsys)] == ["refused"]
