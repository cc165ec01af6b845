"""Weights of the learner into vLLM: a weight-transfer backend of vLLM's own kind, named `gvm`.

vLLM finds it by the entry point `vllm.general_plugins`, in every worker process and in an external `vllm serve` as
well. An update names a safetensors file; a worker that sees the file maps it into memory, one that does not fetches it
from the learner's weight server first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import trio
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from gvm_stream.config import StreamSection
from gvm_stream.errors import WeightsError
from gvm_stream.producers.weights import WeightsSource
from gvm_stream.wire.messages import WeightsInfo

BACKEND = "gvm"


@dataclass
class NoInit(WeightTransferInitInfo):
    pass


@dataclass
class Update(WeightTransferUpdateInfo):
    """The fields of `wire.messages.WeightsInfo`, and how to reach the weight server."""

    version: int
    path: str
    size: int
    checksum: str
    address: str = ""
    keys: str = ""
    """Folder with keys, as `stream.keys`, on the worker's host."""


class GvmTransfer(WeightTransferEngine[NoInit, Update]):
    """All of an update happens in `update_weights`: until then the model is whole, and afterwards again.

    Only modules with a changed tensor are loaded; the file in force stays mapped for the comparison, and to go back to
    when loading fails.
    """

    init_info_cls = NoInit
    update_info_cls = Update

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._in_force: dict[str, Tensor] = {}
        """Memory-mapped; empty while the model has the weights of its checkpoint."""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: Update) -> None:
        """Raises `WeightsError`: the weights before are in force. Any other error: the model is not usable."""
        new = weights_of(update_info)
        where = f"the weights of version {update_info.version} in {update_info.path}"
        if self._in_force:
            check_alike(self._in_force, new, where)
        try:
            self._load(new, changed_modules(self._in_force, new))
        except Exception as error:
            if not self._in_force:
                raise
            finalize_layerwise_reload(self.model, self.model_config)
            self._load(self._in_force, self._in_force)
            raise WeightsError(f"{where} cannot be loaded: {error}") from error
        self._in_force = new

    def shutdown(self) -> None:
        self._in_force = {}

    def _load(self, weights: dict[str, Tensor], names: Iterable[str]) -> None:
        initialize_layerwise_reload(self.model)
        self.model.load_weights((name, weights[name]) for name in names)  # type: ignore[operator]
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_weights(self.model)


def weights_of(update: Update) -> dict[str, Tensor]:
    path = Path(update.path)
    if path.exists() or not update.address:
        return mapped(path)  # who named it has checked it
    info = WeightsInfo(
        version=update.version,
        path=update.path,
        size=update.size,
        checksum=update.checksum,
        address=update.address,
    )

    async def fetch(folder: Path) -> dict[str, Tensor]:
        async with WeightsSource(StreamSection(keys=update.keys), "vllm-worker", folder).local(info) as copy:
            return mapped(copy)

    with TemporaryDirectory(prefix="gvm-weights-") as folder:
        return trio.run(fetch, Path(folder))


def mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory shared with the file; it may be deleted meanwhile."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as problem:
        raise WeightsError(f"the weights file {path} cannot be read as safetensors: {problem}") from problem


def check_alike(old: dict[str, Tensor], new: dict[str, Tensor], where: str) -> None:
    for name in sorted(old.keys() | new.keys()):
        was, found = old.get(name), new.get(name)
        if was is None or found is None or was.shape != found.shape:
            raise WeightsError(
                f"{where} have {name} in shape {None if found is None else list(found.shape)}, "
                f"expected {None if was is None else list(was.shape)}"
            )


def changed_modules(old: dict[str, Tensor], new: dict[str, Tensor]) -> list[str]:
    """Names of all tensors of modules with at least one changed tensor.

    vLLM fuses tensors of sibling modules (queries, keys and values), so a name belongs with those that share its name
    but for the last two parts.
    """
    changed = {module_of(name) for name, tensor in new.items() if name not in old or not torch.equal(old[name], tensor)}
    return sorted((name for name in new if module_of(name) in changed), key=module_of)


def pack_tied_weights(model: nn.Module) -> None:
    """On a CPU, vLLM computes with packed copies of weights. It renews those of the modules that it loads, but a tied
    output layer is not among them."""
    sharing: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.numel():
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        if len(modules) > 1:
            for module in modules:
                module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]


def module_of(name: str) -> str:
    return ".".join(name.split(".")[:-2]) or name


def register() -> None:
    """The entry point. vLLM calls it in each of its processes, perhaps several times."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, GvmTransfer.__name__)
