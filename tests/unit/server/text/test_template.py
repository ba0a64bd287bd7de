"""Chat templates as others write them, and those that try to do more than write."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from srm.engine.config import DEMO_MODEL
from srm.server.text import template_process as template
from srm.server.text.template_process import TemplateFailed, compile_template, render
from srm.training.problems.drawn import chats, problems

LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


def chat(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    """Messages that take turns, behind a system message where `first` says so."""
    roles = ["system"] * (first == "system") + ["user", "assistant"] * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def rendered(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    variables = {"add_generation_prompt": True, "messages": messages or chat("hi"), **variables}
    return render(compile_template(source), variables)


def test_a_llama_template() -> None:
    text = rendered(LLAMA, chat("be kind", " hi ", "ho", first="system"), bos_token="<s>")
    text = text.replace("<|start_header_id|>", "[").replace("<|end_header_id|>\n\n", "]")
    assert text == (
        "<s>[system]be kind<|eot_id|>[user]hi<|eot_id|>[assistant]ho<|eot_id|>[assistant]"
    )
    with pytest.raises(TemplateFailed, match=r"^Conversation roles must alternate user/assistant"):
        rendered(LLAMA, [*chat("hi"), *chat("hi")], bos_token="<s>")


WRITTEN = {
    "{% for message in messages %}\n  {{ message.role }}\n  {%- endfor %}\n.": "  user.",
    "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
    "{{ {'b': '<é>', 'a': [1, none]} | tojson }}": '{"b": "<é>", "a": [1, null]}',
    "{{ [1] | tojson(indent=1) }}": "[\n 1\n]",
    "{{ strftime_now('%Y') | int > 2000 }}": "True",
    "{{ tools is defined and tools is none }}": "True",
    "{% set ns = namespace(n=0) %}{% set ns.n = 1 %}{{ ns.n }}": "1",
}


def test_what_templates_expect_to_find_is_there() -> None:
    assert {source: rendered(source, tools=None) for source in WRITTEN} == WRITTEN


def test_the_demo_template_is_the_form_it_was_trained_on() -> None:
    source = (DEMO_MODEL / "chat_template.jinja").read_text()
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    problem = next(problems("train", 0))
    ask, whole = chat(problem.question), chat(problem.question, problem.solution)
    shown = begin + problem.prompt + problem.solution + end
    assert rendered(source, ask) == begin + problem.prompt
    assert rendered(source, whole, add_generation_prompt=False) == shown
    assert rendered(source, [*whole, *ask]) == shown + begin + problem.prompt
    system = {"role": "system", "content": " Be kind. "}
    asked = begin + problem.prompt_with("Be kind.")
    assert rendered(source, [system, *ask]) == asked
    answered = asked + problem.solution + end
    assert rendered(source, [system, *whole, *ask]) == answered + asked
    blank, kind, brief = ({"role": "system", "content": name} for name in (" ", "Be", "kind."))
    assert rendered(source, [blank, *ask]) == begin + problem.prompt
    assert rendered(source, [kind, blank, brief, *ask]) == asked
    assert rendered(source, [brief, *whole, kind, brief, *ask]).endswith(end + asked)


def test_the_demo_template_writes_tools_as_it_was_trained() -> None:
    source = (DEMO_MODEL / "chat_template.jinja").read_text()
    drawn = (turns for turns in chats(0) if "Tools: calculator(expression)" in turns[0][0])
    turns = next(turns for turns in drawn if len(turns) > 2 and turns[-1][1].startswith(" #"))
    parameters = {"type": "object", "properties": {"expression": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": parameters}}]
    messages: list[dict[str, Any]] = []
    system = ""
    for prompt, reply in turns:
        named = dict(re.findall(r"^(\w+): (.*)$", prompt, re.MULTILINE))
        if named.get("System", system) != system:
            messages.append({"role": "system", "content": (system := named["System"])})
        role, asked = ("user", "Question") if "Question" in named else ("tool", "Result")
        messages.append({"role": role, "content": named[asked]})
        said: dict[str, Any] = {"role": "assistant", "content": reply}
        if reply.startswith("{"):
            said = {**said, "content": None, "tool_calls": [{"function": json.loads(reply)}]}
        messages.append(said)
    shown = "".join(f"<|begin_of_text|>{prompt}{reply}<|end_of_text|>" for prompt, reply in turns)
    assert rendered(source, messages, tools=tools, add_generation_prompt=False) == shown


def test_the_demo_template_joins_questions_in_a_row() -> None:
    source = (DEMO_MODEL / "chat_template.jinja").read_text()
    system: dict[str, Any] = {"role": "system", "content": "Be kind."}
    ask, halves = chat("Ava has 6. How many?"), [*chat("Ava has 6."), *chat(" How many?\n")]
    for before in ([], [system], chat("hi", "ho"), [system, *chat("hi", "ho"), system]):
        assert rendered(source, [*before, *halves]) == rendered(source, [*before, *ask])
    answer = chat("hi", "ho")[1:]
    whole = [[*asked, *answer, *chat("bye")] for asked in (halves, ask)]
    assert rendered(source, whole[0]) == rendered(source, whole[1])


NO_CHATS: dict[str, list[dict[str, Any]]] = {
    "a message of system between": [*chat("hi"), {"role": "system", "content": "x"}],
    "no messages of clown": [{"role": "clown", "content": "x"}],
    "a result has no call before it": [*chat("hi", "ho"), {"role": "tool", "content": "5"}],
    "an answer has no question before it": [*chat("hi", "ho"), *chat("hi", "ho")[1:]],
    "the last message is no question": chat("hi", "ho"),
    "the last message is no": [{"role": "system", "content": "x"}],
    "a question has no text": chat(" "),
}


@pytest.mark.parametrize("why", NO_CHATS)
def test_the_demo_template_refuses_what_it_was_not_trained_on(why: str) -> None:
    source = (DEMO_MODEL / "chat_template.jinja").read_text()
    with pytest.raises(TemplateFailed, match=why):
        rendered(source, NO_CHATS[why])


def test_what_is_no_template_is_told_with_its_line() -> None:
    for source, why in (
        ("a\n{% for %}", "line 2: "),
        ("{{ a", "line 1: "),
        ("{% nothing %}", "line 1: "),
        ("{{ 'a' | nothing }}", "line 1: "),
        ("{{" + "(" * 5_000 + "1" + ")" * 5_000 + "}}", "RecursionError"),
    ):
        with pytest.raises(TemplateFailed, match=f"^{why}"):
            compile_template(source)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__base__'] }}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{m.__class__.__mro__}'.format_map({'m': ''}) }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ self._TemplateReference__context.environment.globals }}",
    "{{ messages.append(messages[0]) }}",
    "{{ messages[0].update(content='other') }}",
    "{{ (messages[0].items).__self__.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.getcwd() }}",
    "{% extends '/etc/passwd' %}",
    "{{ range(10 ** 8) | list }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 1 / 0 }}",
    "{{ messages[0].content + 1 }}",
    "{{ nothing.at.all }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_nothing_but_the_chat_is_in_reach(source: str) -> None:
    messages = chat("hi")
    with pytest.raises(TemplateFailed):
        rendered(source, messages)
    assert messages == chat("hi")


def test_text_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_TEXT", 1_000)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}ab{% endfor %}{% endfor %}"
    with pytest.raises(TemplateFailed, match="more than 1000 characters"):
        rendered(endless)
