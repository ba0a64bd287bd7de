"""Chats through a template's own process: what it is told, and how it is stopped."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from engine.errors import CheckpointError, ConfigError, InvalidRequest
from server.schema.conversation import Conversation, messages_of
from server.text.chat_template import ChatTemplate
from server.text.tokenizer_files import MAX_BYTES, chat_template, special_tokens
from tests.serving import ROOT
from tests.unit.server.text.test_template import CHAT_ML, LLAMA

HANGS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BY_CONTENT = "{% if messages[0].content == 'bad' %}BAD{% endif %}{{ messages[0].content }}"
SHOWS_ALL = "{{ messages | tojson }}"
USER = {"role": "user", "content": "hi"}


class Make(Protocol):
    def __call__(self, source: str, render_s: float = 60, **special: str) -> ChatTemplate: ...


@pytest.fixture
def make() -> Iterator[Make]:
    """make(source, render_s, bos_token="…"): a template; its process ends with the test."""
    with ExitStack() as stack:

        def start(source: str, render_s: float = 60, **special: str) -> ChatTemplate:
            return stack.enter_context(closing(ChatTemplate(source, special, render_s)))

        yield start


def chat(*messages: dict[str, Any], **fields: Any) -> Conversation:
    found = messages_of({"messages": list(messages or [USER])})
    conversation = Conversation(messages=found, **fields)
    conversation.check()
    return conversation


async def test_a_template_is_told_special_tokens_variables_and_roles(make: Make) -> None:
    template = make(
        "{{ bos_token }}{{ mood }}{{ tools }}{{ add_generation_prompt }}", bos_token="B"
    )
    assert await template.render(chat(chat_template_kwargs={"mood": "!"})) == "B!NoneTrue"
    assert await template.render(chat(add_generation_prompt=False)) == "BNoneFalse"
    # A developer is the system to templates that know none.
    developer = {"role": "developer", "content": "be kind"}
    shows_role = "{{ messages[0].role }}"
    assert await make(shows_role).render(chat(developer)) == "system"
    assert await make("{# developer #}" + shows_role).render(chat(developer)) == "developer"


async def test_parts_are_lines_and_arguments_are_objects(make: Make) -> None:
    template = make(SHOWS_ALL)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"x": 1}', "no json")
    ]
    shown = await template.render(
        chat(
            {"role": "user", "content": parts, "name": "Ava"},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        )
    )
    user, assistant, tool = json.loads(shown)
    assert user == {"role": "user", "content": "a\nb", "name": "Ava"}
    assert assistant["content"] == ""
    functions = [call["function"] for call in assistant["tool_calls"]]
    assert [function["arguments"] for function in functions] == [{"x": 1}, "no json"]
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHAT_ML, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhi there "),
        (LLAMA, "<s><system>\n\n<|eot_id|><user>\n\nhi<|eot_id|><assistant>\n\nhi there "),
    ],
    ids=["as it is", "trimmed"],
)
async def test_the_last_message_can_be_left_open(make: Make, source: str, expected: str) -> None:
    template = make(source, bos_token="<s>")
    messages = [USER, {"role": "assistant", "content": "hi there "}]
    shown = await template.render(chat(*messages, continue_final_message=True))
    shown = re.sub(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>", r"<\1>", shown)
    assert shown == expected


async def test_a_last_message_that_is_not_shown_cannot_be_continued(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="nothing to continue") as refused:
        await make("{{ messages[0].content }}").render(
            chat(USER, {"role": "assistant", "content": "x"}, continue_final_message=True)
        )
    assert refused.value.param == "continue_final_message"


TOO_FAR = {
    "time": (HANGS, "takes longer than 0.5 s"),
    "product": ("{{ messages[0].content * 2000000000 }}", "MemoryError"),
    "filter": ("{{ messages[0].content | center(2000000000) }}", "MemoryError"),
    "doubling": (
        "{% set ns = namespace(x=messages[0].content) %}"
        "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "MemoryError",
    ),
    "raised": ("{{ raise_exception('not like this') }}", "not like this"),
}


async def test_a_template_that_goes_too_far_is_stopped_and_the_next_chat_is_read(
    make: Make,
) -> None:
    cases = (
        f"{{% elif messages[0].content == '{name}' %}}{source}"
        for name, (source, _) in TOO_FAR.items()
    )
    template = make(f"{{% if messages[0].content == 'ok' %}}ok{''.join(cases)}{{% endif %}}")
    for name in (*TOO_FAR, "time", "raised"):
        template._render_s = 0.5 if name == "time" else 60
        with pytest.raises(InvalidRequest, match=TOO_FAR[name][1]) as refused:
            await template.render(chat({"role": "user", "content": name}))
        template._render_s = 60
        assert refused.value.param == "messages"
        assert await template.render(chat({"role": "user", "content": "ok"})) == "ok"


async def test_chats_that_come_at_once_are_not_mixed_up_and_one_may_leave(make: Make) -> None:
    template = make(BY_CONTENT)
    texts = [str(i) * 1_000 for i in range(50)]
    chats = [chat({"role": "user", "content": text}) for text in texts]
    assert await asyncio.gather(*map(template.render, chats)) == texts
    waiting = [asyncio.create_task(template.render(chat())) for _ in range(20)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert done[1::2] == ["hi"] * 10
    assert await template.render(chat(USER)) == "hi"


async def test_the_process_knows_no_secrets_is_started_again_and_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SECRET", "1")
    template = make(BY_CONTENT)
    (child,) = renderers()
    assert "SOME_SECRET" not in child.environ()
    child.kill()
    child.wait()
    assert await template.render(chat()) == "hi"
    assert len(renderers()) == 1
    template.close()
    assert renderers() == []


def renderers(of: int | None = None) -> list[psutil.Process]:
    running = [
        child
        for child in psutil.Process(of).children()
        if child.status() != psutil.STATUS_ZOMBIE  # of another test
    ]
    return [child for child in running if "server.text.template_process" in child.cmdline()]


def test_the_process_ends_with_its_parent_even_while_it_hangs() -> None:
    program = (
        "import asyncio, sys\n"
        "from server.text.chat_template import ChatTemplate\n"
        "from server.schema.conversation import Conversation, messages_of\n"
        f"template = ChatTemplate({HANGS!r}, {{}}, 600)\n"
        "found = messages_of({'messages': [{'role': 'user', 'content': ''}]})\n"
        "print('started', flush=True)\n"
        "asyncio.run(template.render(Conversation(messages=found)))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        (child,) = renderers(parent.pid)
        parent.kill()
    psutil.wait_procs([child], timeout=120)
    assert not child.is_running()


def test_what_is_no_template_stops_the_start() -> None:
    with pytest.raises(CheckpointError, match=r"the chat template is not one: line 1: "):
        ChatTemplate("{{ a", {})
    assert renderers() == []


def test_where_a_template_is_looked_for(tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("given")
    folder = tmp_path / "model"
    folder.mkdir()
    assert chat_template(folder) is None
    assert chat_template(folder, str(given)) == "given"
    config = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    for written, found in ((None, None), ("z", "z"), (named, "y"), (named[:1], None)):
        config.write_text(json.dumps({"chat_template": written, "model_max_length": 1e30}))
        assert chat_template(folder) == found
    (folder / "chat_template.jinja").write_text("own")
    assert chat_template(folder) == "own"
    assert chat_template(folder, str(given)) == "given"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jinja"):
        chat_template(tmp_path, str(tmp_path / "none.jinja"))
    config = tmp_path / "tokenizer_config.json"
    for content in ("{", '{"chat_template": 5}', '{"bos_token": {"text": "x"}}'):
        config.write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            special_tokens(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_BYTES + 1))
    with pytest.raises(CheckpointError, match="larger than"):
        chat_template(tmp_path)


def test_special_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    assert special_tokens(tmp_path) == {}
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**tokens, "pad_token": None}))
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
