"""What is downloaded is what was looked at: locks have hashes, actions and images digests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.serving import ROOT

UNHASHED = {"torch.lock"}
"""Which build of torch it is, is for whoever installs it to choose."""
OWN = ("srm", "srm-loadtest", "srm-router")
"""Images that are built here."""
DIGEST = r"@sha256:[0-9a-f]{64}"
LOCKS = sorted([*ROOT.glob("requirements/*.lock"), *ROOT.glob("deploy/**/*.lock")])


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_line_of_a_lock_has_a_hash_and_is_installed_by_it(lock: Path) -> None:
    lines_of_lock = re.sub(r"\\\n\s*", "", lock.read_text()).splitlines()
    pins = [line for line in lines_of_lock if not line.startswith("#")]
    unhashed = [pin for pin in pins if not re.search(r" --hash=sha256:[0-9a-f]{64}\b", pin)]
    if lock.name in UNHASHED:
        assert unhashed == pins == [pin for pin in pins if pin.startswith("torch==")]
        return
    assert pins and not unhashed
    places = ("Makefile", "Dockerfile", "deploy/kubernetes/router/Dockerfile")
    scripts = [*(ROOT / name for name in places), *ROOT.glob("tests/**/*.sh")]
    lines = [
        line
        for script in scripts
        for line in script.read_text().replace("\\\n", "").splitlines()
        if re.search(rf"-r (/|\S*/)?{re.escape(lock.name)}\b", line)
    ]
    assert lines and all("--require-hashes" in line for line in lines)


def actions() -> Iterator[str]:
    for workflow in (ROOT / ".github").rglob("*.yml"):
        yield from re.findall(r"uses: (?!\./)(.*)", workflow.read_text())


def images() -> Iterator[str]:
    """Every image that a build begins from or a manifest runs."""
    for file in [*ROOT.glob("**/Dockerfile"), *(ROOT / "docs").rglob("*.md")]:
        if ".venv" not in str(file):
            text = file.read_text()
            stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.M)) | set(OWN)
            matches = re.findall(r"^(?:FROM |ARG BASE=|COPY --from=)([^\s$]+)", text, re.M)
            yield from (match for match in matches if match not in stages)
            yield from re.findall(r"^# syntax=(\S+)", text, re.M)
    for folder in ("compose.yaml", "deploy/**/*.yml", "deploy/**/*.yaml"):
        for file in ROOT.glob(folder):
            matches = re.findall(r"^\s*(?:- )?image: (\S+)", file.read_text(), re.M)
            yield from (match for match in matches if match not in OWN)


def test_every_action_is_pinned_by_its_commit_with_its_version_behind_it() -> None:
    results = [*actions()]
    assert results
    for action in results:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v?\d+\.\d+\.\d+", action), action


def test_every_image_is_pinned_by_its_digest() -> None:
    results = [*images()]
    assert len(results) >= 4
    for image in results:
        assert re.search(f"{DIGEST}$", image), image
