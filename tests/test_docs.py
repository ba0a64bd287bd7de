"""The pages of docs/ name all there is and nothing else, and their examples run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest

import srm.__main__ as srm
from srm import limited_process
from srm.engine import metrics as engine_metrics
from srm.engine.config import EngineConfig, Mixer, ModelConfig
from srm.engine.messages import SamplingParams
from srm.engine.python.replay import replay_parser
from srm.engine.python.request_output import Completion, Generated
from srm.engine.weights.convert import parser as convert_parser
from srm.engine.weights.inspect_model import inspect_parser
from srm.engine.weights.upstream_config import Constructor, PublishedArgs
from srm.errors import ConfigError
from srm.server import metrics as server_metrics
from srm.server.commands.score_lines import LineScore
from srm.server.config import ServerConfig
from srm.server.dialects.chat import tokenize
from srm.server.errors import ErrorDetail
from srm.server.generation import dedup_counts, matching
from srm.server.routes import pages
from srm.server.routes.app import OPERATIONS
from srm.server.routes.scrape import VLLM_CACHE_CONFIG
from srm.server.schema import conversation, json_parts, sampling_fields, tools, verify
from srm.server.supervise import launch
from srm.server.text.chat_template import RENDER_S
from srm.settings import build, settings_in
from tests.kit.serving import ROOT, SERVER_FLAGS, Server, free_port
from tests.tools import doc_tables

DOCS = ROOT / "docs"
PAGES = [*doc_tables.PAGES, *sorted(ROOT.glob("*.md"))]
API = ["api.md", *(f"api/{name}.md" for name in (
    *("completions", "chats", "responses", "messages", "streaming", "sampling", "many-samples"),
    *("models", "files-and-batches", "rollouts", "administration", "limits", "compatibility"),
)), "states.md", "trees.md", "log-probabilities.md"]  # fmt: skip
"""In the order in which their examples go on from each other."""
FILLED_IN_ELSEWHERE = {"BenchConfig", "ModelConfig", "LoadConfig", "SRMConfig"}
"""What is named as settings are, and is that of no command by itself."""
CHECKED_LATER = {"GenerateConfig", "BatchConfig", "EvaluateConfig"}
"""Settings that become others, of a request or of the engine, which check them."""
UNCHECKED = {("HostBenchConfig", "seconds")}
WRITTEN_IN_A_SENTENCE = {
    *("FileDeleted", "Health", "Pong", "Version", "WorldSize", "Detokenized", "ChunkChoice"),
    *("PauseState", "IsPaused", "FolderInUse", "Aborted", "PrefixesDropped", "WeightVersion"),
    *("Alive", "Loads"),
}
"""Replies without a table of their own."""


def read(page: str) -> str:
    return (DOCS / page).read_text()


def sections(page: str) -> dict[str, str]:
    """The text below each heading, up to the next one."""
    parts = re.split(r"^#+ (.*)\n", read(page), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def names(text: str) -> list[str]:
    """What the first cells of the tables name, heads aside."""
    cells = re.findall(r"^\| ([^|]*)\|.*\n(?!\|--)", f"{text}\n", re.M)
    return [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_those_of_the_code_and_whole(path: Path) -> None:
    text = path.read_text()
    whole = doc_tables.REFERENCE.get(path, lambda: doc_tables.written(text))
    assert whole() == text, "make tables"
    assert f"| {doc_tables.MISSING} |" not in text, "say what only a person can say"
    assert path.stem == "CHANGELOG" or text.count("\n") <= 300, "split the page"


def test_everything_that_has_a_table_has_it() -> None:
    tables = set(chain(*(doc_tables.names(path.read_text()) for path in PAGES)))
    assert {name.partition(" ")[0] for name in tables} == set(doc_tables.TABLES)
    assert {"metrics srm.server.metrics", "metrics srm.engine.metrics"} <= tables
    of = {name.split(".")[-1] for name in (re.sub(" but .*", "", table) for table in tables)}
    for operation in OPERATIONS:
        for kind in (
            operation.body.kind if operation.body else None,
            operation.query,
            operation.form,
        ):
            assert kind is None or kind.__name__ in of
    for package in ("engine", "server", "training", "research", "loadtest"):
        for path in (ROOT / package).rglob("*.py"):
            result = set(re.findall(r"^class (\w+Config)\(", path.read_text(), re.M))
            assert result <= of | FILLED_IN_ELSEWHERE


def settings_tables() -> Iterator[tuple[type[msgspec.Struct], dict[str, dict[str, str]]]]:
    for path in PAGES:
        for name, table in doc_tables.BLOCK.findall(path.read_text()):
            if name.startswith("settings "):
                yield doc_tables.struct(name.split()[1]), doc_tables.cells(table)


def test_srm_knows_the_variables_that_are_read() -> None:
    known = set(chain(*doc_tables.FROM_VARIABLES.values()))
    assert sorted(srm.SETTINGS) == sorted(known)


def test_numbers_beyond_what_a_table_allows_are_refused() -> None:
    """Where a cell is a range, such as `≥ 1` or `each 1 … 504`."""
    refused = 0
    for kind, rows in settings_tables():
        defaults = {setting.name: setting.default for setting in settings_in(kind)}
        for name, row in ((first.strip("`"), row) for first, row in rows.items()):
            is_left_out = kind.__name__ in CHECKED_LATER or (kind.__name__, name) in UNCHECKED
            for value in [] if is_left_out else beyond(row["allowed"]):
                typed = float(value) if isinstance(defaults[name], float) else int(value)
                given = (typed,) if isinstance(defaults[name], tuple) else typed
                with pytest.raises(ConfigError):
                    build(kind, {name: given})
                    pytest.fail(f"{kind.__name__} takes {name} = {given}")
                refused += 1
    assert refused > 100


def beyond(allowed: str) -> list[float]:
    if least := re.match(r"(?:each )?(≥|>) ([\d.]+)(?:$|[,;])", allowed):
        return [float(least[2]) - (least[1] == "≥")]
    ends = re.match(r"(?:each )?([\d.]+) (?:…|to) ([\d.]+)(?:$|[,;])", allowed)
    return [float(ends[1]) - 1, float(ends[2]) + 1] if ends else []


def test_the_example_file_is_understood(tmp_path: Path) -> None:
    (example,) = blocks("configuration.md", "toml serving")
    file = tmp_path / "srm.toml"
    file.write_text(example)
    server_config, engine_config = launch.load_settings([f"--config={file}"])
    assert server_config == ServerConfig(
        model=Path("models/demo"), served_model_name="demo", host="0.0.0.0"
    )
    assert engine_config == EngineConfig(model=Path("models/demo"))


COMMANDS = re.findall(r"^  (\w+)  ", srm.USAGE, re.M)


def struct_names() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Pages and headings whose tables have exactly these names in their first cells."""
    yield "models.md", "Variants", get_args(Mixer)
    for place, kind in {
        "models.md#config.json": ModelConfig,
        "models.md#ARGS.json": PublishedArgs,
        "models.md#Constructor arguments": Constructor,
        "configuration/commands.md#Results of scoring": LineScore,
        "api.md#Errors": ErrorDetail,
        "api/streaming.md#Streaming": sampling_fields.StreamOptions,
    }.items():
        page, _, heading = place.partition("#")
        yield page, heading, kind.__struct_encode_fields__
    fields = {*dataclasses.fields(Generated), *dataclasses.fields(Completion)}
    yield "python.md", "What comes back", tuple(field.name for field in fields if field.repr)
    for page in API:
        for heading, text in sections(page).items():
            if heading in WIRE and "<!-- table: fields" not in text:
                yield page, heading, WIRE[heading].__struct_encode_fields__


WIRE: dict[str, type[msgspec.Struct]] = {
    name: kind
    for module, result in list(sys.modules.items())
    if module.startswith(("srm.server.schema.", "srm.server.routes."))
    for name, kind in vars(result).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
}
"""Every struct of requests and replies, by its name."""


@pytest.mark.parametrize(("page", "heading", "expected"), [*struct_names()])
def test_every_field_is_there(page: str, heading: str, expected: tuple[str, ...]) -> None:
    assert sorted(names(sections(page)[heading])) == sorted(expected)


def test_every_reply_command_and_sampling_parameter_is_there() -> None:
    kinds = chain(
        *((operation.reply, operation.events, *operation.parts) for operation in OPERATIONS)
    )
    replies = {kind.__name__ for kind in kinds if isinstance(kind, type)}
    headings = {heading for page in API for heading in sections(page)}
    assert replies <= headings | WRITTEN_IN_A_SENTENCE
    listed = re.findall(r"^\| `srm (\w+)", sections("configuration.md")["Commands"], re.M)
    assert list(dict.fromkeys(listed)) == COMMANDS
    named = set(re.findall(r"`(\w+)`", sections("python.md")["SamplingParams"]))
    assert set(SamplingParams.__struct_fields__) <= named


def test_limits_are_what_they_are() -> None:
    text = read("api/limits.md")
    limits = {name: getattr(sampling_fields, name) for name in """
        MAX_CHOICES MAX_STOPS MAX_STOP_LENGTH MAX_SCORES MAX_BIASES MAX_BAD_WORDS
        MAX_BAD_WORD_LENGTH MAX_CUT_LENGTH MAX_METADATA MAX_METADATA_KEY MAX_METADATA_VALUE
    """.split()}  # fmt: skip
    assert limits["MAX_BAD_WORDS"] == limits["MAX_STOPS"]
    assert limits["MAX_BAD_WORD_LENGTH"] == limits["MAX_STOP_LENGTH"]
    for message in (
        *(f" {limit}" for limit in limits.values()),
        f"| {verify.MAX_PATTERN_LENGTH} characters, {matching.MAX_PROGRAM} instructions |",
        f"| {dedup_counts.MAX_DISTINCT_BYTES // 2**20} MiB |",
        "| messages of a chat, parts of a content, tool calls of a message | "
        f"{conversation.MAX_MESSAGES} each, {conversation.MAX_PARTS} together |",
        f"| `tools`; calls of a reply | {tools.MAX_TOOLS}; {tools.MOST_CALLS} |",
        f"| arguments of a chat's tool calls | {json_parts.MAX_VALUE_BYTES} characters ",
        f"| fields of a body, keys of a message | {json_parts.MAX_FIELDS} |",
        f"| the JSON of any other field | {json_parts.MAX_VALUE_BYTES // 2**20} MiB;",
        f"| {tokenize.MAX_TEXTS}, and ",
        f" {RENDER_S:g} s, {limited_process.MAX_MEMORY // 2**30} GiB ",
        *(f" {tokenize.MAX_CHARACTERS} characters ", f" {tokenize.MAX_TOKENS} tokens "),
    ):
        assert message in text
    settings = re.findall(r"`(\w+)`", text.strip().splitlines()[-1])
    assert settings and set(settings) <= set(srm.SETTINGS)


def test_every_metric_that_is_named_exists() -> None:
    known = {
        doc_tables.exposed(metric)
        for module in (server_metrics, engine_metrics)
        for metric in doc_tables.metrics_of(module)
    }
    assert VLLM_CACHE_CONFIG in read("metrics.md")
    board = json.loads((ROOT / "deploy" / "grafana" / "srm.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    page = (pages.FOLDER / "watch.js").read_text()
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    for text in (read("metrics.md"), page, "\n".join(asked), alerts):
        named = re.findall(r"\b(?:srm|http)_\w+", text)
        assert len(named) > 8
        assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known


@cache
def known_flags() -> set[str]:
    """Names of the flags of all commands."""
    fields = chain(*(settings_in(kind) for kind, _ in settings_tables()))
    flags = {"config", "help", "version"} | {field.name.replace("_", "-") for field in fields}
    for parser in (convert_parser(), inspect_parser(), replay_parser()):
        flags |= set(re.findall(r"--([a-z][a-z-]*)", parser.format_help()))
    return flags


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_nothing_that_does_not_exist(path: Path) -> None:
    text = path.read_text()
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.S))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= set(targets)
    assert set(re.findall(r"(?<!from )\bsrm ([a-z]+)(?![\w.])", code)) <= set(COMMANDS)
    used = re.findall(r"(?:srm|engine\.device\.precompile) [^`\n]*?--([a-z][a-z-]*)", code)
    assert set(used) <= known_flags()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        linked = path.parent / target if target else path
        assert linked.exists(), f"{target} is not there"
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M) if anchor else []
        assert not anchor or anchor in [heading.lower().replace(" ", "-") for heading in headings]
    folders = "engine|server|loadtest|training|research|tests|deploy|mojo_kernels|models"
    files = (
        re.findall(rf"`((?:{folders}|docs)/[\w/.-]*)`", text) if path.stem != "CHANGELOG" else []
    )
    assert not [file for file in files if not (ROOT / file).exists()]


def test_the_tests_that_complaints_name_are_there() -> None:
    named = re.findall(r"\[(test_\w+)\]\(\.\./([^)]*)\)", read("trainers.md"))
    assert len(named) > 20
    for test, path in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.M), test
    for heading in ("Rollouts", "Recurrent and hybrid models"):
        for complaint, row in doc_tables.cells(sections("trainers.md")[heading].strip()).items():
            proof = {"Solved": "[test_", "Documented": "[page]", "Open": ""}
            verdict = re.split(r"\W", row["here"])[0]
            assert proof[verdict] in row["test or page"], complaint


def test_each_figure_of_the_readmes_list_has_a_record() -> None:
    """It said "20,480 of 20,480 tokens", of which nothing was kept."""
    _, _, behind = (ROOT / "README.md").read_text().partition("\n## What it is good at\n")
    claims = re.findall(r"^- \*\*.*(?:\n  .*)*", behind.partition("\n## ")[0], re.M)
    assert len(claims) == 4
    for claim in claims:
        linked = re.findall(r"\]\(((?:docs|research)/[^)#]+)", claim)
        has_record = [
            "records/" in link or "/records/" in (ROOT / link).read_text() for link in linked
        ]
        assert any(has_record) or not re.search(r"\d{2,}", claim), claim


def test_the_readme_leads_to_all_else() -> None:
    """An edit of one section cut off the four behind it."""
    text = (ROOT / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w./-]+)\)", text))
    assert linked >= {"ARCHITECTURE.md", "CONTRIBUTING.md", "docs/index.md", "docs/tour.md"}
    assert text.endswith("\nLicence: Apache-2.0.\n")


def test_the_site_asks_no_other_host(caplog: pytest.LogCaptureFixture) -> None:
    """Search from a file rested on a script of a CDN."""
    settings = (ROOT / "mkdocs.yml").read_text()
    (shim,) = re.findall(r"^  polyfills: \[(\S+)\]", settings, re.M)
    assert "iframe-worker" in shim and "IFrameWorker" in read(shim)
    check = runpy.run_path(str(DOCS / "site.py"))["on_post_page"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    for tag in ('<script src="assets/a.js">', '<a href="https://x.org">', '<img src="a.png">'):
        check(tag, page=page)
    assert not caplog.records
    for tag in ('<script src="https://x.org/a.js">', "<link rel=stylesheet href=//x.org/a.css>"):
        check(tag, page=page)
        assert "needs no network" in caplog.records.pop().getMessage()


def test_what_is_to_be_installed_is_on_an_index() -> None:
    """`srm-server[parquet]` is on none: the packages of an extra are named themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    known = {re.split(r"[>=<\[]", package)[0] for package in packages}
    sources = [
        path
        for name in ("engine", "server", "loadtest", "training")
        for path in (ROOT / name).rglob("*.py")
    ]
    sources += (ROOT / "srm").glob("*.py")
    for path in (*PAGES, *sources):
        for match in re.findall(r"pip install ([^`\"\n:]*)", path.read_text()):
            words = [word.strip("'") for word in match.split() if not word.startswith(("-", "{"))]
            named = list(takewhile(lambda word: re.fullmatch(r"[\w\[\]-]+", word), words))
            assert set(named) <= known, f"{path}: pip install {match}"


def blocks(page: str, info: str) -> list[str]:
    """Fenced blocks that begin with ```info."""
    return re.findall(rf"^```{info}\n(.*?)^```$", read(page), re.M | re.S)


def ran(program: Sequence[str], example: str, url: str = "", **options: Any) -> str:
    """What an example printed whose server is at this address; one that fails fails the test."""
    here = re.sub(r"http://127.0.0.1:800[01]", url, example)
    done = subprocess.run([*program, here], capture_output=True, check=False, text=True, **options)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


BASH = ("bash", "-euo", "pipefail", "-c")
PYTHON = (sys.executable, "-W", "error", "-c")


def test_shell_examples_run(server: Server) -> None:
    examples = [example for page in API for example in blocks(page, "sh test")]
    assert len(examples) > 2
    for example in examples:
        message = ran(BASH, example, server.url)
        assert message.startswith(("{", "data: ")) and '"error":{' not in message
    (refused,) = blocks("api/compatibility.md", "sh test refused")
    (shown,) = blocks("api/compatibility.md", "json")
    assert json.loads(ran(BASH, refused, server.url)) == json.loads(shown)


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (API, {"n invalid_request Error code: 400": 1}),
        (["many-samples.md"], {"drawn": 1}),
        (["structured-outputs.md"], {"item=": 1, "['#### ": 1}),
        (["tools.md"], {"add {'x': ": 1}),
        (["batches.md"], {"completed ": 1, "question ": 10}),
        (["python.md"], {"of 1000 samples say 42": 1, "boxes: ": 20}),
    ],
    ids=["api", "many-samples", "structured-outputs", "tools", "batches", "python"],
)
def test_python_examples_run_one_after_the_other(
    server: Server, pages: list[str], expected: dict[str, int]
) -> None:
    script = "\n".join(example for page in pages for example in blocks(page, "python test"))
    message = ran(PYTHON, script, server.url, cwd=ROOT)
    assert {text: message.count(text) for text in expected} == expected


def test_a_trainer_changes_weights(text_model: Path, tmp_path: Path) -> None:
    (example,) = blocks("weights.md", "python test")
    with Server(text_model, *SERVER_FLAGS, f"--admin-port={free_port()}") as running:
        environment = {**os.environ, "CHECKPOINT": str(text_model)}
        ran(PYTHON, example, running.admin_url, env=environment, cwd=tmp_path)
