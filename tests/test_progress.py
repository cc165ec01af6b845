"""What `gvm-stream run` shows while it goes, and at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gvm_stream.allocator.record import Record
from gvm_stream.progress import MOST_ROWS, Progress, picture
from gvm_stream.top_view import View
from tests.report_samples import CONFIG, TOKENS, report
from tests.status_samples import new_run, peer, status


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def plain() -> Progress:
    return Progress(CONFIG, Path("runs/a"), plain=True)


def test_plain_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with plain() as progress:
        for seconds in (250, 251):
            progress.show(status(seconds=seconds))
        progress.note("producer-0 ended")
    first, line, note = capsys.readouterr().out.splitlines()
    assert first.startswith("run directory runs/a  policy neyman")
    assert line.split("  ")[-5:] == ["version 34", "8,704 rollouts", "reward 0.412", "lag 0.83", "held-out 0.465"]
    assert note == "producer-0 ended"


def test_a_run_in_which_nothing_has_happened_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    plain().show(new_run())
    assert "waiting for the learner  batch 0/120  version -1  0 rollouts\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "sample", [new_run(), status(), status(peers=tuple(peer("producer", f"p{i}") for i in range(99)))]
)
def test_the_live_picture_fits_a_small_terminal(sample: Any) -> None:  # noqa: ANN401
    view = View("tcp://h:1")
    view.saw(sample, 0.0)
    console = Console(width=80, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(picture(view, sample, 80))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 14 + 2 * MOST_ROWS
    assert f"batch {sample.step} of 120" in lines[1]


def test_the_summary_says_what_came_of_it_and_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    plain().summary(report(), Path("runs/a"))
    text = capsys.readouterr().out
    for words in (
        "0.333 before, 0.453 after", "30 batches, 30 policy updates", "246,000 generated: trained 80,000",
        "3 min 40 s, 1,118 tokens/s", "mean 0.83, most 1 batches", "runs/a/report.html",
    ):  # fmt: skip
        assert words in text


def test_the_summary_of_a_run_that_trained_nothing_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = {**dict.fromkeys(TOKENS, 0), "generated": 0}
    plain().summary(report(Record(), tokens=tokens, rollouts={}, seconds=0.0), Path("runs/a"))
    text = capsys.readouterr().out
    assert "not measured before, not measured after" in text
    assert "nothing trained" in text
