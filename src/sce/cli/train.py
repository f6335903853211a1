"""`sce train`: from a prepared dataset to a trained model and its run directory."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_args

from cyclopts import Group, Parameter

from sce.cli import say, telling
from sce.cli.output import show_lines, show_metrics
from sce.config import (
    DEFAULT_NAMES,
    EXACT_ITEMS,
    EXACT_ITEMS_IN_HALF,
    EXACT_LOSS,
    SECTIONS,
    Config,
    classes_with,
    for_loss,
    is_exact_faster,
    load_toml,
    setting_types,
    settings_from,
    settings_like,
    settings_of,
)
from sce.data.prepared import PreparedDataset
from sce.distributed.ranks import was_started
from sce.documented import fields_of
from sce.errors import InputError, RankError
from sce.losses import DEFAULT_LOSS, LOSSES
from sce.models.registry import BACKBONES
from sce.planning import summarize_lengths
from sce.training.device import resolve_device
from sce.training.fit import FitResult, fit
from sce.training.run import MANIFEST
from sce.training.run_start import check_target
from sce.training.shards import begun_with, chose_shards, need_shards
from sce.training.signals import TrainingInterrupted
from sce.training.start import unite_items
from sce.units import plural

# Settings with a short name beside the dotted one.
_DAILY = {
    "loss.name": "--loss",
    "training.epochs": "--epochs",
    "training.batch_size": "--batch-size",
    "training.learning_rate": "--learning-rate",
    "training.seed": "--seed",
    "training.device": "--device",
}


def _options(section: str) -> Any:
    """A TypedDict of every setting in a section, which has those that are given."""
    options, group = {}, Group(section.capitalize(), sort_key=[*SECTIONS].index(section) + 1)
    for name, kind in setting_types(section).items():
        flag = f"--{section}.{name}".replace("_", "-")
        names = [flag]
        if daily := _DAILY.get(f"{section}.{name}"):
            # Behind --loss, cyclopts would look for --loss.name among the parts of a loss.
            names = [flag, daily] if section == "loss" else [daily, flag]
        parameter = Parameter(
            name=names,
            help=_help(section, name),
            group="Parameters" if daily else group,
            negative=flag.replace(".", ".no-") if bool in (kind, *get_args(kind)) else (),
            show_choices=name != "name",
        )
        options[name] = Annotated[kind, parameter]
    make: Any = TypedDict
    return Annotated[make(section, options, total=False), Parameter(name="*")]


def _help(section: str, name: str) -> str:
    """The docstring of a setting, after the losses or models that have it, and the default."""
    if name == "name":
        table: Any = LOSSES if section == "loss" else BACKBONES
        choices = ", ".join(f"{key} ({entry.summary})" for key, entry in table.items())
        default = DEFAULT_NAMES[section]
        if section == "loss":
            few = f"{EXACT_ITEMS:,} items on a CPU or {EXACT_ITEMS_IN_HALF:,} in bf16 on a GPU"
            default += f"; ce up to about {few}"
        return f"{choices}. [default: {default}]"
    owners = classes_with(section, name)
    text = str([fields_of(settings)[name].description for settings in owners.values()][-1])
    if len(owners) < len(SECTIONS[section]):
        text = f"{', '.join(owners)}: {text}"
    defaults: dict[str, list[str]] = {}
    for key, settings in owners.items():
        defaults.setdefault(_show_default(getattr(settings, name)), []).append(key)
    shown = "; ".join(f"{', '.join(keys)}: {value}" for value, keys in defaults.items())
    if len(defaults) == 1:
        (shown,) = defaults
    return f"{text} [default: {shown}]" if shown else text


def _show_default(value: object) -> str:
    if value is None:
        return ""  # the docstring names it
    text = str(value).strip("()").replace(",", "")
    return text.lower() if isinstance(value, bool) else text


_USUAL = (DEFAULT_LOSS, str(EXACT_LOSS["loss"]["name"]))  # losses that are chosen unasked


def train(  # noqa: D417 - the settings document themselves
    prepared: Annotated[Path, Parameter(name="PREPARED")],
    /,
    *,
    out: Path | None = None,
    loss: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    config: Path | None = None,
    start_from: Annotated[Path | None, Parameter(name="--from")] = None,
    like: Path | None = None,
    resume: bool = False,
    force: bool = False,
) -> int:
    """Train a model on a prepared dataset, and measure it on the test users.

    Args:
        prepared: Directory that "sce prepare" wrote.
        out: Directory of the run to write. [default: runs/PREPARED-LOSS]
        config: TOML file of settings, in tables [model], [loss], [training]; options override it.
        start_from: Another run, of whose best weights and optimizer state to begin: its items are
            carried over by their ids, also those that PREPARED lacks, new ones begin as the mean of
            known ones near them (or as "sce add-items" made them before). Settings that are not
            given are those of the run, but --epochs, patience, --seed and --device; the model must
            be. What it begins with is measured as epoch 0. PREPARED is of the whole log, old events
            included.
        like: A run that has ended: take its settings, and its best epoch as the number of epochs,
            without patience; options override them. For a dataset of "sce prepare --split none".
        resume: Go on with the run in --out, from where it was stopped, interrupted or killed. Its
            settings are kept, and others are refused, but more --epochs. Where there is none, that
            is refused. What torchrun starts again goes on without this option.
        force: Replace the run in --out: it is deleted when training begins, and nothing of the new
            one is saved yet. Another --out keeps both.
    """
    options = {"model": model or {}, "loss": loss or {}, "training": training or {}}
    if config is not None and like is not None:
        raise InputError("--config and --like both say all settings; give one of them")
    goes_on = start_from is not None
    taken = settings_like(like, options, goes_on=goes_on) if like else {}
    given = load_toml(config) if config else taken
    file, dropped = for_loss(given, options)
    first = os.environ.get("RANK", "0") == "0"  # of torchrun's processes the one that tells
    needed = resume
    place = Path("runs") / prepared.resolve().name
    name = {**file.get("loss", {}), **options["loss"]}.get("name")
    usual = [place.with_name(f"{place.name}-{one}") for one in ([name] if name else _USUAL)]
    if any(map(was_started, usual if out is None else [out])):
        resume, force = True, False
    if resume and out is None:  # perhaps begun on another kind of device
        found = [path for path in usual if (path / MANIFEST.file).exists()]
        out = found[0] if len(found) == 1 else None
    begun_there = resume and out is not None and (out / MANIFEST.file).exists()
    begun = settings_of(out, file, options) if begun_there and out else {}
    kept = settings_from(start_from, file, options) if start_from and not begun_there else begun
    chosen = Config.compose(kept, file, options)
    if dropped and first:
        left_out = f"leaving out its {', '.join(dropped)}"
        say(f"{config or like} is for another loss than {chosen.loss_name}: {left_out}")
    if out is not None and first:
        check_target(out, force=force, resume=resume, needed=needed)
    device = resolve_device(chosen.training.device)  # a GPU that is not there is refused first
    dataset = PreparedDataset.load(prepared)
    if start_from is not None and not begun_there:
        dataset = unite_items(dataset, start_from)
    counted = {"epochs", "max_steps"} & {*file.get("training", {}), *options["training"]}
    if not (len(dataset.test) or counted or begun):
        raise InputError(
            f"{prepared} has no test users by whom to see when to stop; say how long to train with "
            "--epochs N, or take a measured run's settings and best epoch with --like RUN"
        )
    if not (kept.get("loss") or file.get("loss") or options["loss"] or chosen.training.row_wise):
        lengths, size = dataset.train.lengths, chosen.training.batch_size
        mean = summarize_lengths(lengths, chosen.model.max_length)[1]["mean_length"]
        targets = mean * min(size, len(lengths))
        if is_exact_faster(dataset.n_items, targets, chosen, device):
            chosen = Config.compose(kept, EXACT_LOSS, file, options)
        if first and not needed and chosen.loss_name == "ce":
            where = "a CPU" if device.type == "cpu" else "a GPU in half precision"
            why = f"with {plural(dataset.n_items, 'item')} it takes less time than SCE on {where}"
            say(f"exact cross-entropy: {why}; --loss sce takes the latter")
    if out is None:
        out = place.with_name(f"{place.name}-{chosen.loss_name}")
        if first and needed:
            check_target(out, resume=True, needed=True)
    if first and force and (out / MANIFEST.file).exists():
        say(f"{out} will be replaced when training begins, before the new run has saved anything")
    if resume and (out / MANIFEST.file).exists():
        dataset = unite_items(dataset, out)
    chosen = with_shards(chosen, dataset, device, begun_with(out) if resume else {}, first)
    try:
        network, objective = chosen.build(dataset)
        result = fit(
            network,
            objective,
            dataset,
            settings=chosen.training,
            out=out,
            resume=resume,
            force=force,
            start_from=start_from,
            config=chosen.to_dict(),
        )
    except TrainingInterrupted as interruption:
        if first:
            say(f"{interruption}; go on with the same command and --resume")
        return interruption.exit_code
    except RankError as error:
        how = "with --resume goes on" if (out / MANIFEST.file).exists() else "begins again"
        raise RankError(f"{error}; the same command {how}") from error
    if not first:
        return 0
    with telling():
        if result.test is not None and result.popularity is not None:
            rows = {chosen.loss_name: result.test, "popularity": result.popularity["test"]}
            apart = result.by_popularity["test"]
            show_metrics(rows, title="test", users=result.users["test"], apart=apart)
        show_lines(_closing_lines(result, out), width=12)
    return 0


def with_shards(
    chosen: Config, dataset: PreparedDataset, device: Any, begun: dict[str, Any], first: bool
) -> Config:
    """Shard the catalogue where it must be, before each process makes the whole of it."""
    given: Any = {"ranks": int(os.environ.get("WORLD_SIZE", "1")), "device": device}
    wanted = begun.get("shard_catalogue", False)
    if not begun and chosen.loss_name == "sce":
        wanted = need_shards(chosen.training, chosen.model, chosen.loss, dataset, **given)
        if wanted and first:
            say(chose_shards())
    if not wanted or chosen.training.shard_catalogue is not None:
        return chosen
    return replace(chosen, training=replace(chosen.training, shard_catalogue=True))


# The command line reads the settings of the tables, which no annotation could spell out.
train.__annotations__ |= {section: _options(section) | None for section in SECTIONS}


def _closing_lines(result: FitResult, out: Path) -> Iterator[tuple[str, str]]:
    reason = {
        "epochs": "all that were asked for",
        "max_steps": "ended by --training.max-steps",
        "patience": "none was better for a while",
    }
    which = "best" if result.users["test"] else "kept"  # without test users, the last
    best = f"epoch {result.best_epoch} of" if result.best_epoch else "what it began with, of epochs"
    yield which, f"{best} {result.epochs} ({reason.get(result.stopped, result.stopped)})"
    if result.users["validation"] < result.users["test"]:
        yield "", f"by a sample of {result.users['validation']:,} of {result.users['test']:,} users"
    users = plural(result.users["test"], "test user")
    speeds = {"training": f", {result.tokens_per_second:,.0f} tokens/s", "evaluation": f", {users}"}
    for phase, speed in speeds.items():
        peak = result.memory_mib[phase]
        if peak is not None:
            yield phase, f"{result.seconds[phase]:,.1f} s{speed}, peak {peak:,.0f} MiB"
    yield "", f"on {result.device}; peaks are of {result.memory_measured}"
    place = shlex.quote(str(out))
    yield "written", f"{out}"
    if result.users["test"]:
        yield "next", f"sce evaluate {place}"
    yield "" if result.users["test"] else "next", f"sce recommend {place} --out FILE.csv"
    yield "", f"sce recommend {place} --histories FILE.jsonl -k 10"
    yield "", f"sce report {place}"
