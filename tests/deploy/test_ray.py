"""Batches over a Ray cluster. What needs Ray is tried where it is installed."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from deploy.ray.config import RayBatchConfig
from deploy.ray.files import Shard, in_order, input_files, output_names, pieces, read_shard
from deploy.ray.worker import PARQUET, Job, ShardWorker, batch_of
from srm.engine.client.client import EngineClient
from srm.engine.config import EngineConfig
from srm.errors import ConfigError, EngineUnavailable
from srm.server.commands import batch as batch_command
from srm.server.commands.batch_config import BatchConfig
from srm.server.commands.batch_input import open_input
from srm.server.commands.batch_results import job_name
from tests.kit.serving import ROOT, write_text_model

ENGINE = "tests.kit.processes.numpy_engine"
LINES = [
    b'{"prompt": "the cat", "max_tokens": 5, "custom_id": "a"}',
    b"",
    b'{"prompt": [5, 7], "n": 2, "max_tokens": 3}',
    b"no JSON",
    b'{"messages": [{"role": "user", "content": "mat"}], "max_tokens": 4}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"custom_id": "b", "body": {"prompt": "the mat", "stop": [" t"]}}',
]


def shards_of(folder: Path, lines: int) -> list[Shard]:
    files = input_files(str(folder))
    return in_order([pieces(str(folder), file, lines) for file in files])


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"a", b"a\n", b"a\n\nb\nc", b"\xef\xbb\xbfa\r\nb\n\n"]
)
@pytest.mark.parametrize("lines", [1, 2, 3, 100])
def test_shards_are_the_lines_of_all_files_numbered_through(
    tmp_path: Path, data: bytes, lines: int
) -> None:
    source, both = tmp_path / "source", tmp_path / "both.jsonl"
    source.mkdir()
    (source / "1.jsonl").write_bytes(data)
    (source / "2.jsonl").write_bytes(b"x\ny\n")
    both.write_bytes(data + b"\n" * (data[-1:] not in (b"", b"\n")) + b"x\ny\n")
    shards = shards_of(source, lines)
    results = [line for shard in shards for line in read_shard(str(source), shard, 10)]
    assert results == [line for some in open_input(both, 10).lines for line in some]
    assert all(shard.last - shard.first < lines for shard in shards)


@pytest.mark.parametrize("lines", [1, 3, 7, 100])
def test_shards_are_the_rows_of_a_parquet_file(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "in.parquet"
    rows = [{"prompt": f"p{number}", "n": number % 2 or None} for number in range(17)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
    results = [
        line for shard in shards_of(path, lines) for line in read_shard(str(path), shard, 20)
    ]
    assert results == [line for some in open_input(path, 20).lines for line in some]
    assert (2, None) in results  # too long


def test_nulls_that_may_be_values_are_refused_as_files_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    rows = [
        {"prompt": "a", "structured_outputs": {"json": {"const": const}}} for const in (1, None)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(ConfigError, match=r"json\.const is null or NaN, which may be a value"):
        shards_of(path, 1)


@pytest.mark.parametrize("suffix", ["jsonl.zst", PARQUET])
def test_a_worker_answers_as_srm_batch_does(tmp_path: Path, suffix: str) -> None:
    model, source, output = tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out"
    write_text_model(model)
    source.write_bytes(b"\n".join(LINES) + b"\n")
    flags = ("--max-step-rows=16", "--max-step-tokens=64")
    alone = tmp_path / f"alone.{suffix}"
    batch_command.main([str(source), f"-o{alone}", f"--model={model}", *flags], ENGINE)
    batch = BatchConfig()
    engine = EngineConfig(model=model, max_step_rows=16, max_step_tokens=64)
    name = job_name(batch, engine, LINES[0])
    job = Job(name, str(source), str(output), suffix, batch, engine, ENGINE)
    shards = shards_of(source, 2)
    output_names(str(output))
    worker = ShardWorker(job)
    try:
        with ThreadPoolExecutor(4) as threads:
            rows = [{name: [value] for name, value in batch_of(shard).items()} for shard in shards]
            counts = list(threads.map(worker, rows))
    finally:
        worker.close()
    assert [(count["completed"], count["failed"]) for count in counts] == [
        ([1], [0]), ([1], [1]), ([1], [1]), ([1], [0])
    ]  # fmt: skip
    names = {shard.file_name(name, suffix) for shard in shards}
    assert output_names(str(output)) == names
    assert sorted(records([output / name for name in names])) == sorted(records([alone]))


def test_a_call_to_a_worker_raises_what_ended_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that waits for an answer at that moment."""
    model = tmp_path / "model"
    write_text_model(model)
    source = tmp_path / "in.jsonl"
    source.write_bytes(LINES[0])
    asked = threading.Event()

    async def end(_config: EngineConfig, _module: str, serve: Any, _progress: Any) -> None:
        serving = asyncio.create_task(serve(EngineClient("tcp://127.0.0.1:1")))
        await asyncio.to_thread(asked.wait, 120)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        raise EngineUnavailable("it was given up")

    async def answer(_shard: Shard) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("deploy.ray.worker.with_engine", end)
    engine = EngineConfig(model=model)
    job = Job("a", str(source), str(tmp_path), "jsonl", BatchConfig(), engine, ENGINE)
    worker = ShardWorker(job)
    monkeypatch.setattr(worker, "_answer", answer)
    rows = {name: [value] for name, value in batch_of(shards_of(source, 1)[0]).items()}
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="it was given up"):
            worker(rows)
    with pytest.raises(EngineUnavailable, match="it was given up"):
        worker.close()


def records(paths: list[Path]) -> list[Any]:
    if paths[0].suffix == ".parquet":
        tables = [pyarrow.parquet.read_table(path) for path in paths]
        return [json.dumps(row) for table in tables for row in table.to_pylist()]
    return [line for path in paths for some in open_input(path, 1 << 30).lines for _, line in some]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": ""}, "input is missing"),
        ({"output": ""}, "output is missing"),
        ({"shard_lines": 0}, "shard_lines must be at least 1, got 0"),
        ({"actors": 3, "max_actors": 2}, "max_actors must be 0 or at least actors = 3, got 2"),
        ({"cpus_per_actor": -1.0}, "cpus_per_actor must be at least 0, got -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayBatchConfig(**{"input": "in", "output": "out"} | given)


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.zst", None])
def test_input_that_cannot_be_cut_is_refused(tmp_path: Path, name: str | None) -> None:
    if name is not None:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="compressed" if name else "has no files"):
        input_files(str(tmp_path))


def unknown_keys(given: Any, model: Any, place: str = "") -> list[str]:
    """Keys of a Serve configuration that its schema has not; the schema itself takes any."""
    fields = model.model_fields
    results = [f"{place}{key}" for key in given if key not in fields]
    for key in given.keys() & fields.keys():
        kinds = [item for item in kinds_in(fields[key].annotation) if hasattr(item, "model_fields")]
        values = given[key] if isinstance(given[key], list) else [given[key]]
        for value in values:
            if kinds and isinstance(value, dict):
                results += unknown_keys(value, kinds[0], f"{place}{key}.")
    return results


def kinds_in(hint: Any) -> list[Any]:
    return [hint, *(kind for item in getattr(hint, "__args__", ()) for kind in kinds_in(item))]


def test_the_serve_configuration_is_one() -> None:
    schema = pytest.importorskip("ray.serve.schema").ServeDeploySchema
    yaml, module = import_module("yaml"), import_module("deploy.ray.serve_app")
    given = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
    assert schema.model_validate(given)
    assert not unknown_keys(given, schema)
    (one,) = given["applications"]
    module.settings_of(one["args"])
    one["deployments"][0]["max_ongoing_request"] = 8
    one["deployments"][0]["autoscaling_config"]["target_ongoing_request"] = 8
    assert schema.model_validate(given), "the reason for unknown_keys is gone"
    assert sorted(unknown_keys(given, schema)) == [
        "applications.deployments.autoscaling_config.target_ongoing_request",
        "applications.deployments.max_ongoing_request",
    ]
    with pytest.raises(ConfigError, match="host is no setting of a replica"):
        module.settings_of({"host": "0.0.0.0"})


def test_input_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), path)
    content = bytearray(path.read_bytes())
    content[-6] ^= 0xFF  # of the footer's length
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^input = .*in\.parquet: .*[a-z]{4}"):
        pieces(str(tmp_path), str(path), 10)
    with pytest.raises(ConfigError, match=r"^input = .*none\.jsonl: "):
        pieces(str(tmp_path), str(tmp_path / "none.jsonl"), 10)
