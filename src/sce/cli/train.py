"""`sce train`: from a prepared dataset to a trained model and its run directory."""

import inspect
import math
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TextIO, get_type_hints

from cyclopts import Group, Parameter

from sce.cli.evaluate import output_console, show_metrics
from sce.config import SECTIONS, Config, describe_settings, for_loss, load_toml
from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.training.begin import check_target
from sce.training.device import resolve_device
from sce.training.interrupt import TrainingInterrupted
from sce.training.loop import FitResult, TrainingWarning, fit
from sce.training.objective import LossSettings
from sce.units import plural

_FLAG = Annotated[bool, Parameter(show_default=False)]
# Settings with a short name of their own, beside the dotted one.
_DAILY = {
    "loss.name": "--loss",
    "training.epochs": "--epochs",
    "training.batch_size": "--batch-size",
    "training.learning_rate": "--learning-rate",
    "training.seed": "--seed",
    "training.device": "--device",
}


def train(  # noqa: D417 - the settings document themselves
    prepared: Annotated[Path, Parameter(name="PREPARED")],
    /,
    *,
    out: Path | None = None,
    config: Path | None = None,
    resume: _FLAG = False,
    force: _FLAG = False,
    tensorboard: _FLAG = False,
    **settings: Any,
) -> int:
    """Train a model on a prepared dataset, and measure it on the test users.

    Args:
        prepared: Directory that "sce prepare" wrote.
        out: Directory of the run to write. [default: runs/PREPARED-LOSS]
        config: TOML file of settings, in tables [model], [loss], [training]; options override it.
        resume: Go on with the run in --out, from where it was stopped, interrupted or killed.
        force: Replace the run in --out.
        tensorboard: Also write event files for TensorBoard into the run.
    """
    options = _given(settings)
    file, dropped = for_loss(load_toml(config) if config else {}, options)
    chosen = Config.compose(file, options)
    if dropped:
        _say(
            f"{config} is for another loss than {chosen.loss.name}: leaving out its "
            f"{', '.join(dropped)}"
        )
    out = out or Path("runs") / f"{prepared.resolve().name}-{chosen.loss.name}"
    check_target(out, force=force, resume=resume)
    resolve_device(chosen.training.device)  # a GPU that is not there should be said first
    dataset = PreparedDataset.load(prepared)
    left_open = chosen.loss
    chosen = chosen.settled(dataset.n_items, len(dataset.train.items))
    if chosen.loss != left_open and not resume:
        _say("; ".join(_decided(left_open, chosen.loss, dataset)))
    try:
        with _plain_warnings():
            model, loss = chosen.build(dataset)
            result = fit(
                model,
                loss,
                dataset,
                settings=chosen.training,
                out=out,
                resume=resume,
                force=force,
                config=chosen.to_dict(),
                tensorboard=tensorboard,
            )
    except TrainingInterrupted as interruption:
        _say(f"{interruption}; go on with the same command and --resume")
        return interruption.exit_code
    _show(result, out, chosen.loss.name)
    return 0


def _decided(
    left_open: LossSettings, settled: LossSettings, dataset: PreparedDataset
) -> Iterator[str]:
    """Say what of the loss followed from the dataset."""
    if left_open.bucket_size_y is None:
        yield f"{plural(settled.bucket_size_y or 0, 'item')} in a bucket"
    if left_open.mix is None:
        mean = math.floor(10 * len(dataset.train.items) / dataset.n_items) / 10
        where = "near the states" if settled.mix else "anywhere"
        yield f"buckets {where}, with {mean:,} training events an item"


def _options() -> list[inspect.Parameter]:
    """Every setting as an option, which is None when it is not given."""
    options = []
    for position, (section, settings) in enumerate(SECTIONS.items()):
        group = Group(section.capitalize(), sort_key=position + 1)
        help_of, kinds = describe_settings(settings), get_type_hints(settings)
        for entry in fields(settings):
            dotted = f"{section}.{entry.name}"
            flag = f"--{dotted.replace('_', '-')}"
            text = f"{help_of[entry.name]}{_default(entry.default)}"
            kind = kinds[entry.name] | None
            negative = flag.replace(".", ".no-") if kinds[entry.name] in (bool, bool | None) else ()
            if dotted in _DAILY:
                daily = Parameter(name=_DAILY[dotted], help=text)
                options.append(_option(f"daily_{section}_{entry.name}", kind, daily))
            option = Parameter(
                name=flag, help=text, group=group, negative=negative, show=dotted not in _DAILY
            )
            options.append(_option(f"{section}_{entry.name}", kind, option))
    # Daily ones first, in the order above.
    return sorted(options, key=lambda option: not option.name.startswith("daily_"))


def _option(name: str, kind: Any, parameter: Parameter) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, parameter],
    )


def _default(value: object) -> str:
    if value is None:
        return ""  # the text says it
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f" [default: {shown.lower() if isinstance(value, bool) else shown}]"


def _given(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort what was given by section and name."""
    layer: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for option, value in options.items():
        if value is None:
            continue
        section, _, name = option.removeprefix("daily_").partition("_")
        if name in layer[section]:
            dotted = f"{section}.{name}"
            raise InputError(
                f"{_DAILY[dotted]} and --{dotted.replace('_', '-')} are the same; give one of them"
            )
        layer[section][name] = value
    return layer


def _sign(options: list[inspect.Parameter]) -> None:
    """Give `train` the signature that the command line reads: its own, and every setting."""
    own = inspect.signature(train)
    named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    everything = [named[0], named[1], *options, *named[2:]]  # PREPARED, --out, settings, the rest
    train.__signature__ = own.replace(parameters=everything)  # type: ignore[attr-defined]
    train.__annotations__ |= {option.name: option.annotation for option in options}


_sign(_options())


def _say(text: str) -> None:
    with suppress(OSError):  # nobody may be there to read it
        print(f"sce: {text}", file=sys.stderr, flush=True)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show our warnings as one line each; those of others as ever."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrainingWarning)
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, TrainingWarning):
                _say(f"warning: {message}")
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _show(result: FitResult, out: Path, loss: str) -> None:
    console = output_console()
    if result.test is not None and result.popularity is not None:
        show_metrics({loss: result.test, "popularity": result.popularity["test"]}, title="test")
    for name, value in _closing_lines(result, out):
        console.print(f"{name:<12}{value}", soft_wrap=True, markup=False)


def _closing_lines(result: FitResult, out: Path) -> Iterator[tuple[str, str]]:
    reason = {"patience": "none was better for a while", "epochs": "all that were asked for"}
    yield "best", f"epoch {result.best_epoch} of {result.epochs} ({reason[result.stopped]})"
    speed = f"{result.tokens_per_second:,.0f} tokens/s"
    for phase in ("training", "evaluation"):
        seconds, peak = result.seconds[phase], result.memory_mib[phase]
        if peak is not None:
            parts = [f"{seconds:,.1f} s", *([speed] if phase == "training" else [])]
            yield phase, ", ".join([*parts, f"peak {peak:,.0f} MiB"])
    yield "", f"on {result.device}; peaks are of {result.memory_measured}"
    place = shlex.quote(str(out))
    yield "written", f"{out}"
    yield "next", f"sce evaluate {place}"
    yield "", f"sce recommend {place} --histories FILE -k 10"
    yield "", f"sce report {place}"
