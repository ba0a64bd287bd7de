"""`srm train pretrain`: trains a tokenizer and a model from scratch, on texts or on generated word
problems."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor

from srm.engine.kept_model import WEIGHTS
from srm.errors import ConfigError
from srm.files import read_file
from srm.settings import build
from srm.tokenizer_file import DESCRIPTIONS, read_tokenizer
from srm.training.data import IGNORED, CountdownBatches, ProblemBatches, RegexBatches, problem_kinds
from srm.training.instruments.events import check_events
from srm.training.loop import Losses, Run, TrainingBatches
from srm.training.loss_files import write_losses
from srm.training.model import SRM
from srm.training.problems.countdown import Countdown
from srm.training.problems.countdown_tokenizer import countdown_tokenizer
from srm.training.problems.drawn import examples, problems
from srm.training.problems.regex_tokenizer import regex_tokenizer
from srm.training.problems.regexes import write_prompt
from srm.training.processes import process_count, processes
from srm.training.schedule import Schedule
from srm.training.settings import PretrainConfig, select_fixed
from srm.training.text.documents import documents, files
from srm.training.text.mixed_batches import MixedBatches
from srm.training.text.packed_batches import PackedBatches
from srm.training.text.token_file import token_file
from srm.training.text.tokenizer import (
    SpecialIds,
    count_entries,
    special_ids,
    train_tokenizer,
)
from srm.training.text.whole_files import has, write_whole
from srm.training.watch import ShownSamples

TOKENIZER_PROBLEMS = 100_000
EXAMPLES = {
    "countdown": Countdown((11, 49, 18, 74, 14), 958).prompt,
    "regexes": write_prompt(("2024-01-15", "1999-12-31", "2031-11-09")),
}
"""Prompts that a model is shown while it learns."""
OWN_TOKENIZERS = {"countdown": countdown_tokenizer, "regexes": regex_tokenizer}
"""Tokenizers of problems that need no training."""

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


def pretrain(config: PretrainConfig) -> Losses:
    """Train, or resume the run in `config.output`; leaves a model folder there."""
    check_events(config)
    if config.capture and process_count() > 1:
        raise ConfigError(f"capture must be false for {process_count()} processes, got true")
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    with processes(config.device) as own, own.alone_in(config.output):
        if 1 < own.count > config.batch_tokens // config.n_ctx:
            raise ConfigError(
                f"batch_tokens must be at least n_ctx = {config.n_ctx} for each of the {own.count} "
                f"processes, got {config.batch_tokens}"
            )
        with own.first_alone():
            tokenizer = _tokenizer(config, own.is_first)
            ids = special_ids(tokenizer, config.output)
            batches, evaluation, source = _batches(config, tokenizer, ids)
        model = SRM(config.model(count_entries(tokenizer), ids))
        if config.separate_documents or config.problems == "regexes":
            model.separator = ids.begin
        schedule = build(Schedule, msgspec.structs.asdict(config))
        settings = select_fixed(config) | {"evaluation_share": config.held_out}
        run = Run(model, schedule, config.output, own, {"texts": source}, settings, config.output)
        prompt, shown = _prompt(config, tokenizer, ids), (config.save_every, config.steps)
        samples = ShownSamples(run, tokenizer, prompt, config.n_ctx, *shown)
        run.train(batches, evaluation, (samples,))
        if own.is_first:
            are_words = not config.texts and config.problems == "words"
            kinds = problem_kinds(len(run.losses.steps)) if are_words else {}
            write_losses(run.losses, config.output, kinds)
    return run.losses


def _tokenizer(config: PretrainConfig, is_first: bool) -> Tokenizer:
    """Return the run's tokenizer; a new run takes the one asked for, or the first process trains
    one.

    Raises ConfigError if a new run's folder already has a different one.
    """
    path, saved = config.output / "tokenizer.json", config.output / "run.pt"
    has_model = saved.exists() or (config.output / WEIGHTS).exists()
    if saved.exists() and not path.exists():
        raise ConfigError(f"output: {saved} has no {path.name} beside it: put it back")
    if config.tokenizer:
        wanted, described = _given_tokenizer(Path(config.tokenizer))
        content = wanted.to_str(pretty=True).encode()
        if has_model and not has(path, content):
            raise ConfigError(
                f"tokenizer: {config.output} has a {'run' if saved.exists() else 'model'} of "
                f"another one than {config.tokenizer}: leave it out or change output"
            )
        if is_first:
            for name, written in {path.name: content, **described}.items():
                write_whole(config.output / name, written)
    elif is_first and not saved.exists() and config.problems in OWN_TOKENIZERS:
        content = OWN_TOKENIZERS[config.problems]().to_str(pretty=True).encode()
        if has_model and not has(path, content):
            raise ConfigError(
                f"tokenizer: {config.output} has a model of another one than that of "
                f"{config.problems}: change output"
            )
        write_whole(path, content)
    elif is_first and not saved.exists():
        if config.texts:
            texts = documents(config.texts, config.suffix, config.text_member)
        else:
            sample = islice(examples(config.seed), TOKENIZER_PROBLEMS)
            texts = (prompt + solution for prompt, solution in sample)
        trained = train_tokenizer(texts, config.max_vocab_size).to_str(pretty=True).encode()
        if path.is_file() and not has(path, trained):
            raise ConfigError(
                f"tokenizer: {path} is another one than these texts and max_vocab_size = "
                f"{config.max_vocab_size} make: give it as tokenizer, remove it or change output"
            )
        if not config.texts:
            write_whole(config.output / "chat_template.jinja", CHAT_TEMPLATE.encode())
        write_whole(path, trained)
    return read_tokenizer(path)


def _given_tokenizer(given: Path) -> tuple[Tokenizer, dict[str, bytes]]:
    """Return a tokenizer from a file or a folder, and by name the folder's files that describe
    it."""
    if not given.is_dir():
        tokenizer = read_tokenizer(given)
        special_ids(tokenizer)  # before any work
        return tokenizer, {}
    tokenizer = read_tokenizer(given / "tokenizer.json")
    special_ids(tokenizer, given)
    files = [path for name in DESCRIPTIONS if (path := given / name).is_file()]
    return tokenizer, {path.name: read_file(path) for path in files}


def _prompt(config: PretrainConfig, tokenizer: Tokenizer, ids: SpecialIds) -> list[int]:
    """Return what the model is shown to go on with: a problem, or the beginning of a text."""
    if config.texts:
        return [ids.begin]
    shown = EXAMPLES.get(config.problems) or next(problems("held-out", config.seed)).prompt
    prompt: list[int] = tokenizer.encode(shown).ids
    return prompt


class _WithoutTarget:
    """Batches whose loss leaves out a token."""

    def __init__(self, batches: TrainingBatches, token: int) -> None:
        self._batches, self._token = batches, token

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._batches[index]
        return inputs, targets.masked_fill(targets == self._token, IGNORED)


def _batches(
    config: PretrainConfig, tokenizer: Tokenizer, ids: SpecialIds
) -> tuple[TrainingBatches, list[tuple[Tensor, Tensor]], str]:
    """Return the batches for training, those for evaluation, and a description of their source."""
    batches: TrainingBatches
    held_out: TrainingBatches | None = None
    count, source = 0, "problems"
    if config.texts:
        batches, others, source = _text_batches(config, tokenizer, ids.end)
        if others is not None:
            held_out, count = others, min(config.evaluation_batches, len(others))
    elif config.problems != "words":
        tasks: CountdownBatches | RegexBatches
        if config.problems == "countdown":
            tasks = CountdownBatches(config.seed, config.batch_tokens, "direct")
        else:
            tasks = RegexBatches(config.seed, config.batch_tokens, config.n_ctx)
        return tasks, tasks.evaluation(config.evaluation_batches), source
    else:
        sizes = config.batch_tokens, config.n_ctx
        batches = ProblemBatches(tokenizer, ids.end, config.seed, *sizes)
    # The end of one document does not say how the next begins. Where one token is both, it is the
    # end that is learned.
    if config.separate_documents and ids.begin != ids.end:
        batches = _WithoutTarget(batches, ids.begin)
        held_out = None if held_out is None else _WithoutTarget(held_out, ids.begin)
    evaluation = [] if held_out is None else [held_out[index] for index in range(count)]
    return batches, evaluation, source


TextBatches = PackedBatches | MixedBatches


def _text_batches(
    config: PretrainConfig, tokenizer: Tokenizer, end: int
) -> tuple[TextBatches, TextBatches | None, str]:
    """Return batches of the texts, batches of what is held out of them, and a hash of the texts
    and the tokenizer."""
    rows, weights = max(1, config.batch_tokens // config.n_ctx), config.text_weights
    if not weights:
        return _batches_of(config, tokenizer, end, config.texts, "tokens", rows)
    parts = [
        _batches_of(config, tokenizer, end, (texts,), f"tokens-{number}", 1)
        for number, texts in enumerate(config.texts)
    ]
    training, held_out, sources = zip(*parts, strict=True)
    others = [batches for batches in held_out if batches is not None]
    return (
        MixedBatches(training, weights, rows, config.seed),
        MixedBatches(others, weights, rows, config.seed) if others else None,
        hashlib.sha256("".join(sources).encode()).hexdigest(),
    )


def _batches_of(
    config: PretrainConfig,
    tokenizer: Tokenizer,
    end: int,
    texts: tuple[Path, ...],
    name: str,
    rows: int,
) -> tuple[PackedBatches, PackedBatches | None, str]:
    """Do so for some texts, whose tokens are kept under that name."""
    paths = files(texts, config.suffix)
    sizes = "".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n" for path in paths)
    described = f"{sizes}{config.text_member}\n{tokenizer.to_str()}"
    source = hashlib.sha256(described.encode(errors="surrogateescape")).hexdigest()
    _, ids = token_file(
        config.output / name,
        source,
        lambda: documents(paths, member=config.text_member),
        tokenizer,
        end,
    )
    shape = rows, config.n_ctx, config.seed, end if config.windows == "documents" else None
    trained = len(ids) - int(len(ids) * config.held_out)
    batches, held_out = PackedBatches(ids[:trained], *shape), None
    if config.held_out:
        name = f"texts held out (evaluation_share = {config.held_out:g})"
        held_out = PackedBatches(ids[trained:], *shape, name=name)
    return batches, held_out, source
