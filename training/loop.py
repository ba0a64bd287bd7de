"""The training loop: AdamW, a schedule of learning rates, clipped gradients, saves and resumption.

Knows no tasks and no file formats: it takes a model, batches by index and a folder. `Run.train`
makes all steps, whose loss is the mean over the targets in all processes, however rows are spread
over these and over micro-batches; `Run.update` makes one, of any loss.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, cast

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from srm.engine.weights.tensors import DECAY_RANGE, is_scalar
from srm.errors import ConfigError
from srm.progress import show_progress
from srm.training.captured import CapturedUpdate
from srm.training.checkpoint import keep_model, read_run, save_model
from srm.training.data import IGNORED
from srm.training.instruments.events import events_in
from srm.training.instruments.log import RunLog
from srm.training.instruments.peak import measured_peak
from srm.training.instruments.record import Sample
from srm.training.model import LanguageModel
from srm.training.precision import autocast, choose_precision
from srm.training.processes import Processes, in_order, spread, stop_asked
from srm.training.schedule import LAMBDA, Schedule, count_factors, parameter_groups
from srm.training.settings import MAY_CHANGE
from srm.training.text.whole_files import replace_file, seal

log = logging.getLogger(__name__)

Part = TypeVar("Part")
_SCALARS = {"λ": LAMBDA, "α": ".weight"}
"""Those of the mixers' parameters whose range is written, and the ends of their names."""
_WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


MOST_SKIPPED = 10
"""Updates in a row that are skipped, since they are not finite, before the run ends."""


class TrainingBatches(Protocol):
    """Yields inputs and targets, int64 [rows, length], of step `index`."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...


class Diverged(ConfigError):
    """A loss or a gradient that is not finite."""


class Losses(msgspec.Struct):
    """Losses in nats per target."""

    steps: list[float]
    """Loss of each step's batch, before its update."""
    evaluations: list[tuple[int, float]]
    """Updates before each evaluation, and the mean loss that it found on the evaluation batches."""
    skipped: int = 0
    """Updates that changed no weights, since their loss or gradients were not finite."""


class Run:
    """A training run in `folder`; a run saved there is resumed."""

    def __init__(
        self,
        model: LanguageModel,
        schedule: Schedule,
        folder: Path,
        own: Processes,
        source: Mapping[str, Any],
        fixed: Mapping[str, Any] = MappingProxyType({}),
        text_files: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source` and `fixed` identify the run: its data, and the settings that may not change. A
        run saved by a version that did not store one of `fixed` takes its current value.

        Each save writes the model into `folder` too, with the tokenizer of the folder `text_files`;
        None: the state of the run alone. `clock` counts seconds.

        Raises ConfigError if the folder has a different run, and names what differs.
        """
        self.losses = Losses([], [])
        self._best: dict[str, Tensor] | None = None
        self.decays = ""
        """Range of λ when the run was last saved, for a line of a log; empty for models without."""
        self._schedule, self._own = schedule, own
        self._text_files = text_files
        self.clock, self._begun, self._earlier_s = clock, clock(), 0.0
        self._last_s = {"evaluation": 0.0, "save": 0.0}
        """Seconds that the latest of each took: what follows the last update takes as long."""
        self.is_over = False
        """Whether all updates are made, or no time is left for another."""
        self._is_late = False  # it is over, since no time is left
        self._models: list[int] = []  # updates of the models in step-N that this run wrote
        self._skipped_in_row = 0
        self._written = self._noticed = -1
        """Updates of the model that was written last, and when a save was last considered."""
        self._is_put_off = False
        self._saved = folder / "run.pt"
        self._kept = fixed
        self._config = model.config
        self._source = {**source, "config": msgspec.to_builtins(model.config)}
        self._factors = count_factors(model)
        model.checkpoint_activations = schedule.checkpoint_activations
        self._model = spread(model, own, schedule.shard)
        self._forward = torch.compile(self._model) if schedule.compile else self._model
        self._groups = parameter_groups(self._model, schedule)
        self._optimizer = torch.optim.AdamW(
            [{"params": group.parameters} for group in self._groups],
            lr=schedule.learning_rate,
            # At d 512 on an H100 5.8 ms an update, else 26.5; and it may be captured.
            fused=own.device.type == "cuda" or schedule.capture,
            capturable=schedule.capture,
        )
        self._captured: CapturedUpdate | None = None
        self.precision = choose_precision(schedule.precision, own.device.type, own.is_first)
        """Precision of the products, which is not auto."""
        is_scaled = self.precision == "float16"
        self._scaler = torch.amp.GradScaler(own.device.type, enabled=is_scaled)
        if self._saved.exists():
            self._resume()
        if schedule.capture:
            for values in self._optimizer.param_groups:
                values["lr"] = torch.zeros((), device=own.device)
        self._resumed = len(self.losses.steps)
        if self._resumed:
            self.end_by_clock(0.0)
        self._log: RunLog | None = None
        if own.is_first:
            described = {**fixed, **msgspec.structs.asdict(schedule)}
            events = events_in(folder, self._resumed, schedule, described)
            self._log = RunLog(folder, self._resumed, events)

    def train(
        self,
        batches: TrainingBatches,
        evaluation: list[tuple[Tensor, Tensor]],
        watches: Sequence[Callable[[int], None]] = (),
    ) -> None:
        """Make the remaining steps; losses are appended as they come.

        After each step the `watches` are called with the number of steps, in all processes. The run
        is saved as `save_if_due` says, and when a signal asks it to stop, which raises
        KeyboardInterrupt. Raises Diverged, as `update` does; what was saved before stays.
        """
        schedule, begun = self._schedule, self._resumed
        total = schedule.steps or None
        shown = show_progress("training", total, begun, self._own.is_first)
        steps = range(begun, schedule.steps or sys.maxsize)
        with (
            shown as tell,
            stop_asked() as asked,
            closing(in_order(batches.__getitem__, steps, schedule.data_workers)) as made,
        ):
            for step in steps:
                if self.is_over:
                    break
                started, started_by_clock = time.monotonic(), self.clock()
                inputs, targets = next(made)
                count = self._count(targets)
                parts = [(*part, count) for part in self._parts(inputs, targets)]
                loss = self.update(parts, self._share)
                rate = self.tell_speed(inputs.numel(), time.monotonic() - started)
                done = step + 1
                self.end_by_clock(self.clock() - started_by_clock)
                message = f"step {self.progress}: loss {loss:.3f}, {rate:,.0f} tok/s"
                tell(done, message)
                every = schedule.evaluate_every
                if evaluation and every and (done % every == 0 or self.is_over):
                    with self.timed("evaluation"):
                        self._evaluated(done, self.evaluate(evaluation))
                    message += f", evaluation {self.losses.evaluations[-1][1]:.4f}"
                for watch in watches:
                    watch(done)
                is_stopped = self._total(asked.is_set())
                is_saved = self.save_if_due(bool(is_stopped))
                if is_saved and self._own.is_first and not sys.stdout.isatty():
                    sys.stdout.write(f"{message}{self.notes}\n")  # a log shows no bar
                if is_stopped and not self.is_over:
                    self._own.meet()
                    raise KeyboardInterrupt
        self.write_model()

    @property
    def notes(self) -> str:
        """`decays`, and how many updates were skipped."""
        skipped = self.losses.skipped
        return self.decays + (f", {skipped} updates skipped: not finite" if skipped else "")

    @property
    def progress(self) -> str:
        """Number of updates, of how many or of how many minutes."""
        done, schedule = len(self.losses.steps), self._schedule
        if schedule.steps:
            return f"{done} of {schedule.steps}"
        return f"{done}, {self.elapsed() / 60:.1f} of {schedule.minutes:g} min"

    def end_by_clock(self, update_s: float) -> None:
        """Set `is_over` if all updates are made, or no time is left for another that long; all
        processes must call it. The first update of a process compiles, so others take less."""
        is_last = len(self.losses.steps) == self._schedule.steps
        self._is_late = not is_last and not self.has_time(0.0 if self._noticed < 0 else update_s)
        self.is_over = self.is_over or is_last or self._is_late

    def has_time(self, seconds: float) -> bool:
        """Return whether updates of so many seconds, and the evaluation and save behind them, end
        within `minutes`; all processes must call it."""
        if not self._schedule.minutes:
            return True
        ends = self.elapsed() + seconds + sum(self._last_s.values())
        return not self._total(self._own.is_first and ends >= 60 * self._schedule.minutes)

    def elapsed(self) -> float:
        """Return the seconds of the run, those of its earlier processes too."""
        return self._earlier_s + self.clock() - self._begun

    def _spent(self) -> float:
        """Return the share that has passed of the time for updates by the first process's clock."""
        available = 60 * self._schedule.minutes - sum(self._last_s.values())
        share = self.elapsed() / max(available, 1e-9)
        return self._total(min(1.0, share) if self._own.is_first else 0.0)

    @contextmanager
    def timed(self, name: Literal["evaluation", "save"]) -> Iterator[None]:
        """Measure what will follow the last update too."""
        began = self.clock()
        yield
        self._last_s[name] = self.clock() - began

    def _total(self, value: float) -> float:
        return self._own.total(torch.tensor(float(value)).to(self._own.device))

    def evaluate(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        """Return the mean loss over the targets of all batches."""
        total, count = 0.0, 0
        self._model.eval()
        with torch.no_grad():
            for inputs, targets in batches:
                losses = [self._loss(*part) for part in self._parts(inputs, targets, least=1)]
                total += self._own.total(torch.stack(losses).sum())
                count += int((targets != IGNORED).sum())
        self._model.train()
        return total / count

    def _evaluated(self, done: int, result: float) -> None:
        """Append an evaluation loss. Raises ConfigError if it is not finite."""
        self._check(result, f"evaluation loss after step {done}")
        least = min((loss for _, loss in self.losses.evaluations), default=math.inf)
        self.losses.evaluations.append((done, result))
        self.tell("evaluation loss", result)
        if self._schedule.keep_best and result < least:
            self._best = {name: value.clone() for name, value in self.last_weights().items()}

    def update(self, parts: Sequence[Part], loss: Callable[[Part], Tensor]) -> float:
        """Make the next step; append and return its loss, the sum of `loss` over the parts of all
        processes.

        `parts` are the micro-batches of this process, at least one. Each runs forward and backward
        before the next, so only one's activations are in memory. An update whose loss or gradients
        are not finite changes no weights. Raises Diverged after MOST_SKIPPED of these in a row.
        """
        step, schedule = len(self.losses.steps), self._schedule
        rate = (
            schedule.rate_by_clock(step, self._spent()) if schedule.minutes else schedule.rate(step)
        )
        for values, group in zip(self._optimizer.param_groups, self._groups, strict=True):
            values["weight_decay"] = group.weight_decay  # a resumed run has its own
            if schedule.capture:
                values["lr"].fill_(rate * group.rate_scale)
            else:
                values["lr"] = rate * group.rate_scale
        if schedule.capture:
            make: Any = partial(self._update_all, loss)
            self._captured = self._captured or CapturedUpdate(make)
            total, length = self._captured(cast(Sequence[tuple[Tensor, ...]], parts))
            is_finite = math.isfinite(total) and math.isfinite(length)
        else:
            loss_sum, norm = self._gradients(parts, loss)
            total, length = self._own.total(loss_sum), float(norm)
            if is_finite := math.isfinite(total) and math.isfinite(length):
                self._scaler.step(self._optimizer)
            self._scaler.update()
            self._end_update()
        self._count_skipped(is_finite, total, length)
        self.losses.steps.append(total)
        self.tell("loss", total)
        self.tell("learning rate", rate)
        self.tell("gradient norm", length)
        return total

    def _gradients(
        self, parts: Sequence[Part], loss: Callable[[Part], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute and clip the gradients of an update; return this process's loss, and the norm
        that they had."""
        losses = []
        for number, part in enumerate(parts, 1):
            self._sum_gradients(number == len(parts))
            value = loss(part)
            losses.append(value.detach())
            # Gradients are averaged over processes, and each has its part of the sum alone.
            self._scaler.scale(value * self._own.count).backward()  # type: ignore[no-untyped-call]
        self._scaler.unscale_(self._optimizer)
        parameters, most = self._model.parameters(), self._schedule.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, most)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return torch.stack(losses).sum(), norm

    def _end_update(self) -> None:
        self._optimizer.zero_grad()
        if not self._schedule.clip_decays:
            return
        with torch.no_grad():  # the clip of `decay` has no gradient outside its range
            for name, parameter in self._model.named_parameters():
                if name.endswith(LAMBDA):
                    parameter.clamp_(*DECAY_RANGE)

    def _update_all(self, loss: Callable[[Part], Tensor], parts: Sequence[Part]) -> Tensor:
        """Make an update without the host; return its loss and the norm of its gradients."""
        numbers = torch.stack(self._gradients(parts, loss))
        # The fused optimizer changes nothing where this is 1, moments included.
        self._optimizer.found_inf = 1 - numbers.isfinite().all().float()  # type: ignore[attr-defined]
        self._optimizer.step()
        self._end_update()
        return numbers

    def _count_skipped(self, is_finite: bool, loss: float, norm: float) -> None:
        """Count an update that was skipped. Raises Diverged for MOST_SKIPPED in a row, but not for
        those by which float16 finds its scale."""
        if is_finite:
            self._skipped_in_row = 0
            return
        self.losses.skipped += 1
        self.tell("skipped updates", self.losses.skipped)
        if math.isfinite(loss) and self._scaler.is_enabled() and self._scaler.get_scale() > 1:
            return
        self._skipped_in_row += 1
        if self._skipped_in_row == MOST_SKIPPED:
            which = f"step {len(self.losses.steps) + 1}"
            name = f"gradient of {which}" if math.isfinite(loss) else f"loss of {which}"
            self._check(norm if math.isfinite(loss) else loss, name)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return f32[rows, length, vocab] of ids int64 [rows, length], in the run's precision."""
        with autocast(self.precision, inputs.device):
            logits: Tensor = self._forward(inputs)
        return logits.float()

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Return f32[vocab] of the token that follows; all processes must call it."""
        inputs = torch.tensor([ids], device=self._own.device)
        with torch.no_grad(), autocast(self.precision, inputs.device):
            logits: Tensor = self._model(inputs)
        return logits[0, -1].float().cpu()

    def tell(self, name: str, value: float) -> None:
        """Write a value at the current update into the run's log."""
        if self._log is not None:
            self._log.tell(len(self.losses.steps), name, value)

    def tell_speed(self, tokens: int, seconds: float, flop: int = 6) -> float:
        """Write and return how many tokens a second were computed; `flop` are those of a token and
        a factor of its products: 2 of a pass forward, 4 of one backward."""
        rate = tokens / seconds
        if self._log is not None:
            peak = measured_peak(self._own.device.type, getattr(torch, self.precision))
            self.tell("tokens per second", rate)
            self.tell("FLOP per second", rate * flop * self._factors)
            self.tell("share of peak", rate * flop * self._factors / (peak * self._own.count))
        return rate

    def show(self, sample: Sample) -> None:
        """Write a text of the model into the run's log."""
        if self._log is not None:
            self._log.show(len(self.losses.steps), sample)

    def _check(self, value: float, which: str) -> None:
        if not math.isfinite(value):
            row = self._skipped_in_row
            raise Diverged(
                f"the {which} is {value}: lower learning_rate, or take precision = float32; "
                + (f"{row} updates in a row were skipped; " if row > 1 else "")
                + f"saved is what {self._saved.parent} has"
            )

    def _parts(
        self, inputs: Tensor, targets: Tensor, least: int = 0
    ) -> list[tuple[Tensor, Tensor]]:
        """Return this process's micro-batches of a batch, `least` or more: as many in all
        processes. Raises ConfigError for fewer rows than processes where `least` is 0."""
        count = max(least, min(self._schedule.micro_batches, len(inputs) // self._own.count))
        if not count:
            raise ConfigError(
                f"a batch has {len(inputs)} rows for {self._own.count} processes: raise its size"
            )
        parts = [torch.tensor_split(self._own.part(whole), count) for whole in (inputs, targets)]
        return list(zip(*parts, strict=True))

    def _count(self, targets: Tensor) -> Tensor:
        """Return the number of targets of a batch, f32[] on the device: a captured update reads it
        there."""
        count = float((targets != IGNORED).sum())
        if not count:
            raise ConfigError("a batch has no token to learn: raise its size or n_ctx")
        return torch.tensor(count, device=self._own.device)

    def _share(self, part: tuple[Tensor, ...]) -> Tensor:
        """Return a micro-batch's part of the mean loss over all targets, of which there are as many
        as its last tensor says."""
        inputs, targets, count = part
        return self._loss(inputs, targets) / count

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of the targets."""
        flat = self.logits(inputs).flatten(0, 1)
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def _sum_gradients(self, is_last: bool) -> None:
        """Set whether the next backward pass exchanges gradients with the other processes."""
        if isinstance(self._model, DistributedDataParallel):
            self._model.require_backward_grad_sync = is_last
        elif isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(is_last)

    def save_if_due(self, is_stopped: bool = False, many: int = 1) -> bool:
        """Save behind the last `many` updates if one of them is a multiple of `save_every`, at the
        end, and when the run is stopped; return whether. Keep a model in the same way every
        `keep_every`. All processes must call it.

        While updates are skipped a save waits, since the weights may be the cause; Diverged is
        raised if the run ends so. The first updates of a run leave a model, and those of a run that
        the clock ends a save, so that its time is known.
        """
        done, schedule, is_first = len(self.losses.steps), self._schedule, self._noticed < 0
        self._noticed = done
        due = done % schedule.save_every < many or self._is_put_off or self.is_over or is_stopped
        due = due or (is_first and schedule.minutes > 0)
        self._is_put_off = due and self._skipped_in_row > (self.is_over or is_stopped)
        if self._is_put_off:
            if self.is_over:
                self._check(math.nan, f"loss of step {done}")
            return False
        if self._text_files is not None and not self._skipped_in_row:
            if schedule.keep_every and done % schedule.keep_every < many:
                weights = self.last_weights()
                if self._own.is_first:
                    written = self._config, weights, self._saved.parent, self._text_files
                    keep_model(*written, [*self._models, done], schedule.keep_bytes)
                    self._models.append(done)
            if is_first and not due and not self._resumed:
                self.write_model()
        if due:
            self.save()
        return due

    def save(self) -> None:
        """Save the run, so that it can be resumed, and its model; all processes must call it.

        Raises ConfigError for weights that are not finite, which the losses so far did not show.
        """
        with self.timed("save"):
            self._save()
        self._written = len(self.losses.steps)

    def _save(self) -> None:
        model, optimizer = states.get_state_dict(self._model, self._optimizer, options=_WHOLE)
        run: dict[str, Any] = {}
        if self._own.is_first:
            self._tell_ranges(self._checked(cast(dict[str, Tensor], model)))
            run = {"settings": self._source, "kept": dict(self._kept)}
            run |= {"model": model, "optimizer": optimizer}
            run |= {"scaler": self._scaler.state_dict(), "losses": msgspec.to_builtins(self.losses)}
            run["best"] = self._best
            run["seconds"] = max(self.elapsed(), 60 * self._schedule.minutes * self._is_late)
            run["models"] = self._models
        # The log is written first: a resumed run drops the lines of updates that are not saved.
        try:
            self.flush()
        finally:
            if self._own.is_first:
                try:
                    self._write_model(cast(dict[str, Tensor], model))
                finally:
                    self._write(run)

    def write_model(self) -> None:
        """Write the model of `weights` unless the last save did; all processes must call it."""
        if self._written < len(self.losses.steps):
            self._write_model(self.last_weights())
            self._written = len(self.losses.steps)

    def _write_model(self, last: dict[str, Tensor]) -> None:
        if self._own.is_first and self._text_files is not None:
            save_model(self._config, self._best or last, self._saved.parent, self._text_files)

    def _write(self, run: dict[str, Any]) -> None:
        with replace_file(self._saved) as partial:
            try:
                torch.save(run, partial)
            except RuntimeError as error:  # its writer says no more
                raise ConfigError(
                    f"{self._saved} cannot be written, is the disk full? {error}"
                ) from error
            seal(partial)

    def flush(self) -> None:
        """Write what the log has not written yet."""
        if self._log is not None:
            self._log.flush(self.is_over)

    def _tell_ranges(self, weights: Mapping[str, Tensor]) -> None:
        for symbol, end in _SCALARS.items():
            named = [name for name in weights if is_scalar(name) and name.endswith(end)]
            if named:
                values = torch.cat([weights[name].flatten() for name in named])
                low, high = float(values.min()), float(values.max())
                self.tell(f"least {symbol}", low)
                self.tell(f"largest {symbol}", high)
                if symbol == "λ":
                    self.decays = f", λ {low:.4f} to {high:.4f}"

    def _resume(self) -> None:
        run = read_run(self._saved)
        source, fixed = run["settings"], run.get("kept")
        if fixed is None:
            fixed = {name: source[name] for name in source.keys() - self._source.keys()}
        unknown = sorted(self._kept.keys() - fixed.keys())
        *made_of, config = ((name, source.get(name), now) for name, now in self._source.items())
        settings = [(name, fixed.get(name, now), now) for name, now in self._kept.items()]
        for name, was, value in (*made_of, *settings, config):  # settings name the config's sizes
            if was != value:
                raise ConfigError(
                    f"{self._saved} is a run of another {name}, {was!r:.200} and not "
                    f"{value!r:.200}: remove it or change output; {MAY_CHANGE}"
                )
        if len(run["losses"]["steps"]) > self._schedule.steps > 0:
            raise ConfigError(
                f"{self._saved} has {len(run['losses']['steps'])} updates: steps, which epochs set "
                f"too, must be at least these, got {self._schedule.steps}"
            )
        if unknown and self._own.is_first:
            log.warning("%s does not say its %s: now as given", self._saved, ", ".join(unknown))
        for values in run["optimizer"]["param_groups"]:
            values |= {name: self._optimizer.defaults[name] for name in ("fused", "capturable")}
        states.set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=run["model"],
            optim_state_dict=run["optimizer"],
            options=_WHOLE,
        )
        if run["scaler"]:  # empty where products were of another precision than float16
            self._scaler.load_state_dict(run["scaler"])
        self.losses = msgspec.convert(run["losses"], Losses)
        self._best, self._earlier_s = run.get("best"), run.get("seconds", 0.0)
        self._models = run.get("models", [])
        if (most := 60 * self._schedule.minutes) and self._earlier_s >= most:
            log.warning("%s has had all %g minutes: give it more", self._saved, most / 60)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole model's tensors on the host; all processes must call it.

        With `keep_best` they are those of least evaluation loss, else the last ones.
        """
        return self.last_weights() if self._best is None else self._best

    def last_weights(self) -> dict[str, Tensor]:
        """Return the whole model's tensors as they are now; all processes must call it. Raises
        ConfigError for weights that are not finite, which the losses so far did not show."""
        weights = states.get_model_state_dict(self._model, options=_WHOLE)
        return self._checked(cast(dict[str, Tensor], weights))

    def _checked(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in weights.items():
            if not bool(tensor.isfinite().all()):
                self._check(math.nan, f"{name} after step {len(self.losses.steps)}")
        return weights
