"""Alert rules and the dashboard's queries, by Prometheus' own tool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import prometheus_client
import pytest

from srm.engine import metrics as engine_metrics
from srm.server import metrics as server_metrics
from tests.kit.serving import ROOT
from tests.tools.doc_tables import exposed, metrics_of

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
CASES = Path(__file__).with_name("alerts.yml")
NAMES = re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("there is no promtool; tests/install.sh installs it as root on Debian")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def test_the_settings_of_compose_are_those_of_prometheus() -> None:
    done = promtool("check", "config", str(RULES.with_name("prometheus.yml")))
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_come_when_they_must_and_else_do_not() -> None:
    done = promtool("test", "rules", str(CASES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_that_never_comes_is_noticed(tmp_path: Path) -> None:
    never = re.sub(
        r"(expr:).*?(\n +for:)", r"\1 vector(0) > 1\2", RULES.read_text(), flags=re.DOTALL
    )
    (tmp_path / "rules.yml").write_text(never)
    cases = CASES.read_text().replace("../../deploy/prometheus/alerts.yml", "rules.yml")
    (tmp_path / "cases.yml").write_text(cases)
    done = promtool("test", "rules", str(tmp_path / "cases.yml"))
    assert done.returncode == 1
    assert [name for name in NAMES if f"alertname: {name}" not in done.stdout + done.stderr] == []


def test_every_alert_is_explained() -> None:
    _, *sections = re.split(r"^## ", (ROOT / "docs" / "runbooks.md").read_text(), flags=re.M)
    by_alert = {name: text for name, _, text in (section.partition("\n") for section in sections)}
    assert NAMES and by_alert.keys() == set(NAMES)
    assert all(len(text.split()) <= 90 for text in by_alert.values())
    urls = re.findall(r"runbook_url: \S+#(\w+)$", RULES.read_text(), re.MULTILINE)
    assert urls == [name.lower() for name in NAMES]


def test_the_dashboards_queries_are_queries_of_one_server_or_all(tmp_path: Path) -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "srm.json").read_text())
    chosen = ["namespace", "job", "instance"]
    assert [load["name"] for load in board["templating"]["list"]] == ["source", *chosen]
    selector = re.escape("{" + ", ".join(f'{name}=~"${name}"' for name in chosen))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for query in asked:
        metrics = re.findall(rf"\b(?:(?:srm|http)_\w+|up\b)({selector})?", query)
        assert metrics and all(metrics), query
    filled = [re.sub(r"\$[a-z]+", ".*", ask.replace("$__rate_interval", "1m")) for ask in asked]
    rules = [{"record": f"panel:{number}", "expr": item} for number, item in enumerate(filled)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # YAML too
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_of_an_alert_is_on_a_panel() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "srm.json").read_text())
    shown = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    metric = re.compile(r"\b(?:(?:srm|http)_[a-z]\w*|up\b(?=\{))")
    asked = set(metric.findall(RULES.read_text()))
    assert len(asked) > 15 and asked <= set(metric.findall(shown))


def test_an_alert_window_holds_three_scrapes_of_a_minute() -> None:
    """A rate of one value is none, and its alert never came."""
    windows = re.findall(r"\[(\d+)m\]", RULES.read_text())
    assert windows and min(map(int, windows)) >= 3


def test_alerts_and_dashboard_ask_for_metrics_that_there_are() -> None:
    known = {
        f"{exposed(metric)}{suffix}"
        for module in (engine_metrics, server_metrics)
        for metric in metrics_of(module)
        for suffix in (
            ("_bucket", "_sum", "_count")
            if isinstance(metric, prometheus_client.Histogram)
            else ("",)
        )
    }
    for path in (RULES, ROOT / "deploy" / "grafana" / "srm.json"):
        asked = set(re.findall(r"\b(?:srm|http)_[a-z]\w*", path.read_text()))
        assert asked and asked <= known, asked - known
