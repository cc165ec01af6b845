"""Makes the files of the arithmetic example: prompts, and a model warm-started on careless demonstrations.

    python -m examples.arithmetic.make [--out DIR] [--steps 800] [--seed 0] [--only data|model]

The same seed gives the same files on the same machine and library versions.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from examples.arithmetic import chains
from examples.arithmetic.chains import Chain, Split
from examples.arithmetic.model import PAD_ID, build_model, build_tokenizer, prompt_ids, response_ids

HERE = Path(__file__).parent
TRAIN_PROMPTS = 1024
HELDOUT_PROMPTS = 400
BATCH = 32
BUCKETED_BATCHES = 16
IGNORED = -100
MAX_RESPONSE_TOKENS = 80

Batch = tuple[Tensor, Tensor]


def draw_prompts(split: Split, count: int, seed: int) -> list[Chain]:
    return chains.draw_unique(split, count, random.Random(f"{split} prompts {seed}"))


def write_prompts(path: Path, drawn: list[Chain]) -> None:
    """One JSON object a line with the columns prompt, answer and level."""
    path.write_text("".join(json.dumps(chain.row) + "\n" for chain in drawn), encoding="utf-8")
    print(f"{path}: {len(drawn)} prompts")


def careless_batches(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> Iterator[Batch]:
    """`steps` batches of fresh careless demonstrations, sorted by length within pools so that little is padding.

    Each is token ids and labels, int64 [BATCH, T]; prompts are not labelled.
    """
    rng = random.Random(f"careless {seed}")
    made = 0
    while made < steps:
        pool = [careless_example(tokenizer, rng) for _ in range(BATCH * BUCKETED_BATCHES)]
        pool.sort(key=lambda example: len(example[0]))
        buckets = [pool[start : start + BATCH] for start in range(0, len(pool), BATCH)]
        rng.shuffle(buckets)
        for bucket in buckets[: steps - made]:
            yield padded([ids for ids, _ in bucket], PAD_ID), padded([labels for _, labels in bucket], IGNORED)
            made += 1


def careless_example(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], list[int]]:
    chain = chains.draw_from("train", rng)
    prompt = prompt_ids(tokenizer, chain.prompt)
    response = response_ids(tokenizer, chains.careless_demonstration(chain, rng))
    return prompt + response, [IGNORED] * len(prompt) + response


def padded(rows: list[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the layers, AdamW on embeddings, head and norms; AdamW alone varies by seed."""
    matrices = [p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (".layers." in name and p.ndim == 2)]
    return [
        torch.optim.Muon(matrices, lr=0.01, momentum=0.95, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up over 5 % of the steps, constant to 40 %, then linear down to 5 % of the peak."""
    done = (step + 1) / steps
    if done < 0.4:
        return min(1.0, done / 0.05)
    return 1.0 - 0.95 * (done - 0.4) / 0.6


def warm_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Supervised training on careless demonstrations, in place; the loss covers the response only."""
    both = optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: lr_factor(step, steps)) for o in both]
    started = time.process_time()
    for step, (ids, labels) in enumerate(careless_batches(tokenizer, steps, seed), start=1):
        loss = model(input_ids=ids, labels=labels).loss
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(both, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.process_time() - started:.0f} CPU s", flush=True)


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], *, greedy: bool
) -> list[str]:
    """One response to each prompt, at temperature 1 or greedy, 256 at a time."""
    rows = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    texts: list[str] = []
    for start in range(0, len(rows), 256):
        part = rows[start : start + 256]
        longest = max(map(len, part))
        ids = torch.tensor([[PAD_ID] * (longest - len(row)) + row for row in part])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in part])
        generate = cast("Any", model).generate  # its type differs between versions of transformers
        output = generate(input_ids=ids, attention_mask=mask, max_new_tokens=MAX_RESPONSE_TOKENS, do_sample=not greedy)
        texts += tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
    return texts


def report(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, train: list[Chain], heldout: list[Chain], seed: int
) -> None:
    """Print held-out accuracy (300 prompts x 2, and greedy) and how often 200 training prompts are solved (x 8)."""

    def times_solved(drawn: list[Chain], samples: int, *, greedy: bool = False) -> tuple[list[int], float]:
        """Right responses to each prompt, and mean response tokens."""
        texts = sample(model, tokenizer, [c.prompt for c in drawn for _ in range(samples)], greedy=greedy)
        groups = [texts[start : start + samples] for start in range(0, len(texts), samples)]
        right = [sum(chains.is_right(t, c.answer) for t in group) for c, group in zip(drawn, groups, strict=True)]
        return right, sum(len(response_ids(tokenizer, t)) for t in texts) / len(texts)

    torch.manual_seed(seed)
    right, tokens = times_solved(heldout[:300], 2)
    print(f"held-out accuracy at T = 1: {sum(right) / 600:.3f}; {tokens:.1f} tokens a response")
    right, _ = times_solved(heldout[:300], 1, greedy=True)
    print(f"held-out accuracy, greedy: {sum(right) / 300:.3f}")
    right, _ = times_solved(train[:200], 8)
    print(f"training prompts solved 0 of 8 times: {right.count(0) / 200:.3f}; 8 of 8: {right.count(8) / 200:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the prompts and the warm-started model of the example.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: beside this file)")
    parser.add_argument("--steps", type=int, default=800, help="warm-start steps of 32 examples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["data", "model"], help="make only this")
    args = parser.parse_args()
    out, seed = args.out, args.seed

    train, heldout = draw_prompts("train", TRAIN_PROMPTS, seed), draw_prompts("heldout", HELDOUT_PROMPTS, seed)
    if args.only != "model":
        out.mkdir(parents=True, exist_ok=True)
        write_prompts(out / "train.jsonl", train)
        write_prompts(out / "heldout.jsonl", heldout)
    if args.only != "data":
        torch.set_num_threads(1)  # two threads give nothing at this size, and one makes the sums repeatable
        tokenizer, model = build_tokenizer(), build_model(seed)
        warm_start(model, tokenizer, args.steps, seed)
        model.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
        report(model, tokenizer, train, heldout, seed)


if __name__ == "__main__":
    main()
