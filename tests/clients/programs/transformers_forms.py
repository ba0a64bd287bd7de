"""Compares what the classes beside checkpoints compute with logits that training's model gave.

Arguments: a folder with a folder for each model, in which `expected.safetensors` has `ids` [3, n]
and `logits` [3, n, vocab], and what a new model begins with: scalars, and deviations of all else,
as `first NAME`. Prints, as JSON, for each model and each way to run it the largest error relative
to the largest logit.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM


def error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).abs().max() / expected.abs().max())


def padded(ids: Tensor, lengths: list[int], width: int, begin: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of so many first ids, from the columns `begin` on, among others that nothing reads."""
    rows = torch.randint(0, int(ids.max()) + 1, (len(ids), width))
    mask = torch.zeros_like(rows)
    for row, (length, first) in enumerate(zip(lengths, begin, strict=True)):
        rows[row, first : first + length] = ids[row, :length]
        mask[row, first : first + length] = 1
    return rows, mask


def at_tokens(logits: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([row[here == 1] for row, here in zip(logits, mask, strict=True)])


def stepped(model: Any, cache: Any, name: str, ids: Tensor, begin: list[int], steps: int) -> Tensor:
    """Logits of the next tokens of each row, fed one at a time."""
    outputs = []
    for step in range(steps):
        token = torch.stack([ids[row, first + step] for row, first in enumerate(begin)])
        output = model(token[:, None], use_cache=True, **{name: cache})
        cache = output[name]
        outputs.append(output.logits[:, 0])
    return torch.stack(outputs, 1)


@torch.no_grad()
def errors(folder: Path) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    expected = load_file(folder / "expected.safetensors")
    ids, logits = expected["ids"], expected["logits"]
    n = ids.shape[1]
    lengths = [n, n // 2 + 1, 1]
    right = [row[:length] for row, length in zip(logits, lengths, strict=True)]
    measured = {"parallel": error(model(ids).logits, logits)}
    for side, begin in (
        ("left", [n + 2 - length for length in lengths]),
        ("right", [0, 0, 0]),
        ("middle", [1, n // 3, n // 2]),
    ):
        rows, mask = padded(ids, lengths, n + 2, begin)
        result = model(rows, attention_mask=mask).logits
        measured[side] = error(at_tokens(result, mask), torch.cat(right))

    # A sequence with padding within it: what follows is predicted across the gap.
    gap = torch.cat([ids[:1, : n // 2], ids[:1, :3], ids[:1, n // 2 :]], 1)
    mask = torch.ones_like(gap)
    mask[:, n // 2 : n // 2 + 3] = 0
    result = model(gap, attention_mask=mask).logits
    measured["gap"] = error(result[mask == 1], logits[0])
    measured["across the gap"] = error(result[0, n // 2 + 2], logits[0, n // 2 - 1])

    packed = torch.cat([row[:length] for row, length in zip(ids, lengths, strict=True)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    measured["packed"] = error(model(packed, position_ids=positions).logits[0], torch.cat(right))

    # A right-padded prompt, then its rows go on from states at positions of their own.
    prompts, steps = [n // 2, n // 4, 1], min(n // 2, 20)
    rows, mask = padded(ids, prompts, n // 2 + 1, [0, 0, 0])
    output = model(rows, attention_mask=mask, use_cache=True)
    name = "cache" if "cache" in output else "past_key_values"
    last = torch.stack([logits[row, length - 1] for row, length in enumerate(prompts)])
    measured["after padding"] = error(output.logits[:, -1], last)
    on = torch.stack([logits[row, p : p + steps] for row, p in enumerate(prompts)])
    cache = output[name]
    half = steps // 2
    begin = [prompt + half for prompt in prompts]
    result = [stepped(model, cache, name, ids, prompts, half)]
    cache.reorder_cache(torch.tensor([2, 0, 1]))  # beams change places, and change back
    cache.batch_select_indices(torch.tensor([1, 2, 0]))
    result.append(stepped(model, cache, name, ids, begin, steps - half))
    measured["stepped"] = error(torch.cat(result, 1), on)
    cache = model(ids[:1, : n // 2], use_cache=True)[name]
    cache.batch_repeat_interleave(2)
    chunk = ids[:1, n // 2 :].repeat(2, 1)
    result = model(chunk, use_cache=True, **{name: cache}).logits
    measured["whole chunk on a state"] = error(result, logits[:1, n // 2 :].repeat(2, 1, 1))
    new = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
    first: dict[str, list[float]] = {"scalars": [], "deviations": [0.0]}
    for name, value in new.named_parameters():
        if (own := expected.get(f"first {name}")) is None:
            continue
        if own.ndim:
            first["scalars"].append(float((value - own).abs().max()))
        else:
            first["deviations"].append(float((value.std() / own - 1).abs()))
    measured |= {f"first {kind}": max(values) for kind, values in first.items()}
    measured["bfloat16"] = error(model.bfloat16()(ids).logits.float(), logits)
    return measured


torch.set_num_threads(1)
torch.manual_seed(0)
print(json.dumps({path.name: errors(path) for path in sorted(Path(sys.argv[1]).iterdir())}))
