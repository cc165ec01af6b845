"""The model that the KL penalty holds the policy to: the one that the run starts with, as it was."""

from __future__ import annotations

from transformers import PreTrainedModel

from gvm_stream.config import Config
from gvm_stream.learner.distributed import Ranks, shard
from gvm_stream.learner.model import load_model


def load_reference(config: Config, ranks: Ranks) -> PreTrainedModel:
    """`model.path`, without gradients, divided among the ranks like the policy and computed in the same types: as long
    as their weights are equal, so are their log-probs, bit for bit. Raises ModelError if it cannot be loaded."""
    device = config.learner.device if ranks.size == 1 else "cpu"
    model = load_model(config.model.path, "float32", device).requires_grad_(False)
    return shard(model, ranks, config.learner.device, config.model.dtype)
