"""A third kind of reply takes a format and nothing else; other servers have it at `/generate`."""

from __future__ import annotations

from typing import Any

import pytest

from server.generation.detokenize import ChoicePart
from server.reply.format import Format
from server.reply.scores import CompletionScores
from server.text.text import Text
from tests.unit.server.reply.test_stream_writer import CAT, MAT, THE, Served, turns


class GenerateFormat(Format):
    """A choice is a document of its own, with all else below `meta_info`."""

    scores_kind = CompletionScores
    may_share_events = False

    def make_choice(self, part: ChoicePart, is_event: bool = False) -> Any:
        reason = part.finish_reason and {"type": part.finish_reason, "matched": part.stop_reason}
        meta: dict[str, Any] = {"finish_reason": reason}
        if (scores := self.logprobs(part)) is not None:
            meta["output_token_logprobs"] = scores
        return {"index": part.index, "text": part.text, "meta_info": meta}

    def events(self, parts: list[ChoicePart]) -> list[list[Any]]:
        shown = [self.make_choice(part) for part in parts if part.text or part.finish_reason]
        return [shown] if shown else []

    def envelope(self, fields: dict[str, Any], is_event: bool) -> Any:
        return fields["choices"][0]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stop": ["cat m"]}, {"n": 17}])
async def test_another_dialect_streams_as_the_others_do(text: Text, fields: dict[str, Any]) -> None:
    served, n = Served(text), fields.get("n", 1)
    reply, task = await served.ask(dialect=GenerateFormat, **fields)
    for token in (THE, CAT, THE):
        served.say({(0, index): token for index in range(n)})
        await turns()
    assert reply.num_written
    served.say({(0, index): MAT for index in range(n)}, ends={(0, index) for index in range(n)})
    await task
    events = [event for event in reply.events if event["index"] == n - 1]
    assert "".join(event["text"] for event in events) == " the cat the mat"
    *others, last = (event["meta_info"] for event in events)
    assert {str(other["finish_reason"]) for other in others} == {"None"}
    assert last["finish_reason"] == {"type": "length", "matched": None}
    assert all(("output_token_logprobs" in meta) == ("logprobs" in fields) for meta in others)
