"""Rows become marked tokens; only what is marked is trained on, and the best weights are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch.nn import functional as F

from srm.engine.config import ModelConfig
from srm.engine.weights.checkpoint import load_checkpoint
from srm.errors import ConfigError
from srm.server.text.text import Text
from srm.training.checkpoint import load_model, save_model
from srm.training.data import IGNORED
from srm.training.finetuning.config import SFTConfig
from srm.training.finetuning.conversations import Chats, RowText, read
from srm.training.finetuning.examples import ExampleBatches, encode, in_order, with_shots
from srm.training.finetuning.sft import prepared, sft
from srm.training.model import SRM
from srm.training.pretrain import CHAT_TEMPLATE
from srm.training.text.tokenizer import BEGIN, BEGIN_ID, END, END_ID, train_tokenizer
from tests.unit.training.conftest import StopAt, assert_same_run, run_on_two

PAIRS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(8) for b in range(8)]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4 é"},
]


CLOWN, TOOL = ({"role": role, "content": "x"} for role in ("clown", "tool"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer([f"{row['prompt']}{row['completion']}" for row in PAIRS], 270)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    torch.manual_seed(0)
    model = SRM(
        ModelConfig(d_model=16, num_layers=2, num_heads=2, n_ctx=48,
                    vocab_size=tokenizer.get_vocab_size(),
                    bos_token_id=BEGIN_ID, eos_token_id=END_ID)
    )  # fmt: skip
    save_model(model.config, model.state_dict(), folder)
    return folder


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def settings(base: Path, folder: Path, *rows: dict[str, Any], **changes: Any) -> SFTConfig:
    folder.mkdir(parents=True, exist_ok=True)
    train = lines(folder / "train.jsonl", *rows)
    wanted = {"epochs": 1, "batch_rows": 8, "threads": 1, "precision": "float32", **changes}
    return SFTConfig(model=base, output=folder / "run", train=(train,), **wanted)


def read_rows(base: Path, path: Path) -> list[RowText]:
    return read([path], "train", Chats(base, Text(base).special_tokens))


def test_each_form_is_told_apart_and_its_second_half_marked(base: Path, tmp_path: Path) -> None:
    table = {"question": ["1?", None], "answer": ["one", None], "prompt": [None, "p"],
             "completion": [None, "c"]}  # fmt: skip
    parquet.write_table(pa.table(table), tmp_path / "some.parquet")
    first, second = read_rows(base, tmp_path / "some.parquet")
    assert first.pieces == (("Question: 1?\nAnswer:", False), (" one", True))
    assert second.pieces == (("p", False), ("c", True))
    (chat,) = read_rows(
        base, lines(tmp_path / "chat.jsonl", {"messages": CHAT, "prompt": "ignored"})
    )
    assert [piece.text for piece in chat.pieces if piece.is_target] == [f" 2{END}", f" 4 é{END}"]
    assert "".join(piece.text for piece in chat.pieces) == (
        f"{BEGIN}System: Be brief.\nQuestion: What is 1 + 1?\nAnswer: 2{END}"
        f"{BEGIN}System: Be brief.\nQuestion: And 2 + 2?\nAnswer: 4 é{END}"
    )


def test_tokens_are_those_of_the_server_with_an_end(base: Path, tmp_path: Path) -> None:
    text = Text(base)
    rows = read_rows(base, lines(tmp_path / "a.jsonl", {"messages": CHAT}, PAIRS[9]))
    chat, pair = encode(rows, text)
    whole = "".join(piece.text for piece in rows[0].pieces)
    assert chat.ids.tobytes() == text.encode([whole], adds_special=False)[0]
    prompt, completion = text.encode(["1 + 1 ="])[0], text.encode([" 2"], adds_special=False)[0]
    assert pair.ids.tobytes() == prompt + completion + np.int32(END_ID).tobytes()
    assert pair.ids[0] == BEGIN_ID and pair.ids[~pair.is_target].tobytes() == prompt
    ((inputs, targets),) = in_order([chat, pair], rows=3)
    for row, wanted in ((0, f" 2{END} 4 é{END}"), (1, f" 2{END}"), (2, "")):
        trained = targets[row][targets[row] != IGNORED]
        assert text.spell(trained.to(torch.int32).numpy().tobytes()).decode() == wanted
    length = len(pair.ids)
    assert inputs[1, : length - 1].tolist() == pair.ids[:-1].tolist()
    is_ignored = (targets[1, length - 2 :] == IGNORED).tolist()
    assert not is_ignored[0] and all(is_ignored[1:]) and len(is_ignored) > 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "answer": "b"}, r":2: a row must have .*; it has answer, prompt$"),
        ({"prompt": "a", "completion": None}, r":2: a row must have .*; it has prompt$"),
        ({}, r":2: a row must have .*; it has nothing$"),
        ({**PAIRS[0], "messages": CHAT}, r":2: a row must have .*completion, messages, prompt$"),
        ({"prompt": "a", "completion": ["b"]}, r":2: 'completion' must be a text, got \['b'\]"),
        ({"question": "a", "answer": ""}, r":2: 'answer' must not be empty"),
        ({"messages": CHAT[:2]}, r":2: the last of messages must be assistant's, got user"),
        ({"messages": [{"role": "", "content": "x"}]}, r":2: messages\[0\] must be an object"),
        (
            {"messages": [CLOWN, *CHAT[-1:]]},
            r":2: messages\[0\]: role must be .* names; got 'clown'",
        ),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, r":2: tools must be absent"),
        (
            {"messages": [TOOL, *CHAT[-1:]]},
            r":2: the chat template: this model knows questions and answers, no messages of tool",
        ),
    ],
)
def test_a_row_of_no_form_is_named(
    base: Path, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = lines(tmp_path / "rows.jsonl", PAIRS[0], row)
    with pytest.raises(ConfigError, match=f"train: .*rows.jsonl{message}"):
        read_rows(base, path)


def test_files_without_rows_of_ours_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train: .*none\.jsonl has no row"):
        read_rows(base, lines(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"train: .*x\.csv must be a file \.jsonl or \.parquet"):
        read_rows(base, tmp_path / "x.csv")
    with pytest.raises(ConfigError, match=r"train: .*gone\.jsonl: No such file"):
        read_rows(base, tmp_path / "gone.jsonl")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the chat template: .* has none, so messages cannot be read"),
        ("{{ messages | length }}", "it writes what comes before the end of messages\\[2\\]"),
        ("{% if %}", "the chat template of .* is not one"),
    ],
)
def test_templates_that_cannot_be_used_are_refused(
    base: Path, tmp_path: Path, template: str | None, message: str
) -> None:
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    path = lines(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(ConfigError, match=message):
        read([path], "train", Chats(tmp_path, {}))


def test_shots_are_other_rows_drawn_with_the_seed(base: Path, tmp_path: Path) -> None:
    rows = read_rows(base, lines(tmp_path / "a.jsonl", *PAIRS[:5]))
    own = ["".join(piece.text for piece in row.pieces) for row in rows]
    drawn = with_shots(rows, rows, 4, 1, "train")
    for row, before, text in zip(drawn, rows, own, strict=True):
        *shots, prompt = row.pieces[0].text.split("\n\n")
        assert sorted([*shots, text]) == sorted(own)
        assert (prompt, row.pieces[1:]) == (before.pieces[0].text, before.pieces[1:])
    assert drawn == with_shots(rows, rows, 4, 1, "train") != with_shots(rows, rows, 4, 2, "train")
    (other,) = with_shots(read_rows(base, lines(tmp_path / "b.jsonl", PAIRS[60])), rows, 2, 1, "x")
    assert set(other.pieces[0].text.split("\n\n")[:2]) < set(own)
    with pytest.raises(ConfigError, match="shots must be less than the 5 rows of train, got 5"):
        with_shots(rows, rows, 5, 1, "train")
    chats = read_rows(base, lines(tmp_path / "c.jsonl", {"messages": CHAT}, {"messages": CHAT}))
    with pytest.raises(ConfigError, match="shots must be 0 where rows of train have messages"):
        with_shots(chats, chats, 1, 1, "train")


def test_rows_are_held_back_and_those_too_long_left_out(base: Path, tmp_path: Path) -> None:
    rows = [*PAIRS[:19], {"prompt": "9" * 80, "completion": " 1"}]
    config = settings(base, tmp_path, *rows, evaluation_share=0.25)
    data = prepared(config, Text(base))
    assert (len(data.train) + len(data.evaluation), data.left_out) == (19, 1)
    ids = [item.ids.tobytes() for item in (*data.train, *data.evaluation)]
    assert len(set(ids)) == 19 and len(data.evaluation) in {4, 5}
    other = prepared(msgspec.structs.replace(config, seed=1), Text(base))
    assert {path.ids.tobytes() for path in other.evaluation} != set(ids[-len(data.evaluation) :])
    for changes, message in (
        ({"max_length": 3}, r"train: every row is longer than max_length = 3 tokens; the shortest"),
        ({"max_length": 49}, "max_length must be at most the model's context of 48 tokens, got 49"),
        ({"evaluation_share": 0.99}, "evaluation_share = 0.99 holds back 20 of 20 rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepared(msgspec.structs.replace(config, **changes), Text(base))


def test_an_epoch_has_each_row_once_though_batches_lie_in_two(base: Path, tmp_path: Path) -> None:
    examples = encode(read_rows(base, lines(tmp_path / "a.jsonl", *PAIRS[:10])), Text(base))
    batches, same = (ExampleBatches(examples, rows=4, seed=3) for _ in range(2))
    drawn = [batches[index] for index in range(5)]
    rows = [str(row[row > 1].tolist()) for inputs, _ in drawn for row in inputs]
    assert len(set(rows[:10])) == 10 and sorted(rows[:10]) == sorted(rows[10:]) != rows[10:]
    assert rows[:10] != rows[10:]
    for index in (4, 2, 0):  # whatever came before
        for token, again in zip(drawn[index], same[index], strict=True):
            assert torch.equal(token, again)


def test_only_completions_are_trained_on(base: Path, tmp_path: Path) -> None:
    """The first loss is the mean over their tokens; and it falls."""
    config = settings(base, tmp_path, *PAIRS, epochs=20, learning_rate=1e-2, clip_norm=1.0)
    losses = sft(config)
    data = prepared(config, Text(base))
    inputs, targets = ExampleBatches(data.train, 8, 0)[0]
    with torch.no_grad():
        result = F.log_softmax(load_model(base)(inputs), -1)
    picked = [-result[row, at, targets[row, at]] for row, at in (targets != IGNORED).nonzero()]
    assert losses.steps[0] == pytest.approx(float(torch.stack(picked).mean()), rel=1e-5)
    assert sum(losses.steps[-8:]) < 0.3 * sum(losses.steps[:8])
    evaluated = [done for done, _ in losses.evaluations]
    assert evaluated == [*range(8, 8 * 20, 8), len(losses.steps)]
    new = load_checkpoint(config.output)
    assert new.config == load_model(base).config and Text(config.output).has_tokenizer
    assert (config.output / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert (config.output / "loss.svg").exists()


def test_the_weights_of_least_evaluation_loss_are_the_model(base: Path, tmp_path: Path) -> None:
    """Rows for evaluation say the opposite, so learning makes them worse."""
    wrong = lines(tmp_path / "wrong.jsonl", *({**row, "completion": " 0"} for row in PAIRS[20:30]))
    config = settings(base, tmp_path, *PAIRS[20:60], epochs=20, learning_rate=1e-2, clip_norm=1.0,
                      evaluation=(wrong,), evaluate_every=10)  # fmt: skip
    losses = sft(config)
    (done, least), last = min(losses.evaluations, key=lambda one: one[1]), losses.evaluations[-1]
    assert done < last[0] and least < 0.9 * last[1]
    data = prepared(config, Text(base))
    total, count = 0.0, 0
    for inputs, targets in in_order(data.evaluation, 8):
        with torch.no_grad():
            logits = load_model(config.output)(inputs).flatten(0, 1)
        total += float(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
        count += int((targets != IGNORED).sum())
    assert total / count == pytest.approx(least, rel=0.02)  # stored in bfloat16


def test_a_resumed_run_has_the_best_weights_of_before(
    base: Path, tmp_path: Path, stop_at: StopAt
) -> None:
    others = [{**row, "completion": "?!?!?!"} for row in PAIRS[20:30]]
    wrong = lines(tmp_path / "wrong.jsonl", *others)
    changes = {"epochs": 4, "learning_rate": 1e-2, "clip_norm": 1.0, "evaluation": (wrong,)}
    whole = settings(base, tmp_path / "whole", *PAIRS[20:60], evaluate_every=5, **changes)
    expected = sft(whole)
    best = min(expected.evaluations, key=lambda one: one[1])[0]
    assert best < 15, "what is kept must be older than where the run stops"
    halves = settings(base, tmp_path / "halves", *PAIRS[20:60], evaluate_every=5, **changes,
                      save_every=4)  # fmt: skip
    with stop_at(18), pytest.raises(KeyboardInterrupt):
        sft(halves)
    assert sft(halves) == expected
    for name in ("model.safetensors", "losses.json", "evaluation_losses.json"):
        assert (halves.output / name).read_bytes() == (whole.output / name).read_bytes()
    with pytest.raises(ConfigError, match="a run of another batch_rows, 8 and not 4"):
        sft(msgspec.structs.replace(halves, batch_rows=4))
    lines(halves.train[0], *PAIRS[21:60])
    with pytest.raises(ConfigError, match="a run of another rows"):
        sft(halves)


def test_two_processes_find_a_single_processes_best_weights(base: Path, tmp_path: Path) -> None:
    config = settings(base, tmp_path, *PAIRS[:43], epochs=2, micro_batches=2, evaluate_every=3)
    expected = sft(config)
    flags: dict[str, Any] = {"epochs": 2, "batch_rows": 8, "micro_batches": 2, "evaluate_every": 3}
    flags |= {
        "threads": 1,
        "precision": "float32",
        "shard": "true",
        "model": base,
        "train": config.train[0],
    }
    run_on_two("sft", tmp_path / "two", **flags)
    assert_same_run(expected, config.output, tmp_path / "two")


def test_rows_left_out_are_counted_in_a_message(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sft(settings(base, tmp_path, *PAIRS[:9], {"prompt": "9" * 80, "completion": " 1"}))
    assert [record.message for record in caplog.records] == [
        "1 of 10 rows are left out: too many tokens"
    ]


def test_settings_that_cannot_be_met_are_refused(base: Path, tmp_path: Path) -> None:
    config = settings(base, tmp_path, *PAIRS)
    for changes, message in (
        ({"train": ()}, r"train must be files \.jsonl or \.parquet, got none"),
        ({"output": base}, "output must be another folder than model"),
        ({"batch_rows": 10**6}, r"batch_rows must be at most epochs = 1 times the \d+ rows of"),
        ({"micro_batches": 3}, "batch_rows must be a multiple of micro_batches = 3 times the 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            sft(msgspec.structs.replace(config, **changes))
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((base / name).read_bytes())
    with pytest.raises(ConfigError, match=r"bare has no tokenizer\.json"):
        sft(msgspec.structs.replace(config, model=tmp_path / "bare"))
