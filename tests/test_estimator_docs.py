"""docs/estimators.md names what there is, and its Python runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest
import torch

from gvm_stream.config import Aggregate, Config, DataSection, LearnerSection, ModelSection
from gvm_stream.config_learner import KlEstimator
from gvm_stream.learner.advantages import ADVANTAGES, Advantage, Group, Measured, Opob, Rloo
from gvm_stream.learner.losses import LOSSES, Loss, PolicyGradient, Responses
from gvm_stream.learner.registry import Registry

DOCS = (Path(__file__).parents[1] / "docs" / "estimators.md").read_text()
PYTHON, TOML = (re.search(rf"```{language}\n(.*?)```", DOCS, re.DOTALL) for language in ("python", "toml"))
TABLES: list[tuple[str, Iterable[str]]] = [
    ("learner.advantage", ADVANTAGES.classes),
    ("learner.loss", LOSSES.classes),
    ("learner.aggregate", get_args(Aggregate)),
    ("learner.kl_estimator", get_args(KlEstimator)),
    ("weights", get_args(get_type_hints(PolicyGradient)["weights"])),
]


@pytest.mark.parametrize(("key", "names"), TABLES)
def test_a_table_has_a_row_for_every_name(key: str, names: Iterable[str]) -> None:
    (table,) = re.findall(rf"^\| `{re.escape(key)}` \|.*\n\|[-|]+\n((?:\|.*\n)+)", DOCS, re.MULTILINE)
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(names)


@pytest.mark.parametrize("registry", [ADVANTAGES, LOSSES])
def test_sources_are_those_of_the_code(registry: Registry[msgspec.Struct]) -> None:
    for name, cls in registry.classes.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*", DOCS, re.MULTILINE)
        in_code = set(re.findall(r"\b\d{4}\.\d{5}\b", cls.__doc__ or ""))
        assert set(re.findall(r"\b\d{4}\.\d{5}\b", row)) >= in_code, name


@pytest.mark.parametrize(
    "row", re.findall(r"^\| (\d) \| (0\.\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", DOCS, re.MULTILINE)
)
def test_opob_gains_what_is_said_where_energies_differ(row: tuple[str, ...]) -> None:
    ratio, p, *said = map(float, row)
    random = np.random.default_rng(0)
    for n, expected in zip((4, 8, 32), said, strict=True):
        moments = np.zeros(2)
        for _ in range(1000):
            rewards = (random.random(n) < p).astype(float)
            energies = np.where(rewards > 0, ratio, 1.0) * random.lognormal(0, 0.5, n)
            if np.ptp(rewards):
                group = Group(rewards, np.ones(n), np.zeros(n), n, (1.0, 1.0))
                weighted = Opob().of_measured(group, Measured([np.zeros(1)] * n, list(energies[:, None])))
                moments += Rloo().of_group(group) ** 2 @ energies, np.concatenate(weighted) ** 2 @ energies
        assert moments[1] / moments[0] == pytest.approx(expected, abs=0.05)


def test_every_key_that_is_named_exists() -> None:
    config = Config(model=ModelSection(path="-"), data=DataSection(train="-"))
    for section, key in re.findall(r"`(learner|allocation|sampling)\.(\w+)", DOCS):
        assert key in getattr(config, section).__struct_fields__


def test_estimators_of_your_own_work_as_written() -> None:
    assert PYTHON is not None
    assert TOML is not None
    names: dict[str, type] = {}
    exec(compile(PYTHON[1], "docs/estimators.md", "exec"), names)
    configured = msgspec.toml.decode(TOML[1], type=dict[str, LearnerSection])["learner"]
    half, squashed = (names[path.partition(":")[2]] for path in (configured.advantage, configured.loss))
    advantage: object = msgspec.convert(configured.advantage_options, half)
    loss = squashed()
    assert isinstance(advantage, Advantage)
    assert isinstance(loss, Loss)
    (found,) = advantage.of_batch([Group(np.array([1.0, 0.0]), np.ones(2), np.zeros(2), 2, (1, 1))])
    assert found.tolist() == [0.875, -0.125]
    zero, column = torch.zeros(2, 1), torch.tensor(found)[:, None]
    torch.testing.assert_close(
        loss.terms(Responses.of(zero, zero, zero == 0, column, zero)), -column * np.tanh(1), check_dtype=False
    )
