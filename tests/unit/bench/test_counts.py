"""What work takes at least, against what arrays and the model say; how much of it there is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from research.bench.engine.counts import PROMPT, count_op, prefill_bytes
from research.bench.engine.decode import decode_rows, prefill_rows
from research.bench.engine.feeds import Array, Feeds
from research.bench.host.load import Load
from research.bench.peaks.memory import measure_memory
from research.bench.peaks.rates import memory_peak
from srm.engine.config import Dtype, ModelConfig
from srm.engine.device.linear import widen_bfloat16
from srm.engine.steps.batch import Batch
from srm.engine.weights.step_bytes import decode_bytes
from tests.kernels import oracle
from tests.kit.engines.numpy_runner import TINY, NumpyRunner, tiny_weights

MODEL = ModelConfig(d_model=64, num_layers=3, num_heads=2, n_ctx=128, vocab_size=96)
OPS = ("embed", "norm", "up", "down", "proj_in", "proj_out", "head", "mix", "mix_prompts", "taps",
       "edit", "sample", "sample_top_p", "sample_slices", "score")  # fmt: skip


def size(arrays: list[Array]) -> int:
    return sum(array.nbytes for array in arrays)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_products_of_a_step_are_those_of_its_tokens(dtype: Dtype, width: int) -> None:
    ops = [count_op(name, MODEL, dtype, "cpu", 5) for name in ("up", "down", "proj_in", "proj_out")]
    head = count_op("head", MODEL, dtype, "cpu", 5)
    flops = MODEL.num_layers * sum(op.flops for op in ops) + head.flops
    assert flops == 5 * MODEL.flops_per_token
    step = decode_bytes(MODEL, dtype, "cpu")
    weights = MODEL.num_layers * 10 * 64**2 + 64 * 96
    assert step.once == width * weights
    assert step.row == width * 64 + 2 * 4 * 3 * 64 + 2 * 4 * 96
    of_layers = width * MODEL.num_layers * 10 * 64**2
    assert prefill_bytes(MODEL, dtype, 40, 2) == of_layers + 40 * width * 64 + 2 * 4 * 3 * 64


def test_float8_halves_what_channel_mixers_read() -> None:
    wide, narrow = (decode_bytes(MODEL, dtype, "gpu") for dtype in ("bfloat16", "float8"))
    assert narrow == wide._replace(once=wide.once - MODEL.num_layers * 8 * 64**2)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_an_op_moves_what_it_is_fed_and_gives(rows: int, narrow: bool) -> None:
    """Counted bytes against whole arrays, of those ops that read and write all of theirs."""
    dtype: Dtype = "bfloat16" if narrow else "float32"
    feeds, value = Feeds(MODEL, is_narrow=narrow, narrow_logits=False), 2 if narrow else 4
    y = rows * MODEL.d_model * value

    def count(name: str) -> int:
        return count_op(name, MODEL, dtype, "cpu", rows).bytes

    assert count("norm") == size(feeds.norm(rows)) + y
    _, ids, _, table = feeds.embed(rows)
    assert count("embed") == ids.nbytes + rows * table[0].nbytes + y
    q, *_, residual = feeds.taps(rows)
    assert count("taps") == size([q, residual]) + y
    logits = feeds.sample(rows)[1]
    assert count("sample") == count("sample_top_p") == logits.nbytes
    state, _, x, *where, offsets, _, _, _, _ = feeds.mix(rows)
    touched = 2 * state[:, : MODEL.d_model].nbytes + rows * 3 * MODEL.num_heads * 4
    assert count("mix") == x.nbytes + y + touched + size(where) + offsets[1:].nbytes
    prompts = len(feeds.mix(rows, length=PROMPT)[0])
    assert prompts == -(-rows // PROMPT)
    assert count("mix_prompts") < count("mix") if rows > 1 else True


def test_slices_fed_are_those_of_the_logits() -> None:
    model = msgspec.structs.replace(MODEL, vocab_size=512)
    _, logits, *_, slices = Feeds(model, is_narrow=True, narrow_logits=True).sample_slices(5)
    expected = oracle.slices(widen_bfloat16(logits).astype(np.float64), np.ones(5))
    np.testing.assert_allclose(slices, expected, rtol=1e-6)
    # whole slices, and of the logits one slice
    assert count_op("sample_slices", model, "bfloat16", "gpu", 5).bytes == slices.nbytes + 5 * 512


def test_edits_fed_are_those_that_are_counted() -> None:
    _, logits, _, _, rows, spans, penalties, tokens, biases, _ = Feeds(
        MODEL, is_narrow=False, narrow_logits=False
    ).edit(5)
    lengths = (spans[:, 1::2] - spans[:, ::2]).sum(1)
    assert len(rows) == len(penalties) == len(logits) == 5
    assert lengths.tolist() == [72] * 5 and spans.max() == len(tokens)
    assert len(np.unique(tokens[: len(biases)])) == len(biases)
    # each token's id, and its logit read and written; the biases
    assert count_op("edit", MODEL, "float32", "cpu", 5).bytes == 5 * (72 * 12 + len(biases) * 4)


@pytest.mark.parametrize("name", OPS)
def test_more_rows_take_more_and_weights_only_once(name: str) -> None:
    one, two = (count_op(name, MODEL, "float32", "cpu", rows) for rows in (64, 128))
    assert two.flops == 2 * one.flops
    assert one.bytes < two.bytes <= 2 * one.bytes


def test_an_op_that_nobody_counts_is_an_error() -> None:
    with pytest.raises(KeyError, match="call"):
        count_op("call", MODEL, "float32", "cpu", 1)


def test_streams_are_measured_by_the_bytes_they_move() -> None:
    memory = measure_memory("cpu", 2, values=1_000)
    moved = [(item["stream"], item["bytes"]) for item in memory]
    assert moved == [("copy", 8_000), ("add", 12_000), ("read", 4_000)]
    assert all(len(item["raw"]) == 2 and max(item["raw"]) == item["gb_per_s"] for item in memory)
    assert memory_peak(memory) == max(item["gb_per_s"] for item in memory) > 0


PROMPTS = np.arange(15, dtype=np.int32).reshape(3, 5)


def sampled(batches: list[Batch]) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of the last of the batches, run on a pool of rubbish."""
    runner = NumpyRunner(tiny_weights(), num_slots=len(PROMPTS))
    result = [runner.launch(batch) for batch in batches][-1].wait()
    return result.token_ids.tolist(), result.logprobs.tolist()


def test_a_prompt_is_the_same_in_one_step_and_by_tokens() -> None:
    last = decode_rows(PROMPTS[:, -1], 4)
    at_once = sampled([prefill_rows(PROMPTS[:, :4]), last])
    assert sampled([*(prefill_rows(PROMPTS[:, i : i + 1], i) for i in range(4)), last]) == at_once
    assert sampled([*(decode_rows(PROMPTS[:, i], i) for i in range(4)), last]) == at_once
    assert sampled([prefill_rows(PROMPTS[:, :3]), last]) != at_once


def test_the_work_of_a_step_is_what_it_says() -> None:
    prefill, decode = prefill_rows(PROMPTS), decode_rows(PROMPTS[:, 0], TINY.n_ctx - 1)
    assert (prefill.num_tokens, prefill.num_rows, prefill.num_decode) == (15, 3, 0)
    assert (decode.num_tokens, decode.num_rows, decode.num_decode) == (3, 3, 3)
    assert decode.new["sampling"]["temperature"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("length", [None, 12])
@pytest.mark.parametrize("rows", [64, 24])
def test_so_many_sequences_run(samples: int, length: int | None, rows: int) -> None:
    load = Load(64, rows, length, samples)
    load.run(0, 50)
    cost = load.run(0, 30, 30)
    assert cost.steps == 30
    assert 48 <= load.scheduler.table.num_owned <= 64  # those that ended are replaced a step later
    assert cost.rows == 30 * rows if length is None else cost.rows >= 0.8 * 30 * rows
    assert (cost.ended > 0) == (length is not None)
    assert cost.entry()["rows"] == cost.rows and load.bytes_per_row() > 8
