"""The tables of a record of `srm bench precision`, in Markdown."""

from __future__ import annotations

from typing import Any

from bench.frame import Record, table

LEGEND = """Errors are |logit - oracle| in units of the oracle's largest |logit|, the oracle being
float64. Greedy is the share of positions whose likeliest token is the oracle's. KL is of the
distribution at temperature 1 from the oracle's, in nats. Answers are greedy completions of held-out
problems: how many are right, and how many are word for word those of the case float32. Arithmetic
and sums are float32 in every case, and so are the mixer's scalars. With random weights
distributions are nearly flat: there only the errors mean something.
"""


def markdown(record: Record) -> list[str]:
    """Render the cases; then for each model the measures over all positions, and by position."""
    kinds = list(next(iter(record["cases"].values())))
    lines = [*LEGEND.splitlines(), "", *_cases(record["cases"], kinds)]
    for model in record["models"]:
        shape, length = model["config"], model["positions"][-1][-1]
        lines += [
            "",
            f"## {model['name']}",
            "",
            f"{shape['mixer']}, d {shape['d_model']}, {shape['num_layers']} layers, matrices "
            f"stored as {model['matrices_stored_as']}, {model['sequences']} × {length:,} tokens. "
            f"Largest |value|: logits {model['largest_logit']:.3g}, activations "
            f"{model['largest_activation']:.3g}, last states {model['largest_last_state']:.3g}.",
            "",
            *_overall(model["cases"]),
            "",
            "RMS error by position:",
            "",
            *_by_position(model, "rms_error"),
            "",
            "Mean KL by position:",
            "",
            *_by_position(model, "kl_mean"),
        ]
    return lines


def _cases(cases: dict[str, dict[str, str]], kinds: list[str]) -> list[str]:
    rows = (
        [name, *("" if one[kind] == "float32" else one[kind] for kind in kinds)]
        for name, one in cases.items()
    )
    return table(" | ".join(["case, float32 where empty", *kinds]), map(" | ".join, rows))


def _overall(cases: list[dict[str, Any]]) -> list[str]:
    answers = ("right_answers", "same_answers") if "right_answers" in cases[0] else ()
    heads = ["case", "max error", "rms error", "greedy", "mean KL", "p99 KL"]
    rows = (
        f"{one['case']} | {one['max_error']:.1e} | {one['rms_error']:.1e} "
        f"| {one['greedy_agreement']:.2%} | {one['kl_mean']:.1e} | {one['kl_p99']:.1e}"
        + "".join(f" | {one[name]:.1%}" if name in one else " | " for name in answers)
        for one in cases
    )
    return table(" | ".join([*heads, *(name.replace("_", " ") for name in answers)]), rows)


def _by_position(model: dict[str, Any], measure: str) -> list[str]:
    heads = ["–".join(map(str, sorted(set(span)))) for span in model["positions"]]
    rows = ([c["case"], *(f"{v:.0e}" for v in c["by_position"][measure])] for c in model["cases"])
    return table(" | ".join(["case", *heads]), map(" | ".join, rows))
