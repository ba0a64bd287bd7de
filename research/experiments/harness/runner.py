"""Runs cases once, trains their models, and writes a record with table and picture."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl

mpl.use("svg")  # no display needed
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.harness.corpus import Corpus
from research.experiments.harness.result_cache import Numbers, cached
from research.experiments.harness.settings import ExperimentSettings
from srm.errors import ConfigError
from srm.loadtest.records import new_record, settings_of, write_record
from srm.training.loop import Run, TrainingBatches
from srm.training.model import LanguageModel
from srm.training.processes import processes
from srm.training.schedule import Schedule
from srm.training.text.whole_files import replace_file

NOT_OF_A_RESULT = ("output", "results", "seeds", "kinds", "budgets")
"""Settings that results do not depend on: a cached result is used whatever they are. Those that do
say so in what they are made of."""

SAVE_EVERY = 100
"""Updates between two saves of training that goes on where it stopped."""

SPREADS = "± is the standard deviation over seeds, except where a standard error is named."

NO_LIMIT = 2**31
"""Number of updates that no run makes."""

Results = dict[str, list[Numbers]]
"""Results of each case, one for each seed."""
Report = tuple[Results, Sequence[str], Figure]
"""An experiment's results, the blocks of its page, and its picture."""


def run_cases(
    config: ExperimentSettings,
    cases: Mapping[str, Callable[[int], Numbers]],
    made_of: Mapping[str, Any],
    seeds: Sequence[int] = (),
) -> Results:
    """Run each case with each seed, or read its result from disk; `made_of` identifies the data.

    Without `seeds`, those of the settings are taken. Raises ConfigError before any work if
    `results` or `output` cannot be written.
    """
    folder = config.results / config.name
    for setting, path in (("results", folder), ("output", config.output)):
        check_writable(setting, path)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    made_of = {"settings": made_with(config), "torch": str(torch.__version__), **made_of}
    of_now = new_record("", getattr(config, "device", "cpu"))
    by_case: Results = {case: [] for case in cases}
    # Seed by seed, so that a run that is stopped has all cases with the first seeds.
    runs = list(itertools.product(seeds or config.seeds, cases))
    for number, (seed, case) in enumerate(runs, 1):

        def measured(seed: int = seed, case: str = case) -> Numbers:
            result = {name: of_now[name] for name in ("commit", "machine")} | cases[case](seed)
            return {"seed": seed} | result

        place = f"{number} of {len(runs)}: " if len(runs) > 1 else ""
        sys.stderr.write(f"{config.name}: {place}{case}, seed {seed}\n")
        path = folder / f"{case.replace(' ', '_')}-{seed}.json"
        about = {"case": case, "seed": seed, **made_of}
        by_case[case].append(cached(path, about, measured))
    return by_case


def made_with(config: ExperimentSettings) -> dict[str, Any]:
    """Return the settings that a result depends on."""
    return {k: v for k, v in settings_of(config).items() if k not in NOT_OF_A_RESULT}


def check_writable(setting: str, folder: Path) -> None:
    """Make the folder where it is absent. Raises ConfigError if no file can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{setting}: {folder}: {error.strerror}") from error


def in_fresh_process(measure: partial[Numbers]) -> Callable[[int], Numbers]:
    """Return a function that measures a case in a new process, forked from one that has loaded
    torch and computed nothing."""
    processes = get_context("forkserver")
    processes.set_forkserver_preload([measure.func.__module__])

    def measured(seed: int) -> Numbers:
        with ProcessPoolExecutor(1, processes) as pool:
            return pool.submit(measure, seed).result()

    return measured


def process_bytes(name: str) -> int:
    """Return a member of /proc/self/status in bytes; Linux gives it in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(kib)


def fit(
    make: Callable[[], LanguageModel],
    batches: TrainingBatches,
    seed: int,
    steps: int = 0,
    *,
    learning_rate: float,
    minutes: float = 0.0,
    folder: Path | None = None,
    device: Literal["cpu", "gpu"] = "cpu",
    **treatment: Any,
) -> tuple[Run, LanguageModel, Numbers]:
    """Train a model made with this seed; return its run, the model, and what training took.

    Training ends after the steps, or after the minutes of processor time, and goes on where it
    stopped if it has a folder. The learning rate rises over a tenth of either and falls to 0 over
    the rest. Processor seconds are those of all threads, and leave out what evaluation takes.
    On a GPU they are the clock's, and so are the minutes.
    `treatment` has further members of the schedule.
    """
    torch.manual_seed(seed)
    model = make()
    schedule = Schedule(
        steps=steps,
        learning_rate=learning_rate,
        warmup_steps=max(1, steps // 10) if steps else NO_LIMIT,  # which a tenth of the time is
        weight_decay=0.0,
        save_every=SAVE_EVERY if folder else steps or NO_LIMIT,
        minutes=minutes,
        **treatment,
    )
    with processes(device) as own, tempfile.TemporaryDirectory() as temporary:
        clock = time.process_time if device == "cpu" else time.monotonic
        place = folder or Path(temporary)
        run = Run(model, schedule, place, own, {"seed": seed}, clock=clock)
        run.train(batches, [])
        seconds = run.elapsed()
    took = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "processor_seconds": seconds,
        "precision": run.precision,
        "training_losses": run.losses.steps,
    }
    return run, model, took


def fit_text(
    corpus: Corpus,
    config: Any,
    make: Callable[[], LanguageModel],
    seed: int,
    steps: int,
    learning_rate: float,
    **treatment: Any,
) -> tuple[Run, LanguageModel, Numbers]:
    """Train on text, in `rows` sequences of `n_ctx` tokens as the settings say; return what `fit`
    does, with the loss on held-out text in nats per token."""
    sizes = config.rows, config.n_ctx
    batches = corpus.batches(*sizes, seed)
    run, model, took = fit(make, batches, seed, steps, learning_rate=learning_rate, **treatment)
    return run, model, {"loss": run.evaluate(corpus.evaluation(*sizes)), **took}


def publish(
    config: ExperimentSettings,
    argv: list[str],
    results: Results,
    blocks: Sequence[str],
    figure: Figure,
) -> Path:
    """Write the record, its page and its plot; print the page. Returns the page's path."""
    command = " ".join(["python -m research.experiments", config.name, *argv])
    record = new_record(command, getattr(config, "device", "cpu"))
    record |= {"settings": settings_of(config), "torch": str(torch.__version__), "results": results}
    stem = f"experiment-{config.name}"
    picture = f"{record['date']}-{record['commit']}-{stem}.svg"
    page = write_record(record, stem, reported(record, blocks, picture), config.output)
    with mpl.rc_context({"svg.hashsalt": "srm"}):  # the same picture for the same numbers
        figure.tight_layout()
        with replace_file(page.with_name(picture)) as partial:
            figure.savefig(partial, format="svg", metadata={"Date": None})
        plt.close(figure)
    return page


def reported(record: Mapping[str, Any], blocks: Sequence[str], picture: str) -> str:
    """Return what stands on a record's page below its heading."""
    seeds = [*itertools.chain.from_iterable(record["results"].values())]
    precisions = {seed.get("precision", "") for seed in seeds}
    made_with = ", ".join([f"torch {record['torch']}", *sorted(precisions - {""})])
    commits = ", ".join(sorted({seed["commit"] for seed in seeds}))
    made = f"{made_with}; cases ran at {commits}. {SPREADS}"
    return "\n\n".join([made, *blocks, f"![the same as a picture]({picture})"]) + "\n"


def values_of(results: Results, member: str) -> dict[str, list[float]]:
    """Return one number, `member`, of each result, by case."""
    return {case: [seed[member] for seed in seeds] for case, seeds in results.items()}
