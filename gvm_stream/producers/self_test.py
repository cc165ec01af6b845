"""Before a producer takes work: does its engine report the log-probs that the learner will compute?

An engine that reports them before the temperature is applied, or samples with a repetition penalty from the
checkpoint's own configuration, runs well and trains badly.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from gvm_stream.canary import canary_tokens
from gvm_stream.errors import ModelError
from gvm_stream.learner.batch import Row, pack
from gvm_stream.learner.model import response_logprobs
from gvm_stream.producers.causal_lm import copy_weights, load_causal_lm
from gvm_stream.producers.engine import Completion, Engine, Float32, Request

TEMPERATURES = (0.5, 1.0, 1.5)
RESPONSES, TOKENS, PROMPT = 4, 16, 8
"""Of each temperature."""
LIMIT = {"float32": 2e-3, "bfloat16": 0.05}
"""Mean difference in nats, by `model.dtype`."""


def self_test(engine: Engine, weights: Path, *, model_path: str, dtype: str, max_length: int) -> None:
    """Sample at three temperatures and compare with the learner's forward pass, in the model's dtype on the CPU.

    The engine has the weights of the file `weights`, of the architecture of `model_path`, and no work. Raises
    `ModelError`.
    """
    model = load_causal_lm(model_path, dtype=getattr(torch, dtype), device=torch.device("cpu"), max_length=max_length)
    copy_weights(model, weights)
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
    prompt = canary_tokens(vocabulary)[: min(PROMPT, max_length - 1)].numpy().astype(np.int32)
    requests = [
        Request(
            id=-1 - i,
            prompt_tokens=prompt,
            max_tokens=min(TOKENS, max_length - len(prompt)),
            temperature=TEMPERATURES[i // RESPONSES],
        )
        for i in range(len(TEMPERATURES) * RESPONSES)
    ]
    for request in requests:
        engine.submit(request)
    ended: dict[int, Completion] = {}
    while engine.has_work():
        ended |= {completion.id: completion for completion in engine.step()}
    for temperature in TEMPERATURES:
        differences = []
        for request in requests:
            completion = ended[request.id]
            if completion.finish not in ("stop", "length"):
                raise ModelError(f"the engine's self-test failed: {completion.error or completion.finish}")
            if request.temperature == temperature:
                expected = learner_logprobs(model, request, completion)
                differences.append(np.abs(completion.logprobs - expected))
        found = float(np.concatenate(differences).mean())
        if not found < LIMIT[dtype]:
            raise ModelError(
                f"the engine's log-probs at temperature {temperature:g} differ from the learner's by {found:.3g} nats "
                f"on average, less than {LIMIT[dtype]:g} was expected: does it report them after the temperature is "
                "applied, and sample without penalties, top-k or top-p of the checkpoint's generation_config.json?"
            )


@torch.no_grad()
def learner_logprobs(model: PreTrainedModel, request: Request, completion: Completion) -> Float32:
    """float32 [T], of a response, as the learner computes them for its loss."""
    row = Row(
        group=0,
        work=request.id,
        prompt_length=len(request.prompt_tokens),
        tokens=np.concatenate([request.prompt_tokens, completion.tokens]),
        logprobs=completion.logprobs,
        advantage=0.0,
        coefficient=0.0,
    )
    (batch,) = pack([row], len(row.tokens))
    logprobs: Float32 = response_logprobs(model, batch, request.temperature)[0].float().numpy()
    return logprobs[: len(completion.tokens)]
