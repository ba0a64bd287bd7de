"""The bundled model of regexes, asked as README does."""

from __future__ import annotations

import json
import re

from srm.engine.config import REGEX_MODEL
from srm.regex_examples import fits
from srm.server.supervise.launch import EXAMPLE as OWN_EXAMPLE
from tests.kit.serving import ROOT, Server

EXAMPLE = re.compile(r"'(\{\s*\"prompt\": \"✓.*?\})'", re.S)


def test_the_readmes_regex_is_found_and_is_right() -> None:
    readme = (ROOT / "README.md").read_text()
    (example,) = EXAMPLE.findall(readme)
    body = json.loads(example)
    assert body == json.loads((REGEX_MODEL / OWN_EXAMPLE).read_text())
    rule = body["verify"]
    *shown, _ = rule["accepts"]
    assert "".join("✓" + text for text in shown) + "→" == body["prompt"]
    accepts, rejects = ([text.encode() for text in rule[kind]] for kind in ("accepts", "rejects"))
    with Server(REGEX_MODEL, "--dtype=float32", "--num-slots=256") as server:
        reply = server.http.post("/v1/completions", json=body, timeout=600).json()
    (samples,) = reply["samples"]
    assert samples["reached"] and samples["matched"] == 1
    *wrong, right = (choice["text"] for choice in reply["choices"])
    assert fits(right, accepts, rejects)
    assert not any(fits(text, accepts, rejects) for text in wrong)
