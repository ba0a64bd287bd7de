"""Chats through a template's own process: what it is told, and how it is stopped."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import Raw

from srm.engine.config import DEMO_MODEL
from srm.errors import CheckpointError, ConfigError, InvalidRequest
from srm.limited_process import Died, LimitedProcess
from srm.server.schema.conversation import Conversation, messages_of
from srm.server.schema.tools import Function, Tool
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.tokenizer_files import MAX_BYTES, chat_template, special_tokens
from tests.kit.serving import ROOT

HANGS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FIRST = "{{ messages[0].content }}"
USER = {"role": "user", "content": "hi"}
Make = Callable[..., ChatTemplate]


@pytest.fixture
def make() -> Iterator[Make]:
    """make(source, bos_token="…"): a template; its process ends with the test."""
    with ExitStack() as stack:
        yield lambda source, **special: stack.enter_context(
            closing(ChatTemplate(source, special, render_s=60))
        )


def chat(*messages: dict[str, Any], **fields: Any) -> Conversation:
    result = messages_of({"messages": Raw(json.dumps(messages or [USER]).encode())})
    conversation = Conversation(messages=result, **fields)
    conversation.check()
    return conversation


async def test_a_template_is_told_special_tokens_variables_and_roles(make: Make) -> None:
    shows_all = "{{ bos_token }}{{ mood }}{{ tools }}{{ add_generation_prompt }}"
    template = make(shows_all, bos_token="B")
    assert await template.render(chat(chat_template_kwargs={"mood": "!"})) == "B!NoneTrue"
    assert await template.render(chat(add_generation_prompt=False)) == "BNoneFalse"
    # A developer is the system to templates that know none.
    for source, role in (("", "system"), ("{{ 'developer' if false }}", "developer")):
        developer = chat({"role": "developer", "content": "be kind"})
        assert await make(source + "{{ messages[0].role }}").render(developer) == role


async def test_a_role_that_the_template_names_reaches_it_and_no_other(make: Make) -> None:
    template = make("{% for m in messages if m.role == 'critic' %}{{ m.content }}{% endfor %}")
    critic = {"role": "critic", "content": "no"}
    assert await template.render(chat(USER, critic)) == "no"
    message = r"^messages\[1\]: role must be .* that the chat template names; got 'judge'$"
    with pytest.raises(InvalidRequest, match=message):
        await template.render(chat(USER, {**critic, "role": "judge"}))


@pytest.mark.parametrize(
    "shown", ["{{ messages[-1].content }}", "{{ messages[-1].content | trim }}"]
)
async def test_the_last_message_can_be_left_open(make: Make, shown: str) -> None:
    template = make(shown + "<|end|>")
    answer = {"role": "assistant", "content": "hi there "}
    assert await template.render(chat(USER, answer, continue_final_message=True)) == "hi there "


async def test_a_last_message_that_is_not_shown_cannot_be_continued(make: Make) -> None:
    answer = {"role": "assistant", "content": "x"}
    with pytest.raises(InvalidRequest, match="nothing to continue") as refused:
        await make(FIRST).render(chat(USER, answer, continue_final_message=True))
    assert refused.value.param == "continue_final_message"


TOO_FAR = {
    "time": (HANGS, "takes longer than 0.5 s"),
    "product": ("{{ messages[0].content * 2000000000 }}", "MemoryError"),
    "filter": ("{{ messages[0].content | center(2000000000) }}", "MemoryError"),
    "doubling": (
        "{% set ns = namespace(x='x') %}"
        "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "MemoryError",
    ),
    "raised": ("{{ raise_exception('not like this') }}", "not like this"),
}


async def test_stops_a_template_that_goes_too_far(make: Make) -> None:
    cases = "".join(
        f"{{% if messages[0].content == '{name}' %}}{source}{{% endif %}}"
        for name, (source, _) in TOO_FAR.items()
    )
    template = make(cases + FIRST)
    for name in (*TOO_FAR, "time", "raised"):
        template.render_s = 0.5 if name == "time" else 60
        with pytest.raises(InvalidRequest, match=TOO_FAR[name][1]) as refused:
            await template.render(chat({"role": "user", "content": name}))
        template.render_s = 60
        assert refused.value.param == "messages"
        assert await template.render(chat()) == "hi"


async def test_mixes_up_no_chats_that_come_at_once(make: Make) -> None:
    template, texts = make(FIRST), [str(i) * 1_000 for i in range(50)]
    chats = (chat({"role": "user", "content": text}) for text in texts)
    waiting = [asyncio.create_task(template.render(item)) for item in chats]
    await asyncio.sleep(0)
    for task in waiting[1::2]:
        task.cancel()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert done[::2] == texts[::2]
    assert await template.render(chat()) == "hi"


def renderers(of: int | None = None) -> list[psutil.Process]:
    running = [
        child
        for child in psutil.Process(of).children()
        if child.status() != psutil.STATUS_ZOMBIE  # of another test
    ]
    return [child for child in running if "srm.server.text.template_process" in child.cmdline()]


async def test_restarts_its_process(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "1")
    template = make(FIRST)
    (child,) = renderers()
    assert "SOME_SECRET" not in child.environ()
    child.kill()
    child.wait()
    assert await template.render(chat()) == "hi"
    assert len(renderers()) == 1
    template.close()
    with pytest.raises(CheckpointError, match=r"the chat template is not one: line 1: "):
        make("{{ a")
    assert renderers() == []


def test_the_process_ends_with_its_parent_even_while_it_hangs() -> None:
    program = f"""
import asyncio
from srm.server.schema.tools import Function, Tool
from srm.server.text.chat_template import ChatTemplate
from srm.server.schema.conversation import Conversation, messages_of
template = ChatTemplate({HANGS!r}, {{}}, 600)
found = messages_of({{"messages": {json.dumps([USER]).encode()!r}}})
print("started", flush=True)
asyncio.run(template.render(Conversation(messages=found)))
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        (child,) = renderers(parent.pid)
        parent.kill()
    psutil.wait_procs([child], timeout=120)
    assert not child.is_running()


# What lies in the model's folder


def test_where_a_template_is_looked_for(tmp_path: Path) -> None:
    given, folder = tmp_path / "given.jinja", tmp_path / "model"
    given.write_text("given")
    folder.mkdir()
    assert chat_template(folder) is None
    config = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    for written, result in ((None, None), ("z", "z"), (named, "y"), (named[:1], None)):
        config.write_text(json.dumps({"chat_template": written, "model_max_length": 1e30}))
        assert chat_template(folder) == result
    (folder / "chat_template.jinja").write_text("own")
    assert [chat_template(folder), chat_template(folder, str(given))] == ["own", "given"]
    (folder / "chat_template.jinja").write_text("x" * (MAX_BYTES + 1))
    with pytest.raises(CheckpointError, match="larger than"):
        chat_template(folder)
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jinja"):
        chat_template(folder, str(tmp_path / "none.jinja"))


def test_special_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    assert special_tokens(tmp_path) == {}
    config = tmp_path / "tokenizer_config.json"
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    config.write_text(json.dumps({**tokens, "pad_token": None}))
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
    for content in ("{", '{"chat_template": 5}', '{"bos_token": {"text": "x"}}'):
        config.write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            special_tokens(tmp_path)


KNOWS = {
    "calls": "{% for call in m.tool_calls or [] %}<{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}>{% endfor %}",
    "results": "{% if m.role == 'tool' %}({{ m.content }}){% endif %}",
}
CALL = {"id": "1", "function": {"name": "add", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "2"}
WRITTEN = 'hi|{"name":"add","arguments":{"x": 1}}|Result of add: 2|'
"""What becomes of them where a template shows contents alone."""


async def test_calls_are_told_as_text_unless_the_template_writes_them(make: Make) -> None:
    """A template of any messages writes of a call its content, which is empty."""
    every = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    both = "{% for m in messages %}" + "".join(KNOWS.values()) + "{% endfor %}"
    objects = every.replace("|", "|{{ raise_exception('no tool') if m.role == 'tool' }}")
    only_calls = "{% for m in messages %}" + KNOWS["calls"] + "{{ m.role }}|{% endfor %}"
    for source, expected in {
        both: '<add {"x": 1}>(2)',
        every: WRITTEN,
        objects: WRITTEN,
        only_calls: "user|assistant|user|",
    }.items():
        assert await make(source).render(chat(USER, CALLING, RESULT)) == expected
    assert await make(every).render(chat(USER)) == "hi|"


async def test_arguments_of_any_depth_are_shown_or_refused(make: Make) -> None:
    template = make("{% for m in messages %}" + "".join(KNOWS.values()) + "{% endfor %}")
    refused = 0
    for depth in (1, *range(970, 1_010, 3), 100_000):
        function = {"name": "a", "arguments": f'{{"x":{"[" * depth}{"]" * depth}}}'}
        calling = {**CALLING, "tool_calls": [{**CALL, "function": function}]}
        try:
            assert "[" * depth in str(await template.render(chat(USER, calling, RESULT)))
        except InvalidRequest as error:
            assert "nest" in error.message or "recursion" in error.message, error.message
            refused += 1
    assert refused


async def test_tools_are_shown_where_the_template_writes_them(make: Make) -> None:
    tool = Tool("function", Function("add", parameters=Raw(b'{"type":"object"}')))
    shows = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}"
    assert await make(shows).render(chat(tools=[tool])) == (
        '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}hi'
    )
    assert await make(shows).render(chat()) == "hi"
    refuses = "{{ raise_exception('no tools here') if tools }}" + FIRST
    assert await make(refuses).render(chat(tools=[tool])) == "hi"


async def test_a_model_whose_template_shows_no_tools_is_told_of_them(make: Make) -> None:
    tool = Tool("function", Function("add", "adds", Raw(b'{"type":"object"}')))
    shown = (
        'To call a function, answer with {"name":"NAME","arguments":ARGUMENTS} alone. Functions:\n'
        '{"name":"add","description":"adds","parameters":{"type":"object"}}'
    )
    each = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    telling = chat(tools=[tool], tells_tools=True)
    assert await make(each).render(telling) == f"system: {shown}|user: hi|"
    system = {"role": "system", "content": "Be brief."}
    asked = chat(system, USER, tools=[tool], tells_tools=True)
    assert await make(each).render(asked) == f"system: Be brief.\n{shown}|user: hi|"
    assert await make(each).render(chat(tools=[tool])) == "user: hi|"
    shows = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + each
    assert await make(shows).render(telling) == "adduser: hi|"


async def test_the_demo_models_second_turn_has_what_a_tool_returned(make: Make) -> None:
    template = make((DEMO_MODEL / "chat_template.jinja").read_text())
    assert await template.render(chat(USER, CALLING, RESULT, RESULT)) == (
        '<|begin_of_text|>Question: hi\nAnswer: {"name":"add","arguments":{"x": 1}}'
        "<|end_of_text|><|begin_of_text|>Question: Result of add: 2\nResult of add: 2\nAnswer:"
    )


async def test_a_slow_trial_says_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was slow once would write calls otherwise than its siblings, for ever."""
    template = make("{% for m in messages %}" + "".join(KNOWS.values()) + "{% endfor %}")
    ask = LimitedProcess.ask

    def be_late(*_: object) -> str:
        raise Died("it takes longer than 5 s", 9)

    monkeypatch.setattr(LimitedProcess, "ask", be_late)
    with pytest.raises(InvalidRequest, match="takes longer"):
        await template.render(chat(USER, CALLING, RESULT))
    monkeypatch.setattr(LimitedProcess, "ask", ask)
    assert await template.render(chat(USER, CALLING, RESULT)) == '<add {"x": 1}>(2)'
