"""What a training step costs: our Trainer against TRL's GRPOTrainer and against the model's bare forward and backward.

All train on the same completions, sampled once by the model of the arithmetic example (32 prompts, 8 each), with the
same loss (clipped, mean over tokens), in float32 on one thread, every one in a process of its own, in rounds:
  ours   `Trainer.train`, all of it;
  trl    loss, backward, clipping and optimizer step, without the time to make batches; completions come from a
         `rollout_func`. Every size of its micro-batches is tried and the best counts;
  bare   `loss.backward()` on as many tokens in rows of equal length, so without padding, optimizer or anything else.
Time is CPU time, which other work on the machine disturbs least. Memory is what training adds to the peak of the
process. Energy is the time of all rollouts' lm_head energies over that of a step; noise, what a step takes longer that
measures its gradient's noise, as every tenth does by default and none of the others here. `publish_seconds` is what a
new policy version takes from the training, `announce_seconds` the time until it is announced, by the clock.

    python -m benchmarks.learner --json [--models small,large] [--rounds 3] [--steps 5]

TRL comes with `pip install 'gvm-stream[bench-trl]'`; without it the rest is measured.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.completions import EXAMPLE, LR, PER_PROMPT, Completed, peak_mb, resident_mb, rewards, sample
from benchmarks.learner_trl import measure_trl
from benchmarks.report import finish, machine, parser, say
from gvm_stream.config import Config, DataSection, LearnerSection, ModelSection
from gvm_stream.learner.batch import Row, pack
from gvm_stream.learner.distributed import Ranks, SharedFeed
from gvm_stream.learner.energy import lm_head_energies
from gvm_stream.learner.model import lm_head_weight, load_model, response_logprobs, response_states
from gvm_stream.learner.publisher import Publisher
from gvm_stream.learner.trainer import Trainer
from gvm_stream.wire.messages import TrainGroup, TrainRollout

MICRO_BATCH_TOKENS = 4096
TRL_MICRO_BATCHES = (32, 64, 128)


def make_model(name: str) -> PreTrainedModel:
    """small: the example's model, 0.15 M parameters; large: random, 4.3 M."""
    if name == "small":
        return load_model(str(EXAMPLE / "model"), "float32", "cpu")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=1024,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            eos_token_id=3,
            pad_token_id=0,
        )
    )
    model.train(False)
    return model


def measure_ours(model: PreTrainedModel, work: list[Completed], steps: int) -> dict[str, Any]:
    config = Config(
        model=ModelSection(path="-"),
        data=DataSection(train="-"),
        learner=LearnerSection(
            advantage="grpo",
            loss="ppo_clip",
            aggregate="token_mean",
            lr=LR,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
        ),
    )
    rows = scored(model, make_rows(work))
    groups = make_groups(rows)
    padding: list[float] = []

    def train(measure_every: int) -> dict[str, Any]:
        learner = msgspec.structs.replace(config.learner, measure_every=measure_every)
        trainer = Trainer(msgspec.structs.replace(config, learner=learner), model)

        def step() -> None:
            result = trainer.train(1, groups, lambda: None)  # a step with its noise only if every one has it
            assert result.trained, result.reason
            assert (result.stats.noise is not None) == (measure_every == 1)
            padding.append(result.stats.padding_share)

        return measure(step, steps)

    measured = train(config.learner.measure_every)
    without_noise = padding[-1]  # whose parts have micro-batches of their own
    noisy = statistics.median(train(1)["seconds"])
    micro_batches = pack(rows, MICRO_BATCH_TOKENS)
    states = [response_states(model, m).detach() for m in micro_batches]
    started = time.process_time()
    for m, hidden in zip(micro_batches, states, strict=True):
        rows_of, _, position = m.index
        lm_head_energies(hidden, lm_head_weight(model), m.tokens[rows_of, position], m.mask.sum(1).tolist())
    energy = time.process_time() - started
    return {
        **measured,
        "padding_share": without_noise,
        "energy_overhead": energy / statistics.median(measured["seconds"]),
        "noise_overhead": noisy / statistics.median(measured["seconds"]) - 1,
        **measure_publishing(model, config, steps),
    }


def measure_publishing(model: PreTrainedModel, config: Config, times: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(config, Path(folder), model, SharedFeed(None, Ranks()), Ranks())
        publish, announce = [], []
        for version in range(times + 1):
            started = time.perf_counter()
            publisher.publish(version, version)
            publish.append(time.perf_counter() - started)
            publisher.wait()
            announce.append(time.perf_counter() - started)
    return {"publish_seconds": statistics.median(publish[1:]), "announce_seconds": statistics.median(announce[1:])}


def make_rows(work: list[Completed]) -> list[Row]:
    """Numbered in order, with log-probs of zero."""
    pairs = [(g, c.prompt, response) for g, c in enumerate(work) for response in c.responses]
    return [
        Row(g, i, len(prompt), np.array(prompt + response, np.int32), np.zeros(len(response), np.float32), 1.0, 1.0)
        for i, (g, prompt, response) in enumerate(pairs)
    ]


@torch.no_grad()
def scored(model: PreTrainedModel, rows: list[Row]) -> list[Row]:
    """With their log-probs under `model`."""
    values = [v for m in pack(rows, MICRO_BATCH_TOKENS) for v in response_logprobs(model, m, 1.0).numpy()]
    by_length = sorted(rows, key=lambda row: row.tokens.size, reverse=True)  # as `pack` lays them out
    known = [replace(row, logprobs=v[: row.logprobs.size]) for row, v in zip(by_length, values, strict=True)]
    return sorted(known, key=lambda row: row.work)


def make_groups(rows: list[Row]) -> list[TrainGroup]:
    groups: dict[int, list[TrainRollout]] = {}
    prompts: dict[int, bytes] = {}
    for row, reward in zip(rows, rewards(len(rows)), strict=True):
        response = row.tokens[row.prompt_length :]
        prompts[row.group] = row.tokens[: row.prompt_length].tobytes()
        groups.setdefault(row.group, []).append(
            TrainRollout(
                work=row.work,
                reward=reward,
                tokens=response.tobytes(),
                logprobs=row.logprobs.tobytes(),
                spans=((0, 0, response.size),),
                truncated=False,
                lag=0,
                coefficient=0.0,
            )
        )
    return [
        TrainGroup(
            group=g,
            prompt=f"train-{g}",
            prompt_tokens=prompts[g],
            weight=1.0,
            prior=(1.0, 1.0),
            rollouts=tuple(members),
        )
        for g, members in groups.items()
    ]


def measure_bare(model: PreTrainedModel, work: list[Completed], steps: int) -> dict[str, Any]:
    """As many rows of the mean length as fit in a micro-batch of ours, at a time."""
    rows = sum(len(c.responses) for c in work)
    length = round(sum(c.tokens for c in work) / rows)
    ids = torch.randint(6, 100, (rows, length))

    def step() -> None:
        for part in torch.split(ids, MICRO_BATCH_TOKENS // length):
            model(input_ids=part, labels=part, use_cache=False).loss.backward()
        model.zero_grad()

    return {**measure(step, steps), "tokens": ids.numel()}


def measure(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """CPU seconds of every step after a first one to warm up, and MB that all of them add to the peak."""
    before = resident_mb()
    seconds = []
    for _ in range(steps + 1):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    return {"seconds": seconds[1:], "memory_mb": peak_mb() - before}


def measure_part(part: str, model: PreTrainedModel, work: list[Completed], steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    if part == "ours":
        measured = measure_ours(model, work, steps)
    elif part == "bare":
        measured = measure_bare(model, work, steps)
    else:
        measured = measure_trl(model, work, steps, int(part.removeprefix("trl-")))
    tokens = measured.pop("tokens", sum(c.tokens for c in work))
    return {**measured, "tokens_per_second": tokens / statistics.median(measured.pop("seconds"))}


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def in_child(part: str, name: str, work: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.learner", "--part", part, "--models", name, "--work", str(work)]
    command += ["--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def compare(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds; ratios are those within a round."""

    def median(part: str, key: str) -> float:
        return float(statistics.median(r[part][key] for r in rounds))

    def ratio(part: str, key: str = "tokens_per_second") -> float:
        return float(statistics.median(r["ours"][key] / r[part][key] for r in rounds))

    result: dict[str, Any] = {
        "tokens_per_second": {part: median(part, "tokens_per_second") for part in rounds[0]},
        "memory_mb": {part: median(part, "memory_mb") for part in rounds[0]},
        "ratio_to_bare": ratio("bare"),
        "padding_share": median("ours", "padding_share"),
        "energy_overhead": median("ours", "energy_overhead"),
        "noise_overhead": median("ours", "noise_overhead"),
        "publish_seconds": median("ours", "publish_seconds"),
        "announce_seconds": median("ours", "announce_seconds"),
    }
    trl = [part for part in rounds[0] if part.startswith("trl")]
    if trl:
        best = max(trl, key=lambda part: median(part, "tokens_per_second"))
        result |= {
            "best_trl": best,
            "ratio_to_trl": ratio(best),
            "memory_ratio_to_trl": ratio(best, "memory_mb"),
            "padding_share_trl": median(best, "padding_share"),
        }
    return result


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", default="small,large")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--prompts", type=int, default=32)
    arguments.add_argument("--part", help="measure this in this process: ours, bare, or trl-SIZE")
    arguments.add_argument("--work", type=Path, help="completions for --part")
    options = arguments.parse_args()
    if options.part:
        work = msgspec.json.decode(options.work.read_bytes(), type=list[Completed])
        finish(measure_part(options.part, make_model(options.models), work, options.steps), as_json=True)
        return
    parts = ["ours", "bare"]
    missing = [name for name in ("trl", "accelerate") if not is_installed(name)]
    if missing:
        say(f"no comparison with TRL: {' and '.join(missing)} not installed (pip install 'gvm-stream[bench-trl]')")
    else:
        parts += [f"trl-{size}" for size in TRL_MICRO_BATCHES if size <= options.prompts * PER_PROMPT]
    result: dict[str, Any] = {"benchmark": "learner", "machine": machine(), "trl_missing": missing}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "completions.json"
        path.write_bytes(msgspec.json.encode(sample(options.prompts)))
        for name in options.models.split(","):
            rounds = []
            for number in range(options.rounds):
                rounds.append({part: in_child(part, name, path, options.steps) for part in parts})
                rates = {part: round(m["tokens_per_second"]) for part, m in rounds[-1].items()}
                say(f"{name}, round {number + 1} of {options.rounds}: tokens/s {rates}")
            result[name] = compare(rounds)
    finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
