"""Continuous batching over a preallocated key-value cache, for any causal LM of the transformers library.

Running requests occupy rows 0 .. n - 1 without holes: when some end, the last rows move into their places, and when
enough rows are free waiting requests are appended. The last token of a row is never in the cache yet, so admission and
recomputation are the same pass (`_fill`), and every token comes out of the same one (`_decode`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from gvm_stream.canary import canary_logprobs
from gvm_stream.producers.causal_lm import copy_weights, load_causal_lm
from gvm_stream.producers.engine import Completion, EngineLoad, Float32, Int32, Request
from gvm_stream.producers.requests import Running, why_impossible, without_tokens
from gvm_stream.producers.row_table import RowTable
from gvm_stream.producers.sampling import sample_tokens
from gvm_stream.producers.slot_cache import SlotCache

FILL_TOKENS = 8192
"""Most tokens, padding included, in one pass of `_fill`."""
REFILL_SHARE = 1 / 16
"""Free rows are filled once this share of all slots can be, so that prefill runs in batches ..."""
REFILL_STEPS = 4
"""... or after so many steps with a free row and a request waiting."""


class TransformersEngine:
    """`producers.engine.Engine` on transformers: at most `slots` requests at once, each of at most `max_length` tokens,
    prompt included. Sampling is plain softmax(logits / temperature): the checkpoint's generation config is not used.

    `kv_policy` says what a weight update does to running requests: their keys and values are computed again with the
    new weights (`recompute`) or stay (`keep`).
    """

    def __init__(
        self,
        model_path: str,
        *,
        slots: int,
        max_length: int,
        end_tokens: Sequence[int],
        dtype: str,
        device: str,
        kv_policy: Literal["recompute", "keep"],
        seed: int,
        version: int = 0,
    ) -> None:
        place = torch.device(device)
        self._slots, self._max_length = slots, max_length
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._model = load_causal_lm(model_path, dtype=self._dtype, device=place, max_length=max_length)
        self._vocabulary = self._model.get_input_embeddings().get_parameter("weight").shape[0]
        # transformers renamed the argument within version 5.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._recompute = kv_policy == "recompute"
        self._generator = torch.Generator(place).manual_seed(seed)
        self._version = version
        self._generated = 0

        self._waiting: dict[int, Request] = {}
        self._running: list[Running] = []
        self._ended: list[Completion] = []
        self._steps_held = 0

        self._rows = RowTable(slots, max_length, place)
        self._cache = SlotCache(slots, max_length)
        self._positions = torch.arange(max_length, device=place)
        self._end_set = frozenset(end_tokens)
        self._end_tokens = self._rows.index(sorted(self._end_set))
        self._allocate_cache()

    @property
    def version(self) -> int:
        return self._version

    @property
    def generated_tokens(self) -> int:
        return self._generated

    def submit(self, request: Request) -> None:
        problem = why_impossible(request, self._max_length, self._vocabulary)
        if problem:
            self._ended.append(without_tokens(request, "error", f"request {request.id}: {problem}"))
        else:
            self._waiting[request.id] = request

    @torch.inference_mode()
    def abort(self, ids: list[int]) -> None:
        wanted = set(ids)
        for request_id in [request_id for request_id in self._waiting if request_id in wanted]:
            self._ended.append(without_tokens(self._waiting.pop(request_id), "abort"))
        rows = [row for row, running in enumerate(self._running) if running.request.id in wanted]
        if rows:
            self._retire(rows, aborted=True)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        self._admit()
        if self._running:
            self._decode()
        ended, self._ended = self._ended, []
        return ended

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def progress(self) -> dict[int, int]:
        tokens = dict.fromkeys(self._waiting, 0)
        for running, length in zip(self._running, self._rows.lengths(len(self._running)), strict=True):
            tokens[running.request.id] = length - running.prompt_length
        return tokens

    @torch.inference_mode()
    def load_weights(self, path: Path, version: int) -> None:
        copy_weights(self._model, path)
        self._version = version
        for running, length in zip(self._running, self._rows.lengths(len(self._running)), strict=True):
            if running.versions[-1][0] != version:
                running.versions.append((version, length - running.prompt_length))
        if self._recompute:
            self._fill(range(len(self._running)))

    def load(self) -> EngineLoad:
        running = len(self._running)
        return EngineLoad(running=running, waiting=len(self._waiting), cache_used=running / self._slots, preemptions=0)

    def score(self, tokens: Int32) -> Float32:
        logprobs: Float32 = canary_logprobs(self._model, self._rows.index(tokens.tolist())).cpu().numpy()
        return logprobs[None]

    def close(self) -> None:
        for work in (self._waiting, self._running, self._ended):
            work.clear()
        self._cache = SlotCache(self._slots, self._max_length)

    def _admit(self) -> None:
        """Append waiting requests as rows. Prompts that occur several times (siblings of a group) are computed once."""
        first = len(self._running)
        count = min(self._slots - first, len(self._waiting))
        if count == 0:
            return
        self._steps_held += 1
        if first > 0 and count < REFILL_SHARE * self._slots and self._steps_held < REFILL_STEPS:
            return
        self._steps_held = 0
        requests = [self._waiting.pop(request_id) for request_id in list(islice(self._waiting, count))]
        self._running.extend(Running(request, [(self._version, 0)]) for request in requests)
        self._rows.write(first, requests)
        computed: dict[bytes, int] = {}
        copies: list[tuple[int, int]] = []
        for row, request in enumerate(requests, start=first):
            source = computed.setdefault(request.prompt_tokens.tobytes(), row)
            if source != row:
                copies.append((source, row))
        self._fill(computed.values())
        if copies:
            sources, targets = (self._rows.index(rows) for rows in zip(*copies, strict=True))
            self._cache.copy_rows(sources, targets, int(self._rows.length[targets].max()))

    def _fill(self, rows: Iterable[int]) -> None:
        """Compute the keys and values of all tokens of `rows` but the last, in passes of at most `FILL_TOKENS`."""
        lengths = self._rows.lengths(len(self._running))
        longest_first = sorted((row for row in rows if lengths[row] > 1), key=lambda row: -lengths[row])
        while longest_first:
            width = lengths[longest_first[0]] - 1
            count = max(1, FILL_TOKENS // width)
            chunk, longest_first = self._rows.index(longest_first[:count]), longest_first[count:]
            positions = self._positions[:width]
            # Padding repeats the row's own last token, so no other token's numbers, finite or not, reach its cache.
            inside = torch.minimum(positions, self._rows.length[chunk, None] - 1)
            self._cache.expect_prefill(chunk, width)
            self._forward(
                self._model.base_model,
                self._rows.tokens[chunk, : width + 1].gather(1, inside),
                positions.expand(len(chunk), width),
                self._mask(positions, width)[None, None],
            )

    def _decode(self) -> None:
        """Sample one token for every row and retire the rows that end with it."""
        n = len(self._running)
        tokens, length = self._rows.tokens[:n], self._rows.length[:n]
        position = length[:, None] - 1
        width = int(length.max())
        self._cache.expect_decode(position[:, 0], width)
        mask = self._mask(position, width)[:, None]
        logits: Tensor = self._forward(self._model, tokens.gather(1, position), position, mask)["logits"]
        token, logprob = sample_tokens(logits[:, -1], self._rows.temperature[:n], self._generator)
        tokens.scatter_(1, length[:, None], token[:, None])
        self._rows.logprobs[:n].scatter_(1, length[:, None], logprob[:, None])
        # A row without a distribution stays one token shorter than the others: that is how `_retire` knows it.
        sampled = logprob.isfinite()
        length += sampled
        ended = (token[:, None] == self._end_tokens).any(dim=1) | (length >= self._rows.limit[:n]) | ~sampled
        self._generated += n
        rows = ended.nonzero()[:, 0].tolist()
        if rows:
            self._retire(rows)

    def _retire(self, rows: list[int], aborted: bool = False) -> None:
        """End the requests in `rows` (ascending) and close the gaps."""
        broken = []
        for row, (tokens, logprobs) in zip(rows, self._rows.read(rows), strict=True):
            running = self._running[row]
            sampled = len(tokens) - running.prompt_length
            finish, error = "length", ""
            if aborted:
                finish = "abort"
            elif sampled and int(tokens[-1]) in self._end_set:
                finish = "stop"
            elif sampled < running.request.max_tokens:
                finish = "error"
                error = (
                    f"request {running.request.id}: the logits of response token {sampled} under policy version "
                    f"{self._version} are not finite"
                )
                broken.append(row)
            self._ended.append(running.complete(tokens, logprobs, finish, error))
        if broken:
            self._generated -= len(broken)
            self._cache.clear_rows(self._rows.index(broken))
        self._close_gaps(rows)

    def _close_gaps(self, gone: list[int]) -> None:
        left = len(self._running) - len(gone)
        holes = [row for row in gone if row < left]
        if holes:
            moved = sorted(set(range(left, len(self._running))) - set(gone))
            sources, targets = self._rows.index(moved), self._rows.index(holes)
            self._rows.move(sources, targets)
            self._cache.copy_rows(sources, targets, int(self._rows.length[targets].max()))
            for source, target in zip(moved, holes, strict=True):
                self._running[target] = self._running[source]
        del self._running[left:]

    def _mask(self, positions: Tensor, width: int) -> Tensor:
        """Additive attention mask [..., width] of queries at `positions` [...]: 0 up to the position, then -inf."""
        return torch.where(self._positions[:width] <= positions[..., None], 0.0, -torch.inf).to(self._dtype)

    def _forward(self, module: nn.Module, tokens: Tensor, positions: Tensor, mask: Tensor) -> ModelOutput:
        """`tokens` and `positions` int64 [B, Q], `mask` [B or 1, 1, Q, width]: transformers passes it on as it is."""
        cache = {self._cache_argument: self._cache}
        output: ModelOutput = module(
            input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=True, **cache
        )
        return output

    @torch.inference_mode()
    def _allocate_cache(self) -> None:
        """Run one token: the model knows the shapes of its cache, and too little memory shows up at the start."""
        row = self._rows.index([0])
        self._cache.expect_prefill(row, 1)
        self._forward(self._model.base_model, row[None], row[None], self._mask(row, 1)[None, None])
