"""`srm evaluate harness`: has lm-eval ask a server, and writes a record of what it measured.

lm-eval needs other versions of packages than srm, so it runs as a program of an environment of its
own. Each task is a process: one whose data cannot be had takes no other along.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from srm.engine.config import read_model_config
from srm.engine.weights.checkpoint import read_model
from srm.engine.weights.tensor_file import read_file
from srm.errors import ConfigError
from srm.loadtest.records import ROOT, new_record, settings_of, write_record
from srm.settings import Command, load
from srm.tokenizer_file import read_tokenizer
from srm.training.harness.config import HarnessConfig
from srm.training.harness.served import served
from srm.training.harness.tasks import page, run_task
from srm.training.passk.server import CompletionsServer

COMMAND = Command(
    "srm evaluate harness",
    "Run benchmarks of lm-eval against a server or a model folder; write a table of them.",
    "srm evaluate harness --model runs/mine --tasks arc_easy,hellaswag,lambada_openai",
    "tasks url model shots limit output",
)


def main(argv: list[str]) -> int:
    """Run the tasks and write the record; return the exit code, 1 if a task has no result."""
    config = load(HarnessConfig, argv, prog=COMMAND)
    program = _program(config)
    with served(config.model) if config.model else nullcontext(config.url) as url:
        model, fingerprint = asyncio.run(_model_of(config, url))
        settings = _model_settings(config, url, model)
        about = f"{model} at {url} {fingerprint}"
        if config.model:
            about = read_model(config.model).fingerprint
        for name, path in files_of_tasks(config).items():
            about += f" {name} {hashlib.sha256(read_file(path)).hexdigest()}"
        results = [run_task(config, program, settings, about, task) for task in config.tasks]
    record = new_record(shlex.join(["srm", "evaluate", "harness", *argv])) | {
        "settings": settings_of(config),
        "model": config.model.name if config.model else model,
        "tasks": msgspec.to_builtins(results),
    }
    write_record(record, "harness", page(record["model"], results), config.output)
    return int(any(result.error for result in results))


async def _model_of(config: HarnessConfig, url: str) -> tuple[str, str | None]:
    """Return the model's name and what the server says identifies its weights, if it does."""
    name = config.served_model_name
    async with CompletionsServer(url, name, config.api_key_env, 60.0) as server:
        if config.model or not server.is_srm:
            return server.model, None
        reply = await server.complete({"prompt": "0", "max_tokens": 1})
        return server.model, reply.system_fingerprint


def files_of_tasks(config: HarnessConfig) -> dict[str, Path]:
    """Return the files that results depend on beside the model, by name: the tokenizer, and of
    `include` what no program has written. Raises ConfigError for an output that is around it."""
    read = {}
    if config.tokenizer:
        read["tokenizer"] = config.tokenizer / "tokenizer.json"
    output = config.output.resolve()
    if config.include and config.include.resolve().is_relative_to(output):
        raise ConfigError(f"output must not be include or around it, got {config.output}")
    for path in sorted(config.include.rglob("*")) if config.include else ():
        name = path.relative_to(config.include or "")
        is_written = "__pycache__" in name.parts or path.resolve().is_relative_to(output)
        if path.is_file() and not is_written and not any(x.startswith(".") for x in name.parts):
            read[str(name)] = path
    return read


def _program(config: HarnessConfig) -> str:
    own = ROOT / ".venv-clients" / "bin" / "lm-eval"
    program = shutil.which(config.program or (own if own.exists() else "lm-eval"))
    if program is None:
        raise ConfigError(
            f"program: there is no {config.program or 'lm-eval'}: call `make .venv-clients/ready` "
            'in a source tree, or pip install "lm-eval[api]" into an environment of its own and '
            "give its lm-eval as program"
        )
    return program


def _model_settings(config: HarnessConfig, url: str, model: str) -> dict[str, Any]:
    """Return the settings of lm-eval's model, whose tokenizer is written beside the results."""
    base = url.rstrip("/").removesuffix("/v1")
    settings: dict[str, Any] = {
        "model": model,
        "base_url": f"{base}/v1/completions",
        "num_concurrent": config.concurrency,
        "max_retries": 3,
    }
    folder = config.tokenizer or config.model
    if folder is None:
        return settings | {"tokenizer_backend": "auto"}
    return settings | _tokenizer_settings(folder, config.output / "tokenizer")


def _tokenizer_settings(folder: Path, copy: Path) -> dict[str, Any]:
    """Copy a model's tokenizer as transformers loads one."""
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    model, _ = read_model_config(folder)
    try:
        begin, end = map(tokenizer.id_to_token, (model.bos_token_id, model.end_id))
        copy.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "tokenizer.json", copy)
        written = {"bos_token": begin, "eos_token": end}
        written["tokenizer_class"] = "PreTrainedTokenizerFast"
        (copy / "tokenizer_config.json").write_bytes(msgspec.json.encode(written))
    except OSError as error:
        raise ConfigError(f"tokenizer: {folder} or output cannot be used: {error!r}") from error
    adds_begin = tokenizer.encode("a").ids[:1] == [model.bos_token_id]
    return {
        "tokenizer_backend": "huggingface",
        "tokenizer": str(copy),
        "add_bos_token": adds_begin,
        "max_length": model.n_ctx,
    }
