"""vLLM alone, for comparisons: answers every line on standard input with a round of the same work.

    python -m benchmarks.bare_vllm WORK.json {generate,async}

WORK.json: {"engine": arguments of EngineArgs, "sampling": of SamplingParams, "prompts": [[token id, ...], ...]}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gvm_stream.vllm.environment import hide_unmatched


def main() -> None:
    work, kind = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    hide_unmatched()  # all else as vLLM comes: its own process for the engine, its threads bound to cores
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        **work["sampling"], logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in work["prompts"]]
    (serve_generate if kind == "generate" else serve_async)(work["engine"], sampling, prompts)


def serve_generate(arguments: dict[str, Any], sampling: Any, prompts: list[dict[str, Any]]) -> None:  # noqa: ANN401
    from vllm import LLM

    llm = LLM(**arguments)

    def sample(some: list[dict[str, Any]]) -> int:
        outputs = llm.generate(some, sampling, use_tqdm=False)  # type: ignore[arg-type]
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    serve(sample, prompts)


def serve_async(arguments: dict[str, Any], sampling: Any, prompts: list[dict[str, Any]]) -> None:  # noqa: ANN401
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def one(llm: AsyncLLM, id: int, prompt: dict[str, Any]) -> int:
        tokens = 0
        async for output in llm.generate(prompt, sampling, str(id)):  # type: ignore[arg-type]
            tokens = len(output.outputs[0].token_ids)
        return tokens

    async def together(llm: AsyncLLM, some: list[dict[str, Any]]) -> int:
        return sum(await asyncio.gather(*(one(llm, id, prompt) for id, prompt in enumerate(some))))

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    llm = loop.run_until_complete(start())
    serve(lambda some: loop.run_until_complete(together(llm, some)), prompts)
    llm.shutdown()


def serve(sample: Callable[[list[dict[str, Any]]], int], prompts: list[dict[str, Any]]) -> None:
    sample(prompts[:512])  # warm-up
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        tokens = sample(prompts)
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    main()
