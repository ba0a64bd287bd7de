"""Models whose texts end with one of several tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from srm.engine.config import ModelConfig, read_model_config
from srm.engine.constraints.automaton import UNREACHABLE
from srm.engine.constraints.byte_table import START
from srm.engine.constraints.constraint import choice_constraint, lark_constraint
from srm.engine.constraints.grammars import Grammars
from srm.engine.constraints.trial import tokenizer_of, why_not
from srm.engine.process.weight_reload import load_weights
from srm.engine.scheduler.accept import accept
from srm.engine.weights.checkpoint import load_checkpoint, with_ends_of
from srm.engine.weights.random_model import write_random_model
from srm.errors import CheckpointError, InvalidRequest
from srm.server.text.text import Text
from tests.kit.engines.making import request_of
from tests.kit.engines.numpy_runner import TINY
from tests.kit.models.tiny_tokenizer import CHARACTERS, tiny_folder

COMMA = 2 + CHARACTERS.index(",")
PADDED = TINY.vocab_size + 40
"""Entries of a vocabulary that has more of them than its tokenizer."""
SEVERAL = msgspec.structs.replace(TINY, eos_token_id=(1, COMMA))


def described(folder: Path, config: object, generation: object = None) -> Path:
    """Write a folder whose files name these end tokens."""
    write_random_model(folder, TINY)
    fields = msgspec.to_builtins(TINY) | {"eos_token_id": config}
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (1, None, (1,)),
        ([1, 12], None, (1, 12)),
        (1, [1, 12], (1, 12)),
        (1, 12, (1, 12)),
        ([12], [1, 13], (12, 1, 13)),
    ],
)
def test_reads_the_end_tokens_of_both_files(
    config: object, generation: object, ends: tuple[int, ...], tmp_path: Path
) -> None:
    folder = described(tmp_path, config, generation)
    assert read_model_config(folder)[0].end_ids == ends
    assert load_checkpoint(folder).config.end_ids == Text(folder).model.end_ids == ends


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ([99], r"generation_config\.json: eos_token_id must lie in 0 … vocab_size - 1, got 99"),
        ([-1], "must lie in"),
        (2**70, "eos_token_id"),
        ("</s>", "eos_token_id must be"),
        ([*range(2, 32)] * 9 + [0] * 99, ""),
    ],
)
def test_end_tokens_that_the_model_does_not_have_are_refused(
    generation: object, message: str, tmp_path: Path
) -> None:
    folder = described(tmp_path, 1, generation)
    if not message:
        assert len(read_model_config(folder)[0].end_ids) == TINY.vocab_size
        return
    with pytest.raises(CheckpointError, match=message):
        read_model_config(folder)


def test_every_end_token_ends_a_sample() -> None:
    assert accept(request_of(ignore_eos=False), SEVERAL, 0).stop_ids == {1, COMMA}
    assert accept(request_of(ignore_eos=True), SEVERAL, 0).stop_ids == set()
    held = accept(request_of(ignore_eos=False, min_tokens=3, max_tokens=9), SEVERAL, 0)
    assert held.edits is not None
    assert {*np.frombuffer(held.edits.ends, np.int32).tolist()} == {1, COMMA}


@pytest.mark.parametrize(
    "constraint", [choice_constraint(["a"]), lark_constraint('start: "a" "b"?')]
)
def test_every_end_token_ends_a_constrained_text(constraint: str) -> None:
    grammar = Grammars(SEVERAL, tiny_folder() / "tokenizer.json").compile(constraint)
    a = 2 + CHARACTERS.index("a")
    masks = [grammar.first_mask, np.zeros_like(grammar.first_mask)]
    matcher = grammar.start(np.array([a], "<i4").tobytes())
    masks[1] = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(masks[1])]
    first, last = (np.unpackbits(mask.view(np.uint8), bitorder="little") for mask in masks)
    assert not first[[1, COMMA]].any() and last[[1, COMMA]].all()
    if grammar.automaton is not None:
        state = grammar.automaton.walk(np.array([a], np.int32))
        assert grammar.automaton.allowed(state, UNREACHABLE)[[1, COMMA]].all()
        assert not grammar.automaton.allowed(START, UNREACHABLE)[[1, COMMA]].any()


@pytest.mark.parametrize("ends", [(1, PADDED - 1), (PADDED - 1,), (PADDED - 1, COMMA, 1)])
def test_constraints_take_end_tokens_of_a_padded_vocabulary(
    ends: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = msgspec.structs.replace(TINY, vocab_size=PADDED, eos_token_id=ends)
    grammars = Grammars(model, tiny_folder() / "tokenizer.json")
    for constraint, text in (
        (choice_constraint(["a"]), b"a"),
        (lark_constraint('start: "a" "b"'), b"ab"),
    ):
        last = grammars.compile(constraint).start()
        last.consume_tokens([grammars.tokens.index(bytes([byte])) for byte in text])
        allowed = np.unpackbits(np.frombuffer(last.compute_bitmask(), np.uint8), bitorder="little")
        assert {*np.flatnonzero(allowed)} == {*ends}
    shutil.copytree(tiny_folder(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(model))
    Text(tmp_path)
    assert f"end tokens that only the model has: [{PADDED - 1}]" in caplog.text


def test_an_end_token_is_no_part_of_a_constrained_text() -> None:
    """Else a sample would end within it."""
    tokens = [b"a", b"b", b""]
    assert why_not(lark_constraint('start: "b"'), tokenizer_of(tokens, [2])) == ""
    assert "no text of the model's tokens" in why_not(
        lark_constraint('start: "b"'), tokenizer_of(tokens, [2, 1])
    )


def test_new_weights_go_on_with_the_end_tokens_that_are_served(tmp_path: Path) -> None:
    """A trainer writes no generation_config.json."""
    served = read_model_config(described(tmp_path / "served", 1, [1, 12]))[0]
    folder = described(tmp_path / "trained", 1)
    assert load_weights(load_checkpoint, folder, served).config == served
    assert with_ends_of(tmp_path / "served", load_checkpoint(folder)).config == served
    others = described(tmp_path / "others", 13)
    with pytest.raises(InvalidRequest, match="eos_token_id"):
        load_weights(load_checkpoint, others, served)


def test_a_configuration_is_written_as_it_was() -> None:
    assert b'"eos_token_id":1,' in msgspec.json.encode(TINY)
    again = msgspec.json.decode(msgspec.json.encode(SEVERAL), type=ModelConfig)
    assert again == SEVERAL and again.end_id == 1
