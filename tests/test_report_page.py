"""`gvm-stream report`: what it concludes, what it draws, and the page in a real browser."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.record import Record
from gvm_stream.cli import main
from gvm_stream.report import charts
from gvm_stream.report.charts import Series
from gvm_stream.report.objective import POINTS, implied
from gvm_stream.report.page import render
from gvm_stream.report.verdicts import allocation_helps, bottleneck, learned, sound
from tests.browser import browser
from tests.report_samples import ALLOCATION, CONFIG, GAIN, TOKENS, eval_row, record, report, step_row

# --- verdicts ---


def evaluated(*accuracies: float, error: float = 0.014) -> dict[str, Any]:
    rows = [eval_row(10 * i, accuracy, error) for i, accuracy in enumerate(accuracies)]
    return report(Record(steps=record().steps, evaluations=rows))


@pytest.mark.parametrize(
    ("accuracies", "answer"),
    [
        ((0.3, 0.4), "Yes"),
        ((0.4, 0.3), "It got worse"),
        ((0.3, 0.32), "Cannot be told"),
        ((0.3, math.nan), "Cannot be told"),
        ((0.3,), "Cannot be told"),
        ((), "Cannot be told"),
    ],
)
def test_it_has_learned_only_where_the_interval_says_so(accuracies: tuple[float, ...], answer: str) -> None:
    assert learned(evaluated(*accuracies)).answer == answer


def test_an_interrupted_run_is_judged_by_its_last_evaluation() -> None:
    text = learned(evaluated(0.3, 0.35, 0.4, math.nan)).text
    assert "from 0.300 to 0.400 in 20 batches: +0.100 (95 % interval +0.061 to +0.139" in text


@pytest.mark.parametrize(
    ("gain", "answer"),
    [
        ({"gain": 1.3, "low": 1.1, "high": 1.6}, "Yes"),
        ({"gain": 0.7, "low": 0.5, "high": 0.9}, "No, it costs"),
        ({"gain": 1.0, "low": 0.9, "high": 1.1}, "Cannot be told"),
        ({"gain": None, "low": None, "high": None}, "Not measured"),
    ],
)
def test_allocation_helps_only_where_the_interval_of_its_gain_says_so(gain: dict[str, float], answer: str) -> None:
    verdict = allocation_helps(report(allocation={**ALLOCATION, "gain_over_uniform": {**GAIN, **gain}}))
    assert verdict.answer == answer
    if gain["gain"] is not None:
        assert f"{gain['low']:.2f} to {gain['high']:.2f}" in verdict.text


def test_uniform_is_not_compared_with_itself() -> None:
    assert allocation_helps(report(allocation={**ALLOCATION, "policy": "uniform"})).answer == "Not in use"


@pytest.mark.parametrize(
    ("waited", "verifier", "answer"),
    [
        (0.02, None, "The trainer"),
        (0.7, None, "Generation"),
        (0.25, 0.1, "Nothing alone"),
        (0.7, 0.5, "Verification"),
        (None, None, "Cannot be told"),
    ],
)
def test_the_bottleneck_is_who_was_waited_for(waited: float | None, verifier: float | None, answer: str) -> None:
    seen = {**report(), "learner_wait_share": waited, "producer_shares": {"verifier": verifier}}
    verdict = bottleneck(seen)
    assert verdict.answer == answer
    assert bool(verdict.advice) == (answer not in ("Nothing alone", "Cannot be told"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"outcome": "failed", "reason": "no progress for 300 s"}, "The run failed: no progress for 300 s."),
        ({"conserved": False}, "does not add up"),
        ({"engine_tokens_unaccounted": 7}, "7 tokens"),
        ({"history": Record(steps=[step_row(0, effective_sample_size=0.2)])}, "fell to 0.20"),
        (
            {"history": Record(steps=[msgspec.structs.replace(step_row(0), trained=False)])},
            "1 of 1 batches were skipped",
        ),
    ],
)
def test_whatever_makes_a_run_unsound_is_said(changes: dict[str, Any], said: str) -> None:
    assert sound(report()).answer == "Yes"
    verdict = sound(report(**changes))
    assert verdict.answer == "Not quite"
    assert said in verdict.text


# --- objective ---


def objective_at(p: float, design: str = "planned", **allocation: Any) -> float:  # noqa: ANN401
    section = msgspec.structs.replace(CONFIG.allocation, **allocation)
    values, _ = implied(msgspec.structs.replace(CONFIG, allocation=section), design)
    return values[int(abs(POINTS - p).argmin())]


@pytest.mark.parametrize("p", [0.02, 0.5, 0.98])
@pytest.mark.parametrize("policy", ["uniform", "neyman", "gvm", "knapsack"])
def test_planned_policies_follow_the_mean_reward(policy: str, p: float) -> None:
    assert objective_at(p, policy=policy) == 1


def test_published_methods_show_what_their_docstrings_say() -> None:
    at = [objective_at(p, "reference", policy="reinforce_ada_balance") for p in (0.02, 0.1, 0.5)]
    assert at == pytest.approx([7.2, 4.0, 1.0], rel=0.02)
    assert objective_at(0.1, "sequential", policy="reinforce_ada_balance") == 1


def test_raft_follows_log_p_as_far_as_its_rollouts_find_a_success() -> None:
    assert objective_at(0.5, coefficient="raft") == pytest.approx((1 - 0.5**8) / 0.5)


def test_grpo_favours_both_ends_and_unknown_advantages_are_called_unknown() -> None:
    def of(advantage: str) -> list[float]:
        learner = msgspec.structs.replace(CONFIG.learner, advantage=advantage)
        return list(implied(msgspec.structs.replace(CONFIG, learner=learner), "planned").values)

    curve = of("grpo")
    assert curve[4] > 1.2 * curve[24]
    assert curve[4] == pytest.approx(curve[-5])
    assert of("rloo") == [1] * len(POINTS)
    assert of("bnpo") == []


# --- charts ---

floats = st.floats(allow_nan=True, allow_infinity=False, width=32)


@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=400), st.booleans())
def test_any_numbers_make_a_chart_within_its_frame(pairs: list[tuple[float, float]], errors: bool) -> None:
    y, error = [a for a, _ in pairs], [abs(b) for _, b in pairs]
    chart = charts.line_chart("t", "x", list(range(len(y))), [Series("y", y, error if errors else ())])
    assert len(chart.rows) <= charts.MOST_ROWS
    if not any(map(math.isfinite, y)):
        assert (chart.svg, chart.note) == ("", "Nothing was measured.")
        return
    assert "nan" not in chart.svg
    svg = ElementTree.fromstring(chart.svg)
    dots = svg.findall("circle")
    assert 0 < len(dots) <= charts.MOST_POINTS
    assert all(
        0 <= float(dot.attrib["cx"]) <= charts.WIDTH and 0 <= float(dot.attrib["cy"]) <= charts.HEIGHT for dot in dots
    )


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_enclose_the_range(low: float, span: float) -> None:
    high = low + span
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return
    found = charts.ticks(low, high)
    assert 2 <= len(found) <= 8
    assert found == sorted(found)
    assert found[0] <= low + 1e-6 * span
    assert found[-1] >= high - 1e-6 * span


def test_a_gap_in_the_data_is_a_gap_in_the_line() -> None:
    chart = charts.line_chart("t", "x", [0, 1, 2, 3], [Series("y", [1, 2, math.nan, 3])])
    path = ElementTree.fromstring(chart.svg).find("path")
    assert path is not None
    assert re.sub("[^ML]", "", path.attrib["d"]) == "MLM"


def test_long_curves_are_means_of_neighbours_and_say_so() -> None:
    chart = charts.line_chart("t", "x", list(range(1000)), [Series("y", [i % 2 for i in range(1000)])], note="N.")
    assert chart.note == "N. A point is the mean of 7."


# --- the page ---


class Outline(HTMLParser):
    """Which elements are open, and what could make a request."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


NOTHING = {**dict.fromkeys(TOKENS, 0), "generated": 0}
LOST = dict.fromkeys(
    ("loss", "grad_norm", "mean_lag", "mismatch", "effective_sample_size", "seconds", "padding_share"), math.nan
)
RUNS = {
    "finished": report(),
    "a single batch": report(record(1)),
    "interrupted before the first batch": report(
        Record(), outcome="interrupted", tokens=NOTHING, rollouts={}, seconds=0.0
    ),
    "without evaluations": report(Record(steps=record().steps)),
    "not a number anywhere": report(
        Record(steps=[step_row(i, **LOST) for i in range(3)], evaluations=[eval_row(0, math.nan, math.nan)]),
        allocation={**ALLOCATION, "price": None, "by_acceptance": []},
    ),
    "long": report(record(2000)),
}


@pytest.mark.parametrize("content", RUNS.values(), ids=RUNS.keys())
def test_every_run_has_a_page_that_is_whole_and_needs_nothing_else(content: dict[str, Any]) -> None:
    page = render(content, "a run")
    outline = Outline(page)
    assert outline.open == []
    assert outline.links == ["data:,"]
    assert "script" not in outline.tags
    assert not re.search(r"\bnan\b|None|Undefined", page)
    assert len(page) < 1_000_000


def test_all_that_was_asked_for_is_on_the_page() -> None:
    page = render(report(), "a run")
    for words in (
        "Did it learn?", "Does allocation help?", "What held it up?", "Was it sound?", "Where the tokens went",
        "Held-out accuracy by tokens", "Held-out accuracy by updates", "Loss", "Gradient norm", "Effective sample size",
        "Mismatch", "Lag", "Gradient variance", "Noise scale", "Rollouts of a visit by difficulty", "Implied objective",
        "Faults on the way", "attempts whose process died or got stuck", "keys are not as by default",
    ):  # fmt: skip
        assert words in page


def test_shares_of_the_token_account_sum_to_all_of_it() -> None:
    page = render(report(), "a run")
    shares = [float(share) for share in re.findall(r"<td>([\d.]+) %</td>", page)]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_texts_of_a_run_are_never_markup() -> None:
    page = render(report(outcome="failed", reason="<script>alert(1)</script>"), "<b>&")
    assert "script" not in Outline(page).tags
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;&amp;" in page


def test_the_environment_is_shown() -> None:
    page = render(report(), "a run")
    assert f"<td>packages.trio</td><td>{trio.__version__}</td>" in page


def test_settings_that_were_changed_come_first() -> None:
    config = msgspec.to_builtins(msgspec.structs.replace(CONFIG, run=msgspec.structs.replace(CONFIG.run, seed=7)))
    page = render(report(config=config), "a run")
    rows = re.findall(r"<tr( class=\"changed\")?><td>([a-z_.]+)</td><td>(.*?)</td><td>(.*?)</td></tr>", page)
    changed = [(key, value, default) for mark, key, value, default in rows if mark]
    assert ("run.seed", "7", "0") in changed
    assert ("model.path", "model", "") in changed
    assert len(changed) < 10 < len(rows)
    assert [key for _, key, _, _ in rows][: len(changed)] == [key for key, _, _ in changed]


# --- the command ---


def folder_with(tmp_path: Path, content: str | None) -> Path:
    (tmp_path / "config.json").write_text("{}")
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    return tmp_path


def test_the_command_writes_the_page_into_the_run_or_where_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder_with(tmp_path, json.dumps(report()))
    for given_, out in (
        ([], run / "report.html"),
        (["--out", str(tmp_path / "x" / "y.html")], tmp_path / "x" / "y.html"),
    ):
        assert main(["report", str(run), *given_]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        assert out.read_text() == render(report(), tmp_path.name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "it is written when a run ends: watch it with gvm-stream top"),
        ("{", "is not the report of a run: Expecting property name"),
        ("7", "is not the report of a run"),
        ('{"outcome": "finished"}', "it has no tokens, allocation, history, config"),
        (json.dumps({**report(), "config": {"then": 1}}), "is of another version of gvm-stream"),
    ],
)
def test_without_a_usable_report_there_is_one_sentence(
    tmp_path: Path, content: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder_with(tmp_path, content))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_folder_that_is_no_run_and_an_override_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--run.steps=3"]) == 2
    assert "--run.steps=3 has no meaning here" in capsys.readouterr().err


# --- in a browser ---

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
SMALLEST_TEXT = "Math.min(...[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height))"
OUTSIDE = """[...document.querySelectorAll('svg text')].filter(e => {
  const text = e.getBoundingClientRect(), svg = e.closest('svg').getBoundingClientRect();
  return text.left < svg.left || text.right > svg.right || text.top < svg.top || text.bottom > svg.bottom;
}).map(e => e.textContent)"""


def test_the_page_opens_offline_in_light_and_dark_on_desks_and_phones(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render(report(), "a run"))
    looks = {}
    with browser(tmp_path / "profile") as page:
        for width in (1280, 360):
            for dark in (False, True):
                page.open(path, width=width, dark=dark)
                looks[width, dark] = page.screenshot(), page.evaluate(BACKGROUND)
                assert page.evaluate("document.documentElement.scrollWidth") == width
                assert page.evaluate(SMALLEST_TEXT) >= 10
                assert page.evaluate(OUTSIDE) == []
        assert set(page.requests) == {path.as_uri()}
        assert page.complaints == []
    assert looks[1280, False][1] == looks[360, False][1] != looks[1280, True][1]
    assert len({png for png, _ in looks.values()}) == 4
