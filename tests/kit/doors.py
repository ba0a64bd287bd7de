"""Examples that each entry point takes or refuses. tests/unit/server/test_doors.py tries every row;
`python -m tests.tools.doc_tables` writes docs/reference/accepted-input.md from them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}'
"""Stands as LINE in examples."""
ENCODINGS = {
    "": "utf-8",
    "behind a BOM": "utf-8-sig",
    "in Latin-1": "latin-1",
    "in UTF-16": "utf-16",
}


class Row(NamedTuple):
    example: str
    """A file, a body or `params`; of a checkpoint, files or tensors in backticks."""
    verdict: Literal["taken", "refused"]
    words: str
    """Part of the result, or of the message."""
    encoding: str = ""


class Door(NamedTuple):
    name: str
    introduction: str
    rows: list[Row]


def accept(example: str, words: str, encoding: str = "") -> Row:
    return Row(example, "taken", words, encoding)


def refuse(example: str, words: str, encoding: str = "") -> Row:
    return Row(example, "refused", words, encoding)


DOORS = [
    Door(
        "HTTP",
        "Bodies of [`POST /v1/completions`](../api/completions.md).",
        [
            accept('{"prompt": "a", "n": 2.0}', "n is 2"),
            accept('{"prompt": "a", "n": 2}', "n is 2", "behind a BOM"),
            accept('{"prompt": "a", "seed": null}', "seed is null"),
            refuse('{"prompt": "a", "maxTokens": 5}', "did you mean 'max_tokens'?"),
            refuse('{"prompt": "a", "n": 0}', "n must be an integer from 1 to 1000000; got 0"),
            refuse('{"prompt": "é"}', "byte 0xe9 in position 12 is not UTF-8", "in Latin-1"),
        ],
    ),
    Door(
        "Batches of a server",
        f"[Files](../batches.md#input-lines), where LINE is `{LINE}`.",
        [
            accept("\nLINE", "a batch of 1", "behind a BOM"),
            accept(
                '{"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {}}',
                "a batch of 1",
            ),
            refuse(
                '{"custom_id": 7.5, "method": "POST", "url": "/v1/completions", "body": {}}',
                "line 1: custom_id must be a string or a whole number; got 7.5",
            ),
            refuse(
                '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": '
                '{"top_p": 1e400}}',
                "line 1: top_p has 1e400, beyond what a double holds",
            ),
            refuse("LINE\nLINE", "line 2: custom_id 'a' is that of line 1 too"),
            refuse("LINE,", "a comma follows the object; it must be one JSON object a line"),
            refuse("[\nLINE\n]", "line 1: This line is not JSON: an array's bracket"),
            refuse('{"custom_id": "é"}', "byte 0xe9 in position 15 is not UTF-8", "in Latin-1"),
            refuse("[LINE, LINE]", "line 1: This line is not JSON: an array's bracket"),
            refuse("LINE", "it has bytes of 0, as UTF-16 has; it must be UTF-8", "in UTF-16"),
        ],
    ),
    Door(
        "srm batch",
        "[Lines](../offline.md#input) of a file.",
        [
            accept('{"prompt": "a"}', "custom_id is 1"),
            accept('{"custom_id": 7, "messages": []}', "custom_id is 7, asks /v1/chat/completions"),
            accept('{"input": "a"}', 'asks /v1/responses, body is {"input":"a"}'),
            accept(
                '{"custom_id": 7.0, "prompt": "a"}\n{"custom_id": null, "prompt": "b"}',
                "custom_id is 7",
            ),
            refuse(
                '{"custom_id": 7, "prompt": "a"}\n{"custom_id": "7", "prompt": "b"}',
                "line 2: custom_id '7' is that of line 1 too",
            ),
            refuse(
                '{"custom_id": true, "prompt": "a"}',
                "custom_id must be a string or a whole number; got bool",
            ),
            refuse(
                '[{"prompt": "a"}, {"prompt": "b"}]',
                "an array's bracket; it must be one JSON object a line",
            ),
            refuse(
                '{"custom_id": "2", "prompt": "a"}\n{"prompt": "b"}',
                "line 2: custom_id '2' is that of line 1 too",
            ),
            refuse('{"prompt": "a"},', "a comma follows the object"),
            refuse('{"body": {}, "prompt": "a"}', "prompt is none of custom_id, method, url, body"),
        ],
    ),
    Door(
        "Parquet",
        "[Columns](../offline.md#input) for `srm batch`.",
        [
            accept(
                '{"custom_id": [7], "prompt": ["a"], "__index_level_0__": [0]}',
                'custom_id is 7, asks /v1/completions, body is {"prompt":"a"}',
            ),
            accept('{"custom_id": [7.0, null], "prompt": ["a", "b"]}', "custom_id is 7"),
            accept('{"prompt": ["a", "b"], "n": [2, null]}', 'body is {"prompt":"b"}'),
            accept(r'{"body": ["{\"prompt\": \"a\"}"]}', 'body is {"prompt": "a"}'),
            accept(
                r'{"prompt": ["a"], "logit_bias": ["{\"5\": 1}"]}',
                'body is {"prompt":"a","logit_bias":{"5": 1}}',
            ),
            accept(
                '{"prompt": ["a"], "structured_outputs": [{"json": {"enum": [null, 1]}}]}',
                'body is {"prompt":"a","structured_outputs":{"json":{"enum":[null,1]}}}',
            ),
            refuse(
                '{"prompt": ["a"], "structured_outputs": [{"json": {"const": null}}]}',
                "json.const is null or NaN, which may be a value or a field left out",
            ),
            refuse(
                '{"prompt": ["a", "b"], "label": ["x", "y"]}',
                "column 'label' is no field of a request; leave it out",
            ),
            refuse('{"prompt": ["a", "b"], "max_token": [5, 6]}', "did you mean 'max_tokens'?"),
            refuse(
                '{"custom_id": [7, 7], "prompt": ["a", "b"]}',
                "line 2: custom_id '7' is that of line 1 too",
            ),
            refuse('{"prompt": "a"}', "Parquet magic bytes not found"),
        ],
    ),
    Door(
        "Traces",
        "The `trace` of a [load test](../loadtest-scenarios.md).",
        [
            accept('{"timestamp": 1}\n\n', "timestamp is 1.0", "behind a BOM"),
            accept(
                '{"timestamp": 1000, "input_length": 5, "output_length": 0}',
                "timestamp is 1.0, prompt_tokens is 5, output_tokens is 1",
            ),
            accept(
                "TIMESTAMP,ContextTokens,GeneratedTokens\n1970-01-01 00:00:01,5,2",
                "timestamp is 1.0, prompt_tokens is 5, output_tokens is 2",
            ),
            accept(
                "TIMESTAMP, ContextTokens, GeneratedTokens\n1970-01-01 00:00:01, 5.0, 2",
                "timestamp is 1.0, prompt_tokens is 5, output_tokens is 2",
            ),
            refuse(
                "TIMESTAMP,ContextTokens,GeneratedTokens\n1970-01-01 00:00:01,5",
                "line 2: got 2 fields: ['1970-01-01 00:00:01', '5']",
            ),
            refuse('{"timestamp": 1},', "line 1: a comma follows the object"),
            refuse(
                '{"timestamp": 1, "tokens": 5}',
                "allowed is timestamp (seconds) and perhaps prompt_tokens",
            ),
        ],
    ),
    Door(
        "Checkpoints",
        "Tensors given to [`srm convert`](../models.md#converting).",
        [
            accept("`_fsdp_wrapped_module.input_layer.weight`, …", "left wrappers out of 62 names"),
            accept("`base_model.model.input_layer.weight`, …", "left wrappers out of 62 names"),
            refuse(
                "`net.input_layer.weight` and `ema.input_layer.weight`, …",
                "tensors ema.input_layer.weight and net.input_layer.weight are both "
                "input_layer.weight",
            ),
            refuse(
                "all but `output_layer.weight`",
                'if one tensor is both, add "tie_io": true to constructor',
            ),
            refuse(
                "all but `mixer_blocks.0.token_norm.bias`, and `x.bias`",
                "tensor mixer_blocks.0.token_norm.bias [8] is missing",
            ),
            refuse(
                "`model-00001-of-00002.safetensors`",
                "is one of 2 shards: name their index, model.safetensors.index.json",
            ),
        ],
    ),
    Door(
        "Tokenizers",
        "Members of `tokenizer.json`.",
        [
            accept('"padding": null', "a tokenizer", "behind a BOM"),
            accept(
                '"truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, '
                '"direction": "Right"}',
                "truncation is ignored: it is for training",
            ),
            refuse('"model": null', "is not a tokenizer"),
            accept(
                '"decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel", '
                '"add_prefix_space": true, "trim_offsets": true, "use_regex": true}]}',
                "a tokenizer",
            ),
            refuse(
                '"decoder": {"type": "Fuse"}',
                "only byte-level BPE tokenizers are supported; its decoder is Fuse",
            ),
        ],
    ),
    Door(
        "Python",
        "The `params` of [Engine.generate](../python.md).",
        [
            accept("SamplingParams(n=2.0)", "2 completions"),
            accept("SamplingParams(n=np.int64(2))", "2 completions"),
            refuse("SamplingParams(n=10**30)", "prompt 0: n must be within 64 bits; got 1000000"),
            refuse("SamplingParams(n=0)", "prompt 0: n must be at least 1, got 0"),
            refuse('SamplingParams(n="2")', "prompt 0: n must be an integer; got '2'"),
            refuse('{"n": 2}', "params must be SamplingParams, or one for each prompt; got dict"),
        ],
    ),
]


def page() -> str:
    parts = [
        "# Accepted input formats",
        "What each entry point accepts or refuses, with the result or part of the message. "
        "⏎ ends a line.\n<!-- `make tables` writes this page from tests/kit/doors.py -->",
    ]
    for door in DOORS:
        parts += [f"## {door.name}", door.introduction, _table(door.rows)]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[Row]) -> str:
    lines = ["| example | is | result or message |", "|---|---|---|"]
    for example, verdict, words, encoding in rows:
        shown = (example if "`" in example else f"`{example}`").replace("\n", "⏎")
        result = words if verdict == "taken" else f"`{words}`"
        lines.append(f"| {f'{shown} {encoding}'.strip()} | {verdict} | {result} |")
    return "\n".join(lines)
