"""ModelConfig (what a checkpoint is) and EngineConfig (how it is served).

Read by `srm.settings`; the string under a field is its line in `--help`.
"""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from srm.engine.messages import MAX_LOGPROBS
from srm.errors import UNDECODABLE, CheckpointError, ConfigError, in_words
from srm.files import read_file
from srm.logs import LogFormat, LogLevel

DEMO_MODEL = Path(__file__).resolve().parents[1] / "models" / "demo"
"""The bundled checkpoint; the same place in a source tree and in an installed package."""
GRPO_MODEL = DEMO_MODEL.with_name("demo-grpo")
"""Other weights for the bundled model: what `srm train grpo` made of them."""
COUNTDOWN_MODEL = DEMO_MODEL.with_name("countdown")
"""A bundled model that solves puzzles in one of many samples."""
REGEX_MODEL = DEMO_MODEL.with_name("regex")
"""A bundled model that writes a regex from examples in one of many samples."""
_BUNDLED_MODELS = (DEMO_MODEL, GRPO_MODEL, REGEX_MODEL, COUNTDOWN_MODEL)
_BUNDLED = {Path(model.name): model for model in _BUNDLED_MODELS}
BUNDLED_NAMES = ", ".join(model.name for model in _BUNDLED_MODELS)


def find_model(path: Path) -> Path:
    """Return the folder of a model: of a bundled one by its name alone, unless there is a folder of
    that name here."""
    bundled = _BUNDLED.get(path)
    return path if bundled is None or path.exists() else bundled


def check_model_folder(folder: Path) -> None:
    """Raise CheckpointError for what is no folder: a name of Hugging Face, a file of weights."""
    try:
        if folder.is_dir():
            return
        what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / 'config.json'}: {error.strerror}") from None
    raise CheckpointError(
        f"{what}: a model is a folder with the config.json and model.safetensors of an SRM. GGUF "
        "is not read, and nothing is downloaded. demo, demo-grpo, regex and countdown are bundled"
    )


Mixer = Literal[
    "mixed",  # the paper's main model: first half of the heads column, second half row
    "parallel",  # the same with one projection for all heads and one decay a layer
    "column_heads",  # every head a column head
    "combined",  # every head a row and a column unit, added
    "row",  # no heads: one row unit
    "column",  # no heads: one column unit
    "kernel",  # no heads: one column unit that mixes `kernel_size` neighbouring channels
    "diagonal",  # mixed heads whose newest token has a weight of its own
    "expanded",  # two column units with SiLU between them, with or without heads
]
GENERATION = "generation_config.json"
"""Name of the file in which `transformers` keeps how a model is sampled."""
_EVEN_HEADS = {"mixed", "parallel", "diagonal"}
_HEADLESS = {"row", "column", "kernel"}
_ALWAYS_PROJECTED = {"column_heads", "combined", "diagonal"}
_NEVER_DECAYED = {"column_heads", "row", "column", "expanded"}


MOST_HEADS = 65_536
"""Limit over all layers: each head has its own tensors, which are listed before any is read."""


MOST_ENDS = 64
"""Most tokens that end a text."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`config.json` of a checkpoint."""

    d_model: int
    num_layers: int
    num_heads: int
    """Heads of a token mixer; 1 for a model without heads."""
    n_ctx: int
    """Longest sequence that can be fed, in tokens."""
    vocab_size: int
    use_projections: bool = True
    """Whether linear projections stand before and after the heads; never without heads."""
    decay: bool = True
    decay_constant: int = 1
    """The exponent's divisor c: a source s is weighed by lambda ** ((t - s) / c)."""
    bos_token_id: int = 0
    eos_token_id: int | tuple[int, ...] = 1
    """The token that ends a text, or all that do; the first one is what training writes."""
    mixer: Mixer = "mixed"
    kernel_size: int = 1
    """Number of neighbouring channels that the mixer "kernel" mixes."""
    combined_row_quirk: bool = False
    """Whether row units of the mixer "combined" divide values by c instead of the exponent, as
    published."""
    format: Literal["srm"] = "srm"
    format_version: Literal[1] = 1

    def __post_init__(self) -> None:
        for name in ("d_model", "num_layers", "num_heads", "n_ctx", "vocab_size", "decay_constant"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_layers * self.num_heads > MOST_HEADS:
            raise ValueError(
                f"num_layers * num_heads must be at most {MOST_HEADS}, got {self.num_layers} * "
                f"{self.num_heads}"
            )
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads = {self.num_heads} must divide d_model = {self.d_model}")
        mixer, is_kernel = self.mixer, self.mixer == "kernel"
        for name, is_valid, allowed in (
            ("num_heads", mixer not in _HEADLESS or self.num_heads == 1, "1"),
            ("num_heads", mixer not in _EVEN_HEADS or self.num_heads % 2 == 0, "even"),
            ("use_projections", not (self.is_headless and self.use_projections), "false"),
            ("use_projections", mixer not in _ALWAYS_PROJECTED or self.use_projections, "true"),
            ("decay", mixer not in _NEVER_DECAYED or not self.decay, "false"),
            ("kernel_size", not is_kernel or self.kernel_size > 1, "at least 2"),
            ("kernel_size", is_kernel or self.kernel_size == 1, "1"),
            ("combined_row_quirk", mixer == "combined" or not self.combined_row_quirk, "false"),
        ):
            if not is_valid:
                got = getattr(self, name)
                raise ValueError(f"{name} must be {allowed} where mixer is {mixer}, got {got}")
        if not 1 <= len(self.end_ids) <= MOST_ENDS:
            raise ValueError(f"eos_token_id must be 1 … {MOST_ENDS} ids, got {len(self.end_ids)}")
        for name, ids in (("bos_token_id", [self.bos_token_id]), ("eos_token_id", self.end_ids)):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"{name} must lie in 0 … vocab_size - 1, got {token}")

    @property
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end a text."""
        given = self.eos_token_id
        return (given,) if isinstance(given, int) else given

    @property
    def end_id(self) -> int:
        """The token that ends a text where one is written."""
        return self.end_ids[0]

    @property
    def is_headless(self) -> bool:
        return self.mixer in _HEADLESS or (self.mixer == "expanded" and self.num_heads == 1)

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def units_per_layer(self) -> int:
        """Recurrent units, one behind or beside the other, that each keep a state of d_model."""
        return 2 if self.mixer in {"combined", "expanded"} else 1

    @property
    def state_width(self) -> int:
        """Values one sequence keeps: a row of d_model per unit per layer."""
        return self.num_layers * self.units_per_layer * self.d_model

    @property
    def flops_per_token(self) -> int:
        """Multiply-adds of the matrix products, counted as two, output head included."""
        return self.prefill_flops_per_token + 2 * self.d_model * self.vocab_size

    @property
    def prefill_flops_per_token(self) -> int:
        """`flops_per_token` of a prompt's token, which does not go through the output head."""
        mixing = 2 if self.use_projections else 0
        return self.channel_flops_per_token + 2 * self.num_layers * mixing * self.d_model**2

    @property
    def channel_flops_per_token(self) -> int:
        """The part of `flops_per_token` that channel mixers take."""
        return 2 * self.num_layers * 8 * self.d_model**2

    def misfit(self, multiple: int) -> str:
        """Say that the width is no multiple of this; empty if it is."""
        if self.d_model % multiple == 0:
            return ""
        return f"it wants multiples of {multiple} as d_model, the model has {self.d_model}"


_OF_TRANSFORMERS = {
    *("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"),
    *("_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "num_labels"),
    *("output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict"),
    *("use_cache", "_attn_implementation", "_attn_implementation_autoset"),
}
"""Fields that `transformers` adds to a config.json, which say nothing of the model."""
_ALWAYS_FALSE = ("is_encoder_decoder", "tie_word_embeddings")
"""Fields of `transformers` that may only say what an SRM is not."""


def check_utf8(name: str, text: str) -> None:
    """Raise ValueError for a setting with bytes that are none of UTF-8, as names of files may have:
    it cannot be said in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be UTF-8, got {os.fsencode(text)!r}") from None


class GenerationDefaults(msgspec.Struct):
    """The fields of a folder's `generation_config.json` that are read."""

    eos_token_id: int | tuple[int, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """What it says of how to sample, by the names of requests' fields."""
        given = msgspec.structs.asdict(self)
        del given["eos_token_id"]
        return {name: value for name, value in given.items() if value is not None}


def read_generation_config(folder: Path, within: Path | None = None) -> GenerationDefaults:
    """Read a folder's `generation_config.json`, if it has one. Raises CheckpointError."""
    path = folder / GENERATION
    try:
        data = read_file(path, within=within).removeprefix(BOM_UTF8)
        return msgspec.json.decode(data, type=GenerationDefaults)
    except FileNotFoundError:
        return GenerationDefaults()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except UNDECODABLE as error:
        raise CheckpointError(f"{path}: {in_words(error)}") from None


def read_model_config(folder: Path, within: Path | None = None) -> tuple[ModelConfig, bytes]:
    """Return the configuration in a folder, with all end tokens that it names, and what
    `config.json` has. Raises CheckpointError."""
    check_model_folder(folder)
    path = folder / "config.json"
    try:
        data = read_file(path, within=within)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    config = parse_model_config(path, data)
    given = read_generation_config(folder, within).eos_token_id
    more = () if given is None else (given,) if isinstance(given, int) else given
    ends = tuple(dict.fromkeys([*config.end_ids, *more]))
    if ends == config.end_ids:
        return config, data
    try:
        return msgspec.structs.replace(config, eos_token_id=ends), data
    except ValueError as error:
        raise CheckpointError(f"{folder / GENERATION}: {error}") from None


def parse_model_config(path: Path, data: bytes) -> ModelConfig:
    """Parse a config.json. Raises CheckpointError, which names the file."""
    try:
        given = msgspec.json.decode(data.removeprefix(BOM_UTF8), type=dict[str, Any])
        if (kind := given.get("model_type", "srm")) != "srm":
            raise ValueError(f"this is no SRM model, but one of model_type = {kind!r}")
        for name in _ALWAYS_FALSE:
            if (value := given.pop(name, False)) is not False:
                raise ValueError(f"{name} must be false, got {value!r}")
        own = {name: value for name, value in given.items() if name not in _OF_TRANSFORMERS}
        return msgspec.json.decode(msgspec.json.encode(own), type=ModelConfig)
    except (*UNDECODABLE, ValueError) as error:
        why = in_words(error)
        name, is_choice, value = why.partition(": Invalid enum value ")
        if is_choice:
            choices = ", ".join(map(repr, get_args(get_type_hints(ModelConfig)[name])))
            why = f"{name} must be one of {choices}, got {value}"
        raise CheckpointError(f"{path}: {why}") from None


Dtype = Literal["float32", "bfloat16", "float8"]
FLOAT8_MULTIPLE = 512
"""Number that d_model must be a multiple of in float8."""
ProductSetting = Literal["auto", "own", "plain"]
Device = Literal["cpu", "gpu", "torch:cuda", "torch:cpu"]
AUTO_DTYPES: dict[str, Dtype] = {
    "cpu": "float32",
    "gpu": "bfloat16",
    "torch:cuda": "bfloat16",
    "torch:cpu": "float32",
}
"""The dtype that `auto` stands for on each device."""
PLAIN_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
CPU_STEP_ROWS = 2_048
"""The `max_step_rows` that 0 stands for on a CPU; on a GPU it depends on the model's width."""
CPU_PREFILL_STEP_TOKENS = 512
"""The `prefill_step_tokens` that 0 stands for on a CPU, but for narrow models, whose steps cost
more besides their rows: in theirs, tokens times d_model are `CPU_PREFILL_STEP_VALUES`."""
CPU_PREFILL_STEP_VALUES = 2**18
GPU_STEP_VALUES = 2**23
"""Rows of a GPU's step times d_model. On an H200 steps of 16,384 rows at d 512 and of 8,192 at
d 1,024 reach 92 and 93 % of what any number does; of half as many rows, at d 512, 74 %."""
GPU_STEP_ROWS = 65_536
"""Most rows of a GPU's step: what is measured and tested there goes no further."""
GPU_VALUES = 2**31 - 1
"""Most values of a matrix in a GPU's step: kernels of MAX count them in 32 bits."""


def check_max_logprobs(max_logprobs: int) -> None:
    """Raise ValueError for a setting that no vocabulary allows."""
    if max_logprobs < 1 and max_logprobs != -1:
        raise ValueError(
            f"max_logprobs must be at least 1, or -1 for the whole vocabulary, got {max_logprobs}"
        )


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine runs."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    device: Device = "cpu"
    """Device that the model runs on: the processor or a GPU, by MAX; torch:cuda is a GPU of any
    make by PyTorch, torch:cpu the processor by PyTorch."""
    devices: tuple[int, ...] = ()
    """Numbers of the GPUs to run on, an engine on each; empty: the first ones, as many as
    needed."""
    dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    """Dtype of weights and activations; auto: float32 on a CPU, bfloat16 on a GPU. float8 needs an
    H100 or H200."""
    product: ProductSetting = "auto"
    """Matrix product of a GPU: own is for an H100 or H200, plain for any shape and GPU; auto is own
    where sizes are multiples of 256, else plain."""
    num_slots: int = 0
    """Sequences that run at once; 0: as many as fit, on a CPU at most 16384."""
    max_slots: int = 0
    """Most slots that num_slots = 0 chooses; 0: as many as fit."""
    memory_fraction: float = 0.9
    """Fraction of the memory free at the start that slots may take where num_slots is 0."""
    prefix_slots: int = 1_024
    """Slots for states of prompts, besides those of sequences, that later requests can begin
    from."""
    prefix_cache: bool = True
    """Whether states of prompts are kept for later requests; the least recently used make room for
    new ones."""
    max_step_rows: int = 0
    """Most sequences that one step decodes; others take turns. 0: chosen by device and model."""
    max_step_tokens: int = 0
    """Most tokens that one step feeds: decoded ones, then prompts; 0: twice max_step_rows."""
    prefill_step_tokens: int = 0
    """Most tokens of a step that feeds prompts, so that first tokens come soon; 0: chosen by device
    and model."""
    max_prefill_share: float = 0.9
    """Largest fraction of a step with prompts that prompts take from running sequences; their first
    tokens come first."""
    max_logprobs: int = MAX_LOGPROBS
    """Most alternatives to a token that may be asked for; -1: the whole vocabulary. Each costs a
    search of it, and other numbers than 20 a compile."""
    max_waiting: int = 100_000
    """Most sequences that wait for a slot; a request beyond them is refused with 503."""
    max_waiting_bytes: int = 1024**3
    """Most bytes of requests that wait, and of bodies that a process holds; 503 beyond them."""
    max_parked_bytes: int = 4 * 1024**3
    """Most bytes of sequences that gave up their slots to others; none are parked beyond them."""
    request_timeout_s: float = 0.0
    """Most seconds that a request may wait and run; 0, and for batches: no limit."""
    cache_dir: Path = Path("~/.cache/srm")
    """Folder where compiled step graphs are kept between starts."""
    graphs_dir: str = ""
    """Folder of graphs compiled ahead, read before `cache_dir`; empty: the release's folder."""
    overlap: bool = True
    """Whether a step is scheduled while the one before it runs; the tokens are the same without."""
    step_timeout_s: float = 300.0
    """Seconds after which a step that has not ended ends the engine, which is restarted; 0:
    never."""
    drain_s: float = 30.0
    """Seconds that a stop waits for running requests, but not for those of batches."""
    snapshot_dir: str = ""
    """Folder of the snapshot of batches' requests; empty: no snapshots."""
    snapshot_interval_s: float = 600.0
    """Seconds between two snapshots while batches run; 0: a snapshot only at a stop."""
    snapshot_s: float = 60.0
    """Seconds that a stop may take for its snapshot, besides drain_s."""
    log_level: LogLevel = "info"
    """Least level of messages that are logged."""
    log_format: LogFormat = "text"
    """Format of log messages: lines for people, or a JSON object each."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "model", find_model(self.model))
        for path in (str(self.model), os.path.realpath(self.model)):
            check_utf8("model", path)
        if not 0 <= self.num_slots < 2**31:
            raise ValueError(f"num_slots must be 0 … 2**31 - 1, got {self.num_slots}")
        for name in ("memory_fraction", "max_prefill_share"):
            if not 0 < getattr(self, name) <= 1:  # nor NaN
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        for least, names in (
            (1, ("prefix_slots", "max_waiting", "max_waiting_bytes")),
            (0, ("max_slots", "max_step_rows", "max_step_tokens", "max_parked_bytes")),
            (0, ("drain_s", "request_timeout_s", "snapshot_interval_s", "snapshot_s")),
        ):
            for name in names:
                if not getattr(self, name) >= least:  # nor NaN
                    raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        check_max_logprobs(self.max_logprobs)
        if self.devices and not self.on_gpu:
            raise ValueError(
                f"devices must be empty where device is {self.device}, got {self.devices}; use "
                "device = gpu or torch:cuda"
            )
        if len(set(self.devices)) < len(self.devices) or any(device < 0 for device in self.devices):
            raise ValueError(f"devices must be different numbers from 0 on, got {self.devices}")
        allowed = ("auto", *(("bfloat16", "float8") if self.device == "gpu" else PLAIN_DTYPES))
        if self.dtype not in allowed:
            raise ValueError(
                f"dtype must be {', '.join(allowed[:-1])} or {allowed[-1]} where device is "
                f"{self.device}, got {self.dtype}"
            )
        if self.device.startswith("torch:"):
            for name, default in (("product", "auto"), ("graphs_dir", "")):
                if (value := getattr(self, name)) != default:
                    raise ValueError(
                        f"{name} must be {default or 'empty'} where device is {self.device}, got "
                        f"{value}"
                    )
        if self.on_gpu and self.max_step_rows > GPU_STEP_ROWS:
            raise ValueError(
                f"max_step_rows must be at most {GPU_STEP_ROWS} where device is {self.device}, got "
                f"{self.max_step_rows}"
            )
        if 0 < self.max_step_tokens <= max(self.max_step_rows, 1):
            raise ValueError(
                f"max_step_tokens must be 0 or larger than max_step_rows = {self.max_step_rows} "
                f"and 1, got {self.max_step_tokens}"
            )
        if self.prefill_step_tokens < 0 or self.prefill_step_tokens == 1:
            raise ValueError(
                f"prefill_step_tokens must be 0 or at least 2, got {self.prefill_step_tokens}"
            )
        if not (self.step_timeout_s == 0 or 1 <= self.step_timeout_s <= 1e6):
            raise ValueError(f"step_timeout_s must be 0, or 1 … 1000000, got {self.step_timeout_s}")

    @property
    def on_gpu(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device in ("gpu", "torch:cuda")

    @property
    def compute_dtype(self) -> Dtype:
        """Dtype of weights and activations; states, sums and logits on a CPU are float32 always.
        With float8 it is that of the channel mixers, and all else is bfloat16."""
        return AUTO_DTYPES[self.device] if self.dtype == "auto" else self.dtype

    def logprobs_limit(self, model: ModelConfig) -> int:
        """Most alternatives to a token: as set, or all tokens where the setting is -1. Raises
        ConfigError for more than there are tokens, or the default."""
        most = max(model.vocab_size, MAX_LOGPROBS)
        if self.max_logprobs > most:
            raise ConfigError(
                f"max_logprobs must be at most {most} where the vocabulary has {model.vocab_size} "
                f"tokens, got {self.max_logprobs}"
            )
        return model.vocab_size if self.max_logprobs == -1 else self.max_logprobs

    def step_limits(self, model: ModelConfig) -> tuple[int, int]:
        """Most rows and most tokens of a step: as set, or chosen where the setting is 0; then rows
        leave at least half of `max_step_tokens` to prompts.

        Raises ConfigError if a GPU could not count the values of such a step, or if
        `prefill_step_tokens` is more than it.
        """
        rows, tokens = self.max_step_rows, self.max_step_tokens
        widest = max(4 * model.d_model, model.vocab_size)  # an inner activation, or the logits
        most = GPU_VALUES // widest - 1  # and one row that `engine.steps.batch.padded` may add
        if rows == 0:
            gpu_rows = max(1, min(GPU_STEP_VALUES // model.d_model, GPU_STEP_ROWS, most // 2))
            rows = gpu_rows if self.on_gpu else CPU_STEP_ROWS
            rows = min(rows, tokens // 2) if tokens else rows
        tokens = tokens or 2 * rows
        if self.on_gpu and tokens > most:
            raise ConfigError(
                f"max_step_tokens must be at most {most} where device is {self.device} and a token "
                f"has {widest} values in a matrix, got {tokens}"
            )
        if self.prefill_step_tokens > tokens:
            raise ConfigError(
                f"prefill_step_tokens must be at most max_step_tokens = {tokens}, got "
                f"{self.prefill_step_tokens}"
            )
        return rows, tokens

    def prefill_step_limit(self, model: ModelConfig) -> int:
        """Most tokens of a step that feeds prompts: as set, or chosen where the setting is 0."""
        _, tokens = self.step_limits(model)
        if self.prefill_step_tokens or self.on_gpu:
            return self.prefill_step_tokens or tokens
        narrow = CPU_PREFILL_STEP_VALUES // model.d_model
        return min(max(CPU_PREFILL_STEP_TOKENS, narrow), tokens)
