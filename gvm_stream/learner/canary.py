"""The canary of weights that are being published."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from transformers import PreTrainedModel

from gvm_stream.canary import canary_logprobs, canary_tokens
from gvm_stream.wire.messages import Canary


def canary_of(model: PreTrainedModel, weights: dict[str, Tensor]) -> Canary:
    """The canary of `weights`, which are those of `model` as they are published (`distributed.weights_of`).

    A model in parts computes with its own, in the type of its mixed precision, the same; all ranks take part.
    """
    tokens = canary_tokens(model.config.get_text_config().vocab_size)
    on_device = tokens.to(next(iter(weights.values())).device)
    if isinstance(model, FSDPModule):
        logprobs = canary_logprobs(model, on_device)
        model.reshard()  # as no backward pass follows
    else:
        logprobs = canary_logprobs(lambda **inputs: functional_call(model, weights, (), inputs), on_device)
    return Canary(tokens=tokens.numpy().astype("<i4").tobytes(), logprobs=logprobs.cpu().numpy().tobytes())
