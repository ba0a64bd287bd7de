"""Events of SGLang's streams, each with all so far."""

from __future__ import annotations

from array import array
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from srm.engine.messages import Output
from srm.server.dialects.rollouts.requests import parse_generate
from srm.server.dialects.rollouts.sglang import SENT_GROWTH, GeneratedFormat
from srm.server.generation.detokenize import ChoicePart, join
from srm.server.reply.format import encode_json
from srm.server.schema.completion_response import VersionSpan
from srm.server.text.text import Text

LENGTH = 2_000


def form_of(text: Text) -> GeneratedFormat:
    asked = parse_generate(
        b'{"input_ids": [5], "return_logprob": true, "top_logprobs_num": 2, "stream": true}'
    )
    generation: Any = SimpleNamespace(
        request=asked.request, num_choices=1, stream=None, id="a", weights_version=1,
        prompts=[SimpleNamespace(num_tokens=1)],
    )  # fmt: skip
    client: Any = SimpleNamespace(label=str, status=None)
    return GeneratedFormat(generation, text, client, asked)


def part_of(turn: int) -> ChoicePart:
    ids, tops = array("i", [turn % 300]).tobytes(), array("i", [turn % 7, 9]).tobytes()
    scores = array("f", [-turn]).tobytes(), b"", tops, array("f", [-1, -2]).tobytes()
    is_last = turn + 1 == LENGTH
    part = ChoicePart(0, turn == 0, f"{turn} ", Output("", 0, ids, *scores), [],
                      "length" if is_last else None, None)  # fmt: skip
    part.versions = [VersionSpan(turn // 900, turn, turn + 1)]
    return part


def test_a_stream_takes_a_multiple_of_its_length(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is encoded once, and sent about as often as SENT_GROWTH says."""
    form, parts = form_of(text), [*map(part_of, range(LENGTH))]
    encode, encoded = form.scores.entries, 0

    def count(scored: Output, num_top: int) -> list[Any]:
        nonlocal encoded
        encoded += len(scored.token_ids) // 4
        return encode(scored, num_top)

    monkeypatch.setattr(form.scores, "entries", count)
    sent = [choice for part in parts for choices in form.events([part]) for choice in choices]
    assert encoded == LENGTH
    lengths = [len(choice.output_ids) for choice in sent]
    assert lengths[:SENT_GROWTH] == [*range(1, SENT_GROWTH + 1)]
    assert all((b - a) * SENT_GROWTH >= a for a, b in pairwise(lengths[:-1]))
    assert sum(lengths) < (SENT_GROWTH + 2) * LENGTH
    assert encode_json(sent[-1]) == encode_json(form.make_choice(join(parts), is_event=False))
    assert len(sent[-1].meta_info.weight_versions) == 3
