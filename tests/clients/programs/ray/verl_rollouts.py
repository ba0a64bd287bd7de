"""verl's replicas, clients and workers, the rollouts by a server that goes on with their weights.

Prints JSON: what was sampled at each step and, of each token, how far its log-probability is from
that of the model which the workers held then. Arguments: the root of the source tree, the model's
folder, the server's URL, a folder that weights go through, prompts as JSON.
"""

import asyncio
import json
import os
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import uuid4

root, folder, url, weights, prompts = sys.argv[1:]
sys.path.insert(0, root)  # as an installed package would be found, by Ray's workers too
os.environ |= {"PYTHONPATH": root, "VERL_USE_EXTERNAL_MODULES": "srm.verl"}
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}

import ray  # noqa: E402
import torch  # noqa: E402
from hydra import compose, initialize_config_module  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from verl.single_controller.base import Worker  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import (  # noqa: E402
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.config import HFModelConfig, RolloutConfig  # noqa: E402
from verl.workers.rollout import get_rollout_class  # noqa: E402
from verl.workers.rollout.llm_server import (  # noqa: E402
    FullyAsyncLLMServerClient,
    LLMServerManager,
)
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402

from srm.trl import RolloutServer  # noqa: E402
from srm.verl import RolloutActor, SRMReplica  # noqa: E402

torch.set_num_threads(1)
TEMPERATURE = 1.3
SAMPLING = {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
SETTINGS = f'{{urls: ["{url}"], folder: "{weights}"}}'
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={folder}",
            "actor_rollout_ref.model.trust_remote_code=true",
            "actor_rollout_ref.rollout.name=srm",
            f"+actor_rollout_ref.rollout.engine_kwargs.srm={SETTINGS}",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",  # processes of a server
            "actor_rollout_ref.rollout.prompt_length=100",
            "actor_rollout_ref.rollout.response_length=400",
        ],
    )


def scaled(model: Any, factor: float) -> Any:
    """The model whose logits are so many times as large: what a step of training has made."""
    other = deepcopy(model)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(factor)
    return other


def loaded() -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


class Trainer(Worker):
    """A process of the trainer: it holds the model, and verl's adapter for its rollouts."""

    def __init__(self, model: Any, rollout: Any) -> None:
        super().__init__()
        self.model = loaded()
        self.rollout = get_rollout_class("srm")(
            rollout, omega_conf_to_dataclass(model), device_mesh=None
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def update_weights(self, factor: float, step: int, **more: Any) -> str:
        tensors = scaled(self.model, factor).named_parameters()
        try:
            await self.rollout.update_weights(tensors, global_steps=step, **more)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""


def gaps_of(policy: Any, prompt: list[int], tokens: list[int], scores: list[float]) -> list[float]:
    """How far each token's log-probability is from this model's."""
    row = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = policy(row).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    expected = logits.log_softmax(-1).gather(1, row[0, len(prompt) :, None])[:, 0]
    gaps: list[float] = (torch.tensor(scores) - expected).abs().tolist()
    return gaps


async def sample(client: Any, rows: list[list[int]], **more: Any) -> list[Any]:
    asked = (
        client.generate(uuid4().hex, prompt_ids=row, sampling_params={**SAMPLING, **more})
        for row in rows
    )
    replies: list[Any] = await asyncio.gather(*asked)
    return replies


async def refused(asked: Any) -> str:
    try:
        await asked
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def third(settings: dict[str, Any], **more: Any) -> RolloutConfig:
    return RolloutConfig(
        name="srm", tensor_model_parallel_size=1, engine_kwargs={"srm": settings}, **more
    )


def refused_settings(**settings: Any) -> str:
    """Return the error that these settings of the third replica raise; empty: none."""
    os.environ["RANK"] = "2"
    model = HFModelConfig(path=folder, trust_remote_code=True)
    try:
        get_rollout_class("srm")(third(settings), model, None)
    except ValueError as error:
        return str(error)
    return ""


def refused_replica(determined: bool = False, **kind: bool) -> str:
    """Return the error that the third replica raises when it starts; empty: none."""
    rollout = third({"urls": [url] * 3, "folder": weights}, full_determinism=determined)
    return asyncio.run(refused(SRMReplica(2, rollout, None, **kind).launch_servers()))


class NarrowReplica(SRMReplica):
    """16 of its requests run at once."""

    max_concurrency = 16


async def crowd(replica: Any, row: list[int], version: int) -> list[Any]:
    """Samples of a replica that has more calls than may run: control does not wait for them."""
    server = replica.server_handle
    params = {"max_tokens": 400, "ignore_eos": True}
    await replica.abort_all_requests()
    asked = [
        server.generate.remote(prompt_ids=row, sampling_params=params, request_id=uuid4().hex)
        for _ in range(18)
    ]
    await server.check.remote()  # which Ray begins behind these 18, all of which wait
    await server.set_global_steps.remote(7, version)
    await replica.resume_generation()
    await replica.abort_all_requests()  # 16 run, and two go on waiting
    await replica.resume_generation()
    return await asyncio.gather(*asked)


async def until_running(replica: Any) -> None:
    """Until the server has been asked."""
    while not await replica.server_handle.__ray_call__.remote(lambda actor: len(actor._running)):
        await asyncio.sleep(0.01)


async def straddle(manager: Any, group: Any, rows: list[list[int]]) -> list[Any]:
    """Samples whose weights change in the middle, as verl has it: aborted, and asked for again."""
    [replica] = manager.get_replicas()
    client = manager.get_client(client_cls=FullyAsyncLLMServerClient)
    asked = asyncio.create_task(sample(client, rows, ignore_eos=True, logprobs=True))
    await until_running(replica)
    await replica.abort_all_requests()
    assert await asyncio.to_thread(group.update_weights, 0.4, 4) == ["", ""]
    await replica.resume_generation()
    return await asked


tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
RolloutReplicaRegistry.register("srm", lambda: NarrowReplica)
rows = [tokenizer(prompt)["input_ids"] for prompt in json.loads(prompts)]
first = loaded()
ray.init(num_cpus=8, include_dashboard=False)
actor = RayClassWithInitArgs(
    ray.remote(Trainer), config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
)
pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
group = RayWorkerGroup(pool, actor, use_gpu=False)
manager = LLMServerManager.create(config, group)
client = manager.get_client()
result: dict[str, Any] = {"address": manager.get_addresses(), "steps": []}
result["before"] = asyncio.run(sample(client, rows[:1]))[0].extra_fields
for step, factor in enumerate((1.0, 0.8, 0.6), 1):
    assert group.update_weights(factor, step) == ["", ""]
    replies = asyncio.run(sample(client, rows * 4, logprobs=True))
    policy = scaled(first, factor)
    sampled = [
        (row, reply.token_ids, reply.log_probs)
        for row, reply in zip(rows * 4, replies, strict=True)
    ]
    result["steps"].append(
        {
            "now": [gap for item in sampled for gap in gaps_of(policy, *item)],
            "first": [gap for item in sampled for gap in gaps_of(first, *item)],
            "reasons": [reply.stop_reason for reply in replies],
            "fields": [reply.extra_fields for reply in replies],
            "tokens": [len(reply.token_ids) for reply in replies],
        }
    )
replies = asyncio.run(straddle(manager, group, rows * 8))
old, new = scaled(first, 0.6), scaled(first, 0.4)
result["straddled"] = [
    {
        "old": gaps_of(old, row, reply.token_ids, reply.log_probs),
        "new": gaps_of(new, row, reply.token_ids, reply.log_probs),
        "steps": [reply.extra_fields[f"{end}_global_steps"] for end in ("min", "max")],
    }
    for row, reply in zip(rows * 8, replies, strict=True)
]
[replica] = manager.get_replicas()
asyncio.run(replica.abort_all_requests(reject_request=True))
[rejected] = asyncio.run(sample(client, rows[:1]))
result["rejected"] = [rejected.stop_reason, rejected.token_ids]
asyncio.run(replica.resume_generation())
[unscored] = asyncio.run(sample(client, rows[:1]))
result["no scores"] = unscored.log_probs
[span] = unscored.extra_fields["weight_versions"]
result["crowd"] = [
    (reply.stop_reason, len(reply.token_ids), reply.extra_fields["global_steps"])
    for reply in asyncio.run(crowd(replica, rows[0], span["version"]))
]
result["refusals"] = {
    "an image": asyncio.run(
        refused(client.generate("a", prompt_ids=[5], sampling_params={}, image_data=["b"]))
    ),
    "a temperature": asyncio.run(refused(sample(client, rows[:1], temperature=-1))),
    "an adapter": group.update_weights(1.0, 5, peft_config={"r": 8})[0],
    "a delta": group.update_weights(1.0, 5, wire_format="delta_flush")[0],
    "a server too few": refused_settings(urls=[url, url], folder=weights),
    "no folder": refused_settings(urls=[url] * 3),
    "a misspelt setting": refused_settings(url=url),
    "a string": refused_settings(urls=url, folder=weights),
    "a number": refused_settings(urls=[url, url, 3], folder=weights),
    "a reward model": refused_replica(is_reward_model=True),
    "a teacher": refused_replica(is_teacher_model=True),
    "determinism": refused_replica(determined=True),
    "no server": asyncio.run(refused(RolloutActor(None, "http://127.0.0.1:1", "", 1).check())),
    "prompt_logprobs": asyncio.run(refused(sample(client, rows[:1], prompt_logprobs=1))),
    "no number": group.update_weights(float("nan"), 5)[0],
}
RolloutServer(url, weights, first.config).send_weights(first.named_parameters())
result["refusals"]["foreign weights"] = asyncio.run(refused(sample(client, rows[:1])))
result["left"] = [path.name for path in Path(weights).iterdir()]
ray.shutdown()
print(json.dumps(result))
