"""Packed arrays are the engine's own, and a prompt's begin with what its first token has not."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import msgspec

from engine.messages import Output
from server.text.packed import PackedSample, of_delta, of_prompt


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


def unpacked(encoded: bytes) -> dict[str, list[Any]]:
    kinds = {"token_ids": "i", "ranks": "i", "top_token_ids": "i"}
    return {
        name: memoryview(base64.b64decode(value)).cast(kinds.get(name, "f")).tolist()  # type: ignore[call-overload]
        for name, value in msgspec.json.decode(encoded).items()
    }


OUTPUT = Output(
    **{"id": "a", "index": 0, "token_ids": ints(5, 6), "logprobs": floats(-1, -math.inf)},
    **{"ranks": ints(2, 9), "top_ids": ints(7, 5, 8, -1), "top_logprobs": floats(-0.5, -1, 0, 0)},
)


def test_only_what_is_asked_for_is_sent() -> None:
    sample = PackedSample(3, ())
    delta = sample.feed(OUTPUT)
    assert (delta.index, delta.is_first, delta.text, sample.finished) == (3, True, "", False)
    asked = {k: unpacked(msgspec.json.encode(of_delta(delta, k))) for k in (None, 0, 2)}
    assert asked[None] == {"token_ids": [5, 6]}
    assert asked[0] == {"token_ids": [5, 6], "logprobs": [-1, -math.inf]}
    assert asked[2] == asked[0] | {"top_token_ids": [7, 5, 8, -1], "top_logprobs": [-0.5, -1, 0, 0]}


def test_the_token_that_stops_is_told() -> None:
    for stop_token_ids, expected in (((6,), 6), ((9,), None)):
        sample = PackedSample(0, stop_token_ids)
        delta = sample.feed(msgspec.structs.replace(OUTPUT, finish_reason="stop"))
        assert (delta.finish_reason, delta.stop_reason, sample.finished) == ("stop", expected, True)
        assert delta.token_ids == OUTPUT.token_ids


def test_a_prompts_arrays_have_an_entry_for_every_token() -> None:
    prompt = ints(4, 5, 6)
    assert unpacked(bytes(of_prompt(prompt, OUTPUT, None))) == {"token_ids": [4, 5, 6]}
    found = unpacked(bytes(of_prompt(prompt, OUTPUT, 2)))
    assert found["token_ids"] == [4, 5, 6]
    assert found["ranks"] == [0, 2, 9]
    assert found["top_token_ids"] == [-1, -1, 7, 5, 8, -1]
    assert math.isnan(found["logprobs"][0]) and found["logprobs"][1:] == [-1, -math.inf]
    assert found["top_logprobs"][2:] == [-0.5, -1, 0, 0]
    assert all(map(math.isnan, found["top_logprobs"][:2]))
    assert set(unpacked(bytes(of_prompt(prompt, OUTPUT, 0)))) == {"token_ids", "logprobs", "ranks"}
