"""The console command: what it refuses before any subcommand runs."""

from __future__ import annotations

import runpy
import tomllib
from types import ModuleType

import pytest

import srm.__main__ as srm
import srm.loadtest.__main__ as loadtest
from srm.errors import ConfigError
from tests.kit.serving import ROOT, run_python


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("SRM_NUM_SLOT", "7", "read by no command: only settings of serve, generate, batch and"),
        ("SRM_NUM_SLOT", "7", "are variables; did you mean 'SRM_NUM_SLOTS'?"),
        ("SRM_PROT", "7", "are variables; did you mean 'SRM_PORT'?"),
        ("SRM_ROWS", "7", "other settings are flags\n"),
        ("SRM_RETRY_GRACE_S", "2", "are flags\n"),  # the flag that was named is gone as well
        ("SRM_port", "7", "read by no command"),
        ("SRM_ENDPOINT", "7", "read by no command"),
        ("SRM_", "7", "read by no command"),
        ("SRM_NUM_SLOTS", "many", "num_slots = 'many'"),
    ],
)
def test_a_variable_is_a_setting_like_a_flag_or_stops_the_program(
    variable: str,
    value: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert srm.main(["serve"]) == ConfigError.exit_code == 2
    err = capsys.readouterr().err
    assert err.startswith("srm serve: environment: ") and says in err
    assert value == "many" or variable in err


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The one that the wheel is built with."""
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]
    version = runpy.run_path(str(ROOT / given["path"]))["__version__"]
    assert srm.main(["--version"]) == 0
    assert capsys.readouterr().out == f"srm {version}\n"


def test_variables_of_other_commands_and_programs_are_let_be() -> None:
    srm.check_environment({"SRM_SHARD": "1/2", "SRM_NUM_SLOTS": "9", "SRMX": "1", "HOME": "/"})


def test_a_command_that_reads_no_variables_heeds_and_ignores_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SRM_URL", "nowhere")
    assert srm.main(["weights"]) == ConfigError.exit_code
    message = "srm weights: environment: SRM_URL is not read by srm weights: pass --url\n"
    assert capsys.readouterr().err == message
    assert srm.main(["weights", "--url=nowhere", "folder"]) == ConfigError.exit_code
    assert "SRM_URL" not in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_the_usage_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert srm.main(argv) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in srm.COMMANDS)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("sevre", "srm sevre: there is no such command; did you mean 'serve'?"),
        ("x", "srm x: there is no such command; `srm --help` lists the commands"),
        ("serve --prot 80", "srm serve: there is no flag --prot; did you mean '--port'?"),
        ("serve --wings=2", "srm serve: there is no flag --wings; srm serve --help lists them"),
        (
            "serve --port",
            "srm serve: argument --port: expected one argument; srm serve --help lists"
            " the settings",
        ),
        (
            "snapshot now",
            "srm snapshot: nothing can be done with 'now': settings are given as --name VALUE",
        ),
        (
            "train pretrian",
            "commands are tokenizer, pretrain, sft, grpo; got 'pretrian'; did you mean 'pretrain'?",
        ),
        ("train grpo --step=3", "srm train: there is no flag --step; did you mean '--steps'?"),
        ("bench kernel", "got 'kernel'; did you mean 'kernels'?"),
        ("serve --max-num-seqs=9", "there is no flag --max-num-seqs; here it is --num-slots"),
        ("serve --max_model_len 9", "here it is not a setting: the model's n_ctx"),
    ],
)
def test_a_slip_of_the_pen_is_one_line(
    typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert srm.main(typed.split()) == ConfigError.exit_code
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and says in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "pretrain", "--num-heads=3"], "num_heads = 3 must divide d_model = 256"),
        (
            ["train", "sft", "--threads=10000000000"],
            "threads must be at most 4096, got 10000000000",
        ),
        (["train", "pretrain", "--threads=-1"], "threads must be at least 0, got -1"),
        *(
            ([*command.split(), f"--seed={seed}"], message)
            for command in ("train pretrain", "train sft", "train grpo", "evaluate")
            for seed, message in (
                (-1, "seed must be 0 … 2**64 - 1, got -1"),
                (2**64, f"seed = '{2**64}': must be within 64 bits"),
            )
        ),
        (["train", "pretrain", "--learning-rate=inf"], "learning_rate must be a finite number"),
        (
            ["train", "grpo", "--learning-rate=1e39"],
            "learning_rate must be at most 1e+18, got 1e+39",
        ),
        (["train", "sft", "--weight-decay=inf"], "weight_decay must be a finite number, got inf"),
        (["evaluate", "--temperature=nan"], "temperature must be a finite number, got nan"),
        (["evaluate", "--samples=0"], "samples must be at least 1, got 0"),
        (["bench", "engine", "--batch-sizes="], "batch_sizes must be one or more numbers"),
        (["bench", "engine", "--random-widths=510"], "random_widths must be multiples of 4"),
        (["bench", "engine", "--dtypes="], "dtypes must name at least one"),
        (["bench", "engine", "--seconds=0"], "seconds must be above 0, got 0.0"),
        (["bench", "prefill", "--repetitions=0"], "repetitions must be at least 1, got 0"),
        (["bench", "prefill", "--step-tokens=9"], "step_tokens must be at least the longest of"),
        (["bench"], "measures kernels, engine, prefill, until, "),
    ],
)
def test_what_a_command_cannot_do_is_said_before_any_work(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert srm.main(argv) == ConfigError.exit_code
    assert message in capsys.readouterr().err


def test_a_missing_package_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after `make serve`, which installs no torch."""

    def import_without(_: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(srm, "import_module", import_without)
    missing = "torch"
    for argv in (["evaluate"], ["train", "pretrain"]):
        assert srm.main(argv) == ConfigError.exit_code
        needs = f"srm {argv[0]}: it needs torch: call `make setup` in a source tree, or "
        assert capsys.readouterr().err == f"{needs}pip install torch\n"
    missing = "srm.engine.typo"
    with pytest.raises(ModuleNotFoundError):
        srm.main(["evaluate"])


def test_load_tests_name_their_own_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loadtest, "find_spec", lambda _: None)
    assert srm.main(["loadtest", "run"]) == ConfigError.exit_code
    assert capsys.readouterr().err == (
        "srm loadtest: load tests need hdrh and matplotlib: `make load-setup` in a source tree, or "
        "pip install matplotlib hdrhistogram setuptools\n"
    )


HELPS = [
    *([name] for name in srm.COMMANDS),
    *(["train", name] for name in ("tokenizer", "pretrain", "sft", "grpo")),
    ["evaluate", "passk"],
    *(["loadtest", name] for name in ("run", "sweep", "offline", "report", "compare")),
]


def test_help_needs_none_of_the_packages_that_the_work_needs() -> None:
    """And says of what it is the help, with an example."""
    program = """
import io, sys
from contextlib import redirect_stdout
for name in ("torch", "max", "matplotlib", "pyarrow", "hdrh", "hdrh.histogram"):
    sys.modules[name] = None
import srm.__main__ as srm
for argv in HELPS:
    with redirect_stdout(io.StringIO()) as printed:
        try:
            code = srm.main([*argv, "--help"])
        except SystemExit as end:
            code = end.code
    text = printed.getvalue()
    assert code == 0 and text.startswith("usage: srm " + " ".join(argv)), (argv, code, text)
    assert "example:" in text or argv in (["train"], ["snapshot"]), argv
    assert "countdown" in text or argv not in (["inspect"], ["convert"]), text
    assert "Default: ()" not in text and "Default: True" not in text, argv
"""
    done = run_python(program.replace("HELPS", repr(HELPS)))
    assert done.returncode == 0, done.stderr


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: str, args: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(srm, "_run", interrupted)
    assert srm.main(["evaluate", "passk"]) == 130


def test_what_can_be_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, code in ((["--help"], 0), ([], 2), (["nonsense"], 2)):
        assert srm.main(["bench", *argv]) == code
        printed = capsys.readouterr()
        assert all(name in (printed.err if code else printed.out) for name in srm.BENCHMARKS)
