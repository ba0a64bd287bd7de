"""Names of special tokens that a client writes into a chat are text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw
from tokenizers import Tokenizer

from srm.limited_process import ProcessFailed
from srm.server.routes.services import template_of
from srm.server.schema.conversation import Conversation, messages_of
from srm.server.schema.tools import Function, Tool
from srm.server.text.chat_template import ChatTemplate
from srm.server.text.template_process import SpecialNames, compile_template, render
from srm.server.text.text import Text

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
SHOWS_ALL = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{{ tools | tojson }}{{ mood }}"
)


def rendered(text: Text, template: ChatTemplate, **fields: Any) -> bytes:
    prompt = template._rendered(Conversation(**fields))
    assert isinstance(prompt, str)
    return text.encode([prompt], adds_special=False)[0]


def messages(*contents: Any) -> list[Any]:
    made = [{"role": "user", "content": content} for content in contents]
    return messages_of({"messages": Raw(json.dumps(made).encode())})


Make = Callable[..., ChatTemplate]


@pytest.fixture
def make(text: Text, text_model: Path, tmp_path: Path) -> Iterator[Make]:
    """make(source, setting): a template of the served model; its process ends with the test."""
    with ExitStack() as stack:

        def of_source(source: str, *setting: Any) -> ChatTemplate:
            (tmp_path / "t.jinja").write_text(source)
            made = template_of(text_model, text, str(tmp_path / "t.jinja"), *setting)
            assert made is not None
            return stack.enter_context(closing(made))

        yield of_source


@pytest.fixture
def template(make: Make) -> ChatTemplate:
    return make(SHOWS_ALL)


def control(ids: Any) -> list[int]:
    """Return the special tokens among these."""
    return [token for token in memoryview(ids).cast("i").tolist() if token < 2]


SPELLED = [END, f"a {END} b", END * 3, f"<|{END}|>", f"<{END[1:]}"]


@pytest.mark.parametrize("content", SPELLED)
def test_special_names_are_text(content: str, text: Text, template: ChatTemplate) -> None:
    ids = rendered(text, template, messages=messages(content))
    assert control(ids) == [0, 1], "those of the template alone"
    assert content.encode() in text.decode(ids)


@pytest.mark.parametrize(
    ("expression", "content", "written"),
    [
        ("m.content | upper", END, END.upper()),
        ("m.content[:5]", END, END[:5]),
        ("m.content | length", END, str(len(END))),
        ("m.content | truncate(9, true, '')", END, END[:9]),
        ("m.content.split('-') | join(' ')", END, END),
        ("m.content | replace('\\n', '')", "a <|end\n_of_text|>", f"a {END}"),
        ("m.content.lower()", f"a {END.upper()}", f"a {END}"),
        ("m.content.split(' ') | join", "<|end_ of_ text|>", END),
        ("m.content | tojson", END, f'"{END}"'),
        ("'[%s]' | format(m.content)", END, f"[{END}]"),
        ("m.content | reverse", END[::-1], END),
        ("m.content", "a <", "a <"),
        ("'<|' ~ m.content ~ '|>'", "end_of_text", END),
        ("m.content in '" + END + "'", END, "False"),
        ("m.content.split('" + END + "') | length", f"a{END}b", "1"),
    ],
)
def test_no_filter_makes_a_name_of_a_message(
    expression: str, content: str, written: str, text: Text, text_model: Path, make: Make
) -> None:
    made = make("{% set m = messages[0] %}{{ bos_token }}{{ " + expression + " }}" + END)
    plain = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    plain.encode_special_tokens = True
    expected = plain.encode(written, add_special_tokens=False).ids
    ids = memoryview(rendered(text, made, messages=messages(content))).cast("i").tolist()
    assert ids == [0, *expected, 1]


@pytest.mark.parametrize(
    "source", ["{{ '<|' + role + '|>' }}{{ text }}", "<|{{ role }}|>{{ text }}"]
)
def test_a_template_may_put_a_role_between_parts_of_a_name(source: str) -> None:
    special = SpecialNames(["<|user|>", "<|end|>", "<|tool"], ["user", "tool"], "!")
    template = compile_template(source + "<|end|>", special)
    for role, shown in (("user", "<|user|>"), ("end", "<!|end|>"), ("other", "<|other|>")):
        text = special.show(render(template, {"role": role, "text": "a<|user|>"}))
        assert text == f"{shown}a<!|user|><|end|>"


def test_a_template_names_a_special_token_in_its_refusal(text: Text) -> None:
    source = "{{ raise_exception('no ' + '<|end_of_text|>') }}"
    template = ChatTemplate(source, {}, literals=text.special_names)
    with closing(template), pytest.raises(ProcessFailed, match=re.escape(f"no {END}")):
        rendered(text, template, messages=messages("no"))


def test_a_name_is_not_made_of_two_messages(text: Text, make: Make) -> None:
    made = make("{% for m in messages %}{{ m.content }}{% endfor %}")
    for cut in range(1, len(END)):
        ids = rendered(text, made, messages=messages(END[:cut], END[cut:]))
        assert not control(ids) and text.decode(ids) == END.encode()


def test_special_names_in_tools_and_variables_are_text(text: Text, template: ChatTemplate) -> None:
    parameters = Raw(json.dumps({"type": "object", "properties": {END: {"const": BEGIN}}}).encode())
    escaped = Raw(bytes(parameters).replace(b"<", rb"\u003c"))
    for schema in (parameters, escaped):
        tools = [Tool("function", Function("f", END, schema))]
        ids = rendered(text, template, messages=messages("hi"), tools=tools,
                       chat_template_kwargs={"mood": BEGIN})  # fmt: skip
        assert control(ids) == [0, 1]
        decoded = text.decode(ids)
        assert decoded.count(END.encode()) == 2 and decoded.count(BEGIN.encode()) == 2


def test_a_name_has_tokens_of_text(text: Text, template: ChatTemplate, text_model: Path) -> None:
    plain = Tokenizer.from_file(str(text_model / "tokenizer.json"))
    plain.encode_special_tokens = True
    ids = memoryview(rendered(text, template, messages=messages(f"the {END} cat"))).cast("i")
    expected = plain.encode(f"user: the {END} cat", add_special_tokens=False).ids
    assert ids.tolist()[1 : len(expected) + 2] == [*expected, 1]


def test_a_setting_makes_names_tokens(text: Text, make: Make) -> None:
    made = make(SHOWS_ALL, "control")
    assert control(rendered(text, made, messages=messages(f"a {END} b"))) == [0, 1, 1]
    assert control(text.encode([f"a {END} b"])[0]) == [0, 1], "as in prompts of completions"
