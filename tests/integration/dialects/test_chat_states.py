"""States of chats and rollouts, and those that samples passed: each is that of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.dialects.test_exact_chats import USER, answered
from tests.integration.dialects.test_states import STATES, UNKNOWN, go_on, make, tokens
from tests.kit.serving import (
    CHATS,
    COMPLETIONS,
    SERVER_FLAGS,
    TEXT_MODEL,
    Server,
    answer_lines,
    complete,
    error_of,
    events_of,
    free_port,
    parts_of,
    write_text_model,
)

SYSTEM = {"role": "system", "content": "the cat sat on the mat"}
ASKED: dict[str, Any] = {"n": 3, "max_tokens": 6, "seed": 5, "return_token_ids": True}
SCORED: dict[str, Any] = {**ASKED, "logprobs": True}
BEGINNING: dict[str, Any] = {"messages": [SYSTEM], "add_generation_prompt": False}
TOOL = {"type": "function", "function": {"name": "f"}}
A = {"prompt": "a"}
VLLM, SGLANG = "/inference/v1/generate", "/generate"


def post(server: Server, path: str, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def tokenize(server: Server, **fields: Any) -> list[int]:
    ids: list[int] = post(server, "/tokenize", **fields)["tokens"]
    return ids


def scores(reply: dict[str, Any]) -> list[list[float]]:
    return [
        [score["logprob"] for score in choice["logprobs"]["content"]] for choice in reply["choices"]
    ]


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_chat_goes_on_from_the_state_of_its_beginning(server: Server) -> None:
    state = make(server, **BEGINNING)
    assert state["tokens"] == len(tokenize(server, **BEGINNING))
    chat: dict[str, Any] = {"messages": [SYSTEM, USER], **SCORED}
    expected = post(server, CHATS, **chat)
    made = post(server, CHATS, state=state["id"], **chat)
    assert (tokens(made), scores(made)) == (tokens(expected), scores(expected))
    assert made["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert cached(made) == state["tokens"] - 1
    streamed = events_of(server, CHATS, **{**chat, "n": 1}, state=state["id"])
    ids = [id for part in parts_of(streamed, 0) for id in part.get("token_ids") or ()]
    assert ids == tokens(expected)[0]
    chats = [[SYSTEM, {"role": "user", "content": text}] for text in ("mat", "cat")]
    asked = {**SCORED, "messages": chats}
    before = server.metric("srm_engine_prefill_tokens_total")
    both = post(server, f"{CHATS}/batch", state=state["id"], **asked)
    fed = server.metric("srm_engine_prefill_tokens_total") - before
    assert tokens(both) == tokens(post(server, f"{CHATS}/batch", **asked))
    assert fed == both["usage"]["prompt_tokens"] - 2 * state["tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [USER], "tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"add_special_tokens": True},
        {"messages": [USER, {"role": "assistant", "content": "sat"}]}
        | {"continue_final_message": True},
        {"messages": [USER, {"role": "assistant", "content": "sat"}, USER]}
        | {"required_prefix_token_ids": [0, 9, 5]},
    ],
)
def test_a_state_reads_a_chat_as_tokenize_does(server: Server, fields: dict[str, Any]) -> None:
    chat = {"messages": [SYSTEM, USER], **fields}
    ids = tokenize(server, **chat)
    state = make(server, **chat)
    assert state["tokens"] == len(ids)
    assert tokens(go_on(server, state["id"], **ASKED)) == tokens(
        complete(server, prompt=ids, **ASKED)
    )
    made = post(server, CHATS, state=state["id"], **chat, **ASKED)
    assert tokens(made) == tokens(post(server, CHATS, **chat, **ASKED))
    assert (made["prompt_token_ids"], cached(made)) == (ids, len(ids) - 1)


def test_a_state_of_a_chat_goes_on_from_another(server: Server) -> None:
    first = make(server, **BEGINNING)
    chat = {"messages": [SYSTEM, USER]}
    second = make(server, state=first["id"], **chat)
    assert second["tokens"] == len(tokenize(server, **chat))
    made = post(server, CHATS, state=second["id"], **chat, **SCORED)
    expected = post(server, CHATS, **chat, **SCORED)
    assert (tokens(made), scores(made)) == (tokens(expected), scores(expected))


def test_each_choice_of_a_chat_has_a_state_to_go_on_from(server: Server) -> None:
    messages = [USER]
    for turn in range(3):
        fields = {"ignore_eos": bool(turn), **SCORED}
        reply = post(server, CHATS, messages=messages, save_state=True, **fields)
        for index, choice in enumerate(reply["choices"]):
            chat = [*messages, answered(reply, index), USER]
            made = post(server, CHATS, messages=chat, state=choice["state"], **SCORED)
            expected = post(server, CHATS, messages=chat, **SCORED)
            assert (tokens(made), scores(made)) == (tokens(expected), scores(expected))
            assert cached(made) == len(reply["prompt_token_ids"] + choice["token_ids"]) - 1
        messages = [*messages, answered(reply), {"role": "user", "content": "on"}]
    assert "state" not in post(server, CHATS, messages=[USER], **ASKED)["choices"][0]
    called = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40, "seed": 5}
    (call,) = post(server, CHATS, messages=[USER], save_state=True, **called)["choices"]
    assert server.get(f"{STATES}/{call['state']}").is_success


def refused(server: Server, path: str, **fields: Any) -> str:
    error = error_of(server.http.post(path, json=fields))
    assert error["param"] == "state", error
    return str(error["message"])


def test_a_chat_that_begins_otherwise_is_refused(server: Server) -> None:
    state = make(server, messages=[SYSTEM, USER])
    ids = tokenize(server, messages=[SYSTEM, USER])
    other = tokenize(server, messages=[SYSTEM, SYSTEM])
    at = next(i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
    own = {"state": state["id"]}
    expected = (
        f"state has {len(ids)} tokens, with which messages must begin, and from the one at "
        f"position {at} on, counted from 0, they differ: "
    )
    for path in (CHATS, STATES):
        assert refused(server, path, messages=[SYSTEM, SYSTEM], **own).startswith(expected)
        short = refused(server, path, messages=[SYSTEM], add_generation_prompt=False, **own)
        assert f"position {len(tokenize(server, **BEGINNING))} on" in short
    message = refused(server, f"{CHATS}/batch", messages=[[SYSTEM, USER], [USER]], **own)
    assert "with which messages[1] must begin" in message
    # The same tokens but the last one.
    ended = make(server, prompt=[*ids, 5])["id"]
    message = refused(server, CHATS, messages=[SYSTEM, USER], state=ended)
    assert f"position {len(ids)} on" in message


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (STATES, {"prompt": "a", "messages": [USER]}, "prompt"),
        (STATES, {"prompt": "a", "tools": [TOOL]}, "tools"),
        (STATES, {"state": UNKNOWN, "add_generation_prompt": True}, "add_generation_prompt"),
        (STATES, {"messages": []}, "messages"),
        (STATES, {"messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
        (STATES, {"messages": [USER], "refeed": True}, "refeed"),
        (CHATS, {"messages": [USER], "state": "state_1"}, "state"),
        (CHATS, {"messages": [USER], "refeed": True}, "refeed"),
        (CHATS, {"messages": [USER], "save_state": True, "stream": True}, "stream"),
        (CHATS, {"messages": [USER], "save_at": [1], "return": "counts"}, "return"),
        (CHATS, {"messages": [USER], "save_state": True, "n": 1_025}, "n"),
        (
            CHATS,
            {"messages": [USER], "state": UNKNOWN, "truncate_prompt_tokens": 3},
            "truncate_prompt_tokens",
        ),
        (f"{CHATS}/batch", {"messages": [[USER]] * 513, "save_at": [1, 2]}, "n"),
        (COMPLETIONS, {**A, "save_at": [0]}, "save_at"),
        (COMPLETIONS, {**A, "save_at": [2, 2]}, "save_at"),
        (COMPLETIONS, {**A, "save_at": [*range(1, 1_026)]}, "save_at"),
        (COMPLETIONS, {**A, "save_at": [*range(1, 1_025)], "save_state": True}, "save_at"),
        (COMPLETIONS, {**A, "save_at": [*range(1, 514)], "n": 2}, "n"),
        (COMPLETIONS, {**A, "save_at": [1], "stream": True}, "stream"),
        (COMPLETIONS, {**A, "save_at": [1], "echo": True, "max_tokens": 0}, "max_tokens"),
        (VLLM, {"token_ids": [5], "refeed": True}, "refeed"),
        (VLLM, {"token_ids": [], "state": UNKNOWN}, "token_ids"),
        (SGLANG, {"text": "a", "refeed": True}, "refeed"),
        (SGLANG, {"text": "a", "input_ids": [5], "state": UNKNOWN}, "input_ids"),
    ],
)  # fmt: skip
def test_wrong_fields_about_states_are_refused_by_name(
    server: Server, path: str, body: dict[str, Any], named: str
) -> None:
    assert error_of(server.http.post(path, json=body))["param"] == named


def completion_of(server: Server, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    fields = {"prompt": "the cat sat", **ASKED, **fields}
    reply = complete(server, **fields)
    return reply["choices"][0]["prompt_token_ids"], reply


def chat_of(server: Server, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    reply = post(server, CHATS, messages=[SYSTEM, USER], **ASKED, **fields)
    return reply["prompt_token_ids"], reply


@pytest.mark.parametrize("ask", [completion_of, chat_of])
def test_a_sample_has_states_at_the_places_asked_for(
    server: Server, ask: Callable[..., tuple[list[int], dict[str, Any]]]
) -> None:
    prompt, plain = ask(server, ignore_eos=True)
    begun = make(server, prompt=prompt[:3])["id"]
    size = len(prompt)
    places = [1, 3, size, size + 2, size + 6, size + 7, 10**9]
    extra: dict[str, Any] = {"save_at": places, "ignore_eos": True}
    from_state: dict[str, Any] = {"state": begun}
    if ask is completion_of:
        from_state["prompt"] = [prompt[3:]]
    for fields in (extra, extra | {"save_state": True}, extra | from_state):
        _, reply = ask(server, **fields)
        assert tokens(reply) == tokens(plain)
        for choice in reply["choices"]:
            ids = [*prompt, *choice["token_ids"]]
            states = choice["states"]
            assert [*states] == [str(place) for place in places]
            assert states.pop(str(size + 7)) is states.pop(str(10**9)) is None
            for place, state in states.items():
                expected = complete(server, prompt=[ids[: int(place)]], **ASKED)
                assert tokens(go_on(server, state, **ASKED)) == tokens(expected)
            assert ("state" in choice) == ("save_state" in fields)
            made = {choice.get("state"), *states.values()} - {None}
            assert len(made) == 5 + ("save_state" in fields)
    assert "states" not in plain["choices"][0]


def test_all_states_of_a_reply_are_kept_or_none(text_model: Path) -> None:
    with Server(text_model, *SERVER_FLAGS, "--max-state-bytes=4000") as server:
        body = {"messages": [USER], "n": 3, "max_tokens": 3, "save_at": [1, 2, 3, 4, 5]}
        assert "max_state_bytes" in error_of(server.http.post(CHATS, json=body), 403)["message"]
        assert server.get(STATES).json()["data"] == []


def test_lines_of_chats_go_on_from_states(server: Server) -> None:
    id = make(server, **BEGINNING)["id"]
    chat = {"messages": [SYSTEM, USER], **SCORED}
    bodies = [
        {**chat, "state": id},
        {**chat, "messages": [USER], "state": id},
        {**chat, "save_state": True},
        {**chat, "save_at": [1]},
    ]
    output, errors = answer_lines(server, CHATS, bodies)
    expected = post(server, CHATS, **chat)
    assert [(tokens(body), scores(body)) for body in output] == [
        (tokens(expected), scores(expected))
    ]
    assert sorted(body["error"]["param"] for body in errors) == ["save_at", "save_state", "state"]


def test_a_chat_feeds_the_tokens_of_other_weights(folders: Path, tmp_path: Path) -> None:
    flags = (*SERVER_FLAGS, f"--data-dir={tmp_path}", f"--weights-dir={folders}")
    with Server(folders / "0", *flags, f"--admin-port={free_port()}") as server:
        id = make(server, **BEGINNING)["id"]
        loaded = server.admin.post("/v1/admin/weights", json={"path": str(folders / "1")})
        assert loaded.status_code == 200, loaded.text
        chat = {"messages": [SYSTEM, USER], **SCORED}
        for path, body in ((CHATS, chat), (VLLM, {"token_ids": [5]}), (SGLANG, {"text": "a"})):
            error = error_of(server.http.post(path, json={**body, "state": id}), 409)
            assert error["param"] == "state"
            assert server.http.post(path, json={**body, "state": id, "refeed": True}).is_success
        made = post(server, CHATS, state=id, refeed=True, **chat)
        expected = post(server, CHATS, **chat)
        assert (tokens(made), scores(made)) == (tokens(expected), scores(expected))
        assert refused(server, CHATS, messages=[USER], state=id, refeed=True)


def test_rollouts_go_on_from_states(server: Server) -> None:
    id = make(server, prompt=[5, 6, 7])["id"]
    params = {"n": 2, "max_tokens": 6, "seed": 5}
    for rest in ([8, 9], []):
        whole = {"token_ids": [5, 6, 7, *rest], "sampling_params": params}
        own = {"state": id, "sampling_params": params} | ({"token_ids": rest} if rest else {})
        made = post(server, VLLM, **own)
        assert tokens(made) == tokens(post(server, VLLM, **whole))
        assert made["usage"]["prompt_tokens"] == 3 + len(rest)
        body: dict[str, Any] = {
            "sampling_params": {"max_new_tokens": 6, "seed": 5},
            "return_logprob": True,
        }
        made = post(server, SGLANG, state=id, **body, **({"input_ids": rest} if rest else {}))
        expected = post(server, SGLANG, input_ids=[5, 6, 7, *rest], **body)
        for name in ("completion_tokens", "prompt_tokens", "output_token_logprobs"):
            assert made["meta_info"][name] == expected["meta_info"][name]
        assert made["meta_info"]["cached_tokens"] >= 2
    asked = {"state": id, "prompt": [8]}
    rendered: list[dict[str, Any]] = server.http.post(f"{COMPLETIONS}/render", json=asked).json()
    assert "one of text and input_ids" in error_of(server.http.post(SGLANG, json={}))["message"]
    assert [body["token_ids"] for body in rendered] == [[5, 6, 7, 8]]


def test_a_tokenizer_adds_its_own_tokens_if_asked(text_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with Server(text_model, *SERVER_FLAGS, f"--chat-template={template}") as server:
        chat = {"messages": [USER]}
        states = [make(server, **chat, add_special_tokens=adds) for adds in (False, True)]
        assert states[0]["tokens"] == states[1]["tokens"] - 1 == make(server, **chat)["tokens"]
        for adds, state in enumerate(states):
            fields = {**chat, **ASKED, "add_special_tokens": bool(adds)}
            made = post(server, CHATS, state=state["id"], **fields)
            assert tokens(made) == tokens(post(server, CHATS, **fields))


def test_without_a_template_a_chat_has_no_state(tmp_path: Path) -> None:
    write_text_model(tmp_path / "bare", TEXT_MODEL)
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    with Server(tmp_path / "bare", *SERVER_FLAGS) as server:
        errors = [
            error_of(server.http.post(path, json={"messages": [USER]}))
            for path in (STATES, "/tokenize")
        ]
        assert errors[0] == errors[1]
        assert errors[0]["message"].startswith("messages need a chat template")
        assert make(server, prompt="the cat")["tokens"]
