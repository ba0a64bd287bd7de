"""All files of a release name the same version, licence and versions of Python."""

from __future__ import annotations

import re
import tomllib

import yaml

from srm import __version__
from tests.kit.serving import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_changelog_image_and_citation_have_the_version() -> None:
    """A plain `docker build` said `unknown`."""
    released = re.findall(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == (__version__, CITATION["date-released"])
    assert CITATION["version"] == __version__
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.findall(r'image\.version="(.*)"', dockerfile) == [__version__]


def test_every_python_that_the_wheel_names_is_tested() -> None:
    named = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if ":: Python ::" in line]
    checks = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())
    matrix = checks["jobs"]["check"]["strategy"]["matrix"]["include"]
    assert named == [job["python"] for job in matrix]
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_a_release_has_one_paper_and_one_licence() -> None:
    paper = CITATION["preferred-citation"]
    assert PROJECT["urls"] == {"Paper": paper["url"]}
    assert PROJECT["license"] == CITATION["license"]
    assert PROJECT["authors"] == CITATION["authors"]
