from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gvm_stream.config import Config, DataSection, ModelSection, ReasoningGymSection, VerifierSection
from gvm_stream.data.check import Problem, read_answer
from gvm_stream.data.encode import PromptEncoder, end_token_ids
from gvm_stream.data.prepare import ANY_TEXT, is_held_out, main, prepare_prompts
from gvm_stream.data.prompts import Prompt, PromptSet
from gvm_stream.data.store import describe, load_prompt_set, save_prompt_set
from gvm_stream.errors import ConfigError, DataError, ModelError
from gvm_stream.verify.rules import judge
from gvm_stream.verify.verdict import VerdictScored, VerifyItem

SPECIAL = ["<pad>", "<s>", "<end>", "<user>", "<assistant>", "<system>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PAD, BOS, END, USER, ASSISTANT, SYSTEM = range(6)
TRIMMING = TEMPLATE.replace("{{ m.content }}", "{{ m.content | trim }}")

Row = dict[str, object]
Prepare = Callable[..., PromptSet]


def character_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per ASCII character; encoding a text adds the BOS token, as Llama tokenizers do."""
    vocab = {token: n for n, token in enumerate([*SPECIAL, *map(chr, range(128))])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.decoder = decoders.Fuse()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<end>",
        pad_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def characters(text: str) -> list[int]:
    return [len(SPECIAL) + ord(character) for character in text]


def ids(prompt: Prompt) -> list[int]:
    return [int(token) for token in np.frombuffer(prompt.tokens, dtype="<i4")]


def write_jsonl(path: Path, rows: Sequence[Row | str]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Prepare JSON Lines rows, with one held-out row unless the test brings its own."""

    def run(
        rows: Sequence[Row | str],
        heldout: Sequence[Row] = ({"prompt": "held", "answer": "1"},),
        verifier: VerifierSection = ANY_TEXT,
        **keys: object,
    ) -> PromptSet:
        train = write_jsonl(tmp_path / "train.jsonl", rows)
        held = write_jsonl(tmp_path / "heldout.jsonl", heldout) if heldout else ""
        data = msgspec.convert({"train": train, "heldout": held, **keys}, DataSection)
        return prepare_prompts(data, character_tokenizer(), end_tokens=(END,), verifier=verifier)

    return run


def problems(prompt_set: PromptSet) -> list[tuple[int, str]]:
    return [(bad.row, bad.problem) for bad in prompt_set.bad_rows]


# --- encoding ------------------------------------------------------------------------------------------------------


def test_a_chat_prompt_gets_the_template_and_one_bos(prepare: Prepare) -> None:
    prompt = prepare([{"prompt": "1+1", "answer": "2"}]).train[0]
    assert prompt == Prompt(id="train-1", text="1+1", tokens=prompt.tokens, answer="2")
    assert ids(prompt) == [BOS, USER, *characters("1+1"), ASSISTANT]
    messages = [{"role": "user", "content": "1+1"}]
    whole = character_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids(prompt) == whole


def test_a_raw_prompt_gets_one_bos_and_no_template(prepare: Prepare) -> None:
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "<s>1", "answer": "2"}]
    one, bos_as_text = prepare(rows, format="raw").train
    assert ids(one) == [BOS, *characters("1+1")]
    assert ids(bos_as_text) == [BOS, *characters("<s>1")]


def test_the_system_message_comes_first_unless_the_row_has_its_own(prepare: Prepare) -> None:
    own: list[Row] = [{"role": "system", "content": "x"}, {"role": "user", "content": "b"}]
    one, two = prepare([{"prompt": "a", "answer": "1"}, {"prompt": own, "answer": "1"}], system="s").train
    assert ids(one) == [BOS, SYSTEM, *characters("s"), USER, *characters("a"), ASSISTANT]
    assert ids(two) == [BOS, SYSTEM, *characters("x"), USER, *characters("b"), ASSISTANT]
    assert (one.text, two.text) == ("a", "system: x\n\nuser: b")


def test_special_token_text_in_a_prompt_is_plain_text() -> None:
    expected = [BOS, USER, *characters("a<end>b"), ASSISTANT]
    assert (
        PromptEncoder(character_tokenizer(), DataSection()).encode([{"role": "user", "content": "a<end>b"}]) == expected
    )


def test_special_token_text_that_a_template_changes_is_refused() -> None:
    found = PromptEncoder(character_tokenizer(TRIMMING), DataSection()).encode([{"role": "user", "content": " <end>"}])
    assert isinstance(found, Problem)
    assert found.problem == "special_token_text"
    assert "'<end>'" in found.detail


def test_what_a_chat_template_refuses_is_a_bad_row() -> None:
    template = "{{ raise_exception('no ' + messages[0].role) }}"
    found = PromptEncoder(character_tokenizer(template), DataSection()).encode([{"role": "user", "content": "a"}])
    assert found == Problem("template_refused", "the chat template says: no user")


def test_chat_without_a_template_names_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r'use data\.format = "raw"'):
        PromptEncoder(character_tokenizer(None), DataSection())


@pytest.mark.parametrize(("configured", "expected"), [(7, (7, END)), ([7, END, 8], (7, END, 8)), (None, (END,))])
def test_end_tokens_are_those_of_the_generation_config_and_the_tokenizer(
    tmp_path: Path, configured: object, expected: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": configured}))
    assert end_token_ids(character_tokenizer(), str(tmp_path)) == expected


def test_a_model_need_not_have_a_generation_config_but_it_must_be_readable(tmp_path: Path) -> None:
    assert end_token_ids(character_tokenizer(), str(tmp_path)) == (END,)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        end_token_ids(character_tokenizer(), str(tmp_path))


# --- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("a ", "a"),
        (3, "3"),
        (3.0, "3"),
        (-0.5, "-0.5"),
        (10**30, "1" + 30 * "0"),
        (1e-9, "1e-09"),
        (1e17, "1" + 17 * "0"),
    ],
)
def test_texts_and_numbers_are_gold_answers(gold: object, answer: str) -> None:
    assert read_answer(gold) == answer


@pytest.mark.parametrize("gold", [None, True, False, "", " \n", float("nan"), float("inf")])
def test_what_says_nothing_is_a_missing_answer(gold: object) -> None:
    found = read_answer(gold)
    assert isinstance(found, Problem)
    assert found.problem == "missing_answer"


def test_every_refused_row_is_reported_with_its_number_and_the_rest_is_used(prepare: Prepare) -> None:
    rows: list[Row | str] = [
        {"prompt": "good", "answer": 1},
        {"prompt": "no answer"},
        {"prompt": "null answer", "answer": None},
        {"prompt": "nan", "answer": float("nan")},
        {"prompt": "", "answer": "1"},
        {"prompt": " \n", "answer": "1"},
        {"prompt": None, "answer": "1"},
        {"prompt": "x" * 38, "answer": "1"},
        {"prompt": "x" * 37, "answer": "1"},
        {"prompt": 5, "answer": "1"},
        {"prompt": "list", "answer": ["1"]},
        '{"prompt": "half \\ud800", "answer": "1"}',
        {"prompt": [], "answer": "1"},
        {"prompt": [{"role": "user"}], "answer": "1"},
        {"prompt": [{"role": "<end>", "content": "a"}], "answer": "1"},
        {"prompt": "nul \0 {x} %s", "answer": "1"},
        {"prompt": "2020-01-01", "answer": "2020-01-01"},
    ]
    prompt_set = prepare(rows, max_prompt_tokens=40)
    assert [prompt.id for prompt in prompt_set.train] == ["train-1", "train-9", "train-16", "train-17"]
    assert prompt_set.train[3].answer == "2020-01-01"
    assert ids(prompt_set.train[2]) == [BOS, USER, *characters("nul \0 {x} %s"), ASSISTANT]
    assert problems(prompt_set) == [
        *[(row, "missing_answer") for row in (2, 3, 4)],
        *[(row, "empty_prompt") for row in (5, 6, 7)],
        (8, "too_long"),
        *[(row, "not_text") for row in (10, 11, 12)],
        (13, "empty_prompt"),
        (14, "not_text"),
        (15, "not_text"),
    ]
    assert prompt_set.bad_rows[6].detail == "41 tokens, data.max_prompt_tokens = 40"


NUMERIC = VerifierSection(kind="numeric")
NAMED: list[Row] = [{"prompt": "held", "answer": "1", "verifier": None}]
UNREADABLE: list[Row] = [
    {"prompt": p, "answer": a} for p, a in (("a", "4"), ("b", "four"), ("c", 5), ("d", "see solution"))
]


def test_golds_that_the_verifier_cannot_read_are_left_out_or_refused(prepare: Prepare) -> None:
    prompt_set = prepare(UNREADABLE, verifier=NUMERIC)
    assert [prompt.answer for prompt in prompt_set.train] == ["4", "5"]
    assert problems(prompt_set) == [(2, "unreadable_gold"), (4, "unreadable_gold")]
    assert prompt_set.bad_rows[0].detail == "numeric: 'four' is not a number"
    assert problems(prepare(UNREADABLE)) == [(4, "unreadable_gold")]
    strict = VerifierSection(kind="numeric", bad_golds="error")
    with pytest.raises(DataError, match=r'bad_golds = "error", and 2 train rows .*, unreadable_gold: rows 2, 4 \('):
        prepare(UNREADABLE, verifier=strict)


def test_a_row_may_name_its_verifier(prepare: Prepare) -> None:
    rows: list[Row] = [
        {"prompt": "a", "answer": "4", "verifier": None},
        {"prompt": "b", "answer": "B", "verifier": "choice"},
        {"prompt": "c", "answer": "four", "verifier": " exact "},
        {"prompt": "d", "answer": "four", "verifier": ""},
        {"prompt": "e", "answer": "4", "verifier": "nummeric"},
        {"prompt": "f", "answer": "4", "verifier": 5},
    ]
    prompt_set = prepare(rows, NAMED, verifier=NUMERIC, verifier_column="verifier")
    assert [(prompt.text, prompt.verifier) for prompt in prompt_set.train] == [
        ("a", ""),
        ("b", "choice"),
        ("c", "exact"),
    ]
    assert problems(prompt_set) == [(4, "unreadable_gold"), (5, "unknown_verifier"), (6, "unknown_verifier")]
    assert prompt_set.bad_rows[1].detail == "there is no verifier 'nummeric'; did you mean numeric?"


def test_a_verifier_that_a_row_names_must_be_configured(prepare: Prepare) -> None:
    with pytest.raises(ConfigError, match=r"^verifier\.patterns\.answer is empty"):
        prepare([{"prompt": "a", "answer": "4", "verifier": "regex"}], NAMED, verifier_column="verifier")
    with pytest.raises(DataError, match=r"no column 'verifer'.*did you mean verifier"):
        prepare([{"prompt": "a", "answer": "4", "verifier": "regex"}], NAMED, verifier_column="verifer")


def test_a_list_of_messages_needs_the_chat_format(prepare: Prepare) -> None:
    messages = [{"role": "user", "content": "b"}]
    prompt_set = prepare([{"prompt": "a", "answer": "1"}, {"prompt": messages, "answer": "1"}], format="raw")
    assert problems(prompt_set) == [(2, "not_text")]


REPEATED: list[Row] = [{"prompt": "a", "answer": "3"}, {"prompt": "b", "answer": "1"}, {"prompt": "a", "answer": 3.0}]


def test_duplicates_are_dropped_kept_or_refused(prepare: Prepare) -> None:
    dropped = prepare(REPEATED)
    assert [prompt.id for prompt in dropped.train] == ["train-1", "train-2"]
    assert problems(dropped) == [(3, "duplicate")]
    kept = prepare(REPEATED, duplicates="keep")
    assert [prompt.id for prompt in kept.train] == ["train-1", "train-2", "train-3"]
    with pytest.raises(DataError, match="rows 1 and 3"):
        prepare(REPEATED, duplicates="error")


def test_one_prompt_with_two_answers_is_an_error_that_lists_up_to_five_pairs(prepare: Prepare) -> None:
    rows: list[Row] = [{"prompt": "a", "answer": n} for n in range(8)]
    with pytest.raises(DataError, match=r"different answers in rows 1 and 2, .*, 1 and 6 and 2 more pairs$"):
        prepare(rows, duplicates="keep")


def test_a_held_out_prompt_is_never_trained_on(prepare: Prepare) -> None:
    prompt_set = prepare([{"prompt": "held", "answer": "2"}, {"prompt": "a", "answer": "1"}])
    assert [prompt.text for prompt in prompt_set.train] == ["a"]
    assert problems(prompt_set) == [(1, "heldout_in_train")]
    assert prompt_set.bad_rows[0].detail == "the same prompt as heldout-1"


def test_the_held_out_share_does_not_depend_on_the_order_of_rows(prepare: Prepare) -> None:
    rows: list[Row] = [{"prompt": f"{n}+1", "answer": n + 1} for n in range(200)]
    forward, backward = (prepare(order, heldout=(), heldout_share=0.25) for order in (rows, rows[::-1]))
    held = {prompt.text for prompt in forward.heldout}
    assert held == {prompt.text for prompt in backward.heldout}
    assert held == {f"{n}+1" for n in range(200) if is_held_out(f"{n}+1", 0.25)}
    assert held.isdisjoint(prompt.text for prompt in forward.train)
    assert 30 < len(held) < 70  # 200 / 4 +- 3.3 standard deviations
    assert all(prompt.text == f"{int(prompt.id.removeprefix('heldout-')) - 1}+1" for prompt in forward.heldout)


@given(st.text(), st.floats(0, 0.5), st.floats(0, 0.5))
def test_a_larger_share_holds_out_the_same_prompts_and_more(text: str, share: float, more: float) -> None:
    text = text.encode(errors="replace").decode()
    assert is_held_out(text, share + more) >= is_held_out(text, share)


def test_no_usable_row_says_why(prepare: Prepare) -> None:
    with pytest.raises(DataError, match=r"no usable training row: 2 train rows left out, missing_answer: rows 1, 2 "):
        prepare([{"prompt": "a", "answer": ""}, {"prompt": "b", "answer": None}])
    with pytest.raises(DataError, match="no usable held-out row: 1 heldout row left out, empty_prompt: row 1 "):
        prepare([{"prompt": "a", "answer": "1"}], heldout=[{"prompt": "", "answer": "1"}])
    with pytest.raises(DataError, match=r"heldout_share = 0.001.*too few rows"):
        prepare([{"prompt": "a", "answer": "1"}], heldout=(), heldout_share=0.001)


def test_the_description_counts_problems_and_names_the_first_rows(prepare: Prepare) -> None:
    rows: list[Row] = [{"prompt": "good", "answer": 1}, *(Row(prompt=f"bad {n}", answer="") for n in range(7))]
    assert describe(prepare(rows)) == (
        "1 training prompts, 1 held-out prompts\n"
        "7 train rows left out, missing_answer: rows 2, 3, 4, 5, 6, ... (the answer is empty or blank)"
    )


# --- sources -------------------------------------------------------------------------------------------------------


def test_jsonl_parquet_and_saved_datasets_hold_the_same_prompts(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    table = Dataset.from_dict({"q": ["1+1", "1+2"], "a": [2, 3]})
    held = Dataset.from_dict({"q": ["2+2"], "a": [4]})
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, rows in (("train", table), ("test", held)):
        rows.to_parquet(folder / f"{name}.parquet")
        write_jsonl(tmp_path / f"{name}.jsonl", [dict(row) for row in rows])
    DatasetDict({"train": table, "test": held}).save_to_disk(tmp_path / "saved")
    sources = [
        {"source": "jsonl", "train": tmp_path / "train.jsonl", "heldout": tmp_path / "test.jsonl"},
        {"source": "parquet", "train": folder / "train.parquet", "heldout": folder / "test.parquet"},
        {"source": "hub", "train": folder, "heldout": folder},
        {"source": "hub", "train": tmp_path / "saved", "heldout": tmp_path / "saved"},
    ]
    found = []
    for source in sources:
        keys = {key: str(value) for key, value in source.items()}
        data = msgspec.convert({**keys, "prompt_column": "q", "answer_column": "a"}, DataSection)
        found.append(prepare_prompts(data, character_tokenizer(), end_tokens=()))
    assert [prompt.text for prompt in found[0].train + found[0].heldout] == ["1+1", "1+2", "2+2"]
    assert found == found[:1] * len(sources)


def test_a_wrong_column_names_the_columns_there_are_and_the_nearest(prepare: Prepare) -> None:
    with pytest.raises(DataError, match=r"no column 'anwser'.* columns are prompt, answer; did you mean answer\?"):
        prepare([{"prompt": "a", "answer": "1"}], answer_column="anwser")


@pytest.mark.parametrize(
    ("line", "message"), [('{"prompt": ', "line 2: not a JSON object"), ("[1]", "line 2: not a JSON object but")]
)
def test_a_broken_json_line_is_named(prepare: Prepare, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare([{"prompt": "a", "answer": "1"}, line])


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_a_missing_file_is_named_with_its_key(tmp_path: Path, source: str) -> None:
    missing = str(tmp_path / "nothing.here")
    data = msgspec.convert({"source": source, "train": missing}, DataSection)
    with pytest.raises(DataError, match=f"data.train = '{missing}' does not exist"):
        prepare_prompts(data, character_tokenizer(), end_tokens=())


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    data = DataSection(source="parquet", train=write_jsonl(tmp_path / "rows.parquet", [{"prompt": "a"}]))
    with pytest.raises(DataError, match=r'cannot be read with data.source = "parquet"'):
        prepare_prompts(data, character_tokenizer(), end_tokens=())


def gym(**keys: object) -> DataSection:
    section = msgspec.convert({"task": "chain_sum", "size": 6, "heldout_size": 3, **keys}, ReasoningGymSection)
    return DataSection(source="reasoning_gym", reasoning_gym=section)


def test_reasoning_gym_held_out_items_use_the_seeds_after_the_training_ones() -> None:
    first = prepare_prompts(gym(seed=5), character_tokenizer(), end_tokens=())
    shifted = prepare_prompts(gym(seed=11), character_tokenizer(), end_tokens=())
    assert (len(first.train), len(first.heldout)) == (6, 3)
    assert [prompt.text for prompt in first.heldout] == [prompt.text for prompt in shifted.train[:3]]


def test_reasoning_gym_answers_are_whole_entries_for_the_verifier_of_that_name() -> None:
    (plain, *_), (whole, *_) = (
        prepare_prompts(gym(), character_tokenizer(), end_tokens=(), verifier=VerifierSection(kind=kind)).train
        for kind in ("exact", "reasoning_gym")
    )
    gold = json.loads(whole.answer)
    assert (gold["task"], gold["options"]) == ("chain_sum", {})
    assert (gold["entry"]["question"], gold["entry"]["answer"]) == (plain.text, plain.answer)
    verdict = judge(VerifierSection(kind="reasoning_gym"), VerifyItem(answer=whole.answer, response=plain.answer))
    assert isinstance(verdict, VerdictScored)
    assert verdict.reward == 1


def test_one_question_of_a_task_may_have_several_good_answers() -> None:
    few = gym(size=40, heldout_size=1, options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    verifier = VerifierSection(kind="reasoning_gym")
    prompt_set = prepare_prompts(few, character_tokenizer(), end_tokens=(), verifier=verifier)
    assert {bad.problem for bad in prompt_set.bad_rows} <= {"duplicate", "heldout_in_train"}
    assert len(prompt_set.train) + len(prompt_set.bad_rows) == 40


def test_reasoning_gym_tasks_and_options_are_checked() -> None:
    with pytest.raises(DataError, match=r"'chain_summ' is not a task of reasoning-gym; did you mean chain_sum"):
        prepare_prompts(gym(task="chain_summ"), character_tokenizer(), end_tokens=())
    with pytest.raises(DataError, match=r"does not take .*nope"):
        prepare_prompts(gym(options={"nope": 1}), character_tokenizer(), end_tokens=())


def test_a_missing_reasoning_gym_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"gvm-stream\[reasoning-gym\]"):
        prepare_prompts(gym(), character_tokenizer(), end_tokens=())


# --- the process ---------------------------------------------------------------------------------------------------


def test_a_prompt_set_file_reads_back_and_a_damaged_one_is_an_error(prepare: Prepare, tmp_path: Path) -> None:
    prompt_set, path = prepare([{"prompt": "a", "answer": "1"}]), tmp_path / "prompts"
    save_prompt_set(prompt_set, path)
    assert load_prompt_set(path) == prompt_set
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="cannot be read"):
        load_prompt_set(path)


def arguments(config: Config, folder: Path) -> list[str]:
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return [str(folder / "config.json"), str(folder / "out")]


def test_the_process_writes_the_prompts_and_leaves_nothing_in_caches(tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerBase = character_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"{n}+1", "answer": n + 1} for n in range(256)])
    config = Config(model=ModelSection(path=str(tmp_path / "model")), data=DataSection(train=train))
    command = [sys.executable, "-m", "gvm_stream.data.prepare", *arguments(config, tmp_path)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_prompt_set(tmp_path / "out") == prepare_prompts(config.data, tokenizer, end_tokens=(END,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model", "out", "train.jsonl"]


def test_the_allocator_side_imports_no_tokenizer_library() -> None:
    code = (
        "import sys, gvm_stream.data.store as s; sys.exit('transformers' in sys.modules or 'datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_error_is_one_sentence_on_stderr_and_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("DATASETS_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(variable, "critical")
    model, missing = tmp_path / "model", str(tmp_path / "nothing.jsonl")
    config = Config(model=ModelSection(path=str(model)), data=DataSection(train=missing))
    model.mkdir()
    assert main(arguments(config, tmp_path)) == ModelError.exit_status
    no_model = capsys.readouterr().err
    assert no_model.startswith(f"model.path = '{model}': no tokenizer can be loaded")
    assert no_model.count("\n") == 1

    character_tokenizer().save_pretrained(model)
    assert main(arguments(config, tmp_path)) == DataError.exit_status
    no_data = capsys.readouterr().err
    assert no_data == f"data.train = '{missing}' does not exist, or holds no data for data.source = \"jsonl\"\n"

    assert main(["config.json"]) == ConfigError.exit_status
    assert capsys.readouterr().err.endswith("got 1 arguments\n")
