"""Found by Python processes that vLLM starts (see `gvm_stream.vllm.environment`), before anything else is imported."""

import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None  # type: ignore[assignment]
