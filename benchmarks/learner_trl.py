"""The side of TRL in `benchmarks.learner`: a GRPOTrainer that is handed its completions."""

from __future__ import annotations

import importlib
import tempfile
import time
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback

from benchmarks.completions import EXAMPLE, LR, MAX_TOKENS, PER_PROMPT, Completed, peak_mb, resident_mb, rewards


def measure_trl(model: PreTrainedModel, work: list[Completed], steps: int, micro_batch: int) -> dict[str, Any]:
    trl = importlib.import_module("trl")

    class Timed(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        """Knows how long it took to make batches."""

        preparing = 0.0

        def _prepare_inputs(self, batch: Any) -> Any:  # noqa: ANN401
            started = time.process_time()
            prepared = super()._prepare_inputs(batch)
            self.preparing += time.process_time() - started
            return prepared

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = time.process_time() - trainer.preparing

        def on_step_end(self, *_: object, **__: object) -> None:
            self.seconds.append(time.process_time() - trainer.preparing - self.started)

    def roll_out(prompts: list[str], _: object) -> dict[str, Any]:
        turn = dict.fromkeys(prompts, 0)
        chosen = []
        for name in prompts:
            chosen.append((work[int(name)].prompt, work[int(name)].responses[turn[name]]))
            turn[name] += 1
        return {
            "prompt_ids": [prompt for prompt, _ in chosen],
            "completion_ids": [response for _, response in chosen],
            "logprobs": [[0.0] * len(response) for _, response in chosen],
        }

    rollouts = len(work) * PER_PROMPT
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=rollouts // micro_batch,
            num_generations=PER_PROMPT,
            max_completion_length=MAX_TOKENS,
            max_steps=steps + 1,
            learning_rate=LR,
            loss_type="dapo",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        clock = Clock()
        trainer = Timed(
            model=model,
            args=arguments,
            reward_funcs=lambda completions, **_: rewards(len(completions)),
            train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(work))]),
            processing_class=AutoTokenizer.from_pretrained(EXAMPLE / "model"),
            rollout_func=roll_out,
            callbacks=[clock],
        )
        before = resident_mb()
        trainer.train()
    longest = max(len(c.prompt) for c in work) + max(len(r) for c in work for r in c.responses)
    return {
        "seconds": clock.seconds[1:],
        "memory_mb": peak_mb() - before,
        "padding_share": 1 - sum(c.tokens for c in work) / (rollouts * longest),
    }
