"""Every row of tests/kit/doors.py is fed to its door, which says what stands there."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine as SteppedEngine
from srm.engine.python.offline import Engine
from srm.engine.weights.convert import convert
from srm.engine.weights.random_model import random_tensors
from srm.errors import ConfigError, SRMError
from srm.loadtest import trace
from srm.server.batch.job_input import check_input
from srm.server.batch.lines import BatchLine
from srm.server.commands.batch_input import check_custom_ids, open_input, parse
from srm.server.schema.completion_request import parse_completion
from srm.tokenizer_file import read_tokenizer
from tests.kit.doors import DOORS, ENCODINGS, LINE, Row
from tests.kit.engines.numpy_runner import NumpyRunner, tiny_weights
from tests.kit.serving import COMPLETIONS, TEXT_MODEL
from tests.unit.server.conftest import Served

MODEL = ModelConfig(d_model=8, num_layers=2, num_heads=4, n_ctx=16, vocab_size=11)


def content(row: Row) -> bytes:
    return row.example.replace("LINE", LINE).encode(ENCODINGS[row.encoding])


def as_words(taken: msgspec.Struct) -> str:
    fields = msgspec.to_builtins(taken).items()
    return ", ".join(f"{name} is {'null' if value is None else value}" for name, value in fields)


def server_batch(row: Row, folder: Path) -> object:
    path = folder / "in.jsonl"
    path.write_bytes(content(row))
    checked = check_input(path, COMPLETIONS, 1_000_000)
    for error in checked.errors:
        raise ConfigError(f"line {error.line}: {error.message}")
    return f"a batch of {checked.total}"


def batch_command(path: Path) -> object:
    check_custom_ids(open_input(path, 1_000_000), path)
    read = [
        parse(raw, number) for some in open_input(path, 1_000_000).lines for number, raw in some
    ]
    for line in read:
        if not isinstance(line, BatchLine):
            raise ConfigError(line.message)
    return [
        f"custom_id is {line.custom_id}, asks {line.url}, body is {line.body.decode()}"
        for line in read
        if isinstance(line, BatchLine)
    ]


def lines_file(row: Row, folder: Path) -> object:
    (folder / "in.jsonl").write_bytes(content(row))
    return batch_command(folder / "in.jsonl")


def table(row: Row, folder: Path) -> object:
    path, columns = folder / "in.parquet", json.loads(row.example)
    if all(isinstance(values, list) for values in columns.values()):
        parquet.write_table(pyarrow.table(columns), path)
    else:
        path.write_bytes(content(row))
    return batch_command(path)


def trace_file(row: Row, folder: Path) -> object:
    data = content(row)
    path = folder / ("in.CSV" if data.startswith(b"TIMESTAMP") else "in.jsonl")
    path.write_bytes(data)
    return as_words(trace.read(path)[0])


def checkpoint(row: Row, folder: Path) -> object:
    tensors, names = random_tensors(MODEL), row.example.split("`")[1::2]
    weights, args = folder / "weights.safetensors", folder / "args.json"
    if names[0].endswith(".safetensors"):
        weights = folder / names[0]
    elif row.example.startswith("all but"):
        tensors = {name: value for name, value in tensors.items() if name != names[0]}
        tensors |= {name: np.zeros(1, np.float32) for name in names[1:]}
    else:
        prefixes = [name.removesuffix("input_layer.weight") for name in names]
        tensors = {prefix + name: value for prefix in prefixes for name, value in tensors.items()}
    save_file(tensors, weights)
    constructor = {
        **{"vocab_size": 11, "hidden_dim": 8, "seq_len": 16, "num_blocks": 2, "heads": 4},
        **{"mixed_heads": True, "decay": True},
    }
    args.write_text(json.dumps({"constructor": constructor, "effective_decay_constant": 1}))
    return f"a model; it says: {'; '.join(convert(weights, args, folder / 'model')[1:])}"


def engine_of(text_model: Path) -> Engine:
    config = EngineConfig(num_slots=16, max_step_rows=8, max_step_tokens=64, model=text_model)
    runner = NumpyRunner(tiny_weights(config=TEXT_MODEL), 16)
    return Engine.over(SteppedEngine(TEXT_MODEL, runner, config), config)


@pytest.mark.parametrize(
    ("door", "row"),
    [(door.name, row) for door in DOORS for row in door.rows],
    ids=lambda value: getattr(value, "example", value),
)
async def test_a_door_says_what_the_page_says(
    door: str,
    row: Row,
    tmp_path: Path,
    text_model: Path,
    served: Served,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def http(row: Row, _: Path) -> object:
        async with served() as client:
            reply = await client.post(COMPLETIONS, content=content(row))
        if reply.status_code == 400:
            raise ConfigError(reply.json()["error"]["message"])
        return as_words(parse_completion(content(row)))

    def tokenizer(row: Row, folder: Path) -> object:
        members = json.loads(f"{{{row.example}}}")
        spec = json.loads((text_model / "tokenizer.json").read_text()) | members
        data = json.dumps(spec).encode(ENCODINGS[row.encoding])
        (folder / "tokenizer.json").write_bytes(data)
        assert read_tokenizer(folder / "tokenizer.json").get_vocab_size()
        return "a tokenizer" + "".join(
            f"; it says: {text.partition(': ')[2]}" for text in caplog.messages
        )

    def python(row: Row, _: Path) -> object:
        params = eval(row.example, {"SamplingParams": SamplingParams, "np": np})
        with engine_of(text_model) as llm:
            return f"{len(llm.generate(['a'], params)[0].completions)} completions"

    doors: dict[str, Callable[[Row, Path], Any]] = {
        "HTTP": http,
        "Batches of a server": server_batch,
        "srm batch": lines_file,
        "Parquet": table,
        "Traces": trace_file,
        "Checkpoints": checkpoint,
        "Tokenizers": tokenizer,
        "Python": python,
    }
    try:
        result = doors[door](row, tmp_path)
        answer = "taken", str(await result if isinstance(result, Awaitable) else result)
    except SRMError as error:
        answer = "refused", error.message
    assert answer[0] == row.verdict and row.words in answer[1], answer
