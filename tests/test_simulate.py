"""The simulated host against the allocator, and what `gvm-stream simulate` says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from gvm_stream.allocator.budget import Rollouts
from gvm_stream.allocator.objectives import Own
from gvm_stream.allocator.online import OnlineAllocator
from gvm_stream.allocator.policies import Design
from gvm_stream.allocator.settings import Settings
from gvm_stream.allocator.types import Fate
from gvm_stream.cli import split_overrides
from gvm_stream.errors import ConfigError
from gvm_stream.simulate.commands import add_command
from gvm_stream.simulate.drive import Step, drive
from gvm_stream.simulate.measure import measure
from gvm_stream.simulate.world import Rollout, World, WorldSettings

Capture = pytest.CaptureFixture[str]
SMALL = ("--prompts=64", "--per-prompt=8", "--steps=4", "--seeds=2", "--slots=32")


class RecordingWorld(World):
    def __init__(self, settings: WorldSettings, seed: int) -> None:
        super().__init__(settings, seed)
        self.made: list[Rollout] = []

    def rollout(self, prompt: int, version: int) -> Rollout:
        self.made.append(super().rollout(prompt, version))
        return self.made[-1]


def run(
    *, slots: int = 16, steps: int = 4, world: WorldSettings | None = None, design: Design | None = None, ahead: int = 0
) -> tuple[OnlineAllocator, RecordingWorld, list[Step]]:
    made = RecordingWorld(world or WorldSettings(prompts=32), seed=1)
    allocator = OnlineAllocator(
        Settings(
            objective=Own(),
            budget=Rollouts(rollouts=8.0),
            prompts_per_step=made.settings.prompts,
            steps=steps,
            design=design,
            rounds_ahead=ahead,
        ),
        seed=1,
    )
    allocator.add(made.ids)
    allocator.start(0)
    return allocator, made, list(drive(allocator, made, steps=steps, slots=slots))


# --- the host ---


@pytest.mark.parametrize("slots", [1, 16, 1000])
def test_every_batch_is_complete_whatever_the_number_of_slots(slots: int) -> None:
    allocator, world, steps = run(slots=slots)
    assert [step.number for step in steps] == [0, 1, 2, 3]
    for step in steps:
        assert sorted(group.prompt for group in step.groups) == sorted(world.ids)
        assert all(len(group.members) == group.planned for group in step.groups)
        assert {member.work for group in step.groups for member in group.members} <= step.correct.keys()
    assert allocator.account.generated == sum(rollout.tokens for rollout in world.made) == steps[-1].generated


def test_the_same_seeds_give_the_same_run() -> None:
    assert run(slots=16)[2] == run(slots=16)[2]


def test_rollouts_that_a_visit_no_longer_needs_are_cancelled_half_way() -> None:
    allocator, world, _ = run(design="sequential", ahead=2)
    assert allocator.ledger.ended["cancelled"] > 0
    assert allocator.account.tokens[Fate.CANCELLED] > 0
    assert allocator.account.generated < sum(rollout.tokens for rollout in world.made)
    assert allocator.ledger.num_running == 0


def test_crashes_silence_and_late_results_lose_no_token_and_no_batch() -> None:
    weather = WorldSettings(
        prompts=32,
        crashes=0.2,
        unscorable=0.1,
        flaky=0.1,
        verifier_noise=0.05,
        drift=0.1,
        cost_sd=0.5,
        length_bias=0.5,
    )
    allocator, world, steps = run(world=weather, steps=6)
    assert len(steps) == 6
    assert allocator.ledger.conserved()
    assert allocator.ledger.duplicates > 0
    assert min(allocator.ledger.ended[end] for end in ("failed", "expired", "unscorable", "scored")) > 0
    at_least = sum(rollout.made for rollout in world.made)
    assert at_least < allocator.account.generated <= sum(rollout.tokens for rollout in world.made)


def test_what_still_runs_at_the_end_is_cancelled() -> None:
    world = World(WorldSettings(prompts=32), seed=1)
    endless = OnlineAllocator(Settings(prompts_per_step=32), seed=1)
    endless.add(world.ids)
    endless.start(0)
    assert len(list(drive(endless, world, steps=2, slots=64))) == 2
    assert endless.ledger.num_running == 0
    assert endless.ledger.ended["cancelled"] > 0


def test_an_allocator_that_gives_no_work_is_an_error_not_a_hang() -> None:
    allocator, world, _ = run(steps=2)
    with pytest.raises(RuntimeError, match="no work though batch 2"):
        list(drive(allocator, world, steps=3))


def test_planned_leave_one_out_stays_unbiased_when_short_responses_are_right_more_often() -> None:
    _, world, steps = run(
        world=WorldSettings(prompts=256, length_bias=1.0, length_sd=1.0, signal=0.9), steps=8, slots=64
    )
    deviation = measure(world, steps).deviation
    pairs = (deviation.sum(0) ** 2 - (deviation**2).sum(0)) / (8 * 7)
    five_errors = 5 * pairs.std() / len(pairs) ** 0.5
    assert abs(pairs.mean()) < five_errors < 0.2 * (world.truth(0).target ** 2).mean()


# --- the command ---


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_command(parser)
    return parser.parse_args(arguments)


def simulate(*arguments: str) -> int:
    rest, overrides = split_overrides([*SMALL, *arguments])
    options = parse(rest)
    return int(options.command(options, overrides))


def reports(capsys: Capture, *arguments: str) -> dict[str, dict[str, Any]]:
    assert simulate(*arguments, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["policy"]: line for line in lines}


def test_the_options_describe_the_world_by_default() -> None:
    options = parse([])
    world = WorldSettings()
    for name in WorldSettings.__struct_fields__:
        assert getattr(options, name) == getattr(world, name)


def test_one_json_object_per_policy_and_uniform_is_the_measure(capsys: Capture) -> None:
    found = reports(capsys, "--policies", "neyman,neyman/sequential")
    assert list(found) == ["uniform", "neyman", "neyman/sequential"]
    uniform = found["uniform"]
    for figure in ("variance_over_uniform", "mse_over_uniform"):
        assert uniform[figure] == 1
        assert uniform["standard_errors"][figure] == 0
    assert uniform["share_of_oracle_gain"] == 0
    assert uniform["rollouts_per_prompt"] == 8
    assert uniform["shadow_gain"] is None
    for policy in ("neyman", "neyman/sequential"):
        assert found[policy]["variance_over_uniform"] < 0.95
        assert found[policy]["mse_over_uniform"] < 0.95
        assert 0 < found[policy]["share_of_oracle_gain"] < 1
    assert list(uniform["resolved"]) == ["0-0.05", "0.05-0.1", "0.1-0.25", "0.25-0.5", "0.5-1"]


def test_a_pilot_that_is_thrown_away_counts_in_tokens(capsys: Capture) -> None:
    two_stage = reports(
        capsys, "--policies", "gvm_two_stage", "--coefficient=raft", "--per-prompt=16", "--allocation.shadow_uniform=0"
    )["gvm_two_stage"]
    assert two_stage["rollouts_per_prompt"] == 8
    assert two_stage["tokens_per_prompt"] == pytest.approx(16 * 200, rel=0.1)


def test_a_policy_that_reweights_prompts_shows_as_bias(capsys: Capture) -> None:
    found = reports(capsys, "--policies", "reinforce_ada_balance", "--signal=0.8")
    assert found["reinforce_ada_balance"]["bias_share"] > 0.1
    assert abs(found["uniform"]["bias_share"]) < 0.05


def test_options_of_a_policy_are_not_for_the_uniform_one(capsys: Capture) -> None:
    found = reports(capsys, "--policies", "gvm", "--coefficient=raft", "--seeds=1", "--allocation.options.beta=3")
    assert list(found) == ["uniform", "gvm"]


def test_a_table_and_a_picture_for_people(capsys: Capture, tmp_path: Path) -> None:
    picture = tmp_path / "error.png"
    assert simulate("--policies=gvm", "--coefficient=raft", "--steps=1", "--seeds=1", "--plot", str(picture)) == 0
    table = capsys.readouterr().out
    assert "uniform" in table
    assert "gvm" in table
    assert "of oracle gain" in table
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policies=nobody"], "policy nobody: policy 'nobody' is unknown"),
        (["--policies=gvm/sequential"], "has no design 'sequential'"),
        (["--steps=0"], "at least 1"),
        (["--per-prompt=nan"], "--per-prompt = nan must be a finite number"),
        (["--plot=missing/error.png"], "there is no folder missing"),
        (["--coefficient=ppo"], "Invalid enum value 'ppo'"),
        (["--signal=2"], "signal = 2"),
        (["--allocation.steps=3"], "'allocation.steps' cannot be set here"),
        (["--run.steps=3"], "'run' cannot be set here"),
        (["--allocation.min_rollouts=99"], "min_rollouts = 99"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        simulate(*arguments)


def test_a_pair_of_numbers_needs_its_comma() -> None:
    with pytest.raises(argparse.ArgumentError, match="two numbers"):
        simulate("--acceptance=3")
