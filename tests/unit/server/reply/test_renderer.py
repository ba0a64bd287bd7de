"""Events of at least so many tokens, nothing lost or late; and SGLang's, each with all so far."""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.messages import FinishReason, Output
from srm.server.dialects.rollouts.requests import parse_generate
from srm.server.dialects.rollouts.sglang import SENT_GROWTH, GeneratedFormat
from srm.server.generation.detokenize import ChoicePart, join
from srm.server.http.responses import frame
from srm.server.reply.format import encode_json, escape
from srm.server.reply.renderer import Pacing
from srm.server.schema.completion_response import VersionSpan
from srm.server.text.text import Text

sizes = st.lists(st.integers(0, 4), min_size=1, max_size=20)


@given(st.integers(1, 9), st.lists(sizes, min_size=1, max_size=3))
def test_events_have_enough_tokens_and_miss_none(interval: int, choices: list[list[int]]) -> None:
    def part_of(index: int, turn: int) -> ChoicePart:
        size, is_end = choices[index][turn], turn + 1 == len(choices[index])
        reason: FinishReason | None = "length" if is_end else None
        tokens = Output("", index, bytes([turn]) * 4 * size)
        return ChoicePart(index, turn == 0, f"{turn} " * size, tokens, [], reason, None)

    pacing, sent = Pacing(interval), defaultdict[int, list[ChoicePart]](list)
    for turn in range(max(map(len, choices))):
        parts = [part_of(i, turn) for i, own in enumerate(choices) if turn < len(own)]
        for part in pacing.release(parts):
            sent[part.index].append(part)
    for index, own in enumerate(choices):
        whole, parts = [part_of(index, turn) for turn in range(len(own))], sent[index]
        assert join(parts) == join(whole)
        assert parts[0] == whole[0]
        assert all(part.num_tokens >= interval for part in parts[1:-1])
        if interval == 1:
            assert parts == [item for item in whole if item.text or item in (whole[0], whole[-1])]


def test_no_reader_that_splits_lines_by_unicode_cuts_an_event() -> None:
    text = "a\x85b\u2028c\u2029d"
    event = frame([encode_json(text), b'"%b"' % escape(text)]).decode()
    assert len(event.splitlines()) == 4  # two events, each with an empty line behind it
    assert [json.loads(line[6:]) for line in event.splitlines() if line] == [text, text]


LENGTH = 2_000


def form_of(text: Text) -> GeneratedFormat:
    asked = parse_generate(
        b'{"input_ids": [5], "return_logprob": true, "top_logprobs_num": 2, "stream": true}'
    )
    generation: Any = SimpleNamespace(
        request=asked.request, text=text, num_choices=1, stream=None, id="a", weights_version=1,
        prompts=[SimpleNamespace(num_tokens=1)],
    )  # fmt: skip
    client: Any = SimpleNamespace(label=str, status=None)
    return GeneratedFormat(generation, client, asked)


def part_of(turn: int) -> ChoicePart:
    ids, tops = array("i", [turn % 300]).tobytes(), array("i", [turn % 7, 9]).tobytes()
    scores = array("f", [-turn]).tobytes(), b"", tops, array("f", [-1, -2]).tobytes()
    is_last = turn + 1 == LENGTH
    part = ChoicePart(0, turn == 0, f"{turn} ", Output("", 0, ids, *scores), [],
                      "length" if is_last else None, None)  # fmt: skip
    part.versions = [VersionSpan(turn // 900, turn, turn + 1)]
    return part


def test_a_stream_costs_its_length(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
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
