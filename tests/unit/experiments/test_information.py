"""A decoder tells tokens from one embedding of an encoder, trained with it or not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from research.experiments import information
from research.experiments.harness.corpus import Corpus
from research.experiments.harness.models import SRMS, make_variant
from research.experiments.harness.runner import fit
from srm.training.model import LanguageModel
from tests.unit.experiments.conftest import Experiment

SIZES = (16, 1, 8, 12)
"""Width, layers, tokens and ids."""
KINDS = ["mixed decay", "Mamba 2", "masked mixer", "Transformer"]


@pytest.mark.usefixtures("library")
def test_all_cases_are_trained_and_shown(run_experiment: Experiment) -> None:
    record, text, picture = run_experiment("information", encoder_steps=1)
    *cases, alone = record["results"]
    assert (tuple(cases), alone) == (information.CASES, information.UNIGRAM)
    entries = set()
    for case in cases:
        results = record["results"][case]
        has_learned = case.startswith("retention") and not case.endswith("untrained")
        for result in results:
            assert ("encoder_loss" in result) == has_learned
            entries.add(round(math.exp(result["loss"] / (1 - result["ratio"]))))
    (vocab_size,) = entries  # of the tokenizer, which finds few merges in so little text
    assert 258 < vocab_size <= 300
    assert "<!-- capacity masked mixer -->" in picture
    assert "of 21 pairs of cases" in text and "of 6 pairs of cases" in text


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("is_frozen", [True, False])
def test_only_a_trained_encoder_changes(variant: str, is_frozen: bool) -> None:
    torch.manual_seed(0)
    encoder = make_variant(variant, *SIZES)
    before = {name: value.clone() for name, value in encoder.mixer_blocks.state_dict().items()}

    class Ids:
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            ids = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(index))
            return ids, ids

    def make() -> LanguageModel:
        return information.Autoencoder(
            encoder, make_variant(variant, *SIZES), 16, is_frozen=is_frozen
        )

    fit(make, information.Repeated(Ids()), seed=0, steps=2, learning_rate=0.1)
    for name, value in encoder.mixer_blocks.state_dict().items():
        is_matrix = name.endswith("weight") and value.ndim == 2 and "token_mixing" not in name
        if is_frozen or is_matrix:
            assert torch.equal(value, before[name]) == is_frozen, name


@pytest.mark.parametrize("variant", [*SRMS, *KINDS[1:]])
@pytest.mark.parametrize(("is_frozen", "unseen"), [(True, 1), (False, 0)])
def test_the_embedding_is_of_one_position(variant: str, is_frozen: bool, unseen: int) -> None:
    """The last position but one has seen all tokens but the last."""
    torch.manual_seed(0)
    model = information.Autoencoder(
        make_variant(variant, *SIZES), make_variant(variant, *SIZES), 16, is_frozen=is_frozen
    )
    ids = torch.arange(8)[None]
    first = model.embedding(ids)
    assert first.shape == (1, 16) and model(ids).shape == (1, 8, 12)
    for position in range(8):
        other = ids.clone()
        other[0, position] = 11
        is_seen = not torch.equal(model.embedding(other), first)
        assert is_seen == (position < 8 - unseen), position


def test_windows_go_round() -> None:
    embedding = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert information.windows(embedding, 5).tolist() == [[[0, 1], [1, 2], [2, 3], [3, 0], [0, 1]]]


def test_a_decoder_sees_nothing_but_the_embedding() -> None:
    """Tokens whose embedding is the same have the same logits."""
    torch.manual_seed(0)
    model = information.Autoencoder(
        make_variant("mixed", *SIZES), make_variant("mixed", *SIZES), 16, is_frozen=True
    )
    ids = torch.arange(8)[None]
    other = ids.clone()
    other[0, -1] = 11  # the frozen encoder's embedding is before it
    assert torch.equal(model(ids), model(other))


def test_the_page_compares_trained_and_untrained_encoders() -> None:
    losses = {
        case: [4.0 - 0.5 * case.endswith("untrained") + noise for noise in (0.0, 0.1)]
        for case in information.CASES
    }
    assert information.trained_beside_untrained(losses, "mixed decay").endswith(
        "by +0.500 nats per token, in the paper by +0.064: the same direction."
    )
    assert information.trained_beside_untrained(losses, "Mamba 2").endswith(
        "by -0.251: another direction."
    )
    results = {
        case: [{"loss": item, "ratio": 0.25, "processor_seconds": 3.0} for item in loss]
        for case, loss in losses.items()
    }
    results[information.UNIGRAM] = [{"loss": 4.5}]
    text = "\n".join(information.page(information.Settings(), results))
    assert "| Mamba 2 untrained | 3.550 ± 0.071 | 7.290 | 0.250 ± 0.000 | 0.193 | 3 |" in text
    assert "| Transformer | 4.050 ± 0.071 | – | 0.250 ± 0.000 | – | 3 |" in text
    assert set(information.PAPER) <= set(information.CASES) and "has a loss of 4.500." in text


def test_frequencies_are_of_the_training_text() -> None:
    training, held_out = np.array([0, 0, 1], np.uint16), np.array([1, 2], np.uint16)
    corpus = Corpus(training, held_out, vocab_size=3, sha256="")
    assert math.isclose(information.unigram_loss(corpus), -(math.log(2 / 6) + math.log(1 / 6)) / 2)
