"""Bodies that are refused before an engine is asked: where, for what, by which field and words.

A row holds for every door that reads such a body: HTTP, and the lines of a batch.
"""

from __future__ import annotations

from typing import Any

from srm.engine.messages import NAMED
from srm.server.schema.sampling_fields import MAX_CUT_LENGTH, MAX_SCORES
from srm.server.schema.structured_outputs import SUCCESSORS
from tests.kit.bodies.refusals import USER
from tests.kit.serving import CHATS, COMPLETIONS

Fields = dict[str, Any]
Row = tuple[str, Fields, str, str]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SEVERAL, TOKENIZE, DETOKENIZE = f"{CHATS}/batch", "/tokenize", "/v1/detokenize"
TOKENS, GENERATE = "/inference/v1/generate", "/generate"
RENDER, RENDER_CHAT = f"{COMPLETIONS}/render", f"{CHATS}/render"
NEEDS: dict[str, Fields] = {
    **{path: {"prompt": "x"} for path in (COMPLETIONS, RENDER)},
    **{path: {"messages": [USER]} for path in (CHATS, RENDER_CHAT)},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [USER], "max_tokens": 12},
    TOKENS: {"token_ids": [5]},
}
"""Fields of each route's bodies, unless a row gives others."""


def body_of(path: str, fields: Fields) -> Fields:
    """The body of a row."""
    return {**NEEDS.get(path, {}), **fields}


def turn(content: Any, role: str = "user") -> Fields:
    return {"role": role, "content": content}


STREAM, COUNTS, UNTIL = {"stream": True}, {"return": "counts"}, {"match": "x"}
RULE, USAGE = {"verify": {"match": "a"}}, {"include_usage": True}
TWO_PROMPTS = {"prompt": ["a", "b"]}
SCORES = f"log-probabilities, and may have {MAX_SCORES}"
OF_COMPLETIONS: list[tuple[Fields, str, str]] = [
    ({"n": 3, "best_of": 2}, "best_of", "must be an integer from n"),
    ({"best_of": 2, **STREAM}, "best_of", "must be an integer from n"),
    ({**TWO_PROMPTS, "best_of": 500_001}, "best_of", "500001 of 2 prompts"),
    ({**TWO_PROMPTS, "n": 500_001}, "n", "n = 500001 of 2 prompts"),
    ({"max_completion_tokens": 7, "max_tokens": 16}, "max_completion_tokens", "if both"),
    ({"stream_interval": 5}, "stream_interval", "only with stream"),
    ({"stream_options": USAGE}, "stream_options", "only with stream"),
    ({"stream_whole": True}, "stream_whole", "only with stream"),
    ({**STREAM, "stream_whole": True, "stream_interval": 2}, "stream_interval", "stream_whole"),
    ({**COUNTS, **STREAM}, "return", "known at the end only"),
    ({**COUNTS, "logprobs": 0}, "logprobs", "has no choices"),
    ({**COUNTS, "prompt_logprobs": 0}, "prompt_logprobs", "has no choices"),
    ({**COUNTS, "return_token_ids": True}, "return_token_ids", "has no choices"),
    ({**COUNTS, "return_weight_versions": True}, "return_weight_versions", "has no choices"),
    ({**COUNTS, "return_packed": True}, "return_packed", "has no choices"),
    ({**RULE, **COUNTS, "return_packed": True}, "return_packed", "has no choices"),
    ({"return": "all"}, "return", "return must be"),
    ({"return": "unique", "echo": True}, "echo", 'return = "unique"'),
    ({"return": "unique", "best_of": 2}, "best_of", 'return = "unique"'),
    ({"until": UNTIL, "best_of": 2}, "best_of", "does not go with until"),
    ({"until": UNTIL, "echo": True}, "echo", "does not go with until"),
    ({"until": UNTIL, "max_tokens": 0, "prompt_logprobs": 1}, "max_tokens", "go with until"),
    ({"until": UNTIL, **STREAM}, "until", "stream_whole"),
    ({"until": {"match": "x", "count": 2}}, "until", "cannot be reached with n = 1"),
    ({"until": {"match": "("}}, "until", "missing )"),
    ({"until": {"match": ""}}, "until", "match, a string of 1 to 1000 characters"),
    ({"until": {"match": "a" * 1_001}}, "until", "match, a string of 1 to 1000 characters"),
    ({"until": {"match": "a", "most": 1}}, "until", "most"),
    ({"until": {"match": "a", "budget": 9}}, "until", "budget = 9 is divided until count match"),
    ({"until": {"match": "a", "count": 1, "budget": 0}}, "until", "budget, an integer from 1"),
    ({"until": {"match": "a", "count": 0}}, "until", "count, an integer from 1 to n"),
    ({"until": {"count": 1}}, "until", "match, score or both"),
    ({"until": {"score": 1}}, "until", "verify, which is missing"),
    ({"until": {"score": 1}, **RULE, "count_by": "group", **COUNTS}, "count_by", "until.match"),
    ({"count_by": "group"}, "count_by", "until is missing"),
    ({"count_by": "group", **COUNTS}, "count_by", "until is missing"),
    ({"count_by": "group", "until": UNTIL}, "count_by", "unique or counts"),
    ({**COUNTS, "count_by": "score"}, "count_by", "verify, which is missing"),
    ({**RULE, "count_by": "score"}, "count_by", "unique or counts"),
    ({**RULE, **STREAM}, "verify", "stream_whole"),
    ({**RULE, "best_of": 2}, "best_of", "does not go with verify"),
    ({**RULE, "echo": True}, "echo", "does not go with verify"),
    ({**RULE, "max_tokens": 0, "prompt_logprobs": 0}, "max_tokens", "go with verify"),
    ({"verify": {"not": {"match": "("}}}, "verify", "verify.not.match = '('"),
    ({"verify": {"accepts": []}}, "verify", "verify.rejects must have 1 … 64"),
    ({"verify": [{"match": "a"}] * 2}, "verify", "2 rules and the request 1 prompts"),
    ({"tools": "x"}, "tools", "leave it out or send []"),
    ({"logprobs": -2}, "logprobs", "max_logprobs; -1: the whole vocabulary; got -2"),
    ({"token_ids_logprob": [1]}, "token_ids_logprob", "logprob_token_ids is its name here"),
    ({"max_new_tokens": 1}, "max_new_tokens", "max_tokens"),
    # What the model cannot do.
    ({"prompt": "", "add_special_tokens": False}, "prompt", "at least one token"),
    ({"prompt": "x" * (MAX_CUT_LENGTH + 1), "truncate_prompt_tokens": 5}, "prompt",
     f"it may have {MAX_CUT_LENGTH}"),
    ({"prompt": [320]}, "prompt", "token id 320; ids go from 0 to 319"),
    ({"n": 2_000, "max_tokens": 120, "logprobs": 20}, "logprobs", SCORES),
    ({"n": 3_000, "prompt": [5] * 108, "echo": True, "logprobs": 20}, "logprobs", SCORES),
    ({"n": 3_000, "prompt": [5] * 108, "prompt_logprobs": 20}, "prompt_logprobs", SCORES),
    ({"prompt_logprobs_start": 1}, "prompt_logprobs_start", "only with"),
    ({"prompt": [5, 6, 7], "prompt_logprobs": 0, "prompt_logprobs_start": 4},
     "prompt_logprobs_start", "lies after the last of the prompt's 3 tokens"),
    ({"echo": True, "logprobs": 0, "prompt_logprobs": 0, "prompt_logprobs_start": -1},
     "echo", "prompt_logprobs_start"),
    *(({ids: [5]}, ids, f"only with {name}") for name, ids in NAMED.items()),
    *(({"echo": True, name: 0, ids: [5]}, "echo", ids) for name, ids in NAMED.items()),
    ({"logit_bias": {"320": 1}}, "logit_bias", "logit_bias has 320"),
    ({"allowed_token_ids": [5, 320]}, "allowed_token_ids", "has 320; ids go from 0 to 319"),
    ({"bad_words": [" "]}, "bad_words", "bad_words"),
    ({"min_tokens": 17}, "min_tokens", "min_tokens"),
]  # fmt: skip
EMPTY_ANSWER = {"messages": [USER, {"role": "assistant"}]}
BOTH_WAYS = {"add_generation_prompt": True, "continue_final_message": True}
OF_CHATS: list[tuple[Fields, str, str]] = [
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "two names"),
    ({"echo": True, **COUNTS}, "echo", "does not go with"),
    ({"top_logprobs": 1}, "top_logprobs", "logprobs = true"),
    ({"top_logprobs": 1, "logprobs": False}, "top_logprobs", "logprobs = true"),
    (BOTH_WAYS, "add_generation_prompt", "continue_final_message"),
    ({**EMPTY_ANSWER, "continue_final_message": True}, "continue_final_message", "no content"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}},
     "chat_template_kwargs", "'add_generation_prompt'"),
    ({"stream_options": USAGE}, "stream_options", "only with stream"),
    ({**COUNTS, "prompt_logprobs": 1}, "prompt_logprobs", "has no choices"),
    ({**COUNTS, "logprobs": True}, "logprobs", "has no choices"),
    ({"prompt_logprobs_start": -1}, "prompt_logprobs_start", "only with"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "only with logprobs"),
    ({"stop_token_ids": [1_000]}, "stop_token_ids", "has 1000; ids go from 0 to 319"),
    ({"n": 2_900, "logprobs": True, "top_logprobs": 20, "max_tokens": 100}, "logprobs", SCORES),
    ({"verify": {"any": [{"macth": "a"}]}}, "verify", "verify.any[0].macth is not a field"),
    ({"messages": [turn([{"type": "image_url", "image_url": {"url": "x"}}])]}, "messages",
     'only text is read; got a part of type "image_url"'),
    ({"required_prefix_token_ids": [1]}, "required_prefix_token_ids", "has none"),
    ({"required_prefix_token_ids": []}, "required_prefix_token_ids", "not empty; got []"),
    ({"required_prefix_token_ids": "AAAA"}, "required_prefix_token_ids", 'got "AAAA"'),
]  # fmt: skip


def tool(name: str = "add", **function: Any) -> Fields:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> Fields:
    return {"type": "function", "function": {"name": name}}


ADD = tool(parameters={"type": "object", "properties": {"x": {"type": "integer"}}})
WAYS = '"none", "auto", "required", or {"type": "function", "function": {"name": …}}'
NO_NAME = "function.name must be a string matching"
NO_ROOM: tuple[Fields, ...] = (
    {"continue_final_message": True, "messages": [USER, {"role": "assistant", "content": "I"}]},
    {"ignore_eos": True},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
)
"""Fields that no forced call may have beside it; the one that the error names comes first."""
OF_TOOLS: list[tuple[Fields, str, str]] = [
    ({"tools": "add"}, "tools", "tools must be a list of at most 128 functions"),
    ({"tools": [ADD] * 129}, "tools", "tools must be a list of at most 128 functions"),
    ({"tools": [tool(description="x" * 2**20)]}, "tools", "in at most 1048576 bytes"),
    ({"tools": [ADD, 5]}, "tools", "tools[1] must be an object"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools", "tools[0] must be an object"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "type: Invalid enum value 'custom'"),
    ({"tools": [{"type": "function"}]}, "tools", "function is missing"),
    *(({"tools": [tool(name)]}, "tools", NO_NAME) for name in ("", "a b", "x" * 65, "f\n")),
    ({"tools": [tool(more=1)]}, "tools", "function.more is not a field"),
    ({"tools": [tool(strict="yes")]}, "tools", "function.strict must be"),
    ({"tools": [tool(parameters=[1])]}, "tools", "tools[0] must be an object"),
    ({"tools": [ADD, tool("g", parameters={"type": "array"})]}, "tools",
     'tools[1].function.parameters.type must be "object", since arguments have names; got "arr'),
    ({"tools": [ADD, tool("g"), ADD]}, "tools", 'tools[2].function.name = "add" is the name of'),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", f"tool_choice must be {WAYS}"),
    ({"tool_choice": "any"}, "tool_choice", f"tool_choice must be {WAYS}"),
    ({"tools": [ADD], "tool_choice": named("sub")}, "tool_choice", '"sub" is not in tools: add'),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice", WAYS),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", WAYS),
    ({"tool_choice": "required"}, "tool_choice", "needs tools, which are missing"),
    ({"tool_choice": named("add"), "tools": []}, "tool_choice", "needs tools, which are missing"),
    ({"tools": [ADD], "parallel_tool_calls": "yes"}, "parallel_tool_calls", "true or false"),
    ({"tools": [ADD], "tool_choice": "required", "chat_template_kwargs": {"tools": []}},
     "chat_template_kwargs", "'tools'"),
    *(({"tools": [ADD], "tool_choice": "required", **fields}, next(iter(fields)),
       f'{next(iter(fields))} does not go with tool_choice = "required", by which tools are called')
      for fields in NO_ROOM),
    *(({"tools": [ADD], **fields}, next(iter(fields)), 'tool_choice = "auto"')
      for fields in NO_ROOM),
    ({"tools": [ADD, tool("f", parameters={"properties": {"x": {"minimun": 3}}}, strict=True)],
      "tool_choice": "required"}, "tools",
     "tools: parameters of f: /properties/x/minimun: this keyword is not supported"),
    ({"tools": [ADD, tool("f", parameters={"properties": {"x": {"enum": [1], "type": "string"}},
                                           "required": ["x"]})], "tool_choice": "required"},
     "tools", "parameters of f: no value can meet the schema"),
]  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}
REGEX = {"regex": "a"}
LARGE = {"title": "a" * 2**20}
LARGE_SCHEMA = {"type": "json_schema", "json_schema": {"schema": LARGE}}
OF_OUTPUTS: list[tuple[Fields, str, str]] = [
    ({"response_format": {"type": "grammar"}}, "response_format", "must be an object with type:"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be there"),
    ({"response_format": {**SCHEMA, "type": "text"}}, "response_format", "type is text"),
    ({"response_format": {**SCHEMA, "extra": 1}}, "response_format", "extra is not a field"),
    ({"response_format": LARGE_SCHEMA}, "response_format", "1048576 bytes"),
    *(({"structured_outputs": outputs}, "structured_outputs", words) for outputs, words in (
        ({}, "exactly one of json"),
        ({**REGEX, "choice": ["a"]}, "got regex, choice"),
        ({"json_object": False}, "json_object: true"),
        ({"structural_tag": "a"}, "must be an object"),
        ({"json": {}, "backend": 1}, "backend is not"),
        ({**REGEX, "whitespace_pattern": ""}, "whitespace_pattern is about JSON, not about regex"),
        ({"json": {}, "whitespace_pattern": "\\s*"}, "'' or one space"),
        ({"json": {}, "disable_any_whitespace": False}, "whitespace is never free"),
        ({"json": LARGE}, "1048576 bytes"),
    )),
    ({"structured_outputs": REGEX, "response_format": SCHEMA}, "structured_outputs", "both say"),
    ({"structured_outputs": REGEX, "ignore_eos": True}, "ignore_eos", "does not go with"),
    *(({name: {}}, name, f"its name is {new}") for name, new in SUCCESSORS.items()),
]  # fmt: skip
"""At both routes."""
ITEM = {"type": "reasoning", "summary": []}
OF_RESPONSES: list[tuple[Fields, str, str]] = [
    ({"previous_response_id": 1}, "previous_response_id", "the id of a response"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"background": True}, "background", "only with store = true"),
    ({"n": 2}, "n", "POST /v1/chat/completions makes many"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "POST /v1/chat/completions has it"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "POST /v1/chat/completions has it"),
    ({"truncation": "auto"}, "truncation", "truncate_prompt_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
    ({"top_logprobs": 2}, "top_logprobs", "message.output_text.logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools", 'type "function"'),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "previous_response_id"),
    ({"input": [ITEM]}, "input", "input must have a message or a call"),
    ({"input": [{**ITEM, "output": "x"}]}, "input", "`output` is not a field of a reasoning"),
    ({"input": [{"role": "user"}]}, "input", "`content` is missing"),
    ({"input": [{"role": "usr"}]}, "input", "role user, assistant, system or developer"),
    ({"input": [{"role": "user", "content": "a", "output": "b"}]}, "input", "`output` is not"),
    ({"input": [{"role": "user", "content": [{"type": "refusal"}]}]}, "input",
     "content[0].refusal is missing"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "refusal": "x"}]}]}, "input",
     "content[0].refusal is not a field"),
    ({"input": [{"type": "function_call", "call_id": "1", "phase": "x"}]}, "input",
     "`arguments` is missing"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "5"}]}, "input",
     "no function_call before it"),
    ({"messages": [USER]}, "messages", "it is input here"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"required_prefix_token_ids": [0]}, "required_prefix_token_ids", "required_prefix_token_ids"),
]  # fmt: skip
TOOL = {"name": "f", "input_schema": {"properties": {"x": {"enum": [1, 22]}}, "required": ["x"]}}
CALL = {"type": "tool_use", "id": "abcdefghi", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "abcdefghi"}


OF_MESSAGES: list[tuple[Fields, str, str]] = [
    ({"max_tokens": None}, "max_tokens", "max_tokens is required"),
    *(({"messages": turns}, "messages", words) for turns, words in (
        ([], "a list of 1 to 4096 turns"),
        ([turn("a", "system")], "messages[0] must have"),
        ([USER, turn([{"type": "image"}])], "messages[1] must have"),
        ([turn([{"type": "text"}])], "`text` is missing"),
        ([USER, turn("", "assistant")], "no content to continue"),
        ([USER, turn([{"type": "text", "text": ""}], "assistant")], "no content to continue"),
        ([USER, turn([CALL], "assistant")], "has tool calls"),
        ([USER, turn([RESULT])], 'messages[1]: tool_use_id = "abcdefghi" is the id of no tool_use'),
        ([USER, turn([CALL], "assistant"), turn([RESULT] * 4094)],
         "messages[2]: messages must have at most 4096 turns and tool_results"),
    )),
    ({"tools": [{"type": "web_search_1", "name": "w"}]}, "tools", 'type, if any, is "custom"'),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice", "must be there with"),
    ({"thinking": {"type": "enabled"}}, "thinking", 'send {"type":"disabled"}'),
    ({"stop": ["a"]}, "stop", "leave it out or send []"),
    ({"required_prefix_token_ids": [0]}, "required_prefix_token_ids", "required_prefix_token_ids"),
]  # fmt: skip
OF_SEVERAL: list[tuple[Fields, str, str]] = [
    ({"messages": [USER]}, "messages", "messages[0] must be a list of 1 to"),
    ({"messages": []}, "messages", "messages must be a list of 1 to 4096 lists of messages"),
    ({"messages": [[USER], [{"role": "user"}]]}, "messages", "messages[1][0] must be"),
    ({"messages": [[USER]], "stream": True}, "stream", "several chats in one request"),
    ({"messages": [[USER]], "echo": True}, "echo", "several chats"),
    ({"messages": [[USER]], "prompt_logprobs": 0}, "prompt_logprobs", "several chats"),
    ({"messages": [[USER]], "max_tokens": 0}, "max_tokens", "at least 1"),
]


def with_ids(ids: Any, prompt: Any, **fields: Any) -> Fields:
    """An answer with the token ids that it and its prompt were made of."""
    answer = {"role": "assistant", "content": "sat", **fields}
    return {**answer, "prompt_token_ids": prompt, "generation_token_ids": ids}


PREFIX = "required_prefix_token_ids"
PLAIN = [USER, turn("sat", "assistant"), USER]
OF_IDS: list[tuple[Fields, str, str]] = [
    *(({"messages": [USER, answer, USER]}, "messages", words) for answer, words in (
        (with_ids([320], [0]), "messages[1] has token id 320; ids go from 0"),
        (with_ids([5], [2**31]), "token ids: Expected `int` <= 2147483647"),
        (with_ids([5], [-1]), "Expected `int` >= 0"),
        (with_ids([5], []), "`prompt_token_ids` may not be empty"),
        (with_ids("AAAA", [0]), "Expected `array`, got `str`"),
        (with_ids(None, [0]), "`generation_token_ids` is missing"),
        ({**turn("sat", "assistant"), "generation_token_ids": [5]},
         "`prompt_token_ids` is missing"),
        (with_ids([5], [0], role="user"), "only an assistant's message may have token ids"),
        (with_ids([5], [0], content=None), "the text that its token ids make is missing"),
        (with_ids([5], [0], generation_log_probs=["x"]), "unknown field, which may not have text"),
    )),
    ({"messages": [USER, with_ids([5], [0, 9]), USER], PREFIX: [0, 9]}, PREFIX, PREFIX),
    ({"messages": [USER, with_ids([5], [0, 9]), USER], "add_special_tokens": True},
     "add_special_tokens", "add_special_tokens"),
    ({"messages": PLAIN, PREFIX: [0], "add_special_tokens": True}, "add_special_tokens", PREFIX),
    ({"messages": PLAIN, PREFIX: [320]}, PREFIX, "320"),
    ({"messages": [USER], PREFIX: [0]}, PREFIX, "has none"),
]  # fmt: skip
"""Where chats are generated from, and where they are tokenized."""


def sampled(path: str, **params: Any) -> tuple[str, Fields]:
    """A body of the routes of trainers with these in its `sampling_params`."""
    prompt = {"token_ids": [5]} if path == TOKENS else {"text": "a"}
    return path, {**prompt, "sampling_params": params}


SCORED: Fields = {"input_ids": [5, 6], "return_logprob": True}
OF_TRAINERS: list[Row] = [
    (TOKENS, {"token_ids": None}, "token_ids", "token_ids"),
    (TOKENS, {"token_ids": []}, "token_ids", "token_ids"),
    (TOKENS, {"token_ids": [5_000]}, "token_ids", "5000"),
    (TOKENS, {"sampling_params": []}, "sampling_params", "sampling_params"),
    (*sampled(TOKENS, until={}), "sampling_params", "until"),
    (*sampled(TOKENS, temperature=-1), "temperature", "temperature"),
    (TOKENS, {"features": {"x": 1}}, "features", "features"),
    (GENERATE, {}, "input_ids", "input_ids"),
    (GENERATE, {"input_ids": [5], "text": "a"}, "input_ids", "input_ids"),
    (GENERATE, {"input_ids": []}, "input_ids", "none empty; got []"),
    (GENERATE, {"input_ids": [5_000]}, "input_ids", "5000"),
    (GENERATE, {"text": 7}, "text", "text"),
    (GENERATE, {"text": []}, "text", "none empty; got []"),
    (*sampled(GENERATE, max_new_tokens=-1), "max_new_tokens", "max_new_tokens"),
    (*sampled(GENERATE, max_new_tokens=0), "max_new_tokens", "max_new_tokens"),
    (*sampled(GENERATE, min_new_tokens=-1), "min_new_tokens", "min_new_tokens"),
    (*sampled(GENERATE, min_new_tokens=9, max_new_tokens=4), "min_new_tokens", "min_new_tokens"),
    (*sampled(GENERATE, seed="a"), "seed", "seed"),
    (*sampled(GENERATE, sampling_seed="a"), "sampling_seed", "sampling_seed"),
    (*sampled(GENERATE, sampling_seed=2**64), "sampling_seed", "sampling_seed"),
    (*sampled(GENERATE, seed=1, sampling_seed=2), "sampling_seed", "sampling_seed"),
    (*sampled(GENERATE, no_stop_trim=1), "no_stop_trim", "no_stop_trim"),
    (*sampled(GENERATE, regex="(a"), "regex", "regex"),
    (*sampled(GENERATE, ebnf="root ::= x"), "ebnf", "ebnf"),
    (*sampled(GENERATE, json_schema="{"), "json_schema", "json_schema"),
    (*sampled(GENERATE, regex="a", ebnf='root ::= "a"'), "regex", "regex"),
    (*sampled(GENERATE, response_format={"type": "json_object"}), "response_format",
     "is not supported"),
    (*sampled(GENERATE, max_tokens=1), "sampling_params", "max_tokens"),
    (GENERATE, {"text": "a", "return_hidden_states": True}, "return_hidden_states",
     "is not supported"),
    (GENERATE, {"text": "a", "top_logprobs_num": 2}, "top_logprobs_num", "top_logprobs_num"),
    (GENERATE, {**SCORED, "top_logprobs_num": -1}, "top_logprobs_num", "got -1"),
    (GENERATE, {"text": "x", "logprob_start_len": 1}, "logprob_start_len",
     "only with return_logprob"),
    (GENERATE, {**SCORED, "logprob_start_len": 2}, "logprob_start_len",
     "lies after the last of the prompt's 2 tokens"),
    (GENERATE, {"input_ids": [5, 6], "token_ids_logprob": [5]}, "token_ids_logprob",
     "only with return_logprob"),
    (GENERATE, {**SCORED, "token_ids_logprob": [5], "top_logprobs_num": 1}, "token_ids_logprob",
     "top_logprobs_num"),
    # What these routes cannot say is not rendered for them.
    (RENDER_CHAT, {"until": {"match": "a"}}, "until", "until"),
    (RENDER_CHAT, COUNTS, "return", "return"),
    (RENDER_CHAT, {"tools": [ADD], "tool_choice": "required"}, "tool_choice", "tool_choice"),
    (RENDER_CHAT, {"messages": [USER, with_ids([5], [0])], "echo": True,
                   "continue_final_message": True}, "echo", "echo"),
    (RENDER_CHAT, {"prompt": "a"}, "prompt", "prompt"),
    (RENDER_CHAT, {"messages": []}, "messages", "messages"),
    (RENDER, {"best_of": 3}, "best_of", "best_of"),
    (RENDER, {"echo": True}, "echo", "echo"),
    (RENDER, RULE, "verify", "verify"),
    (RENDER, {"prompt": [320]}, "prompt", "320"),
    (RENDER, {"prompt": ["a"] * 3_000, "stop": ["b" * 256] * 64}, "prompt", "prompt"),
    (RENDER, {"prompt": None}, "prompt", "prompt is required"),
]  # fmt: skip
OF_TOKENIZERS: list[Row] = [
    (TOKENIZE, {}, "prompt", "either prompt or messages"),
    (TOKENIZE, {"prompt": "x", "messages": [USER]}, "prompt", "either"),
    (TOKENIZE, {"prompt": 5}, "prompt", "prompt must be a string or a list of at most"),
    (TOKENIZE, {"prompt": [5]}, "prompt", "got [5]"),
    (TOKENIZE, {"messages": []}, "messages", "a list of 1 to 4096"),
    (TOKENIZE, {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "true or"),
    (TOKENIZE, {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt",
     "only with messages"),
    (TOKENIZE, {"prompt": "x", PREFIX: [1]}, PREFIX, "only with messages"),
    (TOKENIZE, {"prompt": "x", "nothing": 1}, "nothing", "not a field"),
    (TOKENIZE, {"prompt": "a", "x" * 10**5: 1}, "x" * 63 + "…", "x…' is not a field"),
    (DETOKENIZE, {}, "tokens", "tokens is required"),
    (DETOKENIZE, {"tokens": "x"}, "tokens", "a list of at most 4194304 token ids"),
    (DETOKENIZE, {"tokens": [[5]]}, "tokens", "token ids"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens", "token ids"),
    (DETOKENIZE, {"tokens": [5, 320]}, "tokens", "token id 320; ids go from 0 to 319"),
    (DETOKENIZE, {"tokens": [5], "n": 2}, "n", "leave it out or send 1"),
]  # fmt: skip
UNKNOWN = "is not a field of this request"
MEANT: list[Row] = [
    (COMPLETIONS, {"messages": [USER], "prompt": None}, "messages", CHATS),
    (COMPLETIONS, {"messages": [USER]}, "messages", CHATS),
    (CHATS, {"prompt": "a", "messages": None}, "prompt", COMPLETIONS),
    (COMPLETIONS, {"promt": "a", "prompt": None}, "promt", "did you mean 'prompt'?"),
    (COMPLETIONS, {"max_token": 5}, "max_token", "did you mean 'max_tokens'?"),
    (COMPLETIONS, {"maxTokens": 5}, "maxTokens", "did you mean 'max_tokens'?"),
    (COMPLETIONS, {"zzz": 1}, "zzz", f"'zzz' {UNKNOWN}"),
    *((COMPLETIONS, {name: [1]}, name, f"{name!r} {UNKNOWN}")
      for name in ("prompt_token_ids", PREFIX)),
    (CHATS, {"temprature": 1}, "temprature", "'temperature'?"),
    (CHATS, {"tool": []}, "tool", "'tools'?"),
    (TOKENIZE, {"promt": "a"}, "promt", "did you mean 'prompt'?"),
    (TOKENIZE, {"text": "a"}, "text", 'text = "a" is not supported; its name is prompt'),
    (RESPONSES, {"max_tokens": 9}, "max_tokens", f"{UNKNOWN}; it is max_output_tokens here"),
    (CHATS, {"zzz": 1, "messages": None}, "zzz", f"'zzz' {UNKNOWN}"),
    (TOKENS, {"prompt": "a", "token_ids": None}, "prompt", f"'prompt' {UNKNOWN}"),
    *((path, {"ids": [5]}, "ids", f"'ids' {UNKNOWN}") for path in (DETOKENIZE, GENERATE)),
]  # fmt: skip
REFUSED: list[Row] = [
    *((COMPLETIONS, *row) for row in (*OF_COMPLETIONS, *OF_OUTPUTS)),
    *((CHATS, *row) for row in (*OF_CHATS, *OF_TOOLS, *OF_OUTPUTS, *OF_IDS)),
    *((RESPONSES, *row) for row in OF_RESPONSES),
    *((MESSAGES, *row) for row in OF_MESSAGES),
    *((SEVERAL, *row) for row in OF_SEVERAL),
    *((TOKENIZE, *row) for row in OF_IDS),
    (RESPONSES, {"input": [USER, with_ids([5], [0]), USER]}, "input", "token_ids"),
    (MESSAGES, {"messages": [USER, with_ids([5], [0]), USER]}, "messages", "token_ids"),
    (SEVERAL, {"messages": [PLAIN], PREFIX: [0]}, PREFIX, PREFIX),
    (SEVERAL, {"messages": [[USER], [USER, with_ids([320], [0])]]}, "messages",
     "messages[1][1] has token id 320"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True, "structured_outputs": REGEX}, "max_tokens",
     "does not go with structured_outputs.regex"),
    *OF_TRAINERS,
    *OF_TOKENIZERS,
    *MEANT,
]  # fmt: skip
