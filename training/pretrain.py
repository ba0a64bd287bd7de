"""`srm train pretrain`: trains a tokenizer and a model from scratch, on texts or on generated word
problems."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor

from srm.engine.config import Mixer, ModelConfig
from srm.engine.errors import ConfigError
from srm.engine.settings import build
from srm.engine.tokenizer_file import read_byte_level, read_tokenizer
from srm.training.checkpoint import save_model
from srm.training.data import ProblemBatches, problem_kinds
from srm.training.events import check_events
from srm.training.loop import Losses, Run, Schedule, TrainingBatches
from srm.training.loss_files import write_losses
from srm.training.model import SRM
from srm.training.precision import Precision
from srm.training.problems.drawn import examples
from srm.training.processes import processes
from srm.training.settings import check_numbers, select_fixed
from srm.training.text.documents import documents, files
from srm.training.text.packed_batches import PackedBatches
from srm.training.text.token_file import token_file
from srm.training.text.tokenizer import (
    MIN_VOCAB_SIZE,
    OWN_IDS,
    SpecialIds,
    count_entries,
    special_ids,
    train_tokenizer,
)
from srm.training.text.whole_files import write_whole

TOKENIZER_PROBLEMS = 100_000

CHAT_TEMPLATE = r"""{%- set asked = namespace(system='', is_new=false, is_open=false) -%}
{%- for message in messages -%}
{%- set content = message.content | trim -%}
{%- if message.role not in ('system', 'user', 'assistant') or message.tool_calls -%}
{{- raise_exception('this model knows questions and answers, no messages of '
    ~ message.role ~ (' with tool calls' if message.tool_calls else '')) -}}
{%- elif message.role == 'system' and asked.is_open -%}
{{- raise_exception('a message of system between a question and its answer') -}}
{%- elif message.role == 'system' -%}
{%- set asked.system = ((asked.system if asked.is_new else '') ~ ' ' ~ content) | trim -%}
{%- set asked.is_new = true -%}
{%- elif message.role == 'user' -%}
{%- if not content -%}
{{- raise_exception('a question has no text') -}}
{%- endif -%}
{{- ' ' if asked.is_open else
    '<|begin_of_text|>' ~ ('System: ' ~ asked.system ~ '\n' if asked.system else '')
    ~ 'Question: ' -}}
{{- content -}}
{%- set asked.is_new = false -%}
{%- set asked.is_open = true -%}
{%- elif asked.is_open -%}
{{- '\nAnswer: ' ~ content ~ '<|end_of_text|>' -}}
{%- set asked.is_open = false -%}
{%- else -%}
{{- raise_exception('an answer has no question before it') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not asked.is_open -%}
{{- raise_exception('the last message is no question') -}}
{%- elif add_generation_prompt -%}
{{- '\nAnswer:' -}}
{%- endif -%}
"""
"""Formats chats as the training problems: a begin token, the system message if there is one, a
question, its answer, an end token."""


class PretrainConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm train pretrain`; the defaults are those of the bundled demo model."""

    output: Path = Path("runs/demo")
    """Folder of the run and of the model; an existing run is resumed."""
    texts: tuple[Path, ...] = ()
    """Files and folders of text: .jsonl, .parquet; any other file is one text. Empty: generated
    word problems."""
    suffix: str = ""
    """End of the names of the files that are read in folders of `texts`; empty: all."""
    text_member: str = "text"
    """Name of the .jsonl member or .parquet column that has the text."""
    tokenizer: str = ""
    """Path of a tokenizer.json, also of another model; empty: a tokenizer is trained on the
    texts."""
    evaluation_share: float = 0.01
    """Fraction of the texts' tokens, taken from the end, that is kept for evaluation."""
    evaluate_every: int = 200
    """Updates between two evaluations on the held-out texts; 0: none."""
    evaluation_batches: int = 16
    """Most batches of one evaluation."""
    steps: int = 5_000
    """Total updates, including those that a resumed run has made."""
    batch_tokens: int = 4_096
    """Approximate tokens of one update, all processes together."""
    micro_batches: int = 1
    """Parts into which a batch is split, computed one after the other to save memory."""
    learning_rate: float = 1.5e-3
    """Peak learning rate: reached after the warm-up, then falling to 0."""
    warmup_steps: int = 200
    """Updates over which the learning rate rises."""
    decline: Literal["linear", "cosine"] = "linear"
    """How the learning rate falls after the warm-up."""
    weight_decay: float = 0.01
    """Weight decay of the AdamW optimizer."""
    clip_norm: float = 1.0
    """Largest norm of all gradients together; larger gradients are scaled down to it."""
    save_every: int = 100
    """Updates between two saves of the run."""
    precision: Precision = "auto"
    """Precision of the matrix products in training, token mixing included; weights and optimizer
    stay float32. auto: bfloat16, or float32 on a processor without instructions for it."""
    compile: bool = False
    """Whether `torch.compile` compiles the model first."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device that trains the model."""
    shard: bool = False
    """Whether weights and optimizer state are divided among the processes (FSDP) instead of copied
    to each."""
    tensorboard: bool = False
    """Whether losses are also written for TensorBoard, into the folder `tensorboard` of
    `output`."""
    seed: int = 0
    """Seed of the weights, the problems and the order of texts."""
    d_model: int = 256
    """Width of the model; num_heads must divide it."""
    num_layers: int = 8
    """Number of blocks of the model."""
    num_heads: int = 4
    """Number of heads of a token mixer; some mixers need an even number."""
    n_ctx: int = 512
    """Context of the model, in tokens."""
    mixer: Mixer = "mixed"
    """Token mixer of the blocks."""
    use_projections: bool = True
    """Whether a linear projection stands before the heads of a token mixer, and another one behind
    them."""
    decay: bool = True
    """Whether states decay, each head at a learned rate."""
    kernel_size: int = 1
    """Number of neighbouring channels that mixer = kernel mixes."""
    max_vocab_size: int = 2_048
    """Most entries of a trained tokenizer, which always has every byte and two special tokens."""
    threads: int = 0
    """CPU threads; 0: torch chooses."""

    def __post_init__(self) -> None:
        least = "steps batch_tokens micro_batches warmup_steps max_vocab_size evaluation_batches"
        check_numbers(self, dict.fromkeys(least.split(), 1))
        if not 0 <= self.evaluation_share < 1:
            raise ValueError(f"evaluation_share must lie in [0, 1), got {self.evaluation_share}")
        self.model(MIN_VOCAB_SIZE)  # reports an invalid shape before any work

    @property
    def held_out(self) -> float:
        """Fraction of the texts' tokens that is held out from training."""
        return self.evaluation_share if self.texts and self.evaluate_every else 0.0

    def model(self, vocab_size: int, ids: SpecialIds = OWN_IDS) -> ModelConfig:
        """Return the model's configuration. Raises ValueError for an invalid shape."""
        return ModelConfig(
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            n_ctx=self.n_ctx,
            vocab_size=vocab_size,
            mixer=self.mixer,
            use_projections=self.use_projections,
            decay=self.decay,
            kernel_size=self.kernel_size,
            decay_constant=max(1, self.n_ctx // 512),
            bos_token_id=ids.begin,
            eos_token_id=ids.end,
        )


def pretrain(config: PretrainConfig) -> Losses:
    """Train, or resume the run in `config.output`; leaves a model folder there."""
    check_events(config.tensorboard)
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    with processes(config.device) as own, own.alone_in(config.output):
        with own.first_alone():
            tokenizer = _tokenizer(config, own.is_first)
            batches, evaluation, source = _batches(config, tokenizer)
        model = SRM(config.model(count_entries(tokenizer), special_ids(tokenizer)))
        schedule = build(Schedule, msgspec.structs.asdict(config))
        settings = select_fixed(config) | {"evaluation_share": config.held_out}
        run = Run(model, schedule, config.output, own, {"texts": source}, settings)
        run.train(batches, evaluation)
        weights = run.weights()
        if own.is_first:
            save_model(model.config, weights, config.output)
            kinds = {} if config.texts else problem_kinds(len(run.losses.steps))
            write_losses(run.losses, config.output, kinds)
    return run.losses


def _tokenizer(config: PretrainConfig, is_first: bool) -> Tokenizer:
    """Return the run's tokenizer; a new run takes the one asked for, or the first process trains
    one.

    Raises ConfigError if a new run's folder already has a different one.
    """
    path, saved = config.output / "tokenizer.json", config.output / "run.pt"
    if config.tokenizer:
        wanted = read_byte_level(Path(config.tokenizer))
        special_ids(wanted)  # before any work
        content = wanted.to_str(pretty=True).encode()
        if saved.exists() and path.read_bytes() != content:
            raise ConfigError(
                f"tokenizer: {config.output} has a run of another one than {config.tokenizer}: "
                "leave it out or change output"
            )
        write_whole(path, content)
    elif is_first and not (path.exists() and saved.exists()):
        if config.texts:
            texts = documents(config.texts, config.suffix, config.text_member)
        else:
            sample = islice(examples(config.seed), TOKENIZER_PROBLEMS)
            texts = (prompt + solution for prompt, solution in sample)
            write_whole(config.output / "chat_template.jinja", CHAT_TEMPLATE.encode())
        trained = train_tokenizer(texts, config.max_vocab_size).to_str(pretty=True).encode()
        if path.is_file() and path.read_bytes() != trained:
            raise ConfigError(
                f"tokenizer: {path} is another one than these texts and max_vocab_size = "
                f"{config.max_vocab_size} make: give it as tokenizer, remove it or change output"
            )
        write_whole(path, trained)
    return read_tokenizer(path)


def _batches(
    config: PretrainConfig, tokenizer: Tokenizer
) -> tuple[TrainingBatches, list[tuple[Tensor, Tensor]], str]:
    """Return the batches for training, those for evaluation, and a description of their source."""
    if not config.texts:
        made = ProblemBatches(tokenizer, config.seed, config.batch_tokens, config.n_ctx)
        return made, [], "problems"
    paths = files(config.texts, config.suffix)
    sizes = "".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n" for path in paths)
    described = f"{sizes}{config.text_member}\n{tokenizer.to_str()}"
    source = hashlib.sha256(described.encode()).hexdigest()
    _, ids = token_file(
        config.output / "tokens",
        source,
        lambda: documents(paths, member=config.text_member),
        tokenizer,
        special_ids(tokenizer).end,
    )
    rows = max(1, config.batch_tokens // config.n_ctx)
    held_out = int(len(ids) * config.held_out)
    batches = PackedBatches(ids[: len(ids) - held_out], rows, config.n_ctx, config.seed)
    if not held_out:
        return batches, [], source
    others = PackedBatches(ids[len(ids) - held_out :], rows, config.n_ctx, config.seed)
    smallest = min(config.evaluation_batches, len(others))
    return batches, [others[index] for index in range(smallest)], source
