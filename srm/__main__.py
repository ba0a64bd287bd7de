#!/usr/bin/env python3
"""The console command `srm`: one face, each subcommand imported only when asked for.

Knows the settings that `SRM_…` variables set by name, so that a misspelt one stops the program and
one that is meant for another command does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from srm import __version__
from srm.errors import ConfigError, SRMError, did_you_mean
from srm.logs import printable
from srm.server.commands.standard_output import INTERRUPTED

USAGE = """usage: srm COMMAND [SETTINGS]

Serve Structured Recurrent Mixers, and train and measure them.

example:
  srm serve demo     # then http://127.0.0.1:8000

Answer:
  serve     answer OpenAI-style requests over HTTP
  generate  completions of one prompt
  batch     answers to a file of prompts: `srm batch in.jsonl -o out.jsonl`
  score     log-probabilities of given texts
  replay    the tokens of receipts again, bit for bit

A running server:
  weights   change its weights: `srm weights FOLDER`
  snapshot  have it write how far its batches are to disk, now

Models:
  inspect   what a model is and what serving it takes
  convert   make a model folder out of weights of the published code, or for transformers
  train     pretrain, sft, grpo, tokenizer
  evaluate  greedy accuracy and pass@k on held-out problems; `srm evaluate passk`: pass@k of any
            OpenAI-compatible server

Measure:
  loadtest  load any OpenAI-compatible server: run, sweep, offline, report, compare
  bench     benchmarks of this source tree: `srm bench --help`

`srm COMMAND --help` explains each, `srm --version` says which this is.
"""

TRAIN_USAGE = """usage: srm train COMMAND [options]

  tokenizer  make a byte-level BPE tokenizer of texts
  pretrain   train a model on texts, or on generated problems
  sft        fine-tune a model on prompts and completions
  grpo       train a model on rewards of what it samples

`srm train COMMAND --help` explains each. docs/training.md uses all four, in minutes.
"""

COMMANDS = {
    "serve": "srm.server.supervise.launch:main",
    "convert": "srm.engine.weights.convert:main",
    "inspect": "srm.engine.weights.inspect_model:main",
    "generate": "srm.server.commands.generate:main",
    "batch": "srm.server.commands.batch:main",
    "weights": "srm.server.commands.admin_cli:weights",
    "snapshot": "srm.server.commands.admin_cli:snapshot",
    "score": "srm.server.commands.score:main",
    "replay": "srm.engine.python.replay:main",
    "train": "srm.training.__main__:main",
    "evaluate": "srm.training.__main__:main",
    "loadtest": "srm.loadtest.__main__:main",
}
"""Subcommands and the functions that run them; `bench` has its own table."""

BENCHMARKS = {
    "kernels": "research.bench.engine.kernels",
    "engine": "research.bench.engine.throughput",
    "prefill": "research.bench.engine.prefill",
    "until": "research.bench.engine.until",
    "trees": "research.bench.engine.trees",
    "host": "research.bench.host.host",
    "replays": "research.bench.host.replays",
    "profile": "research.bench.gpu.profile",
    "turns": "research.bench.gpu.turns",
    "precision": "research.bench.model.precision",
    "http": "research.bench.server.http",
    "sink": "research.bench.server.sink",
    "states": "research.bench.server.states",
    "forks": "research.bench.server.forks",
    "receipts": "research.bench.server.receipts",
    "against": "research.bench.server.against",
    "cards": "research.bench.server.cards",
    "table": "research.bench.records.table",
}
"""`srm bench NAME` and the module whose `main` it is."""

ADDED = {"torch", "matplotlib"}
"""Packages that some commands need and serving does not."""

SETTINGS = """
  model device devices dtype product num_slots max_slots memory_fraction prefix_slots prefix_cache
  max_step_rows max_step_tokens prefill_step_tokens max_prefill_share
  max_logprobs max_waiting max_waiting_bytes max_parked_bytes
  request_timeout_s cache_dir graphs_dir overlap step_timeout_s drain_s
  snapshot_dir snapshot_interval_s snapshot_s log_level log_format
  served_model_name chat_template special_tokens_in_messages sampling_defaults host port uds
  api_processes engines
  max_body_bytes max_connections max_header_bytes
  receive_timeout_s send_timeout_s stream_max_rate stream_keepalive_s
  api_keys_file requests_per_minute tokens_per_minute priority_keys share_prompts
  cors_origins allowed_hosts root_path
  admin_port admin_host weights_dir trainer_routes pause_lease_s otlp_endpoint stall_s
  data_dir max_file_bytes max_store_bytes max_state_bytes max_batches max_batch_lines
  batch_fsync_s max_batch_lines_in_flight
  prompt token_ids json n max_tokens temperature top_k top_p min_p seed
  stop stop_token_ids ignore_eos extra_body
  input output errors work_dir resume shard
  url api_key_env
""".split()
"""Those that variables may set: of `serve`, `generate`, `batch` and `score`, and three of load
tests. A test holds this against the structs, which would take long to import here."""


VARIABLES = {"SRM_API_KEYS"}
"""Of the environment alone: a flag would be seen by whoever lists the machine's processes."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return its exit code."""
    args = sys.argv[1:] if argv is None else argv
    command, rest = (args[0], args[1:]) if args else ("--help", [])
    try:
        check_environment(os.environ)
        return _run(command, rest)
    except SRMError as error:
        if error.message:  # else who made it has said it
            print(f"srm {printable(command)}: {printable(error.message)}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in ADDED:
            raise
        print(
            f"srm {command}: it needs {error.name}: call `make setup` in a source tree, or "
            f"pip install {error.name}",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    except KeyboardInterrupt:  # what can go on has said so
        return INTERRUPTED


def check_environment(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable `SRM_…` that no command reads."""
    known = {f"SRM_{name.upper()}" for name in SETTINGS} | VARIABLES
    for variable in environ:
        if variable.startswith("SRM_") and variable not in known:
            near = did_you_mean(variable, known, cutoff=0.85)
            raise ConfigError(
                f"environment: {variable} is read by no command: only settings of serve, generate, "
                "batch and score, and url, api_key_env and output of load tests are variables"
                + (near or "; other settings are flags")
            )


def _run(command: str, args: list[str]) -> int:
    if command in {"--help", "-h", "help"}:
        print(USAGE, end="")
        return 0
    if command == "--version":
        print(f"srm {__version__}")
        return 0
    if command == "bench":
        return _bench(args)
    if command == "train" and args[:1] in (["--help"], ["-h"], ["help"]):
        print(TRAIN_USAGE, end="")
        return 0
    if command not in COMMANDS:
        near = did_you_mean(command, [*COMMANDS, "bench"]) or "; `srm --help` lists the commands"
        raise ConfigError(f"there is no such command{near}")
    module, name = COMMANDS[command].split(":")
    if module.startswith("research."):
        _need_source_tree()
    if command == "evaluate" and args[:1] == ["passk"]:  # this needs no torch
        module, args = "srm.training.passk.command", args[1:]
    elif command == "convert" and any(arg.endswith("run.pt") for arg in args):  # this needs torch
        module, name = "srm.training.checkpoint", "convert_run"
    elif command in {"train", "evaluate"}:  # one module runs both
        args = [command, *args]
    return int(getattr(import_module(module), name)(args))


def _need_source_tree() -> None:
    if find_spec("research") is None:
        raise ConfigError("benchmarks need the source tree; an installed srm has none")


def _bench(args: list[str]) -> int:
    _need_source_tree()
    if args[:1] and args[0] in BENCHMARKS:
        module = import_module(BENCHMARKS[args[0]])
        return int(module.main(args[1:]))
    if args[:1] in (["--help"], ["-h"]):
        print(f"usage: srm bench NAME [options]\n\nNAME is one of {', '.join(BENCHMARKS)};")
        print("`srm bench NAME --help` explains each.")
        return 0
    near = did_you_mean(args[0], BENCHMARKS) if args else ""
    raise ConfigError(f"it measures {', '.join(BENCHMARKS)}; got {' '.join(args[:1])!r}{near}")


if __name__ == "__main__":
    raise SystemExit(main())
