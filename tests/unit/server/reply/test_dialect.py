"""A third kind of reply takes a format and nothing else; other servers have it at `/generate`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from srm.server.generation.detokenize import ChoicePart
from srm.server.reply.format import Format
from srm.server.reply.scores import CompletionScores
from srm.server.text.text import Text
from tests.unit.server.reply.test_stream_writer import CAT, CONTINUOUS, MAT, THE, Served


class GenerateFormat(Format):
    """A choice is a document of its own, with all else below `meta_info`."""

    scores_kind = CompletionScores

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
        if is_event and fields["choices"]:
            return fields["choices"][0]
        return {"results": fields["choices"], "usage": fields["usage"] or None}


class NamingFormat(GenerateFormat):
    """A choice also says whose it is, which the request says."""

    may_share_events = is_one_event = True

    def make_choice(self, part: ChoicePart, is_event: bool = False) -> Any:
        choice = super().make_choice(part, is_event)
        return choice | {"user": self.request.user, "by": part.finish_reason and self.request.user}

    def envelope(self, fields: dict[str, Any], is_event: bool) -> Any:
        return {"results": fields["choices"], "usage": fields["usage"] or None}


class TextFirstFormat(NamingFormat):
    """No template has its order."""

    def make_choice(self, part: ChoicePart, is_event: bool = False) -> Any:
        choice = super().make_choice(part, is_event)
        return {"text": choice.pop("text")} | choice


class CountingFormat(NamingFormat):
    """A choice says how many tokens are in it, and of which prompt it is."""

    def make_choice(self, part: ChoicePart, is_event: bool = False) -> Any:
        tokens, of_prompt = part.num_tokens, self.prompts[part.index // self.request.n].token_ids
        return super().make_choice(part, is_event) | {"tokens": tokens, "of": of_prompt}


class FlatFormat(GenerateFormat):
    """A dialect whose event is one flat object: the choice holds the fields of the event."""

    def envelope(self, fields: dict[str, Any], is_event: bool) -> Any:
        if not (is_event and fields["choices"]):
            return super().envelope(fields, is_event)
        return json.loads(bytes(fields["choices"][0])) | {"id": fields["id"]}


async def stream(
    text: Text, dialect: type[Format], fields: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """The events of a stream, and how many its task did not send."""
    reply = await Served(text).stream((THE, CAT, THE, MAT), dialect=dialect, **fields)
    return reply.events, reply.num_written


FIELDS: list[dict[str, Any]] = [
    *({}, {"logprobs": 1}, {"stop": ["cat m"]}, {"n": 17}, {"n": 17, "logprobs": 1}),
    {"stream_options": {"include_usage": True}},
    {"n": 17, "stream_options": CONTINUOUS},
]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize(
    "dialect", [GenerateFormat, NamingFormat, TextFirstFormat, CountingFormat, FlatFormat]
)
async def test_another_dialect_streams_as_the_others_do(
    text: Text, dialect: type[Format], fields: dict[str, Any]
) -> None:
    events, num_written = await stream(text, dialect, fields)
    n = fields.get("n", 1)
    assert bool(num_written) == (n == 1 or dialect in (GenerateFormat, FlatFormat))
    choices = [choice for event in events for choice in event.get("results", [event])]
    own = [choice for choice in choices if choice["index"] == n - 1]
    assert "".join(choice["text"] for choice in own) == " the cat the mat"
    *others, last = (choice["meta_info"] for choice in own)
    assert {str(other["finish_reason"]) for other in others} == {"None"}
    assert last["finish_reason"] == {"type": "length", "matched": None}
    assert all(("output_token_logprobs" in meta) == ("logprobs" in fields) for meta in others)
    if "stream_options" in fields:
        assert events[-1]["results"] == []
        assert events[-1]["usage"]["completion_tokens"] == 4 * n
    if dialect is CountingFormat:
        assert {(choice["tokens"], str(choice["of"])) for choice in choices} == {(1, "[5]")}


@pytest.mark.parametrize("n", [1, 17])
async def test_no_request_is_shown_what_another_says(text: Text, n: int) -> None:
    for user in ("bob", None, "eve"):
        fields = {"n": n} | ({} if user is None else {"user": user})
        events, _ = await stream(text, NamingFormat, fields)
        choices = [choice for event in events for choice in event["results"]]
        assert {choice["user"] for choice in choices} == {user}
        assert [choice["by"] for choice in choices if choice["meta_info"]["finish_reason"]] == (
            [user] * n
        )


async def test_a_whole_reply_of_another_dialect_has_every_choice(text: Text) -> None:
    reply = await Served(text).render_whole(GenerateFormat, (THE, CAT), n=2, stop="cat")
    reason = {"type": "stop", "matched": "cat"}
    assert reply["results"] == [
        {"index": index, "text": " the ", "meta_info": {"finish_reason": reason}}
        for index in range(2)
    ]
    assert reply["usage"]["completion_tokens"] == 4
