"""The tables of a record of `srm bench precision`, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LEGEND = """Errors are |logit - oracle| in units of the oracle's largest |logit|, the oracle being
float64. Greedy is the share of positions whose likeliest token is the oracle's. KL is of the
distribution at temperature 1 from the oracle's, in nats. Answers are greedy completions of held-out
problems: how many are right, and how many are word for word those of the case float32. Arithmetic
and sums are float32 in every case, and so are the mixer's scalars. With random weights
distributions are nearly flat: there only the errors mean something.
"""


def markdown(record: dict[str, Any]) -> str:
    """Render the cases; then for each model the measures over all positions, and by position."""
    stem = f"{record['date']}-{record['commit']}-precision"
    parts = [LEGEND, f"![error by position]({stem}.svg)\n", _cases(record["cases"])]
    for model in record["models"]:
        shape, length = model["config"], model["positions"][-1][-1]
        parts.append(
            f"## {model['name']}\n\n{shape['mixer']}, d {shape['d_model']}, {shape['num_layers']} "
            f"layers, matrices stored as {model['matrices_stored_as']}, {model['sequences']} × "
            f"{length:,} tokens. Largest |value|: logits {model['largest_logit']:.3g}, "
            f"activations {model['largest_activation']:.3g}, last states "
            f"{model['largest_last_state']:.3g}.\n"
        )
        parts += [_overall(model["cases"]), "RMS error by position:\n"]
        parts.append(_by_position(model, "rms_error"))
        parts += ["Mean KL by position:\n", _by_position(model, "kl_mean")]
    return "\n".join(parts)


def _cases(cases: dict[str, dict[str, str]]) -> str:
    kinds = list(next(iter(cases.values())))
    rows = (
        [name, *("" if one[kind] == "float32" else one[kind] for kind in kinds)]
        for name, one in cases.items()
    )
    return _table(["case, float32 where empty", *kinds], rows)


def _overall(cases: list[dict[str, Any]]) -> str:
    head = ["case", "max error", "rms error", "greedy", "mean KL", "p99 KL"]
    answers = ("right_answers", "same_answers") if "right_answers" in cases[0] else ()
    rows = (
        [
            one["case"],
            f"{one['max_error']:.1e}",
            f"{one['rms_error']:.1e}",
            f"{one['greedy_agreement']:.2%}",
            f"{one['kl_mean']:.1e}",
            f"{one['kl_p99']:.1e}",
            *(f"{one[name]:.1%}" if name in one else "" for name in answers),
        ]
        for one in cases
    )
    return _table([*head, *(name.replace("_", " ") for name in answers)], rows)


def _by_position(model: dict[str, Any], measure: str) -> str:
    head = ["–".join(map(str, sorted(set(span)))) for span in model["positions"]]
    rows = ([c["case"], *(f"{v:.0e}" for v in c["by_position"][measure])] for c in model["cases"])
    return _table(["case", *head], rows)


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
