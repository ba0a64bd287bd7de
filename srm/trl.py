"""Rollouts of TRL's trainers by a running server, which goes on with their weights.

For an environment with TRL: this module needs no other of `srm`, and of packages accelerate and
safetensors alone. TRL 1.16 calls it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from hashlib import blake2b
from http.client import HTTPException
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from accelerate.utils import broadcast_object_list
from safetensors.torch import save, save_file

_WAITS_S = (1, 2, 4, 8, 16)  # before a request that is refused for now is sent again


class RolloutServer:
    """A running `srm serve`, as two kinds of trainers take it:

    `GRPOTrainer(rollout_func=server.rollout_func)`, which samples from its newest weights, and
    `AsyncGRPOTrainer(weight_transfer=server)`, which has a worker of its own for the samples.
    """

    def __init__(
        self, url: str, folder: str | Path, config: Any, key: str = "", timeout_s: float = 1800.0
    ) -> None:
        """`url` is that of `admin_port`, or of `port` with `trainer_routes`. Weights go through
        `folder`, which server and trainer see at the same path; `config` is the model's. A request
        that is refused for now is sent again, five times."""
        self._url = url.rstrip("/")
        self._folder = Path(folder).resolve()
        self._config = config
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._sent = b""  # digest of the weights sent last
        self._fingerprint = ""  # of these, as the server's first reply has it
        self.weights_version = 0
        """Version that the server gave the weights sent last; 0 before any were sent."""

    def rollout_func(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Sample a completion for each prompt from the weights that the trainer has now.

        They are sent unless they are those sent last, whoever trained them.

        Returns `prompt_ids`, `completion_ids` and `logprobs` [sample][token], after temperature and
        before top_p, top_k and min_p, as the trainer computes its own. Raises RuntimeError for what
        the server refuses, and for tokens of other weights; ValueError for a trainer whose model or
        samples are no business of one server.
        """
        if hasattr(trainer.accelerator.unwrap_model(trainer.model), "merge_adapter"):
            raise ValueError("peft_config: the server takes whole models; train without an adapter")
        if trainer.tools:
            raise ValueError("tools: TRL would sample all turns but the first by itself")
        self._send_newest(trainer)
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        # A prompt stands there once for each of its samples: it is asked for once, if all agree.
        num_samples = math.gcd(*(len(list(same)) for _, same in groupby(prompt_ids)))
        reply = self._ask(
            "/v1/completions",
            {
                "prompt": prompt_ids[::num_samples],
                "n": num_samples,
                "max_tokens": trainer.max_completion_length,
                **{name: getattr(trainer, name) for name in ("temperature", "top_p", "top_k")},
                **{name: getattr(trainer, name) for name in ("min_p", "repetition_penalty")},
                "logprobs": 0,
                "return_token_ids": True,
                "return_weight_versions": True,
                **(trainer.args.generation_kwargs or {}),
            },
        )
        choices, fingerprint = reply["choices"], reply["system_fingerprint"]
        versions = {span["version"] for choice in choices for span in choice["weight_versions"]}
        if versions != {self.weights_version} or self._fingerprint not in ("", fingerprint):
            self._sent = b""  # whatever comes next sends them again
            raise RuntimeError(
                f"tokens are of weights {sorted(versions)}, and not of {self.weights_version} that "
                "this trainer sent: another trainer changes the server's weights, or it has been "
                "started anew"
            )
        self._fingerprint = fingerprint
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        }

    def _send_newest(self, trainer: Any) -> None:
        """Send the trainer's weights; of several processes all take part, and the first sends."""
        tensors = trainer.accelerator.get_state_dict(trainer.model)
        fault = ""
        if trainer.accelerator.is_main_process:
            try:
                whole = _on_the_host(tensors.items())
                if _digest(whole) != self._sent:
                    self._send(whole)
            except Exception as error:  # noqa: BLE001 - each process raises it below
                fault = f"{error}" or type(error).__name__
        # The other processes wait for this: they are to end with the same error.
        self.weights_version, fault = broadcast_object_list([self.weights_version, fault])
        if fault:
            raise RuntimeError(fault)

    def send_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Have the server go on with these tensors, by name; what runs goes on too.

        Their folder is gone afterwards: the server has a copy. Raises RuntimeError with what it
        refuses; then it goes on with the weights before.
        """
        self._send(_on_the_host(tensors))

    def _send(self, tensors: dict[str, Any]) -> None:
        with TemporaryDirectory(prefix="weights-", dir=self._folder) as folder:
            Path(folder).chmod(0o755)  # for a server of another user
            self._config.save_pretrained(folder)
            save_file(tensors, Path(folder) / "model.safetensors")
            changed = self._ask("/update_weights", {"weight_dir": folder})
        self.weights_version, self._sent = changed["weights_version"], _digest(tensors)
        self._fingerprint = ""

    def init_weight_transfer(self) -> None:
        """Check that the server answers. Raises RuntimeError if it does not."""
        self._ask("/abort_requests", {"request_ids": []})  # as only the operator may

    def pause(self) -> None:
        """Nothing is to pause: weights are read beside the steps, and exchanged between two."""

    def resume(self) -> None:
        """Nothing has been paused."""

    def destroy(self) -> None:
        """Nothing is open between two requests."""

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        url = f"{self._url}{path}"
        request = Request(url, json.dumps(body).encode(), self._headers)
        for wait_s in (*_WAITS_S, 0):
            try:
                with urlopen(request, timeout=self._timeout_s) as reply:
                    return json.load(reply)
            except HTTPError as error:
                status = error.code
                refusal = f"POST {url}: {status} {error.read(2_000).decode(errors='replace')}"
            except (HTTPException, OSError, ValueError) as error:  # the last for no JSON
                raise RuntimeError(f"POST {url}: {type(error).__name__}: {error}") from error
            if status not in (429, 503):
                break
            time.sleep(wait_s)
        raise RuntimeError(refusal)


def _on_the_host(tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}


def _digest(tensors: dict[str, Any]) -> bytes:
    digest = blake2b()
    for name in sorted(tensors):
        digest.update(save({name: tensors[name]}))
    return digest.digest()
