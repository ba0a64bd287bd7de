"""`transformers` loads, runs, trains and saves our models by the classes beside them.

`CLIENTS_VENV=FOLDER pytest -m clients tests/clients/trainers/test_transformers.py` runs this with
any version that is installed there.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional as F

from research.experiments.harness.llama_folder import save_llama
from research.experiments.tasks import large_puzzles
from srm.engine.config import DEMO_MODEL, Mixer, ModelConfig
from srm.engine.weights.checkpoint import read_model
from srm.engine.weights.convert import convert
from srm.engine.weights.delta import write_delta
from srm.engine.weights.random_model import write_random_model
from srm.engine.weights.tensors import is_scalar
from srm.training.baselines.transformer import Transformer, TransformerShape
from srm.training.checkpoint import load_model
from srm.training.model import SRM
from srm.training.problems.countdown_tokenizer import countdown_tokenizer
from srm.training.problems.drawn import problems
from tests.clients.conftest import Noted, Printed
from tests.kit.models.forms import CONFIGS, LENGTHS, TOLERANCE
from tests.kit.serving import ROOT, Server, free_port

SMALL = ModelConfig(d_model=16, num_layers=2, num_heads=4, n_ctx=32, vocab_size=23)
STEPS = 20


def for_transformers(model: Path, folder: Path) -> Path:
    convert(model, None, folder, form="transformers")
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "small", SMALL)
    return for_transformers(tmp_path / "small", tmp_path / "model")


def test_a_saved_transformer_is_a_llama(tmp_path: Path, printed: Printed) -> None:
    torch.manual_seed(0)
    vocabulary = large_puzzles.VOCABULARY
    model = Transformer(TransformerShape(64, 3, 4, 96, len(vocabulary)))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms begin as ones, which nothing could take for others
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    ends = large_puzzles.BEGIN, large_puzzles.END
    tokenizer = countdown_tokenizer(vocabulary)
    save_llama(model, tmp_path / "llama", 70, tokenizer, ends)
    ids = torch.randint(0, len(vocabulary), (3, 70))
    with torch.no_grad():
        logits = model(ids).numpy()
    expected = {"ids": ids.numpy(), "logits": logits}
    save_file(expected, tmp_path / "llama" / "expected.safetensors")
    error, kind, tokens = printed("transformers_llama", str(tmp_path / "llama"))
    assert error < 1e-5 and kind == "LlamaForCausalLM"
    assert tokens == large_puzzles.parse_ids("make 6 4 of 25 3 :")


def test_every_variant_is_the_same_function_however_its_rows_are_padded(
    tmp_path: Path, printed: Printed
) -> None:
    for name, config in (CONFIGS | {"mixed_512": LENGTHS["mixed_512"]}).items():
        write_random_model(tmp_path / "ours" / name, config)
        folder = for_transformers(tmp_path / "ours" / name, tmp_path / "theirs" / name)
        rng = np.random.default_rng(1)
        ids = rng.integers(0, config.vocab_size, (3, config.n_ctx))
        with torch.no_grad():
            logits = load_model(folder).double()(torch.from_numpy(ids)).numpy()
        expected = {"ids": ids, "logits": logits.astype(np.float32)}
        for weight, value in SRM(config).state_dict().items():
            if is_scalar(weight) and "diag" not in weight:
                expected[f"first {weight}"] = value.numpy()
            elif value.numel() > 400:
                expected[f"first {weight}"] = value.std().numpy()
        save_file(expected, folder / "expected.safetensors")
    measured = printed("transformers_forms", str(tmp_path / "theirs"))
    assert measured.keys() == CONFIGS.keys() | {"mixed_512"}
    for name, errors in measured.items():
        assert 1e-5 < errors.pop("bfloat16") < 0.5, name
        assert errors.pop("first deviations") < 0.3, name
        assert len(errors) == 11 and max(errors.values()) <= TOLERANCE, (name, errors)


def greedy(prompt: list[int]) -> list[int]:
    """What our recurrent form continues a prompt with, up to the end."""
    model = load_model(DEMO_MODEL)
    state, ids = model.empty_state(1), list(prompt)
    with torch.no_grad():
        for position in range(len(prompt) + 11):
            logits, state = model.step(torch.tensor([ids[position]]), state, position)
            if position >= len(prompt) - 1:
                ids.append(int(logits.argmax()))
                if ids[-1] == model.config.eos_token_id:
                    break
    return ids[len(prompt) :]


def test_generation_is_that_of_the_recurrent_form(tmp_path: Path, printed: Printed) -> None:
    prompts = [problem.prompt for problem in islice(problems("held-out", 5), 4)]
    prompts[1] = "Question:"
    folder = for_transformers(DEMO_MODEL, tmp_path / "demo")
    fields = [
        {"mixer": mixer, "d_model": 12, "num_heads": heads, "use_projections": is_projected}
        | {"decay": decay, "kernel_size": size, "combined_row_quirk": quirk}
        for mixer, heads, is_projected, decay, size, quirk in product(
            get_args(Mixer), (1, 2, 3, 8), (True, False), (True, False), (1, 2), (True, False)
        )
    ]
    fields += [{name: 0} for name in ("d_model", "num_layers", "num_heads", "n_ctx")]
    configs = tmp_path / "configs.json"
    configs.write_text(json.dumps([*fields, {"mixer": "serial"}, {"tie_word_embeddings": True}]))
    arguments = str(folder), json.dumps(prompts), str(ROOT), str(configs)
    reply = printed("transformers_generate", *arguments)
    expected = [greedy(ids) for ids in reply["token_ids"]]
    assert len({len(ids) for ids in reply["token_ids"]}) > 1 and reply["text"] == prompts[0]
    assert all(ids[0] == 0 for ids in reply["token_ids"])
    assert reply["alone"] == expected
    width = max(map(len, expected))
    filled = [row + [1] * (width - len(row)) for row in expected]
    assert reply["left"] == reply["right"] == filled
    assert reply["from a state"] == [expected[0]] * 2
    assert reply["beams"] == reply["beams without states"]
    assert reply["samples"] == reply["samples without states"]
    assert len({tuple(row) for row in reply["samples"]}) > 2
    assert reply["installed"]
    check_refusals(reply["refusals"])
    for given, message in zip(fields, reply["configs"], strict=False):
        assert bool(message) == (not is_model(given)), (given, message)
    assert "mixer must be one of column" in reply["configs"][-2]
    assert "tie_word_embeddings must be false" in reply["configs"][-1]
    model = SRM(ModelConfig(d_model=256, num_layers=1, num_heads=4, n_ctx=512, vocab_size=2048))
    drawn = {name: value.detach() for name, value in model.named_parameters()}
    assert reply["drawn"].keys() == drawn.keys()
    for name, (mean, deviation) in reply["drawn"].items():
        assert deviation == pytest.approx(float(drawn[name].std(unbiased=False)), rel=0.2), name
        if name.endswith("decay_value"):
            assert mean == pytest.approx(float(drawn[name].mean()))


def is_model(fields: dict[str, Any]) -> bool:
    sizes = {"d_model": 12, "num_layers": 1, "num_heads": 4, "n_ctx": 8, "vocab_size": 9}
    try:
        ModelConfig(**sizes | fields)
    except ValueError:
        return False
    return True


def check_refusals(refusals: dict[str, str]) -> None:
    for name, message in {
        "length": "a sequence of 513 tokens is longer than n_ctx = 512",
        "length of a state": "a sequence of 513 tokens is longer than n_ctx = 512",
        "mask": "attention_mask must be 0 or 1",
        "mask of four dimensions": "attention_mask must be [1, 8], got [1, 1, 1, 8]",
        "no token": "attention_mask leaves no token",
        "positions": "position_ids must count the tokens of each sequence from 0 on",
        "packed with a state": "position_ids must count",
        "rows that go on": "position_ids must count",
        "seq_idx": "the model reads no seq_idx",
        "another cache": "must be an SRMCache, got a object",
        "other rows": "is of 2 sequences, input_ids of 1",
        "no token of a row": "attention_mask leaves a sequence of the cache no token",
    }.items():
        assert message in refusals.pop(name)
    assert not refusals


def test_twenty_steps_of_trainer_are_those_of_a_plain_loop(
    small: Path, tmp_path: Path, printed: Printed
) -> None:
    ids = np.random.default_rng(2).integers(2, SMALL.vocab_size, (STEPS, 4, SMALL.n_ctx))
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    output = tmp_path / "saved"
    reply = printed(
        "transformers_train", str(small), str(tmp_path / "ids.safetensors"), str(output)
    )
    model, losses = load_model(small), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for batch in torch.from_numpy(ids):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert reply["trainer"] == pytest.approx(losses, abs=2e-4)  # which it rounds to four digits
    assert reply["checkpointed"] == pytest.approx(losses, abs=2e-4)
    trained = {name: value.detach().numpy() for name, value in model.named_parameters()}
    for name in ("trainer", "checkpointed"):
        saved = read_model(output / name)
        assert saved.config == SMALL
        assert saved.tensors.keys() == trained.keys()
        for tensor, values in saved.tensors.items():
            assert np.abs(values - trained[tensor]).mean() < 1e-4, tensor
    check_saved(small, output, reply["dtypes"])
    with torch.no_grad():
        plain, rows = load_model(small), torch.from_numpy(ids[0, :2])
        counts = torch.tensor([SMALL.n_ctx - 1, 4.0])
        each = torch.stack([loss_of(plain, rows[:1]), loss_of(plain, rows[1:, :5])])
        expected = float((each * counts).sum() / counts.sum())
    assert reply["losses"] == pytest.approx({"left": expected, "packed": expected}, rel=1e-5)


def loss_of(model: SRM, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def check_saved(model: Path, output: Path, dtypes: dict[str, str]) -> None:
    """Shards of 8 KB are the tensors that were loaded; a bfloat16 model keeps its scalars exact."""
    original = load_file(model / "model.safetensors")
    assert len(list((output / "shards").glob("model-*.safetensors"))) > 2
    assert {path.name for path in model.glob("*.py")} <= {
        path.name for path in (output / "shards").iterdir()
    }
    shards, half = read_model(output / "shards"), read_model(output / "half")
    assert shards.config == half.config == SMALL
    assert shards.tensors.keys() == half.tensors.keys() == original.keys()
    for name, values in original.items():
        assert np.array_equal(shards.tensors[name], values)
        exact = "float32" if is_scalar(name) else "bfloat16"
        assert dtypes[name] == f"torch.{exact}", name
        assert half.dtypes[name] == {"float32": "F32", "bfloat16": "BF16"}[exact]
        rounded = torch.from_numpy(values).to(getattr(torch, exact)).float().numpy()
        assert np.array_equal(half.tensors[name], rounded)


def test_a_lora_of_peft_is_merged_and_served(
    tmp_path: Path, printed: Printed, noted: Noted
) -> None:
    """By a change of weights to the folder, by a delta of it, and by a server that is started."""
    prompts = [problem.prompt for problem in islice(problems("held-out", 5), 4)]
    folder, merged, delta = (tmp_path / name for name in ("demo", "merged", "delta"))
    for_transformers(DEMO_MODEL, folder)
    reply = printed("transformers_lora", str(folder), json.dumps(prompts), str(merged))
    assert reply["losses"][1] < reply["losses"][0]
    assert reply["adapted"] == reply["merged"] != reply["before"]
    expected = [row[: row.index(1)] if 1 in row else row for row in reply["merged"]]
    served = {name: value.detach() for name, value in load_model(folder).named_parameters()}
    trained = read_model(merged)
    changed = {
        name for name, value in trained.tensors.items() if not np.array_equal(value, served[name])
    }
    assert {name.split(".")[2] for name in changed} == {
        *("channel_mixing_layer", "token_mixing_layer"),
    }
    write_delta(folder, merged, delta)
    flags = ("--num-slots=64", f"--admin-port={free_port()}")
    for model, change in ((folder, merged), (folder, delta), (merged, None)):
        with Server(model, *flags, engine_module="srm.engine", start_s=600) as server:
            if change is not None:
                changing = server.admin.post("/v1/admin/weights", json={"path": str(change)})
                assert changing.status_code == 200, changing.text
                assert changing.json()["fingerprint"] == trained.fingerprint
            body = {"prompt": reply["token_ids"], "max_tokens": 16, "temperature": 0}
            made = server.post(**body, return_token_ids=True).json()
        sampled = [choice["token_ids"] for choice in made["choices"]]
        assert [ids[:-1] if ids[-1] == 1 else ids for ids in sampled] == expected
        assert made["system_fingerprint"] == trained.fingerprint
    noted("peft", "`get_peft_model(all-linear)`, `merge_and_unload`; its folder served")
