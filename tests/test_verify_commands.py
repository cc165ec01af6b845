"""`gvm-stream verify check | one | bench`: what people and scripts get from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from gvm_stream.cli import main
from gvm_stream.verify.cases import Case, Judged, count
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable
from tests.test_cli import error_of, gvm

Capture = pytest.CaptureFixture[str]


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def case(name: str, gold: str, output: str, expected: bool, **rest: object) -> dict[str, object]:
    return {"id": name, "gold": gold, "output": output, "expected": expected, **rest}


CASES = (
    case("right-accept", "4", "4", True, category="plain"),
    case("right-reject", "4", "5", False, category="plain"),
    case("wrong-accept", "4", "4", False, category="odd", source="elsewhere"),
    case("wrong-reject", "4", "5", True, category="odd", policy=True),
    case("no-gold-wanted", "four", "4", True, category="odd"),
    case("no-gold", "four", "4", False),
)


def test_bench_counts_are_one_object_and_an_unscorable_case_is_not_accepted(tmp_path: Path, capsys: Capture) -> None:
    file = write_lines(tmp_path / "cases.jsonl", *CASES)
    assert main(["verify", "bench", str(file), "--kind", "numeric", "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "total": 6,
        "right": 3,
        "wrong_accepts": 1,
        "wrong_rejects": 2,
        "unscorable": 2,
        "wrong_ids": ["wrong-accept", "wrong-reject", "no-gold-wanted"],
        "non_policy": {
            "total": 5,
            "right": 3,
            "wrong_accepts": 1,
            "wrong_rejects": 1,
            "unscorable": 2,
            "wrong_ids": ["wrong-accept", "no-gold-wanted"],
        },
    }


def test_bench_shows_the_confusion_table_and_every_wrong_case(tmp_path: Path, capsys: Capture) -> None:
    file = write_lines(tmp_path / "cases.jsonl", *CASES)
    assert main(["verify", "bench", str(file), "--kind=numeric", "--by-category", "--verifier.workers=1"]) == 0
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert cells == [
        ["accepted", "1", "1", "1"],
        ["rejected", "1", "1", "1"],
        ["-", "1", "1", "0", "0", "1"],
        ["odd", "3", "0", "1", "2", "1"],
        ["plain", "2", "2", "0", "0", "0"],
    ]
    assert "wrong-accept is accepted: gold '4', extracted '4'" in printed
    assert "wrong-reject (policy) is rejected: gold '4', extracted '5'" in printed
    assert "no-gold-wanted should be accepted, unscorable: unreadable gold" in printed
    assert "no-gold should" not in printed
    assert "without policy cases: 3 of 5 right, 1 wrong accepts, 1 wrong rejects, 2 unscorable" in printed


@pytest.mark.parametrize(
    ("tolerance", "right"), [("--verifier.numeric.tolerance=0.1", 1), ("--verifier.numeric.tolerance=0", 0)]
)
def test_dotted_overrides_reach_the_verifier(tmp_path: Path, capsys: Capture, tolerance: str, right: int) -> None:
    file = write_lines(tmp_path / "cases.jsonl", case("near", "10", "10.5", True))
    assert main(["verify", "bench", str(file), "--kind=numeric", "--workers=1", "--json", tolerance]) == 0
    assert json.loads(capsys.readouterr().out)["right"] == right


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b"{", "line 2: Input data was truncated"),
        (b"[1]", "line 2: Expected `object`, got `array`"),
        (b'{"id": "a", "gold": "1", "output": "1"}', "line 2: Object missing required field `expected`"),
        (b'{"id": "a", "gold": 1, "output": "1", "expected": true}', "line 2: Expected `str`, got `int` - at `$.gold`"),
        (b'{"id": "a", "gold": "\xff", "output": "1", "expected": true}', "line 2: "),
        (b'{"x": ' + b"[" * 100_000, "line 2: "),
    ],
)
def test_a_malformed_case_is_one_sentence_with_its_line(
    tmp_path: Path, capsys: Capture, line: bytes, part: str
) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_bytes(json.dumps(CASES[0]).encode() + b"\n" + line + b"\n")
    assert main(["verify", "bench", str(file)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert part in sentence
    assert "cases.jsonl" in sentence


@pytest.mark.parametrize(("content", "part"), [(None, "No such file"), ("\n\n", "holds no case")])
def test_a_case_file_without_cases_is_one_sentence(
    tmp_path: Path, capsys: Capture, content: str | None, part: str
) -> None:
    file = tmp_path / "cases.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["verify", "bench", str(file)]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verdict", "accepted"),
    [
        (VerdictScored(1.0), True),
        (VerdictScored(0.5), True),
        (VerdictScored(0.49), False),
        (VerdictScored(-1.0), False),
        (VerdictUnscorable("verifier timeout"), False),
    ],
)
def test_accepted_is_a_reward_of_at_least_one_half(verdict: Verdict, accepted: bool) -> None:
    judged = Judged(Case(id="a", gold="1", output="1", expected=True), verdict)
    assert judged.accepted == accepted
    counts = count([judged])
    assert (counts.right, counts.wrong_rejects, counts.wrong_accepts) == (accepted, not accepted, 0)


def test_one_explains_a_verdict(capsys: Capture) -> None:
    assert (
        main(["verify", "one", "--gold=4", "--answer", "#### 4.0", "--kind=exact", "--verifier.answer_marker=####"])
        == 0
    )
    assert capsys.readouterr().out == (
        "reward         0\nextracted      4.0\ncompared with  4\nrule           different texts\n"
    )


def test_one_takes_texts_that_begin_with_a_dash_and_the_truncation(capsys: Capture) -> None:
    arguments = ["verify", "one", "--gold=-x", "--answer=-x", "--kind=exact", "--json"]
    assert main(arguments) == 0
    assert main([*arguments, "--truncated"]) == 0
    verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(verdict["type"], verdict["reward"]) for verdict in verdicts] == [("scored", 1.0), ("scored", 0.0)]


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options for a verifier that never comes to an end."""
    (tmp_path / "endless.py").write_text("def reward(answer, response):\n    while True:\n        pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    return ["--kind=python", "--verifier.function=endless:reward"]


def test_a_verdict_without_end_ends_in_a_sentence(endless: list[str], capsys: Capture) -> None:
    assert main(["verify", "one", "--gold=7", "--answer=7", *endless, "--verifier.timeout_s=0.5"]) == 0
    assert capsys.readouterr().out == "unscorable     verifier timeout\n"


def test_bench_ends_each_case_at_its_limit(tmp_path: Path, endless: list[str], capsys: Capture) -> None:
    file = write_lines(tmp_path / "cases.jsonl", case("no", "7", "7", False), case("yes", "7", "7", True))
    assert main(["verify", "bench", str(file), *endless, "--timeout-s=0.5", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["right"], counts["unscorable"], counts["wrong_ids"]) == (1, 2, ["yes"])


def test_a_named_verifier_replaces_the_weighted_ones_of_a_configuration(tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[model]\npath = "m"\n[data]\ntrain = "t"\n[verifier]\nkind = "exact"\nanswer_marker = "####"\n'
        "weights = { exact = 3.0 }\n"
    )
    arguments = ["verify", "one", "--config", str(config), "--gold=4.0", "--json"]
    assert main([*arguments, "--answer=#### 4.0"]) == 0
    assert main([*arguments, "--answer=#### 4", "--kind=numeric"]) == 0
    assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [3.0, 1.0]


ROWS: tuple[dict[str, object], ...] = (
    {"prompt": "one", "answer": "1"},
    {"prompt": "two", "answer": "two"},
    {"prompt": "three", "answer": ""},
    {"prompt": "one", "answer": "1"},
    {"prompt": "one", "answer": "2"},
    {"prompt": " ", "answer": "1"},
)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_check_names_every_row_that_cannot_be_used(tmp_path: Path, capsys: Capture, suffix: str) -> None:
    file = tmp_path / f"data{suffix}"
    if suffix == ".jsonl":
        write_lines(file, *ROWS)
    else:
        Dataset.from_list(list(ROWS)).to_parquet(file)
    assert main(["verify", "check", str(file), "--kind=numeric"]) == 1
    *refused, last = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in refused] == [
        "train row 2  unreadable_gold",
        "train row 3  missing_answer",
        "train row 4  duplicate",
        "train row 5  conflict",
        "train row 6  empty_prompt",
    ]
    assert last == "6 rows, 1 usable, 1 conflict, 1 duplicate, 1 empty_prompt, 1 missing_answer, 1 unreadable_gold"


def test_check_is_content_with_usable_rows_whatever_their_columns_are_called(tmp_path: Path, capsys: Capture) -> None:
    file = write_lines(tmp_path / "data.jsonl", {"question": "one", "gold": 1}, {"question": "two", "gold": 2})
    columns = ["--prompt-column", "question", "--answer-column", "gold"]
    assert main(["verify", "check", str(file), "--kind=numeric", *columns]) == 0
    assert capsys.readouterr().out == "2 rows, 2 usable\n"


def test_check_of_a_configuration_looks_at_both_splits_and_allows_the_duplicates_it_allows(
    tmp_path: Path, capsys: Capture
) -> None:
    write_lines(tmp_path / "train.jsonl", *ROWS[:1] * 2, {"prompt": "held out", "answer": "3"})
    write_lines(tmp_path / "heldout.jsonl", {"prompt": "held out", "answer": "3"}, {"prompt": "x", "answer": "y"})
    config = tmp_path / "run.toml"
    config.write_text(
        '[model]\npath = "m"\n[data]\ntrain = "train.jsonl"\nheldout = "heldout.jsonl"\nduplicates = "keep"\n'
        '[verifier]\nkind = "numeric"\n'
    )
    assert main(["verify", "check", "--config", str(config)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed[:-1]] == [
        "heldout row 2  unreadable_gold",
        "train row 3  heldout_in_train",
    ]
    assert printed[-1] == "5 rows, 3 usable, 1 heldout_in_train, 1 unreadable_gold"
    assert main(["verify", "check", str(config), "--kind", "exact"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "5 rows, 4 usable, 1 heldout_in_train"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["give either a data file, or --config FILE"]),
        (("data.jsonl", "--config", "run.toml"), ["give either a data file, or --config FILE"]),
        (("data.csv",), ["'data.csv'", ".jsonl or .parquet", "--config"]),
        (("missing.jsonl",), ["missing.jsonl", "does not exist"]),
        (("data.jsonl", "--answer-column=gold"), ["no column 'gold'", "answer, prompt"]),
        (("data.jsonl", "--kind=mat"), ['verifier.kind = "mat" in the command line', '"math"']),
        (("data.jsonl", "--verifier.kinds=math"), ['unknown key "verifier.kinds"', 'did you mean "verifier.kind"?']),
    ],
)
def test_a_wrong_data_set_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    arguments: tuple[str, ...],
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "data.jsonl", {"answer": "1", "prompt": "one"})
    assert main(["verify", "check", *arguments]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    for part in parts:
        assert part in sentence


@pytest.mark.parametrize("verb", ["check", "one", "bench"])
def test_help_of_every_command_says_how_keys_are_overridden(verb: str) -> None:
    done = gvm("verify", verb, "--help")
    assert done.returncode == 0
    assert "--section.key=value" in done.stdout


def test_a_wrong_command_line_is_one_sentence() -> None:
    assert "gvm-stream verify one --help" in error_of(gvm("verify", "one", "--gold=1"), 2)
