"""The configuration of a run: one frozen struct per part, every key with its default, bounds and meaning in place.

All processes of a run read the same TOML file. This module imports nothing heavy; `config_file.py` reads files,
applies dotted overrides and words the errors; `derived` says what a configuration implies.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gvm_stream.config_allocation import AllocationSection as AllocationSection
from gvm_stream.config_learner import DEVICE
from gvm_stream.config_learner import Aggregate as Aggregate
from gvm_stream.config_learner import LearnerSection as LearnerSection
from gvm_stream.config_verifier import CodeSection as CodeSection
from gvm_stream.config_verifier import HttpSection as HttpSection
from gvm_stream.config_verifier import MathSection as MathSection
from gvm_stream.config_verifier import NumericSection as NumericSection
from gvm_stream.config_verifier import OverlongSection as OverlongSection
from gvm_stream.config_verifier import PatternSection as PatternSection
from gvm_stream.config_verifier import VerifierKind as VerifierKind
from gvm_stream.config_verifier import VerifierSection as VerifierSection
from gvm_stream.config_verifier import used_kinds, verifier_problem
from gvm_stream.trackers import TrackerName


class Section(msgspec.Struct, frozen=True):
    pass


class RunSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dir: Annotated[
        str,
        Meta(description="Run directory. `gvm-stream run` appends -2, -3, ... when it already holds a run."),
    ] = "runs/default"
    seed: Annotated[int, Meta(ge=0, description="Seed of sampling, prompt order and training.")] = 0
    steps: Annotated[int, Meta(ge=1, description="Training batches until the run is finished.")] = 100
    log_format: Annotated[
        Literal["human", "json"], Meta(description="Logs of the processes: lines for people, or one JSON object each.")
    ] = "human"
    producers: Annotated[int, Meta(ge=1, description="Producer processes that `gvm-stream run` starts.")] = 1
    restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="How often `gvm-stream run` starts processes again, in all: producers that died, allocator and "
            "learner that were killed.",
        ),
    ] = 10


class ModelSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(min_length=1, description="Checkpoint folder, or a hub name, of a causal LM.")]
    dtype: Annotated[
        Literal["float32", "bfloat16"], Meta(description="Type of the weights in producers and learner.")
    ] = "float32"


class ReasoningGymSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    task: Annotated[str, Meta(description="Name of a reasoning-gym task, for example chain_sum.")] = ""
    size: Annotated[int, Meta(ge=1, description="Number of training prompts.")] = 1024
    heldout_size: Annotated[int, Meta(ge=1, description="Number of held-out prompts.")] = 256
    seed: Annotated[
        int, Meta(ge=0, description="Training items use seeds seed .. seed + size - 1, held-out ones those after them.")
    ] = 0
    options: Annotated[dict[str, Any], Meta(description="Passed on to the task's own configuration.")] = {}


class DataSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: Annotated[
        Literal["jsonl", "parquet", "hub", "reasoning_gym"],
        Meta(description="Where prompts come from. `hub` is a Hugging Face dataset: a local folder or a hub name."),
    ] = "jsonl"
    train: Annotated[str, Meta(description="File, folder or dataset name of the training prompts.")] = ""
    heldout: Annotated[
        str, Meta(description="The same for held-out prompts; empty: a share of the training rows is held out.")
    ] = ""
    heldout_share: Annotated[
        float, Meta(gt=0, lt=1, description="Share held out (by a hash of the prompt) when `heldout` is empty.")
    ] = 1 / 16
    name: Annotated[str, Meta(description="Hub datasets: configuration name.")] = ""
    train_split: Annotated[str, Meta(description="Hub datasets: split of the training prompts.")] = "train"
    heldout_split: Annotated[str, Meta(description="Hub datasets: split of the held-out prompts.")] = "test"
    prompt_column: Annotated[
        str, Meta(min_length=1, description="Column with the prompt: a text, or a list of chat messages.")
    ] = "prompt"
    answer_column: Annotated[str, Meta(min_length=1, description="Column with the gold answer.")] = "answer"
    verifier_column: Annotated[
        str, Meta(description="Column that names the verifier of a row; empty, or empty in a row: `verifier.kind`.")
    ] = ""
    format: Annotated[
        Literal["chat", "raw"],
        Meta(description="`chat`: the tokenizer's chat template, once. `raw`: the text as it is."),
    ] = "chat"
    system: Annotated[str, Meta(description="System message put before chat prompts; empty: none.")] = ""
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="Longer prompts are left out and reported.")] = 1024
    duplicates: Annotated[
        Literal["drop", "keep", "error"],
        Meta(description="Rows with the same prompt and answer. The same prompt with two answers is always an error."),
    ] = "drop"
    reasoning_gym: ReasoningGymSection = ReasoningGymSection()


class SamplingSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, Meta(gt=0, description="Sampling temperature.")] = 1.0
    max_tokens: Annotated[int, Meta(ge=1, description="Response length cap, in tokens.")] = 512


class StreamSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: Annotated[
        str, Meta(description="Where the allocator listens and the others connect, tcp://HOST:PORT.")
    ] = "tcp://127.0.0.1:5710"
    weights_address: Annotated[
        str,
        Meta(
            description="Where the learner serves its weights to producers on hosts that do not see its files, "
            "tcp://HOST:PORT; empty: nowhere."
        ),
    ] = ""
    nccl_address: Annotated[
        str,
        Meta(
            description="Where the learner listens for producers that take its weights from GPU to GPU, "
            "tcp://HOST:PORT, with HOST as they reach it; empty: nowhere. The transfers use further ports of HOST."
        ),
    ] = ""
    keys: Annotated[
        str,
        Meta(
            description="Folder with the keys of this process, as `gvm-stream keys create` makes it; empty: no "
            "encryption, and only processes of this machine may join."
        ),
    ] = ""
    allow_plaintext: Annotated[
        bool, Meta(description="Listen on more than this machine without encryption or authentication.")
    ] = False
    heartbeat_s: Annotated[float, Meta(gt=0, description="Interval of heartbeats, in seconds.")] = 1.0
    silence_s: Annotated[
        float, Meta(gt=0, description="A producer or an allocator not heard of for so long is taken for dead.")
    ] = 15.0
    progress_s: Annotated[
        float,
        Meta(gt=0, description="A rollout without a new token, or a run without any progress, for so long has failed."),
    ] = 300.0
    spool: Annotated[
        bool,
        Meta(
            description="Write what happens to a database in the run directory, so that a run survives the death of "
            "its allocator. Without it the run ends with it."
        ),
    ] = True
    max_message_mib: Annotated[int, Meta(ge=1, description="Largest message accepted, in MiB.")] = 256


class ProducerSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: Annotated[
        Literal["transformers", "vllm", "vllm-server"],
        Meta(
            description="Inference engine: transformers, vLLM in the producer's process, or external `vllm serve` "
            "processes."
        ),
    ] = "transformers"
    engine_options: Annotated[
        dict[str, Any], Meta(description='Engine "vllm": further arguments of vLLM\'s `EngineArgs`.')
    ] = {}
    servers: Annotated[
        tuple[str, ...], Meta(description='Engine "vllm-server": the URLs of the servers, http://HOST:PORT.')
    ] = ()
    weights: Annotated[
        Literal["file", "nccl"],
        Meta(
            description="How weights reach the engine. `file`: the learner's file, memory-mapped where it is seen and "
            "fetched over ZeroMQ where not. `nccl`: by vLLM's NCCL transfer from the learner's GPU, at "
            "`stream.nccl_address`."
        ),
    ] = "file"
    slots: Annotated[int, Meta(ge=1, description="Most rollouts in generation at once, per producer.")] = 256
    device: Annotated[str, Meta(pattern=DEVICE, description="torch device of the engine.")] = "cpu"
    threads: Annotated[int, Meta(ge=1, description="torch threads of the engine on a CPU.")] = 1
    kv_policy: Annotated[
        Literal["recompute", "keep"],
        Meta(description="After a weight update, the key-value cache of running rollouts is recomputed or kept."),
    ] = "recompute"
    canary_tolerance: Annotated[
        float,
        Meta(
            ge=0,
            description="After every weight update, the mean difference in nats up to which the engine's log-probs of "
            "the learner's canary are right; beyond it no work is taken. 0: 0.001 with float32, 0.1 with bfloat16.",
        ),
    ] = 0.0
    self_test: Annotated[
        bool,
        Meta(
            description="Before taking work, compare the engine's log-probs at three temperatures with the learner's "
            "forward pass (the model is loaded into main memory for that), and refuse to run when they differ."
        ),
    ] = True


class EvalSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompts: Annotated[int, Meta(ge=1, description="Held-out prompts used (the first ones).")] = 300
    samples: Annotated[int, Meta(ge=1, description="Samples of each before and after training.")] = 4
    every_steps: Annotated[int, Meta(ge=0, description="Batches between evaluations on the way; 0: none.")] = 20
    curve_samples: Annotated[int, Meta(ge=1, description="Samples of each in evaluations on the way.")] = 1


class MetricsSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(description="Interface of the Prometheus endpoints.")] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(ge=0, le=65000, description="First port tried; each process takes the next free one. 0: no endpoints."),
    ] = 9400
    trackers: Annotated[
        tuple[TrackerName, ...],
        Meta(
            description="Experiment trackers that get the metrics of allocator and learner after every batch, too: "
            "tensorboard, wandb (offline), trackio. Each needs the extra of its name."
        ),
    ] = ()


class Config(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection = DataSection()
    sampling: SamplingSection = SamplingSection()
    allocation: AllocationSection = AllocationSection()
    stream: StreamSection = StreamSection()
    producer: ProducerSection = ProducerSection()
    verifier: VerifierSection = VerifierSection()
    learner: LearnerSection = LearnerSection()
    eval: EvalSection = EvalSection()
    metrics: MetricsSection = MetricsSection()

    def __post_init__(self) -> None:
        self._check_allocation()
        self._check_learner()
        self._check_engine()
        if self.stream.silence_s < 3 * self.stream.heartbeat_s:
            raise ValueError(
                f"stream.silence_s = {self.stream.silence_s:g} must be at least three times stream.heartbeat_s = "
                f"{self.stream.heartbeat_s:g}"
            )
        if self.data.source == "reasoning_gym":
            if not self.data.reasoning_gym.task:
                raise ValueError('data.reasoning_gym.task must name a task when data.source = "reasoning_gym"')
        elif not self.data.train:
            raise ValueError(f'data.train must name the training prompts when data.source = "{self.data.source}"')
        if problem := verifier_problem(self.verifier, used_kinds(self.verifier)):
            raise ValueError(problem)
        if "code" in used_kinds(self.verifier) and self.verifier.code.wall_s >= self.verifier.timeout_s:
            raise ValueError(
                f"verifier.code.wall_s = {self.verifier.code.wall_s:g} must be below verifier.timeout_s = "
                f"{self.verifier.timeout_s:g}: a slow program would be Unscorable, not wrong"
            )
        overlong = self.verifier.overlong
        if overlong.mode == "penalty" and overlong.buffer_tokens > self.sampling.max_tokens:
            raise ValueError(
                f"verifier.overlong.buffer_tokens = {overlong.buffer_tokens} must not be above sampling.max_tokens = "
                f"{self.sampling.max_tokens}"
            )

    def _check_engine(self) -> None:
        producer = self.producer
        if producer.engine_options and producer.engine != "vllm":
            raise ValueError(f'producer.engine_options are for producer.engine = "vllm", not "{producer.engine}"')
        if bool(producer.servers) != (producer.engine == "vllm-server"):
            raise ValueError(
                f"producer.servers = {list(producer.servers)} must name servers with producer.engine = "
                f'"vllm-server", and only then; producer.engine is "{producer.engine}"'
            )
        for url in producer.servers:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f'producer.servers has "{url}", expected http://HOST:PORT or https://HOST:PORT')
        if producer.weights == "nccl":
            if producer.engine == "transformers":
                raise ValueError('producer.weights = "nccl" is for vLLM; producer.engine is "transformers"')
            if not self.stream.nccl_address:
                raise ValueError('producer.weights = "nccl" needs stream.nccl_address, where the learner listens')
        if self.stream.nccl_address and not self.learner.device.startswith("cuda"):
            raise ValueError(
                f'stream.nccl_address = "{self.stream.nccl_address}" needs a GPU at the learner; learner.device is '
                f'"{self.learner.device}"'
            )

    def _check_learner(self) -> None:
        learner = self.learner
        if not all(0 <= beta < 1 for beta in learner.betas):
            raise ValueError(f"learner.betas = {list(learner.betas)} must hold two numbers from 0 to below 1")
        from gvm_stream.learner.objective import make_estimators  # numpy, only where a configuration is made

        # Classes of the user are imported by the learner alone.
        plain = LearnerSection()
        if ":" in learner.advantage:
            learner = msgspec.structs.replace(
                learner, advantage=plain.advantage, advantage_options=plain.advantage_options
            )
        if ":" in learner.loss:
            learner = msgspec.structs.replace(learner, loss=plain.loss, loss_options=plain.loss_options)
        make_estimators(learner)

    def _check_allocation(self) -> None:
        a, advantage = self.allocation, self.learner.advantage
        if not a.min_rollouts <= a.rollouts_per_prompt <= a.max_rollouts:
            raise ValueError(
                f"allocation.rollouts_per_prompt = {a.rollouts_per_prompt:g} must lie between "
                f"allocation.min_rollouts = {a.min_rollouts} and allocation.max_rollouts = {a.max_rollouts}"
            )
        if min(a.prior) <= 0:
            raise ValueError(f"allocation.prior = {list(a.prior)} must hold two numbers above 0")
        from gvm_stream.allocator.from_config import allocator_settings  # numpy, only where a configuration is made

        try:
            settings = allocator_settings(a, max_tokens=self.sampling.max_tokens, steps=self.run.steps)
        except ValueError as error:
            raise ValueError(f"[allocation]: {error}") from error
        if (advantage == "raft") != (a.coefficient == "raft") and advantage != "allocated":
            raise ValueError(
                f'learner.advantage = "{advantage}" does not go with allocation.coefficient = "{a.coefficient}": the '
                "numbers of rollouts are planned for the estimator in use"
            )
        design = settings.design or settings.make_policy().designs[0]
        if (design != "planned" or a.keep) and advantage != "allocated":
            raise ValueError(
                f'learner.advantage = "{advantage}" must be "allocated" when allocation.policy = "{a.policy}" stops '
                "adaptively, or with allocation.keep: only the allocator knows the coefficients"
            )


class Derived(msgspec.Struct, frozen=True):
    """What a configuration implies."""

    rollouts_per_step: int
    """On average, where the policy keeps to the budget in rollouts."""
    most_in_flight: int
    """Rollouts issued and not yet trained on, at the most: (max_lag + 1) batches."""
    worst_case_lag: int
    """Batches between the oldest token of a rollout and the step that trains on it, at the most."""
    producer_slots: int
    slots_that_can_fill: int
    """Slots that pacing by `max_lag` lets the producers fill at the same time."""


def derived(config: Config) -> Derived:
    allocation = config.allocation
    from gvm_stream.allocator.policies import make_policy

    budget = step_budget(allocation)
    design = allocation.design
    if design == "auto":
        design = make_policy(allocation.policy, allocation.options).designs[0]
    exact = allocation.budget == "rollouts" and design == "planned"
    most = budget if exact else allocation.prompts_per_step * allocation.max_rollouts
    in_flight = (allocation.max_lag + 1) * most
    slots = config.run.producers * config.producer.slots
    return Derived(budget, in_flight, allocation.max_lag, slots, min(slots, in_flight))


def step_budget(allocation: AllocationSection) -> int:
    """Rollouts of one training batch."""
    return round(allocation.prompts_per_step * allocation.rollouts_per_prompt)
