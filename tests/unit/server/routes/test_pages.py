"""The pages show the model's own example, whatever it holds."""

from __future__ import annotations

import json

from tests.unit.server.conftest import Served

EXAMPLE = {"prompt": "✓</script>", "n": 9, "max_tokens": 66, "verify": {"accepts": ["a"]}}


async def test_both_pages_have_the_models_example(served: Served) -> None:
    async with served(example=json.dumps(EXAMPLE)) as http:
        reply = await http.get("/dashboard/example.json")
        assert reply.json() == EXAMPLE
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
        document = (await http.get("/openapi.json")).json()
    asked = document["paths"]["/v1/completions"]["post"]["requestBody"]
    examples = [
        named["value"] for named in asked["content"]["application/json"]["examples"].values()
    ]
    assert examples[0] == EXAMPLE
    assert len(examples) > 1
    assert {(body["prompt"], body["max_tokens"]) for body in examples} == {(EXAMPLE["prompt"], 66)}
    assert not any("verify" in body or "until" in body for body in examples[1:])


async def test_a_model_without_an_example_has_the_usual_ones(served: Served) -> None:
    async with served() as http:
        assert (await http.get("/dashboard/example.json")).json() == {}
        assert "Ava has 6 boxes" in (await http.get("/openapi.json")).text
