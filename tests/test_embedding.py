"""Programs that embed the allocator: the examples, and every piece of Python in docs/allocator.md."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from gvm_stream.allocator import OnlineAllocator, Settings
from gvm_stream.allocator.budget import AnyBudget
from gvm_stream.allocator.objectives import Objective
from gvm_stream.allocator.policies import POLICIES

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "allocator.md").read_text()


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is registered meanwhile is forgotten."""
    with monkeypatch.context() as patch:
        patch.setattr("gvm_stream.allocator.policies.base.POLICIES", dict(POLICIES))
        yield


@pytest.mark.parametrize("name", ["asyncio", "trio"])
def test_a_host_learns(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", f"examples/embed_{name}.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = (float(number) for number in re.findall(r"\d\.\d{3}", done.stdout)[:2])
    assert before < 0.2
    assert after > 0.6
    for fate in ("failed", "cancelled", "zero_signal", "trained"):
        assert re.search(rf"[1-9]\d* {fate}", done.stdout)
    assert "pending" not in done.stdout
    assert re.search(r"gain over uniform: .* 95 % interval", done.stdout)
    assert "Explanation(prompt='prompt-0'" in done.stdout


def test_the_python_of_the_documentation_runs(policies: None, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/allocator.md", "exec"), names)
    assert "Explanation(prompt='prompt-7'" in capsys.readouterr().out
    allocator, restored = names["allocator"], names["restored"]
    assert isinstance(allocator, OnlineAllocator)
    assert isinstance(restored, OnlineAllocator)
    assert allocator.settled_steps == restored.settled_steps == 30
    assert allocator.ledger.conserved()
    settings = names["settings"]
    assert isinstance(settings, Settings)
    mine = OnlineAllocator(settings, seed=0)
    mine.add(f"prompt-{i}" for i in range(20))
    items = mine.ask(20 * 8, 0)
    assert {item.step for item in items} == {0}
    assert {item.reason.partition(":")[0] for item in items} == {"thompson", "shadow-uniform"}
    advantages, weights = names["advantages"], names["weights"]
    assert isinstance(advantages, np.ndarray)
    assert isinstance(weights, np.ndarray)
    assert advantages.shape == (40, 4)
    assert weights.mean() == pytest.approx(1.0)


def test_the_documentation_lists_every_policy_with_its_defaults() -> None:
    table = DOCS.partition("## Policies")[2].partition("\n## ")[0]
    rows = {name: row for row in table.splitlines() if (name := row.partition("| `")[2].partition("`")[0]) in POLICIES}
    assert rows.keys() == POLICIES.keys()
    for name, policy in POLICIES.items():
        cells = [cell.strip() for cell in rows[name].strip("|").split("|")]
        made = msgspec.structs.asdict(policy())
        assert cells[-1] == ", ".join(f"`{key} = {value}`" for key, value in made.items()), name
        assert cells[3] == ", ".join(policy.designs), name
        paper = re.search(r"\d{4}\.\d{5}", cells[1])
        if paper:
            assert paper[0] in f"{policy.__doc__} {sys.modules[policy.__module__].__doc__}", name


def test_the_documentation_lists_every_budget_and_objective() -> None:
    for kind in (*get_args(AnyBudget), *get_args(Objective)):
        assert f"| `{kind.__name__}(" in DOCS
