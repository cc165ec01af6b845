from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.config import Config, DataSection, ModelSection, ReasoningGymSection, derived
from gvm_stream.config_file import AGREED, agreed_values, documented, load_config, parse_config
from gvm_stream.errors import ConfigError

REPOSITORY = Path(__file__).parents[1]
SHIPPED = sorted(REPOSITORY.glob("examples/*.toml"))

Raw = dict[str, Any]


def minimal(**sections: object) -> Raw:
    return {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, **sections}


def refusal(raw: Raw) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, "a.toml")
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.toml"
    path.write_text('[model]\npath = "m"\n[data]\ntrain = "t.jsonl"\n[run]\nsteps = 7\n')
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files_parse_and_their_data_and_model_or_what_makes_it_are_there(path: Path) -> None:
    config = load_config(path)
    if config.data.source != "hub":
        model = path.parent / config.model.path
        assert model.is_dir() or (model.parent / "make.py").is_file()
    assert config.data.source != "jsonl" or Path(config.data.train).is_file()


def test_there_is_a_shipped_file() -> None:
    assert SHIPPED


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (minimal(runn={}), 'unknown key "runn" in a.toml; did you mean "run"?'),
        (minimal(run={"step": 1}), 'unknown key "run.step" in a.toml; did you mean "run.steps"?'),
        (
            minimal(data={"reasoning_gym": {"taks": "chain_sum"}}),
            'unknown key "data.reasoning_gym.taks" in a.toml; did you mean "data.reasoning_gym.task"?',
        ),
        (
            minimal(metrics={"qqqqqqqqqqqqqq": 1}),
            'unknown key "metrics.qqqqqqqqqqqqqq" in a.toml; there are metrics.host, metrics.port, metrics.trackers',
        ),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one_at_any_depth(raw: Raw, sentence: str) -> None:
    assert refusal(raw) == sentence


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (minimal(run={"steps": "many"}), 'run.steps = "many" in a.toml: expected `int`, got `str`'),
        (minimal(run={"steps": 0}), "run.steps = 0 in a.toml: expected `int` >= 1"),
        (minimal(run={"steps": True}), "run.steps = true in a.toml: expected `int`, got `bool`"),
        (
            minimal(data={"train": "t", "heldout_share": 1.0}),
            "data.heldout_share = 1.0 in a.toml: expected `float` < 1.0",
        ),
        (
            minimal(learner={"loss": "ppo"}),
            'a.toml: learner.loss = "ppo" is unknown; there are cispo, delightful, gspo, '
            'gvpo, holder, pg, ppo_clip, r2vpo, or your own as "module:Class"',
        ),
        (minimal(metrics={"port": 65001}), "metrics.port = 65001 in a.toml: expected `int` <= 65000"),
        (minimal(allocation={"prior": [1]}), "allocation.prior = [1] in a.toml: expected `array` of length 2, got 1"),
        (
            minimal(learner={"device": "gpu"}),
            "learner.device = \"gpu\" in a.toml: expected `str` matching regex '^(cpu|cuda(:\\\\d+)?)$'",
        ),
        (minimal(run=3), "run = 3 in a.toml: expected `object`, got `int`"),
        (minimal(learner={"lr": float("nan")}), "learner.lr = nan in a.toml: expected a finite number"),
        (minimal(stream={"progress_s": float("inf")}), "stream.progress_s = inf in a.toml: expected a finite number"),
        (
            minimal(allocation={"prior": [1, float("-inf")]}),
            "allocation.prior[1] = -inf in a.toml: expected a finite number",
        ),
        ({}, "model is missing in a.toml: it has no default"),
        ({"model": {}}, "model.path is missing in a.toml: it has no default"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_key_value_expectation_and_file(raw: Raw, sentence: str) -> None:
    assert refusal(raw) == sentence


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (minimal(allocation={"rollouts_per_prompt": 40}), ["rollouts_per_prompt = 40", "max_rollouts = 32"]),
        (minimal(allocation={"min_rollouts": 9}), ["rollouts_per_prompt = 8", "min_rollouts = 9"]),
        (minimal(allocation={"prior": [0, 1]}), ["allocation.prior = [0.0, 1.0]", "above 0"]),
        (minimal(allocation={"policy": "greedy"}), ["[allocation]", "policy 'greedy' is unknown", "neyman"]),
        (minimal(allocation={"policy": "gvm", "options": {"gamma": 1}}), ["options of policy 'gvm'", "gamma"]),
        (minimal(allocation={"policy": "gvm", "design": "sequential"}), ["no design 'sequential'", "planned"]),
        (minimal(allocation={"budget": "tokens"}), ["tokens budget: tokens = 0.0", "above 0"]),
        (
            minimal(allocation={"coefficient": "raft"}, learner={"advantage": "rloo"}),
            ['learner.advantage = "rloo"', 'allocation.coefficient = "raft"'],
        ),
        (
            minimal(allocation={"policy": "reinforce_ada_pos"}, learner={"advantage": "grpo"}),
            ['learner.advantage = "grpo"', '"allocated"', "reinforce_ada_pos"],
        ),
        (minimal(stream={"heartbeat_s": 6}), ["stream.silence_s = 15", "stream.heartbeat_s = 6"]),
        (minimal(data={"source": "reasoning_gym"}), ["data.reasoning_gym.task"]),
        ({"model": {"path": "m"}}, ["data.train", '"jsonl"']),
        (minimal(verifier={"kind": "regex"}), ["verifier.patterns.answer", '"regex"']),
        (
            minimal(verifier={"kind": "regex", "patterns": {"answer": "("}}),
            ['verifier.patterns.answer = "("', "expression"],
        ),
        (minimal(verifier={"weights": {"exact": 1, "format": 0.1}}), ["verifier.patterns.format", '"format"']),
        (minimal(verifier={"kind": "python", "function": "f"}), ['verifier.function = "f"', "module:function"]),
        (minimal(verifier={"kind": "http", "http": {"url": "file:///x"}}), ['verifier.http.url = "file:///x"']),
        (minimal(producer={"engine_options": {"seed": 1}}), ["producer.engine_options", '"vllm"', '"transformers"']),
        (minimal(producer={"engine": "vllm-server"}), ["producer.servers = []", '"vllm-server"']),
        (minimal(producer={"weights": "nccl"}), ['producer.weights = "nccl"', '"transformers"']),
        (minimal(producer={"engine": "vllm", "weights": "nccl"}), ['producer.weights = "nccl"', "stream.nccl_address"]),
        (
            minimal(stream={"nccl_address": "tcp://10.0.0.1:5712"}),
            ['stream.nccl_address = "tcp://10.0.0.1:5712"', 'learner.device is "cpu"'],
        ),
        (
            minimal(verifier={"overlong": {"mode": "penalty"}}, sampling={"max_tokens": 63}),
            ["verifier.overlong.buffer_tokens = 64", "sampling.max_tokens = 63"],
        ),
    ],
)
def test_fields_that_do_not_go_together_are_named_with_their_values(raw: Raw, parts: list[str]) -> None:
    sentence = refusal(raw)
    assert sentence.startswith("a.toml: ")
    for part in parts:
        assert part in sentence


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("--run.steps=50", "run.steps", 50),
        ("run.steps=50", "run.steps", 50),
        ("--learner.lr=3e-4", "learner.lr", 3e-4),
        ("--stream.allow_plaintext=true", "stream.allow_plaintext", True),
        ("--data.system=Think, then answer.", "data.system", "Think, then answer."),
        ('--data.system="50"', "data.system", "50"),
        ("--verifier.answer_marker=a=b", "verifier.answer_marker", "a=b"),
        ("--verifier.answer_marker=", "verifier.answer_marker", ""),
        ("--learner.betas=[0.8, 0.99]", "learner.betas", (0.8, 0.99)),
        ("--data.reasoning_gym.size=3", "data.reasoning_gym.size", 3),
        ("--data.reasoning_gym.options.min_terms=2", "data.reasoning_gym.options", {"min_terms": 2}),
    ],
)
def test_an_override_is_toml_or_bare_text_and_wins(file: Path, override: str, key: str, value: object) -> None:
    found: Any = load_config(file, ["--run.steps=1", override])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize("override", ["--steps=50", "--run.steps", "run", "=3", ""])
def test_a_malformed_override_says_how_one_looks(file: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"must look like --section\.key=value"):
        load_config(file, [override])


def test_an_override_below_a_value_or_of_an_unknown_key_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match='"steps" is not a section'):
        load_config(file, ["--run.steps.more=1"])
    with pytest.raises(ConfigError, match=r'unknown key "run.stepz".*did you mean "run.steps"'):
        load_config(file, ["--run.stepz=1"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"[run\n", "cannot be understood"), (b"\xff\xfe", "cannot be understood"), (None, "does not exist")],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "b.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)


def leaves(section: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(section, include_extras=True).items():
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from leaves(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


@pytest.mark.parametrize(("key", "hint"), list(leaves(Config)))
def test_every_key_has_a_description(key: str, hint: Any) -> None:  # noqa: ANN401
    (meta,) = hint.__metadata__
    assert meta.description.endswith(".")


texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    texts,
    st.dictionaries(
        texts, texts | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.lists(st.floats(0, 1)), max_size=4
    ),
)
def test_documented_configuration_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, text: str, options: Raw
) -> None:
    config = Config(
        model=ModelSection(path=text + "m"),
        data=DataSection(
            source="reasoning_gym", system=text, reasoning_gym=ReasoningGymSection(task="t", options=options)
        ),
    )
    path = tmp_path_factory.getbasetemp() / "documented.toml"
    path.write_text(documented(config), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_documented_configuration_explains_every_key() -> None:
    lines = documented(load_config(SHIPPED[0])).splitlines()
    assert lines[lines.index("steps = 120") - 1] == "# Training batches until the run is finished."
    assert sum(not line.startswith(("#", "[")) and bool(line) for line in lines) == len(list(leaves(Config)))


def test_json_of_a_run_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(SHIPPED[0])
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    assert load_config(path) == config
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="cannot be understood"):
        load_config(path)


def test_paths_are_relative_to_the_file_where_they_exist_there(file: Path) -> None:
    (file.parent / "m").mkdir()
    config = load_config(file)
    assert config.model.path == str(file.parent / "m")
    assert config.data.train == "t.jsonl"  # not there: perhaps the name of a dataset
    assert config.data.heldout == ""


def test_what_a_configuration_implies() -> None:
    raw = minimal(
        run={"producers": 2},
        allocation={"prompts_per_step": 5, "rollouts_per_prompt": 3.5, "max_lag": 2},
        producer={"slots": 100},
    )
    implied = derived(parse_config(raw, "a.toml"))
    assert implied.rollouts_per_step == 18  # 17.5, to even
    assert implied.most_in_flight == 54
    assert implied.worst_case_lag == 2
    assert implied.producer_slots == 200
    assert implied.slots_that_can_fill == 54


def test_agreed_values_are_texts_and_take_only_the_name_of_the_model() -> None:
    values = agreed_values(parse_config({"model": {"path": "/some/where/m"}, "data": {"train": "t"}}, "a.toml"))
    assert set(values) == set(AGREED)
    assert values["model.path"] == "m"
    assert values["allocation.max_lag"] == "1"


def test_importing_the_configuration_and_the_command_line_stays_light() -> None:
    code = "import gvm_stream.config, gvm_stream.config_file, gvm_stream.cli, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "datasets", "numpy", "zmq", "trio", "rich", "prometheus_client", "matplotlib"}
    assert not heavy & set(done.stdout.split())


def test_a_program_under_test_must_have_less_time_than_its_verdict() -> None:
    code = minimal(verifier={"kind": "code", "timeout_s": 8.0})
    with pytest.raises(ConfigError, match=r"verifier\.code\.wall_s = 8 must be below verifier\.timeout_s = 8"):
        parse_config(code, "run.toml")
    parse_config(minimal(verifier={"kind": "math", "timeout_s": 8.0}), "run.toml")
