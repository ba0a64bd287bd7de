"""The pages of docs/ name all there is and nothing else, and their examples run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import prometheus_client
import pytest
from fastapi import Request
from prometheus_client.metrics import MetricWrapperBase

import engine.metrics
import server.metrics
import srm
from bench.client.client import ClientBenchConfig
from bench.engine.kernels import KernelsBenchConfig
from bench.engine.models import BenchConfig
from bench.engine.prefill import PrefillBenchConfig
from bench.engine.prefix import PrefixBenchConfig
from bench.engine.snapshot import SnapshotBenchConfig
from bench.engine.throughput import EngineBenchConfig
from bench.host.host import HostBenchConfig
from bench.host.simulate import SimulationConfig
from bench.model.many_samples import SamplesBenchConfig
from bench.model.precision import PrecisionConfig
from bench.model.until import UntilBenchConfig
from bench.peers.config import PeersConfig
from bench.records.table import TableConfig
from bench.server.background import BackgroundBenchConfig
from bench.server.http import HttpBenchConfig
from bench.server.jobs import JobsBenchConfig
from engine import errors
from engine.client.client import EngineClient
from engine.config import EngineConfig, Mixer, ModelConfig
from engine.device.precompile import PrecompileConfig
from engine.messages import SamplingParams
from engine.python.request_output import Completion, Generated
from engine.settings import field_docs
from engine.weights.convert import parser as convert_parser
from engine.weights.upstream_config import Constructor, PublishedArgs
from loadtest.__main__ import ReportConfig
from loadtest.commands.offline import OfflineConfig
from loadtest.commands.sweep import SweepConfig
from loadtest.scenario import Scenario
from server.commands.admin_cli import SnapshotConfig, WeightsConfig
from server.commands.batch_config import BatchConfig
from server.commands.generate import GenerateConfig
from server.commands.score import ScoreConfig
from server.commands.score_lines import Score
from server.config import ServerConfig
from server.errors import ErrorDetail, srm_error
from server.generation import dedup_counts, matching
from server.routes import admin, batch_replies, batches, dashboard, files, scrape, tokenize
from server.routes.app import create_app
from server.schema import (
    chat_request,
    chat_response,
    completion_request,
    completion_response,
    conversation,
    sampling_fields,
    until,
)
from server.supervise.launch import load_settings
from server.text import template_process
from server.text.chat_template import RENDER_S
from server.text.text import Text
from tests.serving import ROOT, SERVER_FLAGS, Server, free_port
from tests.tools import field_tables
from training.evaluate import EvaluateConfig
from training.pretrain import TrainConfig

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
MADE_BY_SERVE = {
    *("endpoint", "heartbeat", "listen_fd", "admin_fd", "limits_fd", "max_slots"),
    *("weights_note", "why_no_jobs", "model_id"),
}
COMMANDS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "Serving": (EngineConfig, ServerConfig),
    "The two processes": (EngineConfig, ServerConfig),
    "Generating": (GenerateConfig,),
    "Batches without a server": (BatchConfig,),
    "Changing weights": (WeightsConfig,),
    "Taking a snapshot": (SnapshotConfig,),
    "Scoring": (ScoreConfig,),
    "Training": (TrainConfig,),
    "Evaluation": (EvaluateConfig,),
    "Load tests": (Scenario,),
    "Sweeps": (SweepConfig,),
    "Offline load tests": (OfflineConfig,),
    "Reports of load tests": (ReportConfig,),
    "Engine benchmark": (EngineBenchConfig,),
    "Kernels benchmark": (KernelsBenchConfig,),
    "Prefill benchmark": (PrefillBenchConfig,),
    "Host benchmark": (HostBenchConfig,),
    "Simulation": (SimulationConfig,),
    "Prefix benchmark": (PrefixBenchConfig,),
    "Snapshot benchmark": (SnapshotBenchConfig,),
    "HTTP benchmark": (HttpBenchConfig,),
    "Client benchmark": (ClientBenchConfig,),
    "Jobs benchmark": (JobsBenchConfig,),
    "Background benchmark": (BackgroundBenchConfig,),
    "Precision benchmark": (PrecisionConfig,),
    "Samples benchmark": (SamplesBenchConfig,),
    "Until benchmark": (UntilBenchConfig,),
    "Table of records": (TableConfig,),
    "Peers": (PeersConfig,),
    "Precompilation": (PrecompileConfig,),
}
"""Sections of configuration.md, and whose settings they list."""
KINDS = {kind for kinds in COMMANDS.values() for kind in kinds}

Row = list[str]


def read(page: str) -> str:
    return (DOCS / page).read_text()


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", read(page), re.M | re.S)
    assert found, f"{page} has no section {heading}"
    return found[1]


def rows(page: str, heading: str) -> list[Row]:
    """Cells of the rows of a section's tables, without their heads."""
    lines = section(page, heading).splitlines()
    body = [
        line
        for line, below in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("|") and not line.startswith("|--") and not below.startswith("|--")
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def names(page: str, heading: str) -> list[str]:
    """The first cells, without their backticks."""
    return [row[0].strip("`") for row in rows(page, heading)]


def shown(value: object) -> str:
    """A default as configuration.md writes it: as on a command line, paths from the root."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, Path) and value.is_relative_to(ROOT):
        return str(value.relative_to(ROOT))
    return str(value) or '""'


@pytest.mark.parametrize("heading", COMMANDS)
def test_every_setting_is_there_with_its_default_and_meaning(heading: str) -> None:
    expected: dict[str, Row] = {}
    for kind in COMMANDS[heading]:
        meanings = field_docs(kind)
        for field in msgspec.structs.fields(kind):
            is_made = field.name in MADE_BY_SERVE
            if kind not in COMMANDS["Serving"] or is_made == (heading == "The two processes"):
                row = [f"`{field.name}`", f"`{shown(field.default)}`", meanings[field.name]]
                expected.setdefault(field.name, row)
    found = rows("configuration.md", heading)
    assert [row[:3] for row in found] == list(expected.values())
    assert all(len(row) == 4 and row[3] for row in found)


def test_every_settings_struct_is_one_of_these() -> None:
    sources = [path for package in ("engine", "server", "training", "loadtest", "bench") for path in
               (ROOT / package).rglob("*.py")]  # fmt: skip
    found = {
        name
        for path in sources
        for name in re.findall(r"^class (\w+Config)\(", path.read_text(), re.M)
    }
    kinds = KINDS - {Scenario} | {BenchConfig, ModelConfig}
    assert found == {kind.__name__ for kind in kinds}


def test_srm_knows_the_variables_of_all_commands() -> None:
    known = {name for kind in KINDS for name in kind.__struct_fields__} - MADE_BY_SERVE
    assert set(srm.SETTINGS) == known
    assert len(srm.SETTINGS) == len(known)


def test_the_example_file_is_understood(tmp_path: Path) -> None:
    (example,) = blocks("configuration.md", "toml serving")
    file = tmp_path / "srm.toml"
    file.write_text(example)
    server_config, engine_config = load_settings([f"--config={file}"])
    assert server_config == ServerConfig(
        model=Path("models/demo"), served_model_name="demo", host="0.0.0.0"
    )
    assert engine_config == EngineConfig(model=Path("models/demo"))


def test_every_command_is_there() -> None:
    usage = re.findall(r"^  (\w+)  ", srm.USAGE, re.M)
    listed = [name.split()[1] for name in names("configuration.md", "Commands") if "srm" in name]
    assert list(dict.fromkeys(listed)) == usage


def test_every_variant_and_every_field_of_a_model_is_there() -> None:
    assert names("models.md", "Variants") == list(get_args(Mixer))
    assert names("models.md", "config.json") == list(ModelConfig.__struct_fields__)


def test_every_argument_of_a_published_model_is_there() -> None:
    found = {name for row in rows("models.md", "Constructor arguments") for name in
             re.findall(r"`(\w+)`", row[0])}  # fmt: skip
    assert found == set(Constructor.__struct_fields__)
    assert names("models.md", "ARGS.json") == list(PublishedArgs.__struct_fields__)


def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def targets() -> list[str]:
    return re.findall(r"^([a-z-]+):", makefile(), re.M)


def test_every_make_target_and_variable_is_there() -> None:
    variables = re.findall(r"^(\w+) \?= (.*)$", makefile(), re.M)
    found = rows("configuration.md", "Make targets")
    assert [row[0] for row in found if len(row) == 2] == [f"`make {name}`" for name in targets()]
    assert [row[:2] for row in found if len(row) == 4] == [
        [f"`{name}`", f"`{default}`"] for name, default in variables
    ]


def test_every_route_is_there(text_model: Path) -> None:
    app = create_app(ServerConfig(), EngineClient("tcp://127.0.0.1:1"), Text(text_model))
    paths = app.openapi()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(names("api.md", "Routes")) == served


def described(hint: Any) -> str | None:
    """The outermost description in an annotation."""
    for part in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        found = part.description if isinstance(part, msgspec.Meta) else described(part)
        if found:
            return str(found)
    return None


def test_every_request_field_is_there_with_what_is_allowed() -> None:
    hints = get_type_hints(completion_request.CompletionRequest, include_extras=True)
    found = rows("api.md", "Fields that are honoured")
    fields_by_name = {
        one.encode_name: one for one in msgspec.structs.fields(completion_request.CompletionRequest)
    }
    assert sorted(row[0].strip("`") for row in found) == sorted(fields_by_name)
    for row in found:
        field = fields_by_name[row[0].strip("`")]
        if not field.required and field.default is not None:
            is_made = isinstance(field.default_factory, type)
            default = field.default_factory() if is_made else field.default
            assert row[1] == f"`{json.dumps(default)}`"
        assert row[2] == described(hints[field.name]) or field.name == "prompt"


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Chat fields", chat_request.ChatRequest),
        ("TokenizeRequest", tokenize.TokenizeRequest),
        ("DetokenizeRequest", tokenize.DetokenizeRequest),
        ("FileForm", files.FileForm),
        ("FileQuery", files.FileQuery),
        ("BatchRequest", batches.BatchRequest),
        ("BatchQuery", batches.BatchQuery),
    ],
)
def test_every_field_of_other_requests_is_there(heading: str, kind: type[msgspec.Struct]) -> None:
    hints = get_type_hints(kind, include_extras=True)
    shared = sampling_fields.SamplingRequest.__struct_fields__ if heading == "Chat fields" else ()
    spelled = {one.encode_name: one.name for one in msgspec.structs.fields(kind)}
    found = rows("api.md", heading)
    assert {spelled[row[0].strip("`")] for row in found} == set(hints) - set(shared)
    for row in found:
        name = spelled[row[0].strip("`")]
        most = f"a list of 1 to {conversation.MAX_MESSAGES} messages"
        allowed = most if name == "messages" else described(hints[name])
        assert row[2].removesuffix(", see below") == allowed


def test_every_field_of_a_message_is_there() -> None:
    assert names("api.md", "Message") == list(conversation.Message.__struct_fields__)
    roles = re.findall(r"`(\w+)`", rows("api.md", "Message")[0][1])
    assert roles == list(get_args(conversation.Role))


@pytest.mark.parametrize("page", field_tables.PAGES, ids=lambda path: path.name)
def test_tables_of_fields_are_those_of_the_code(page: Path) -> None:
    assert field_tables.written(page) == page.read_text(), "python -m tests.tools.field_tables"


def test_every_field_at_a_neutral_value_is_there() -> None:
    headings = "Fields that are accepted at one value", "Chat fields that are accepted at one value"
    found = [name for heading in headings for name in names("api.md", heading)]
    assert sorted(found) == sorted(chat_request.CHAT_NEUTRAL)


def test_stream_options_are_there() -> None:
    assert names("api.md", "Streaming") == list(sampling_fields.StreamOptions.__struct_fields__)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("Completion", completion_response.Completion),
        ("Choice", completion_response.Choice),
        ("Logprobs", completion_response.Logprobs),
        ("PromptLogprob", completion_response.PromptLogprob),
        ("Packed", completion_response.Packed),
        ("Usage", completion_response.Usage),
        ("Samples", completion_response.Samples),
        ("Counted", completion_response.Counted),
        ("ModelList", completion_response.ModelList),
        ("ModelCard", completion_response.ModelCard),
        ("ChatCompletion", chat_response.ChatCompletion),
        ("ChatChoice", chat_response.ChatChoice),
        ("ChatLogprobs", chat_response.ChatLogprobs),
        ("TokenLogprob", chat_response.TokenLogprob),
        ("ChatChunk", chat_response.ChatChunk),
        ("WeightsReply", admin.WeightsReply),
        ("SnapshotReply", admin.SnapshotReply),
        ("EngineState", admin.EngineState),
        ("Tokenized", tokenize.Tokenized),
        ("TokenizerInfo", tokenize.TokenizerInfo),
        ("FileObject", batch_replies.FileObject),
        ("FileList", batch_replies.FileList),
        ("Batch", batch_replies.Batch),
        ("BatchList", batch_replies.BatchList),
        ("BatchError", batch_replies.BatchError),
        ("BatchUsage", batch_replies.BatchUsage),
        ("Errors", ErrorDetail),
    ],
)
def test_every_field_of_a_reply_is_there(heading: str, kind: type[msgspec.Struct]) -> None:
    cells = " ".join(row[0] for row in rows("api.md", heading))
    assert sorted(re.findall(r"`(\w+)`", cells)) == sorted(kind.__struct_fields__)


def test_limits_are_what_they_are() -> None:
    text = section("api.md", "Limits")
    limits = (
        *("MAX_CHOICES", "MAX_STOPS", "MAX_STOP_LENGTH", "MAX_SCORES", "MAX_BIASES"),
        *("MAX_CUT_LENGTH", "MAX_METADATA", "MAX_METADATA_KEY", "MAX_METADATA_VALUE"),
    )
    assert sampling_fields.MAX_BAD_WORDS == sampling_fields.MAX_STOPS
    assert sampling_fields.MAX_BAD_WORD_LENGTH == sampling_fields.MAX_STOP_LENGTH
    for limit in limits:
        assert f" {getattr(sampling_fields, limit)}" in text
    assert f"| {until.MAX_PATTERN_LENGTH} characters, {matching.MAX_PROGRAM} instructions |" in text
    assert f"| {dedup_counts.MAX_DISTINCT_BYTES // 2**20} MiB |" in text
    assert f"| messages of a chat | {conversation.MAX_MESSAGES} |" in text
    assert f" {RENDER_S:g} s, {template_process.MAX_MEMORY // 2**30} GiB " in text
    assert f" {tokenize.MAX_CHARACTERS} characters " in text
    assert f" {tokenize.MAX_TOKENS} tokens " in text
    settings = re.findall(r"`(\w+)`", text.strip().splitlines()[-1])
    assert settings and set(settings) <= set(srm.SETTINGS)


def every_metric() -> Iterable[MetricWrapperBase]:
    for module in (server.metrics, engine.metrics):
        yield from (one for one in vars(module).values() if isinstance(one, MetricWrapperBase))


def exposed(metric: MetricWrapperBase) -> str:
    (family,) = metric.describe()
    return family.name + ("_total" if isinstance(metric, prometheus_client.Counter) else "")


def test_every_metric_is_there_with_type_labels_and_meaning() -> None:
    expected = [
        [
            f"`{exposed(metric)}`",
            family.type,
            ", ".join(f"`{label}`" for label in metric._labelnames),
            family.documentation,
        ]
        for metric in every_metric()
        for family in metric.describe()
    ]
    assert rows("metrics.md", "HTTP and requests") + rows("metrics.md", "Engine") == expected


def test_every_name_of_vllm_is_there() -> None:
    by_name = {one.name: exposed(metric) for metric in every_metric() for one in metric.describe()}
    expected = [
        [theirs + by_name[ours].removeprefix(ours), by_name[ours]]
        for theirs, ours in scrape.VLLM_NAMES.items()
    ]
    found = rows("metrics.md", "Names of vLLM")
    assert [[cell.strip("`") for cell in row] for row in found if len(row) == 2] == expected
    assert [row[0] for row in found if len(row) == 3] == [f"`{scrape.VLLM_CACHE_CONFIG}`"]


def test_queries_name_metrics_that_exist() -> None:
    known = {exposed(metric) for metric in every_metric()}
    named = re.findall(r"\b(?:srm|http)_\w+", section("metrics.md", "Questions and answers"))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known


def test_pages_and_dashboards_name_metrics_that_exist() -> None:
    known = {exposed(metric) for metric in every_metric()}
    board = json.loads((ROOT / "deploy" / "grafana" / "srm.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    page = (dashboard.FOLDER / "watch.js").read_text()
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    for text in (read("dashboard.md"), page, "\n".join(asked), alerts):
        named = re.findall(r"\b(?:srm|http)_\w+", text)
        assert len(named) > 8
        assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known


def every_error(kind: type[errors.SRMError] = errors.SRMError) -> Iterable[type[errors.SRMError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from every_error(child)


async def test_every_error_code_is_there_with_status_and_type() -> None:
    request = Request({"type": "http", "method": "GET", "path": "/", "headers": []})
    expected = {
        ("internal_error", 500, "api_error"),
        ("method_not_allowed", 405, "invalid_request_error"),
        ("invalid_http", 400, "invalid_request_error"),
        ("headers_too_large", 431, "invalid_request_error"),
        ("requested_range_not_satisfiable", 416, "invalid_request_error"),
    }
    for kind in every_error():
        error = errors.Overloaded("", 1) if kind is errors.Overloaded else kind("")
        reply = await srm_error(request, error)
        expected.add((kind.code, reply.status_code, json.loads(bytes(reply.body))["error"]["type"]))
    found = [(r[0].strip("`"), int(r[1]), r[2].strip("`")) for r in rows("errors.md", "Over HTTP")]
    assert set(found) == expected
    assert len(found) == len(expected)


def test_every_exit_code_is_there() -> None:
    found = {int(row[0]): row[2].strip("`") for row in rows("errors.md", "Exit codes")}
    assert set(found) == {0} | {kind.exit_code for kind in every_error()}
    for kind in (errors.ConfigError, errors.CheckpointError):
        assert found[kind.exit_code] == kind.code


def test_every_field_of_a_scored_line_is_there() -> None:
    assert names("configuration.md", "Results of scoring") == list(Score.__struct_fields__)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_names_nothing_that_does_not_exist(path: Path) -> None:
    text = path.read_text()
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.S))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= set(targets())
    commands = set(re.findall(r"^  (\w+)  ", srm.USAGE, re.M))
    assert set(re.findall(r"\bsrm ([a-z]+)(?![\w.])", code)) <= commands
    flags = {"config", "help", "version"} | {name.replace("_", "-") for name in srm.SETTINGS}
    flags |= set(re.findall(r"--([a-z][a-z-]*)", convert_parser().format_help()))
    used = re.findall(r"(?:srm|engine\.precompile) [^`\n]*?--([a-z][a-z-]*)", code)
    assert set(used) <= flags
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        linked = path.parent / target if target else path
        assert linked.exists(), f"{target} is not there"
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M) if anchor else []
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_what_is_to_be_installed_is_on_an_index() -> None:
    """`srm-server[parquet]` is on none: the packages of an extra are named themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    known = {re.split(r"[>=<\[]", package)[0] for package in packages}
    sources = [
        path for name in ("engine", "server", "loadtest") for path in (ROOT / name).rglob("*.py")
    ]
    for path in (*PAGES, *sources):
        for said in re.findall(r"pip install ([^`\"\n:]*)", path.read_text()):
            words = [word.strip("'") for word in said.split() if not word.startswith(("-", "{"))]
            named = list(takewhile(lambda word: re.fullmatch(r"[\w\[\]-]+", word), words))
            assert set(named) <= known, f"{path}: pip install {said}"


def blocks(page: str, info: str) -> list[str]:
    """Fenced blocks that begin with ```info."""
    return re.findall(rf"^```{info}\n(.*?)^```$", read(page), re.M | re.S)


def here(example: str, running: Server) -> str:
    return example.replace("http://127.0.0.1:8000", running.url)


@pytest.mark.parametrize(
    ("info", "has_error"), [("sh test", False), ("sh test refused", True)], ids=["sh", "refused"]
)
def test_shell_examples_run(server: Server, info: str, has_error: bool) -> None:
    examples = blocks("api.md", info)
    assert examples
    for example in examples:
        command = ["bash", "-euo", "pipefail", "-c", here(example, server)]
        answer = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        assert answer.startswith(("{", "data: "))
        assert ('"error"' in answer) == has_error, answer


def test_the_refusal_shown_is_the_one_that_comes(server: Server) -> None:
    (example,) = blocks("api.md", "sh test refused")
    (shown_answer,) = blocks("api.md", "json")
    command = ["bash", "-c", here(example, server)]
    answer = subprocess.run(command, capture_output=True, check=True).stdout
    assert json.loads(answer) == json.loads(shown_answer)


@pytest.mark.parametrize(
    ("page", "said"),
    [("api.md", "n invalid_request Error code: 400"), ("many-samples.md", "drawn")],
)
def test_python_examples_run_one_after_the_other(server: Server, page: str, said: str) -> None:
    script = here("\n".join(blocks(page, "python test")), server)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_examples_of_the_python_api_run_one_after_the_other() -> None:
    script = "\n".join(blocks("python.md", "python test"))
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, check=False, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "of 1000 samples say 42" in done.stdout
    assert done.stdout.count("boxes: ") == 20


@pytest.mark.parametrize(
    ("kind", "heading"), [(Generated, "What comes back"), (Completion, "What comes back")]
)
def test_every_field_of_what_python_gives_is_there(kind: type[Any], heading: str) -> None:
    found = names("python.md", heading)
    own = [one.name for one in dataclasses.fields(kind) if one.repr]
    assert [name for name in found if name in own] == own
    assert set(found) <= {
        one.name for each in (Generated, Completion) for one in dataclasses.fields(each)
    }


def test_every_sampling_parameter_of_python_is_there() -> None:
    named = set(re.findall(r"`(\w+)`", section("python.md", "SamplingParams")))
    assert set(SamplingParams.__struct_fields__) <= named


def test_the_batch_of_the_guide_is_answered(server: Server) -> None:
    (example,) = blocks("batches.md", "python test")
    command = [sys.executable, "-c", here(example, server)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("completed ")
    assert done.stdout.count("question ") == 10


def test_a_trainer_changes_weights(text_model: Path, tmp_path: Path) -> None:
    (example,) = blocks("weights.md", "python test")
    with Server(text_model, *SERVER_FLAGS, f"--admin-port={free_port()}") as running:
        example = example.replace("http://127.0.0.1:8001", running.admin_url)
        command = [sys.executable, "-c", example]
        environment = {**os.environ, "CHECKPOINT": str(text_model)}
        done = subprocess.run(
            command, capture_output=True, check=False, text=True, env=environment, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr


def test_what_the_operator_may_say_is_there() -> None:
    hints = get_type_hints(admin.WeightsRequest, include_extras=True)
    found = rows("api.md", "WeightsRequest")
    assert [row[0].strip("`") for row in found] == list(hints)
    assert [row[2] for row in found] == [described(hint) for hint in hints.values()]


@pytest.mark.parametrize("page", [one for one in PAGES if one.stem != "CHANGELOG"], ids=str)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    folders = "engine|server|loadtest|training|bench|tests|deploy|mojo_kernels|models|docs"
    named = re.findall(rf"`((?:{folders})/[\w/.-]*)`", page.read_text())
    assert not [path for path in named if not (ROOT / path).exists()]
