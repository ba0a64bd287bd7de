"""llama.cpp through its C API: all sequences in one `llama_decode` a step, greedy over its logits.

What a server with continuous batching does at best, without HTTP and without a sampler chain.
Models of any kind that llama.cpp knows, recurrent ones too.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np

from research.bench.peers.programs.timing import Prompts, measure, read_task

_ERROR = 4
"""The level of llama.cpp's log from which on it is shown."""
_LEAST_BATCH, _LEAST_STEP, _MOST_STEP = 2048, 512, 2048
"""Tokens that a call takes, and that are computed together."""


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]  # not known here
def _log(level: int, text: bytes, _data: Any) -> None:
    if level >= _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class LlamaContext:
    """A context for so many sequences, and the batch that they are fed by."""

    def __init__(self, model: Any, num_sequences: int, length: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = length * num_sequences
        params.n_batch = max(_LEAST_BATCH, num_sequences)
        params.n_ubatch = max(_LEAST_STEP, min(_MOST_STEP, num_sequences))
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context of {num_sequences} sequences")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._most = params.n_batch
        self._batch = llama_cpp.llama_batch_init(self._most, 0, 1)

    def close(self) -> None:
        """Give the memory back."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def generate(self, prompts: Any, num_tokens: int) -> int:
        """Generate greedy tokens for i32[sequences, length]; return the total number."""
        count, length = map(int, prompts.shape)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        newest = np.zeros(count, np.int32)
        at_once = max(1, self._most // length)
        for first in range(0, count, at_once):
            ids = np.arange(first, min(count, first + at_once))
            positions = np.tile(np.arange(length), len(ids))
            newest[ids] = self._decode(
                prompts[ids].ravel(), positions, np.repeat(ids, length), positions == length - 1
            )
        everyone = np.arange(count)
        for step in range(num_tokens - 1):
            positions = np.full(count, length + step)
            newest = self._decode(newest, positions, everyone, np.ones(count, bool))
        return count * num_tokens

    def _decode(self, tokens: Any, positions: Any, sequences: Any, wanted: Any) -> Any:
        """Return the likeliest next token at each wanted position."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        columns = {"token": tokens, "pos": positions, "n_seq_id": 1, "logits": wanted}
        for name, values in columns.items():
            np.ctypeslib.as_array(getattr(batch, name), (count,))[:] = values
        for row, sequence in enumerate(sequences):
            batch.seq_id[row][0] = int(sequence)
        if code := llama_cpp.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode returned {code}")
        shape = (int(wanted.sum()), self._vocab_size)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape)
        return logits.argmax(1).astype(np.int32)


task = read_task()
llama_cpp.llama_backend_init()
llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
params = llama_cpp.llama_model_default_params()
params.use_mmap = False
model = llama_cpp.llama_model_load_from_file(task["model"].encode(), params)
if not model:
    raise SystemExit(f"llama.cpp does not load {task['model']}")
length = task["prompt_tokens"] + task["output_tokens"]
made: list[LlamaContext] = []


def prepare(prompts: Prompts) -> Callable[[int], int]:
    for decoder in made:
        decoder.close()
    made[:] = [LlamaContext(model, len(prompts), length, task["threads"])]
    array = np.array(prompts, np.int32)
    return lambda num_tokens: made[0].generate(array, num_tokens)


measure(task, prepare)
