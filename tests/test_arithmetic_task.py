"""The arithmetic example: the task, and the prompt files and the model that are kept in the repository."""

from __future__ import annotations

import json
import random
import re
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.arithmetic.chains import (
    Chain,
    Row,
    Step,
    careless_demonstration,
    correct_demonstration,
    draw_chain,
    draw_unique,
    is_right,
)
from examples.arithmetic.make import careless_batches, lr_factor
from examples.arithmetic.model import build_tokenizer, prompt_ids, response_ids

FOLDER = Path(__file__).parent.parent / "examples" / "arithmetic"
MODEL = FOLDER / "model"
LINE = re.compile(r"(-?\d+)([-+*])(\d)=(-?\d+)")
BUILT = build_tokenizer()
CHAIN = Chain(7, (Step("+", 5), Step("*", 3), Step("-", 9)))

seeds = st.integers(min_value=0, max_value=2**32).map(random.Random)


def rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def left_to_right(prompt: str) -> list[int]:
    """Running totals of a prompt, by reading its text."""
    totals = [int(prompt[0])]
    assert prompt[-1] == "="
    for operator, digit in re.findall(r"([-+*])(\d)", prompt):
        a, b = totals[-1], int(digit)
        totals.append({"+": a + b, "-": a - b, "*": a * b}[operator])
    return totals


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(MODEL)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(MODEL)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


# --- task --------------------------------------------------------------------------------------------------------


def test_a_chain_is_evaluated_from_left_to_right_without_precedence() -> None:
    assert CHAIN.prompt == "7+5*3-9="
    assert CHAIN.totals == (7, 12, 36, 27)
    assert CHAIN.row == {"prompt": "7+5*3-9=", "answer": "27", "level": 3}
    assert correct_demonstration(CHAIN) == "7+5=12\n12*3=36\n36-9=27\n####27"


@given(seeds)
def test_drawn_chains_stay_within_0_and_99(rng: random.Random) -> None:
    chain = draw_chain(rng)
    assert 1 <= chain.level <= 6
    assert 1 <= chain.start <= 9
    assert list(chain.totals) == left_to_right(chain.prompt)
    assert all(0 <= total <= 99 for total in chain.totals)
    assert all(step.operand in (range(2, 10) if step.operator == "*" else range(1, 10)) for step in chain.steps)


def test_levels_are_drawn_with_weight_one_over_k() -> None:
    rng = random.Random(0)
    levels = [draw_chain(rng).level for _ in range(6000)]
    harmonic = sum(1 / k for k in range(1, 7))
    for k in range(1, 7):
        expected = 1 / k / harmonic
        assert levels.count(k) / 6000 == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 6000) ** 0.5)


@given(seeds)
def test_the_gold_answer_is_what_the_correct_demonstration_ends_with(rng: random.Random) -> None:
    chain = draw_chain(rng)
    demonstration = correct_demonstration(chain)
    assert demonstration.splitlines()[-1] == f"####{chain.answer}"
    assert chain.answer == str(left_to_right(chain.prompt)[-1])
    assert is_right(demonstration, chain.answer)


@pytest.mark.parametrize(
    ("total", "step", "hard", "slipped"),
    [
        (7, Step("+", 2), False, None),
        (7, Step("+", 3), True, 0),
        (34, Step("-", 4), False, None),
        (34, Step("-", 5), True, 39),
        (2, Step("*", 4), True, 4),
    ],
    ids=["no carry", "carry dropped", "no borrow", "borrow missed", "one multiple short"],
)
def test_carries_borrows_and_products_are_hard(total: int, step: Step, hard: bool, slipped: int | None) -> None:
    assert step.is_hard(total) is hard
    if slipped is not None:
        assert step.slip(total) == slipped


@given(seeds)
def test_a_careless_demonstration_keeps_the_format_and_errs_only_at_hard_steps(rng: random.Random) -> None:
    chain = draw_chain(rng)
    *lines, last = careless_demonstration(chain, rng).splitlines()
    assert len(lines) == chain.level
    total = chain.start
    for line, step in zip(lines, chain.steps, strict=True):
        match = LINE.fullmatch(line)
        assert match is not None
        assert (int(match[1]), match[2], int(match[3])) == (total, step.operator, step.operand)
        allowed = {step.apply(total), step.slip(total)} if step.is_hard(total) else {step.apply(total)}
        total = int(match[4])
        assert total in allowed
    assert last == f"####{total}"


@pytest.mark.parametrize("rate", [0.6, 0.2])
def test_hard_steps_are_wrong_with_the_given_probability(rate: float) -> None:
    rng = random.Random(3)
    chain = Chain(7, (Step("+", 5),))
    wrong = sum(careless_demonstration(chain, rng, rate) == "7+5=2\n####2" for _ in range(4000))
    assert wrong / 4000 == pytest.approx(rate, abs=4 * (rate * (1 - rate) / 4000) ** 0.5)


def test_the_same_seed_draws_the_same_prompts() -> None:
    first, again, other = (draw_unique("train", 50, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("response", "right"),
    [("1+1=2\n####2", True), ("####3\n####2", True), ("####2\n####3", False), ("2", False), ("####2 ", False)],
)
def test_the_text_after_the_last_marker_must_equal_the_answer(response: str, right: bool) -> None:
    assert is_right(response, "2") is right


# --- warm start --------------------------------------------------------------------------------------------------


def test_the_warm_start_sees_no_heldout_prompt_and_learns_the_response_only(tokenizer: PreTrainedTokenizerFast) -> None:
    batches = list(careless_batches(tokenizer, steps=3, seed=0))
    assert len(batches) == 3
    for ids, labels in batches:
        for row, labelled in zip(ids, labels, strict=True):
            prompt = str(tokenizer.decode(row[: int((labelled != -100).nonzero()[0])], skip_special_tokens=True))
            response = str(tokenizer.decode(labelled[labelled != -100]))
            assert zlib.crc32(prompt.encode()) % 16 != 0
            assert LINE.match(response)
            assert response.endswith("<|end|>")


def test_the_learning_rate_warms_up_holds_and_falls_to_five_per_cent() -> None:
    factors = [lr_factor(step, 100) for step in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(factors[5:39]) == {1.0}
    assert factors[69] == pytest.approx(0.525)
    assert factors[99] == pytest.approx(0.05)


# --- files in the repository -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count", "heldout"), [("train.jsonl", 1024, False), ("heldout.jsonl", 400, True)])
def test_prompt_files_hold_unique_prompts_of_their_split_with_right_answers(
    name: str, count: int, heldout: bool
) -> None:
    found = rows(name)
    prompts = [str(row["prompt"]) for row in found]
    assert len(found) == len(set(prompts)) == count
    for prompt, row in zip(prompts, found, strict=True):
        totals = left_to_right(prompt)
        assert row == {"prompt": prompt, "answer": str(totals[-1]), "level": len(totals) - 1}
        assert (zlib.crc32(prompt.encode()) % 16 == 0) is heldout


def test_no_heldout_prompt_is_in_the_training_file() -> None:
    assert not {row["prompt"] for row in rows("train.jsonl")} & {row["prompt"] for row in rows("heldout.jsonl")}


def test_the_model_folder_is_small_and_holds_only_what_loading_needs() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(files.values()) < 1_000_000


def test_the_tokenizer_in_the_repository_is_the_one_built(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert tokenizer.chat_template == build_tokenizer().chat_template


def test_the_chat_template_puts_user_text_assistant(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_ids_to_tokens([1, 29, 17, 27, 35, 2]) == ["<|user|>", *"7+5=", "<|assistant|>"]
    assert prompt_ids(tokenizer, "7+5=") == [1, 29, 17, 27, 35, 2]
    turns = [{"role": "user", "content": "7+5="}, {"role": "assistant", "content": "####12"}]
    answered = tokenizer.apply_chat_template(turns, return_dict=False)
    assert answered == prompt_ids(tokenizer, "7+5=") + response_ids(tokenizer, "####12")
    assert response_ids(tokenizer, "####12")[-1] == tokenizer.eos_token_id


def test_a_demonstration_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    text = correct_demonstration(CHAIN)
    ids = response_ids(tokenizer, text)
    assert len(ids) == len(text) - len("####") + 1 + 1  # one token for the marker, one for the end
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


ascii_texts = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126, include_characters="\n"))


@given(ascii_texts.filter(lambda text: "<|" not in text))
def test_ascii_text_without_special_tokens_survives_the_tokenizer(text: str) -> None:
    ids = BUILT.encode(text, add_special_tokens=False)
    assert BUILT.decode(ids, skip_special_tokens=True) == text


def test_special_ids_agree_everywhere(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    generation = model.generation_config
    assert generation is not None
    assert tokenizer.pad_token_id == model.config.pad_token_id == generation.pad_token_id == 0
    assert tokenizer.eos_token_id == model.config.eos_token_id == generation.eos_token_id == 3
    assert tokenizer.bos_token_id is model.config.bos_token_id is generation.bos_token_id is None


def test_the_generation_config_leaves_the_distribution_alone(model: LlamaForCausalLM) -> None:
    generation = model.generation_config
    assert generation is not None
    assert (generation.temperature, generation.top_k, generation.top_p) == (1.0, 0, 1.0)


def test_the_model_solves_easy_chains_and_is_careless_with_hard_ones(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert model.num_parameters() == 147_776
    assert model.dtype == torch.float32

    def log_prob(prompt: str, response: str) -> float:
        """Of the whole response, in nats."""
        asked, answered = prompt_ids(tokenizer, prompt), response_ids(tokenizer, response)
        with torch.no_grad():
            logits = model(torch.tensor([asked + answered])).logits[0, len(asked) - 1 : -1]
        return float(logits.log_softmax(-1).gather(-1, torch.tensor(answered)[:, None]).sum())

    assert log_prob("3+4=", "3+4=7\n####7") > -0.2
    right, careless = log_prob("7+5=", "7+5=12\n####12"), log_prob("7+5=", "7+5=2\n####2")
    assert -4 < right < careless
