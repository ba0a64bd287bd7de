"""Training learns, resumes exactly, and leaves a folder that loads."""

from __future__ import annotations

import math
import re
import shutil
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional as F

from srm.engine.config import DEMO_MODEL
from srm.engine.weights.checkpoint import load_checkpoint, read_model
from srm.errors import CheckpointError, ConfigError
from srm.server.text.text import Text
from srm.settings import load
from srm.training import pretrain as pretraining
from srm.training.checkpoint import load_model
from srm.training.data import IGNORED, SHORT, WHOLE_EVERY, ProblemBatches, encode
from srm.training.model import SRM
from srm.training.pretrain import CHAT_TEMPLATE, pretrain
from srm.training.problems.drawn import examples, problems
from srm.training.schedule import Schedule
from srm.training.settings import PretrainConfig
from srm.training.text.packed_batches import PackedBatches
from srm.training.text.tokenizer import BEGIN_ID, END_ID, train_tokenizer
from tests.kit.serving import ROOT
from tests.unit.training.conftest import StopAt, assert_same_run, run_on_two, tiny_run

SIZES: dict[str, Any] = {"d_model": 16, "num_layers": 2, "num_heads": 2, "n_ctx": 64}
TINY = PretrainConfig(batch_tokens=256, warmup_steps=2, max_vocab_size=400, threads=1, **SIZES)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = (p.prompt + p.solution for p in islice(problems("train", 0), 500))
    return train_tokenizer(texts, 600)


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of a hundred thousand takes half a minute to train."""
    monkeypatch.setattr(pretraining, "TOKENIZER_PROBLEMS", 500)


def _run(folder: Path, steps: int, **changes: object) -> list[float]:
    return pretrain(msgspec.structs.replace(TINY, output=folder, steps=steps, **changes)).steps


@pytest.mark.parametrize("width", [512, 1024, 2048])
def test_configs_of_the_papers_sizes_are_read(width: int) -> None:
    path = ROOT / "research" / "configs" / f"pretrain-{width}.toml"
    config = load(PretrainConfig, ["--config", str(path)])
    assert (config.d_model, config.steps * config.batch_tokens) == (width, 200_000 * 2**16)


def test_tokenizer_begins_texts_and_gives_them_back(tokenizer: Tokenizer) -> None:
    text = "Question: Ava has 3 pears – naïve, 数, \x00 and all.\nAnswer: 3\n#### 3"
    ids = tokenizer.encode(text).ids
    assert ids[0] == BEGIN_ID
    assert tokenizer.decode(ids) == text


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12 and 345").tokens[1:3] == ["1", "2"]
    assert tokenizer.encode(" 345").tokens[-3:] == ["3", "4", "5"]
    assert not [token for token in tokenizer.get_vocab() if re.search(r"\d.|.\d", token)]


def test_targets_are_the_next_tokens_and_of_short_rows_only_answers(tokenizer: Tokenizer) -> None:
    """And batches are a function of seed and index."""
    batches, same = (
        ProblemBatches(tokenizer, END_ID, seed=1, tokens=512, n_ctx=256) for _ in range(2)
    )
    assert not torch.equal(batches[1][0][:2, :20], batches[2][0][:2, :20])
    for index in (0, WHOLE_EVERY - 1):
        for first, again in zip(batches[index], same[index], strict=True):
            assert torch.equal(first, again)
    inputs, targets = batches[0]
    assert inputs.shape == targets.shape == (4, SHORT)
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        is_answer = [token != IGNORED for token in target]
        assert row[0] == BEGIN_ID and BEGIN_ID not in target
        assert all(t == n for t, n, own in zip(target, row[1:], is_answer, strict=False) if own)
        for place in (i for i, token in enumerate(row) if token == BEGIN_ID):
            begun = is_answer.index(True, place) if True in is_answer[place:] else len(row)
            asked = tokenizer.decode(row[place : begun + 1])
            assert begun == len(row) or asked.endswith("\nAnswer:")
    inputs, targets = batches[WHOLE_EVERY - 1]
    assert inputs.shape == (2, 256)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (inputs == END_ID).sum() > 4


def test_prompt_and_solution_are_the_tokens_of_their_text(tokenizer: Tokenizer) -> None:
    batch = list(islice(examples(0), 200))
    for (prompt, solution), (begun, ended) in zip(
        batch, encode(tokenizer, batch, END_ID), strict=True
    ):
        assert [*tokenizer.encode(prompt + solution).ids, END_ID] == begun + ended


def test_training_learns_and_leaves_a_model_the_engine_loads(tmp_path: Path) -> None:
    losses = _run(tmp_path, steps=60, learning_rate=1e-2)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    modes = {(tmp_path / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1  # who may read one, as a container's user, may read the other
    weights, model = load_checkpoint(tmp_path), load_model(tmp_path)
    assert weights.config == model.config
    assert torch.equal(torch.from_numpy(weights.embedding), model.input_layer.weight)
    with pytest.raises(CheckpointError, match="there is no folder"):
        load_model(tmp_path / "other")
    assert (DEMO_MODEL / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of word problems, as if they were anybody's texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    drawn = [p.prompt + p.solution for p in islice(problems("train", 0), 600)]
    for number in range(3):
        (folder / f"{number}.txt").write_text("\n".join(drawn[number::3]))
    return folder


ON_TEXTS: dict[str, Any] = {"steps": 8, "evaluate_every": 4, "evaluation_share": 0.1}


def test_texts_are_trained_on_and_others_kept_for_evaluation(texts: Path, tmp_path: Path) -> None:
    config = msgspec.structs.replace(TINY, output=tmp_path, texts=(texts,), **ON_TEXTS)
    losses = pretrain(config)
    assert [steps for steps, _ in losses.evaluations] == [4, 8]
    assert losses.evaluations[1][1] < losses.evaluations[0][1] < losses.steps[0]
    assert load_checkpoint(tmp_path).config == load_model(tmp_path).config
    assert not (tmp_path / "chat_template.jinja").exists()  # nobody knows these texts' form
    (texts / "0.txt").write_text("Other words.")
    with pytest.raises(ConfigError, match="a run of another texts"):
        pretrain(config)


def test_texts_are_mixed_by_weight(texts: Path, tmp_path: Path) -> None:
    """And the weights are a part of the run."""
    files = (texts / "0.txt", texts / "1.txt")
    config = msgspec.structs.replace(
        TINY, output=tmp_path / "run", texts=files, text_weights=(0.75, 0.25), **ON_TEXTS
    )
    losses = pretrain(config)
    assert [steps for steps, _ in losses.evaluations] == [4, 8]
    names = sorted(path.name for path in config.output.glob("tokens*.bin"))
    assert names == ["tokens-0.bin", "tokens-1.bin"]
    assert pretrain(config).steps == losses.steps
    with pytest.raises(ConfigError, match="another text_weights"):
        pretrain(msgspec.structs.replace(config, text_weights=(0.5, 0.5)))


def test_a_mixed_text_too_short_to_hold_any_of_it_out_is_refused(
    texts: Path, tmp_path: Path
) -> None:
    """Before any update, and not at the first evaluation."""
    short = tmp_path / "short.txt"
    short.write_text((texts / "0.txt").read_text()[:250])
    config = msgspec.structs.replace(
        TINY, output=tmp_path / "run", texts=(texts, short), text_weights=(0.75, 0.25),
        steps=8, evaluate_every=4, evaluation_share=0.005,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"evaluation_share = 0.005\): 0 tokens make 0 windows"):
        pretrain(config)


@pytest.mark.parametrize(
    "weights", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (1.0, math.inf), (1.0, 1e-19)]
)
def test_weights_that_fit_no_texts_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"text_weights must be a number of 1e-18 … 1e\+18 for"):
        msgspec.structs.replace(TINY, texts=(Path("a"), Path("b")), text_weights=weights)
    with pytest.raises(ValueError, match=r"for each of the 0 texts"):
        msgspec.structs.replace(TINY, text_weights=(1.0,))


@pytest.mark.parametrize("windows", ["packed", "documents"])
def test_documents_of_a_row_are_trained_on_apart(tmp_path: Path, windows: str) -> None:
    """The loss of the first update and of the evaluation is that of each document by itself."""
    lines = [{"text": p.prompt + p.solution} for p in islice(problems("train", 0), 300)]
    file = tmp_path / "texts.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    changes: dict[str, Any] = {"texts": (file,), "precision": "float32", "learning_rate": 0.0}
    changes |= {"evaluation_share": 0.2, "evaluate_every": 1, "evaluation_batches": 2, "steps": 1}
    config = msgspec.structs.replace(
        TINY, output=tmp_path / "run", separate_documents=True, windows=windows, **changes
    )
    losses = pretrain(config)
    torch.manual_seed(config.seed)
    model = SRM(read_model(config.output).config)
    model.separator = BEGIN_ID  # test_torch_model.py has it give what each document alone does
    tokens = np.fromfile(config.output / "tokens.bin", "<u2")
    trained = len(tokens) - int(len(tokens) * 0.2)
    end = END_ID if windows == "documents" else None
    for ids, count, loss in (
        (tokens[:trained], 1, losses.steps[0]),
        (tokens[trained:], 2, losses.evaluations[0][1]),
    ):
        batches = PackedBatches(ids, 4, 64, config.seed, end)
        rows, targets = map(torch.cat, zip(*(batches[i] for i in range(count)), strict=True))
        is_begin = targets == BEGIN_ID
        assert is_begin.any()
        logits, targets = model(rows).detach()[~is_begin], targets[~is_begin]
        assert loss == pytest.approx(float(F.cross_entropy(logits, targets.long())), rel=1e-5)


def test_problems_are_trained_on_one_by_one_too(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"steps": 4, "precision": "float32", "n_ctx": 128}
    together = _run(tmp_path / "together", **sizes)
    apart = _run(tmp_path / "apart", separate_documents=True, **sizes)
    assert together[0] != apart[0] and len(apart) == 4


def test_a_tokenizer_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    given.write_text("{")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        _run(tmp_path / "run", steps=2, tokenizer=str(given))
    other = train_tokenizer(["a text"], 258)
    given.write_text(other.to_str().replace("<|end_of_text|>", "<|other|>"))
    with pytest.raises(ConfigError, match=r"must have an end token, one of .*endoftext"):
        _run(tmp_path / "run", steps=2, tokenizer=str(given))
    other.decoder = decoders.Metaspace()  # the model was trained, and `srm serve` refused it
    given.write_text(other.to_str())
    with pytest.raises(CheckpointError, match="only byte-level BPE tokenizers are supported"):
        _run(tmp_path / "run", steps=2, tokenizer=str(given))


def byte_tokenizer(vocab: dict[str, int], *special: str) -> Tokenizer:
    """A tokenizer of bytes; special tokens that the vocabulary lacks come behind it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab | {character: i for i, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


@pytest.mark.parametrize(
    ("begin", "end", "ids"),
    [("", "<|endoftext|>", (300, 300)), ("<|begin_of_text|>", "<|end_of_text|>", (301, 300))],
    ids=["as GPT-2's", "as Llama's"],
)
def test_tokenizers_of_other_models_were_refused(
    tmp_path: Path, begin: str, end: str, ids: tuple[int, int]
) -> None:
    """Special tokens behind the others, and ids that none has."""
    given, texts = tmp_path / "given.json", tmp_path / "texts.txt"
    last = {end: 300, begin: 301} if begin else {end: 300}
    other = byte_tokenizer(last, *last)
    if begin:
        other.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, ids[0])]
        )
    given.write_text(other.to_str())
    texts.write_text("some words, " * 200)
    _run(tmp_path / "run", steps=1, tokenizer=str(given), texts=(texts,), evaluate_every=0)
    config = read_model(tmp_path / "run").config
    assert (config.bos_token_id, config.eos_token_id) == ids
    assert config.vocab_size == max(ids) + 1
    tokens = np.fromfile(next((tmp_path / "run").glob("tokens*.bin")), "<u2")
    assert tokens[-1] == 300 and (tokens[0] == 301) == bool(begin)
    _run(tmp_path / "problems", steps=1, tokenizer=str(given))


def hugging_face_folder(folder: Path, **described: object) -> Path:
    """A tokenizer whose special tokens have names of its own."""
    folder.mkdir()
    other = byte_tokenizer({}, "<begin>", "<|endoftext|>", "<|im_end|>", "<pad>")  # 256 … 259
    other.post_processor = processors.ByteLevel()
    other.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(described))
    return folder


BOTH = {"eos_token": "<|im_end|>", "bos_token": "<begin>"}


@pytest.mark.parametrize(
    ("described", "ids", "first"),
    [
        ({"eos_token": "<|im_end|>", "pad_token": "<pad>"}, (258, 258), None),
        ({"eos_token": {"content": "<|im_end|>", "lstrip": False}}, (258, 258), None),
        ({**BOTH, "add_bos_token": True}, (256, 258), 256),
        ({**BOTH, "add_bos_token": False}, (258, 258), None),
        ({"eos_token": None}, (257, 257), None),
    ],
    ids=["eos", "as AddedToken", "adds bos", "bos is not added", "by its name"],
)
def test_a_tokenizer_folder_says_which_tokens_end_and_begin(
    tmp_path: Path, described: dict[str, object], ids: tuple[int, int], first: int | None
) -> None:
    folder = hugging_face_folder(tmp_path / "given", **described)
    texts = tmp_path / "texts.txt"
    texts.write_text("some words, " * 200)
    run = {"texts": (texts,), "evaluate_every": 0, "separate_documents": True}
    for _ in range(2):  # the second time it goes on
        _run(tmp_path / "run", steps=2, tokenizer=str(folder), **run)
    _run(tmp_path / "run", steps=3, **run)  # with what the run has
    config = read_model(tmp_path / "run").config
    assert (config.bos_token_id, config.eos_token_id, config.vocab_size) == (*ids, 260)
    tokens = np.fromfile(tmp_path / "run" / "tokens.bin", "<u2")
    assert tokens[-1] == ids[1] and (first is None or tokens[0] == first)
    assert (tokens >= 256).sum() == 1 + (first is not None)
    saved = (tmp_path / "run" / "tokenizer_config.json").read_bytes()
    assert saved == (folder / "tokenizer_config.json").read_bytes()
    _run(tmp_path / "problems", steps=1, tokenizer=str(folder))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"eos_token": "</end>"}, "has the end token '</end>', tokenizer.json not"),
        ({"add_bos_token": True}, "adds a begin token, None, that its tokenizer has not"),
        ({"add_bos_token": True, "bos_token": "<s>"}, "begin token, '<s>', that its tokenizer"),
        ({"eos_token": 3}, r"tokenizer_config\.json: "),
    ],
)
def test_a_tokenizer_folder_that_contradicts_itself_is_refused(
    tmp_path: Path, described: dict[str, object], message: str
) -> None:
    folder = hugging_face_folder(tmp_path / "given", **described)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        _run(tmp_path / "run", steps=1, tokenizer=str(folder))
    assert not (tmp_path / "run" / "tokenizer.json").exists()


@pytest.mark.parametrize("mixer", ["diagonal", "combined", "kernel"])
def test_other_mixers_train_too(tmp_path: Path, mixer: str) -> None:
    shape = {"num_heads": 1, "use_projections": False, "kernel_size": 3}
    losses = _run(tmp_path, steps=30, learning_rate=1e-2, mixer=mixer,
                  **(shape if mixer == "kernel" else {}))  # fmt: skip
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert load_checkpoint(tmp_path).config.mixer == mixer


def test_a_batch_in_parts_is_the_same_batch(tmp_path: Path) -> None:
    """Though its rows are of different lengths."""
    whole = _run(tmp_path / "whole", steps=6, precision="float32")
    parts = _run(tmp_path / "parts", steps=6, precision="float32", micro_batches=3)
    assert parts == pytest.approx(whole, rel=1e-6)


def test_a_loss_that_is_no_number_ends_a_run_and_keeps_its_save(tmp_path: Path) -> None:
    _run(tmp_path, steps=4)
    saved = (tmp_path / "run.pt").read_bytes()
    with pytest.raises(ConfigError, match=r"loss of step \d+ is (nan|inf): lower learning_rate"):
        _run(tmp_path, steps=20, learning_rate=1e18)
    assert (tmp_path / "run.pt").read_bytes() == saved
    config = msgspec.structs.replace(TINY, output=tmp_path, steps=5)
    msgspec.structs.force_setattr(config, "learning_rate", math.inf)  # refused of those who set it
    with pytest.raises(ConfigError, match=r"after step 5 is nan: lower learning_rate"):
        pretrain(config)  # whose last step no loss follows
    assert (tmp_path / "run.pt").read_bytes() == saved


@pytest.mark.parametrize(
    ("shard", "again"),
    [
        *(("false", "false"), ("false", "true")),
        *(pytest.param("true", again, marks=pytest.mark.slow) for again in ("false", "true")),
    ],
)
def test_two_processes_have_the_losses_of_a_single_process(
    texts: Path, tmp_path: Path, shard: str, again: str
) -> None:
    config = msgspec.structs.replace(TINY, texts=(texts,), precision="float32", **ON_TEXTS)
    expected = pretrain(msgspec.structs.replace(config, output=tmp_path / "one"))
    sizes = {**SIZES, **ON_TEXTS, "batch_tokens": 256, "warmup_steps": 2, "max_vocab_size": 400}
    flags = {"texts": texts, "precision": "float32", "threads": 1, "shard": shard}
    flags["checkpoint_activations"] = again
    run_on_two("pretrain", tmp_path / "two", **sizes, **flags)
    assert_same_run(expected, tmp_path / "one", tmp_path / "two")


def test_learning_rate_warms_up_and_decays_to_zero() -> None:
    schedule = Schedule(100, 1.0, warmup_steps=10, weight_decay=0.0, save_every=1)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1 / 90)
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_wsd_stays_until_its_last_share() -> None:
    schedule = Schedule(110, 1.0, 10, 0.0, 1, decline="wsd")
    rates = {at: schedule.rate(at) for at in (0, 10, 90, 91, 100, 109)}
    assert rates == pytest.approx({0: 0.1, 10: 1.0, 90: 1.0, 91: 0.95, 100: 0.5, 109: 0.05})
    by_clock = msgspec.structs.replace(schedule, steps=0, minutes=1.0)
    assert [by_clock.rate_by_clock(99, spent) for spent in (0.1, 0.8, 0.9, 1.0)] == pytest.approx(
        [1.0, 1.0, 0.5, 0.0]
    )
    stays = msgspec.structs.replace(by_clock, decline_share=0.0)
    assert stays.rate_by_clock(99, 1.0) == 1.0


def test_a_branch_of_a_wsd_run_has_the_bits_of_a_short_run(
    texts: Path, tmp_path: Path, stop_at: StopAt
) -> None:
    run = tiny_run(texts, tmp_path / "long", steps=20, decline="wsd", save_every=1)
    with stop_at(7), pytest.raises(KeyboardInterrupt):
        pretrain(run)
    shutil.copytree(run.output, tmp_path / "branch")
    short = msgspec.structs.replace(run, steps=8)
    losses = [
        pretrain(msgspec.structs.replace(short, output=tmp_path / name)).steps
        for name in ("branch", "short")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    models = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("branch", "short"))
    assert next(models) == next(models)


def test_countdown_is_learned_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    """And the run goes on where it stopped."""
    countdown: dict[str, Any] = {"problems": "countdown", "evaluate_every": 20}
    changes = countdown | {"learning_rate": 1e-2, "evaluation_batches": 3, "save_every": 20}
    losses = _run(tmp_path, steps=40, **changes)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert _run(tmp_path, steps=41, **changes)[:40] == losses
    assert not (tmp_path / "chat_template.jinja").exists()
    config, text = read_model(tmp_path).config, Text(tmp_path)
    assert (config.bos_token_id, config.eos_token_id, config.vocab_size) == (1011, 1012, 1014)
    (ids,) = text.encode(["make 64 of 25 3 7 4 :"])
    assert text.decode(ids) == b" make 64 of 25 3 7 4 :"
    with pytest.raises(ConfigError, match="another problems, 'countdown' and not 'words'"):
        _run(tmp_path, steps=42, **{**changes, "problems": "words"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_ctx": 36}, "n_ctx must be at least 37 where problems is countdown, got 36"),
        ({"texts": (Path("a"),)}, "problems must be words where texts is given, got countdown"),
        ({"tokenizer": "a"}, "problems must be words where tokenizer is given, got countdown"),
        ({"problems": "regexes", "n_ctx": 247}, "n_ctx must be at least 248 where problems is reg"),
    ],
)
def test_what_does_not_go_with_countdown_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PretrainConfig(**{"problems": "countdown", **changes})


def test_regexes_are_learned_with_a_tokenizer_of_their_own(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"problems": "regexes", "n_ctx": 248, "learning_rate": 1e-2}
    changes |= {"evaluate_every": 20, "evaluation_batches": 2, "save_every": 20}
    losses = _run(tmp_path, steps=20, **changes)
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert _run(tmp_path, steps=21, **changes)[:20] == losses
    config = read_model(tmp_path).config
    assert (config.bos_token_id, config.eos_token_id, config.vocab_size) == (98, 99, 101)
