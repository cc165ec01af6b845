"""`gvm-stream eval`: held-out accuracy of a checkpoint, with the engine and verifier that a producer uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from gvm_stream.config import Config
from gvm_stream.data.prompts import Prompt
from gvm_stream.producers.engine import Completion, Engine, Request
from gvm_stream.producers.main import prepare_engine
from gvm_stream.verify.blocking import BlockingVerifier
from gvm_stream.verify.verdict import VerdictScored, VerifyItem


def evaluate(config: Config, checkpoint: Path | None, *, as_json: bool) -> str:
    """Mean reward over `eval.prompts` held-out prompts with `eval.samples` samples each, in words or as JSON."""
    if checkpoint is not None:
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(checkpoint)))
    from gvm_stream.data.encode import end_token_ids
    from gvm_stream.data.prepare import load_tokenizer, prepare_prompts

    tokenizer = load_tokenizer(config.model.path)
    end_tokens = end_token_ids(tokenizer, config.model.path)
    prompts = prepare_prompts(config.data, tokenizer, end_tokens=end_tokens, verifier=config.verifier)
    heldout = prompts.heldout[: config.eval.prompts]
    make, decode = prepare_engine(config, "eval")
    engine = make()
    asked = [prompt for prompt in heldout for _ in range(config.eval.samples)]
    completions = generate(engine, config, asked)
    engine.close()
    items = [
        VerifyItem(
            answer=prompt.answer,
            response=decode(completion.tokens.tolist()),
            truncated=completion.finish == "length",
            kind=prompt.verifier,
            prompt=prompt.id,
            tokens=len(completion.tokens),
            max_tokens=config.sampling.max_tokens,
        )
        for prompt, completion in zip(asked, completions, strict=True)
    ]
    with BlockingVerifier(config.verifier) as verifier:
        verdicts = verifier.verify(items)
    rewards = [verdict.reward for verdict in verdicts if isinstance(verdict, VerdictScored)]
    accuracy = sum(rewards) / len(rewards) if rewards else math.nan
    error = math.sqrt(accuracy * (1 - accuracy) / len(rewards)) if rewards else math.nan
    result = {
        "model": config.model.path,
        "accuracy": accuracy,
        "standard_error": error,
        "prompts": len(heldout),
        "samples": len(rewards),
        "unscorable": len(verdicts) - len(rewards),
        "truncated": sum(c.finish == "length" for c in completions),
        "mean_tokens": sum(len(c.tokens) for c in completions) / len(completions),
    }
    if as_json:
        return msgspec.json.encode(result).decode()
    return (
        f"held-out accuracy {accuracy:.3f} (standard error {error:.3f}) of {config.model.path}: "
        f"{len(heldout)} prompts, {len(rewards)} scored samples, {result['unscorable']} unscorable, "
        f"{result['truncated']} truncated, "
        f"{result['mean_tokens']:.1f} tokens on average"
    )


def generate(engine: Engine, config: Config, prompts: Sequence[Prompt]) -> list[Completion]:
    """One completion for each prompt, in order."""
    for i, prompt in enumerate(prompts):
        engine.submit(
            Request(
                id=i,
                prompt_tokens=np.frombuffer(prompt.tokens, "<i4"),
                max_tokens=config.sampling.max_tokens,
                temperature=config.sampling.temperature,
            )
        )
    done: dict[int, Completion] = {}
    while engine.has_work():
        done.update((completion.id, completion) for completion in engine.step())
    return [done[i] for i in range(len(prompts))]
