"""`srm evaluate passk`: samples problems from a server, and writes what their pass@k is."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from typing import Any

import msgspec

from srm.errors import ConfigError, SRMError
from srm.loadtest.records import new_record, page_of, settings_of, write_record
from srm.loadtest.scenario import as_path
from srm.settings import Command, load
from srm.training.passk.config import PassKConfig
from srm.training.passk.journal import Journal, JournalEntry
from srm.training.passk.plot import check_plots, draw
from srm.training.passk.problems import PromptProblem, digest, read_problems
from srm.training.passk.results import Results, page, results_of, results_of_counts
from srm.training.passk.sampling import SamplingSession, choices_of
from srm.training.passk.server import CompletionsServer
from srm.training.questions.rewards import Reward, load_reward, rewarded

COMMAND = Command(
    "srm evaluate passk",
    "Sample problems from any OpenAI-compatible server; say what pass@k is, and how sure that is.",
    "srm evaluate passk --url http://127.0.0.1:8000 --problems 50 --samples 10000",
    "url served_model_name input reward problems samples until match max_tokens temperature output",
)

OF_SAMPLES = (
    *("samples", "until", "match", "max_tokens", "temperature", "top_p", "stop", "seed", "reward"),
    "keep_texts",
)
"""Settings that a run may not change when it goes on."""


def main(argv: list[str]) -> int:
    """Sample what is missing and print the results; return the exit code. Raises SRMError."""
    config = load(PassKConfig, argv, prog=COMMAND)
    check_plots()
    problems, reward = read_problems(config), load_reward(config.reward)
    for problem in problems:  # a reward that fails, or an answer that it cannot read
        rewarded(reward, problem.question.answer, problem.question)
    about, answers = asyncio.run(_sampled(config, problems, reward))
    command = shlex.join(["srm", "evaluate", "passk", *argv])
    _write(config, command, about, results_of(config, problems, answers))
    return 0


async def _sampled(
    config: PassKConfig, problems: list[PromptProblem], reward: Reward
) -> tuple[dict[str, Any], list[JournalEntry]]:
    """Return the journal's description of the run, and all answers."""
    async with CompletionsServer(
        config.url, config.served_model_name, config.api_key_env, config.timeout_s
    ) as server:
        if config.match and not server.is_srm:
            raise ConfigError(
                f"match = {config.match!r} needs an SRM server, which {config.url} is not: leave "
                "it out, and drawing ends by the reward"
            )
        settings = settings_of(config)
        about = {
            "model": server.model,
            "is_srm": server.is_srm,
            "problems": digest(problems),
            **{name: settings[name] for name in OF_SAMPLES},
            **({"regex": config.regex} if config.regex else {}),  # earlier journals have none
            "n": choices_of(config, server.is_srm),
        }
        with Journal(config.output / "journal.jsonl", about) as journal:
            try:
                await SamplingSession(config, problems, reward, server, journal).run()
            except (SRMError, asyncio.CancelledError) as end:
                if not isinstance(end, SRMError):  # Ctrl-C; a reward may never return: the next
                    signal.signal(signal.SIGINT, signal.SIG_DFL)  # one ends the process at once
                sys.stderr.write(
                    f"{len(journal.answers):,} replies are in {journal.path}; the same command "
                    "goes on with the others\n"
                )
                raise
            return about, list(journal.answers.values())


def _write(config: PassKConfig, command: str, about: dict[str, Any], results: Results) -> None:
    record = new_record(command) | {
        "settings": settings_of(config),
        "sampled": about,
        **msgspec.to_builtins(results),
    }
    name = _name(config)
    picture = f"{record['date']}-{record['commit']}-{name}.svg"
    write_record(record, name, page(config, about, results, picture), config.output)
    draw(results, config.output / picture)


def _name(config: PassKConfig) -> str:
    return f"passk-until-{config.until}" if config.until else "passk"


def remake_page(record: dict[str, Any], picture: str) -> str:
    """Return a record's page, computed again from the counts of its problems. Raises ValueError or
    KeyError for a record without them."""
    config = msgspec.convert(record["settings"], PassKConfig, dec_hook=as_path)
    written = msgspec.convert(record, Results)
    results = results_of_counts(config, written.fingerprints, written.totals, written.problems)
    return page_of(record, _name(config), page(config, record["sampled"], results, picture))
