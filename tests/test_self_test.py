"""Engines that would train badly are refused before they start."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gvm_stream.errors import ModelError
from gvm_stream.producers.engine import Completion, Engine, Request
from gvm_stream.producers.self_test import self_test
from gvm_stream.producers.transformers_engine import TransformersEngine
from tests.tiny_models import full_forward_logprobs, save_tiny_model

MAX_LENGTH = 60


def engine_for(model: Path, kind: type[TransformersEngine] = TransformersEngine) -> TransformersEngine:
    return kind(
        str(model),
        slots=4,
        max_length=MAX_LENGTH,
        end_tokens=(1, 2, 3),
        dtype="float32",
        device="cpu",
        kv_policy="recompute",
        seed=0,
    )


def check(engine: Engine, model: Path, max_length: int = MAX_LENGTH) -> None:
    self_test(engine, model / "model.safetensors", model_path=str(model), dtype="float32", max_length=max_length)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def test_the_transformers_engine_passes_and_is_as_new_afterwards(model: Path) -> None:
    engine = engine_for(model)
    check(engine, model)
    assert (engine.has_work(), engine.version) == (False, 0)


def test_a_generation_config_that_would_change_the_sampling_does_not(tmp_path: Path) -> None:
    hostile = save_tiny_model(tmp_path / "hostile", "qwen2")
    settings = {"repetition_penalty": 1.3, "top_k": 5, "top_p": 0.5, "temperature": 0.2, "do_sample": True}
    (hostile / "generation_config.json").write_text(json.dumps(settings))
    check(engine_for(hostile), hostile)


def test_very_short_lengths_are_tested_as_far_as_they_go(model: Path) -> None:
    engine = TransformersEngine(
        str(model), slots=2, max_length=3, end_tokens=(), dtype="float32", device="cpu", kv_policy="keep", seed=0
    )
    check(engine, model, max_length=3)


def test_logprobs_before_the_temperature_are_refused(model: Path) -> None:
    class Raw(TransformersEngine):
        requests: dict[int, Request]

        def submit(self, request: Request) -> None:
            self.requests = {**getattr(self, "requests", {}), request.id: request}
            super().submit(request)

        def step(self) -> list[Completion]:
            return [
                msgspec.structs.replace(
                    completion,
                    logprobs=full_forward_logprobs(
                        model, msgspec.structs.replace(self.requests[completion.id], temperature=1.0), completion.tokens
                    ),
                )
                for completion in super().step()
            ]

    with pytest.raises(ModelError, match=r"log-probs at temperature 0.5 differ from the learner's by .* nats"):
        check(engine_for(model, Raw), model)


def test_an_engine_with_other_weights_is_refused(model: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", "qwen2", seed=1)
    with pytest.raises(ModelError, match=r"less than 0.002 was expected"):
        check(engine_for(other), model)


def test_logprobs_that_are_no_numbers_are_refused(model: Path) -> None:
    class Broken(TransformersEngine):
        def step(self) -> list[Completion]:
            return [
                msgspec.structs.replace(completion, logprobs=np.full_like(completion.logprobs, np.nan))
                for completion in super().step()
            ]

    with pytest.raises(ModelError, match="by nan nats"):
        check(engine_for(model, Broken), model)
