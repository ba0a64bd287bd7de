"""Dockerfile, compose.yaml and Grafana's provisioning agree with each other and the code."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

import srm.__main__ as srm
from srm.engine.config import EngineConfig
from srm.server.config import ServerConfig
from srm.server.routes.app import OPERATIONS
from srm.server.supervise import launch
from tests.kit.serving import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
SERVER = DOCKERFILE.partition(" AS server\n")[2].partition("\nFROM ")[0]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
GRAFANA = ROOT / "deploy" / "grafana"


def environment(instructions: str) -> dict[str, str]:
    matches = re.findall(r"^ENV (.*)$", instructions, re.M)
    return dict(part.split("=", 1) for line in matches for part in shlex.split(line))


def mounts(service: str) -> dict[str, str]:
    """Source of each path that is mounted in a service."""
    parts = [volume.split(":") for volume in COMPOSE["services"][service]["volumes"]]
    return {target: source for source, target, *_ in parts}


def settings(
    monkeypatch: pytest.MonkeyPatch, *given: Mapping[str, str]
) -> tuple[ServerConfig, EngineConfig]:
    """What `srm serve` makes of these variables; those that it does not know stop it."""
    for variables in given:
        srm.check_environment(variables)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    return launch.load_settings([])


def test_the_image_and_its_services_have_settings_that_the_server_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = environment(SERVER)
    server, engine = settings(monkeypatch, image)
    folders = json.loads(re.findall(r"^VOLUME (.*)$", SERVER, re.M)[0])
    assert sorted(folders) == sorted(
        map(str, (engine.cache_dir, server.data_dir, engine.snapshot_dir))
    )
    assert f"EXPOSE {server.port}\n" in SERVER and server.host == "0.0.0.0"
    assert '"--version"' not in SERVER and 'ENTRYPOINT ["srm"]\nCMD ["serve"]' in SERVER
    asked = re.findall(r"c.request\('GET', '([^']+)'\)", SERVER)
    assert len(asked) == 1 and asked[0] in {operation.path for operation in OPERATIONS}
    for name in ("server", "server-gpu"):
        service = COMPOSE["services"][name]
        assert sorted(mounts(name)) == sorted(folders)
        assert all(port.endswith(f":{server.port}") for port in service["ports"])
        (minutes,) = re.fullmatch(r"(\d+)m", service["stop_grace_period"]).groups()  # type: ignore[union-attr]
        assert 60 * int(minutes) >= server.drain_s + engine.snapshot_s + 20
        named = service["environment"]["SRM_ALLOWED_HOSTS"]  # by other services, without a key
        assert settings(monkeypatch, {"SRM_ALLOWED_HOSTS": named})[0].allowed_hosts == (
            "server",
            "server-gpu",
        )
    given = COMPOSE["services"]["server-gpu"]["environment"]
    by_default = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in given.items()}
    server, engine = settings(monkeypatch, by_default)
    assert engine.device == "gpu" and server.engines == 1


def test_every_service_is_hardened_and_only_this_machine_reaches_it() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for target, source in mounts(name).items():
            is_there = (
                source in COMPOSE["volumes"] or source == "./runs" or (ROOT / source).exists()
            )
            assert is_there, f"{name}: {source} for {target}"


def test_prometheus_and_grafana_find_each_other_and_the_server() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (scraped,) = config["scrape_configs"]
    assert scraped["job_name"] == "srm"  # of the alert rules
    (result,) = scraped["dns_sd_configs"]
    assert set(result["names"]) == {"server", "server-gpu"} <= set(COMPOSE["services"])
    assert all((ROOT / "deploy/prometheus" / rules).exists() for rules in config["rule_files"])
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())
    (source,) = sources["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    boards = yaml.safe_load((GRAFANA / "provisioning/dashboards/srm.yml").read_text())
    (provider,) = boards["providers"]
    mounted = PurePosixPath(provider["options"]["path"]) / "srm.json"
    assert mounts("grafana")[str(mounted)] == "./deploy/grafana/srm.json"
    home = COMPOSE["services"]["grafana"]["environment"][
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"
    ]
    assert home == str(mounted)


def test_the_build_gets_all_that_the_wheel_has_and_the_locks() -> None:
    sent = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]
    parts = {path.name for path in (ROOT / "srm").iterdir() if path.is_symlink()}
    assert {*targets["wheel"]["only-include"], *parts} <= sent
    for lock in re.findall(r"^COPY (\S+\.lock) /$", DOCKERFILE, re.M):
        assert "--hash=sha256:" in (ROOT / lock).read_text()
        assert lock in sent or f"{PurePosixPath(lock).parent}/*.lock" in sent
    installs = re.findall(r"pip install [^&\n]*|install +--require[^&\n]*", DOCKERFILE)
    assert installs and all("--require-hashes" in install for install in installs)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("compose-spec", "compose.yaml"),
        ("citation-file-format", "CITATION.cff"),
        *(
            (schema, str(path.relative_to(ROOT)))
            for schema, folder in (
                ("github-workflows", "workflows"),
                ("github-issue-forms", "ISSUE_TEMPLATE"),
            )
            for path in sorted((ROOT / ".github" / folder).glob("*.yml"))
        ),
    ],
)
def test_files_of_other_programs_follow_their_published_schemas(schema: str, path: str) -> None:
    checker = pytest.importorskip("check_jsonschema.cli")
    with pytest.raises(SystemExit) as left:
        checker.main(["--builtin-schema", f"vendor.{schema}", str(ROOT / path)])
    assert left.value.code == 0


@pytest.mark.parametrize("page", ["Dockerfile", "docs/deploy.md"])
def test_every_image_finds_the_server(page: str) -> None:
    """It is in no lock: only PYTHONPATH says where it is."""
    paths = re.findall(r"PYTHONPATH=(\S+)", (ROOT / page).read_text())
    assert paths and all("/opt/srm" in path.split(":") for path in paths)
