"""`sce plan`: the memory that training will take with each loss, and what fits."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import Parameter

from sce.cli.output import output_console, plain_table, show_lines
from sce.config import EXACT_ITEMS_IN_HALF
from sce.data.prepared import PreparedDataset
from sce.distributed.plan import LINKS, RankPlan, plan_ranks
from sce.errors import InputError
from sce.evaluation.precision import Precision
from sce.losses.backend import MAX_DIM
from sce.models.registry import BACKBONES, DEFAULT_BACKBONE
from sce.planning import (
    CONTEXT,
    ERROR,
    MARGIN,
    ROW_WISE,
    Job,
    MemoryPlan,
    PlannedLoss,
    most_sequences,
    predict,
    summarize_lengths,
    usable,
)
from sce.planning import plan as plan_job
from sce.training.settings import TrainingSettings
from sce.units import parse_size, show_size

_MOMENTS = {
    "forward": "activations and the loss are computed",
    "loss backward": "the loss computes its gradients",
    "model backward": "gradients go back through the model",
    "embedding": "the catalogue's two gradients, by the loss and by the histories, are added",
    "update": "the touched rows of the catalogue are gathered and moved",
}
_PARTS = ("model", "activations", "loss", "other")  # of a peak
_MANY = 1_000_000  # items, from which on most of the memory is theirs
_WIDE = 116  # columns of a terminal in which the whole table has room


def plan(
    *,
    items: int | None = None,
    data: Path | None = None,
    batch: int = 128,
    length: int | None = None,
    mean_length: float | None = None,
    model: str = DEFAULT_BACKBONE,
    dim: int = 64,
    blocks: int = 2,
    heads: int = 1,
    precision: Annotated[Precision, Parameter(name=["--precision", "--dtype"])] = "float32",
    negatives: int = 256,
    bucket_size_y: int | None = None,
    alpha: float | None = None,
    beta: float = 1.0,
    chunk_size: int = 1024,
    memory: str | None = None,
    gpus: int = 1,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Predict the peak memory of training with each loss, and say what fits on a GPU.

    Args:
        items: Items in the catalogue, such as 1_000_000 or 1e6.
        data: Prepared dataset, instead of --items: its items and the lengths of its histories.
        batch: Sequences in a step.
        length: Longest history. [default: 200, or the longest in --data if that is less]
        mean_length: Mean history of a user, once it is cut to the longest. [default: the longest]
        model: The backbone.
        dim: Width of item embeddings and states.
        blocks: Transformer blocks.
        heads: Attention heads.
        precision: float32; tf32 in matrix products; or bf16, by autocast.
        negatives: Sampled items against each target, for bce+, gbce and ce-.
        bucket_size_y: Items in a bucket, for sce. [default: 2,048, with row-wise updates 256, or
            the whole catalogue]
        alpha: How many buckets there are, for sce. [default: 8, for large catalogues down to 2]
        beta: States in a bucket against the number of buckets, for sce.
        chunk_size: Items scored at once, for ce in chunks.
        memory: Of the GPU, such as 16GB, 16GiB or '900 MB'. [default: of the GPU here, if any]
        gpus: That share the catalogue by rows: what each holds, sends and computes is modelled,
            not measured. The batch is that of each.
        as_json: Write JSON, for programs.
    """
    width, found = _sizes(items, data, length, mean_length)
    settings: Any = BACKBONES[model].settings
    shape = {"dim": dim, "blocks": blocks, "heads": heads, "max_length": width}
    backbone = settings(**{name: shape[name] for name in _shape_of(settings)})
    options = {"n_negatives": negatives, "bucket_size_y": bucket_size_y, "alpha": alpha}
    options |= {"beta": beta, "chunk_size": chunk_size}
    job = Job(batch=batch, backbone=backbone, precision=precision, options=options, **found)
    size = None if memory is None else parse_size(memory)
    if size is None and torch.cuda.is_available():
        size = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    planned, rank = plan_job(job, size), plan_ranks(job, gpus) if gpus != 1 else None
    if as_json:
        ranks = {} if rank is None else {"modelled_rank": asdict(rank)}
        print(json.dumps(_as_dict(planned) | ranks, indent=2))
    else:
        _show(planned, rank, _next(planned, data, length) if gpus == 1 else [])


plan.__annotations__["model"] = Literal[tuple(BACKBONES)]


def _shape_of(backbone: Any) -> list[str]:
    """The options of this command that a backbone has."""
    names = ("dim", "blocks", "heads", "max_length")
    return [name for name in names if name in backbone.__dataclass_fields__]


def _sizes(
    items: int | None, data: Path | None, length: int | None, mean_length: float | None
) -> tuple[int, dict[str, Any]]:
    """Return the width of a batch, and what a job says of the data."""
    longest = 200 if length is None else length
    if data is None:
        if items is None:
            raise InputError("how large is the catalogue? Give --items N, or --data PREPARED")
        return longest, {"items": items, "mean_length": mean_length}
    if items is not None:
        raise InputError("--data says how many items there are; leave out --items")
    dataset = PreparedDataset.load(data, verify=False)
    width, found = summarize_lengths(dataset.train.lengths, longest)
    if mean_length is not None:
        found |= {"mean_length": mean_length, "longer": None}
    users, events = len(dataset.train), len(dataset.train.items)
    return width, found | {"items": dataset.n_items, "users": users, "events": events}


def _as_dict(found: MemoryPlan) -> dict[str, object]:
    job = asdict(found.job)
    backbone, options = job.pop("backbone"), job.pop("options")
    backbone["length"] = backbone.pop("max_length")
    return {
        "job": job | backbone | options,
        "memory_bytes": found.memory,
        "usable_bytes": None if found.memory is None else usable(found.memory),
        "losses": [
            {"loss": one.name, "settings": one.sizes, "peak_bytes": round(one.peak.total)}
            | {"parts": {part: round(getattr(one.peak, part)) for part in _PARTS}}
            | {"moment": one.peak.moment, "fits": one.fits, "tight": one.tight}
            | {"largest_batch": one.largest_batch}
            for one in found.losses
        ],
        "most_sequences": most_sequences(found.job),
        "largest_bucket_size_y": found.largest_bucket,
        "largest_dim": found.largest_dim,
        "calibration": {"source": ERROR["source"], "largest_error": ERROR["largest"]},
    }


def _show(found: MemoryPlan, rank: RankPlan | None, advice: list[tuple[str, str]]) -> None:
    console = output_console()
    wide, known = console.width >= _WIDE, found.memory is not None
    table = plain_table()
    numbers = ["largest batch"] * known + ["model", "activations", "of the loss", "other"] * wide
    for heading in ("loss", "peak", *["fits"] * known, *numbers, "highest in"):
        right = heading in ("peak", *numbers)
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for one in found.losses:
        verdict = "[yellow]just" if one.tight else "[green]yes" if one.fits else "[red]no"
        most = " (all)" if found.job.users else " or more"
        most = most if one.largest_batch == most_sequences(found.job) else ""
        fits = [verdict, f"{one.largest_batch:,}{most}"] if known else []
        sizes = [show_size(getattr(one.peak, part)) for part in (_PARTS if wide else ())]
        table.add_row(one.name, show_size(one.peak.total), *fits, *sizes, one.peak.moment)
    console.print(table)
    console.print()
    show_lines([*_closing_lines(found, wide), *advice], width=13)
    if rank is not None:
        console.print()
        show_lines(_about_ranks(rank), width=13)


def _closing_lines(found: MemoryPlan, wide: bool) -> Iterator[tuple[str, str]]:
    job, options, mean = found.job, found.job.options, found.job.mean_events
    shape = (f"{name} {getattr(job.backbone, name)}" for name in _shape_of(job.backbone)[:-1])
    batch = f"{job.batch:,} sequences of up to {job.length:,} events, {mean:,.4g} on average"
    losses = f"{options['n_negatives']:,} negatives; chunks of {options['chunk_size']:,} items"
    yield "job", f"{job.items:,} items; {batch}; {', '.join(shape)}, {job.precision}; {losses}"
    if found.memory is None:
        yield "memory", "there is no GPU here; give --memory to see what fits, for example 16GB"
    else:
        room = f"{show_size(found.memory)}, of which {show_size(usable(found.memory))} can be used"
        yield "memory", f"{room}; the driver has {show_size(CONTEXT)}"
        if any(one.tight for one in found.losses):
            yield "just", f"fits by less than {MARGIN:.0%}, and the prediction may be off by that"
        yield _about_sce(found)
    moments = dict.fromkeys(one.peak.moment for one in found.losses)
    yield "highest in", "; ".join(f"{moment}: {_MOMENTS[moment]}" for moment in moments)
    if wide:
        yield "model", "weights, gradients and Adam's moments; other: data, batch and libraries"
        given_back = "everything was given back before, and the peak is not made by the loss"
        yield "of the loss", f"what it holds at the peak; 0 B: {given_back}"
    else:
        yield "parts", f"of the peaks: with --json, or in a terminal of {_WIDE} columns"
    touched = "no moments of the catalogue, and gradients of the touched rows alone"
    buckets = _of_sce(found)[1].sizes["bucket_size_y"]
    yield "row-wise", f"--training.row-wise: {touched}; buckets of {buckets:,} items"
    if job.backbone.dim > MAX_DIM:
        plain = f"with {job.backbone.dim:,} it runs in plain PyTorch"
        most = f"of sce take up to {MAX_DIM} dimensions"
        yield "kernels", f"{most}: {plain}, which is slower and counted here"
    off = f"{ERROR['mean']:.1%} on average and {ERROR['largest']:.1%} at most"
    sizes = f"on {ERROR['sizes']} sizes the peak was off by {off}"
    yield "numbers", f"{ERROR['source']}; {sizes}"


def _next(found: MemoryPlan, data: Path | None, length: int | None) -> list[tuple[str, str]]:
    """Return the training to try with sce, as a command, and why; nothing where nothing fits."""
    job, plain, by_rows = found.job, *_of_sce(found)
    order = (by_rows, plain) if job.items >= _MANY else (plain, by_rows)
    one = max(order, key=lambda one: (bool(one.fits and not one.tight), bool(one.fits)))
    if not one.largest_batch:  # or the memory is not known
        return []
    peaks = f"{show_size(by_rows.peak.total)} instead of {show_size(plain.peak.total)}"
    why = "sce has room as it is; row-wise is for a million items and more"
    if one is by_rows:
        why = f"without Adam's moments of the catalogue, {peaks}"
    elif not one.fits:
        why = "a batch that has room"
    flags = ["--training.row-wise"] * (one is by_rows)
    if job.items <= EXACT_ITEMS_IN_HALF and job.precision == "bf16" and one is plain:
        flags = ["--loss sce"]  # which a GPU might not take unasked
    flags += _flags(replace(job, batch=job.batch if one.fits else one.largest_batch), length)
    command = " ".join(["sce train", shlex.quote(str(data or "DATA")), *flags])
    return [("next", command), ("", f"{why}; the largest batch is what has room, no advice")]


def _flags(job: Job, length: int | None) -> Iterator[str]:
    """Yield the options of `sce train` for what differs from its defaults."""
    backbone: Any = type(job.backbone)()
    (name,) = (name for name, entry in BACKBONES.items() if entry.settings is type(backbone))
    shape = _shape_of(backbone)[: None if length else -1]  # without, the data says how long
    options = {"bucket_size_y": None, "alpha": None, "beta": 1.0}
    for flag, value, default in [
        ("--batch-size", job.batch, TrainingSettings.batch_size),
        ("--training.precision", job.precision, TrainingSettings.precision),
        ("--model.name", name, DEFAULT_BACKBONE),
        *((f"--model.{one}", getattr(job.backbone, one), getattr(backbone, one)) for one in shape),
        *((f"--loss.{one}", job.options[one], usual) for one, usual in options.items()),
    ]:
        if value != default:
            yield f"{flag.replace('_', '-')} {value}"


def _about_ranks(rank: RankPlan) -> Iterator[tuple[str, str]]:
    """Return lines on each of several GPUs that share the catalogue."""
    yield "each of", f"{rank.ranks} GPUs, the catalogue shared by rows; modelled, not measured"
    held = show_size(sum(rank.holds.values()))
    parts = (f"{show_size(size)} of the {name}" for name, size in rank.holds.items())
    yield "holds", f"{held}: {', '.join(parts)}; {rank.rows:,} items"
    links = (f"{rank.sending_ms(rate):,.3g} ms by {name}" for name, rate in LINKS.items())
    yield "sends", f"{show_size(sum(rank.sends.values()))} a step: {', '.join(links)}"
    yield "of which", "; ".join(f"{name} {show_size(size)}" for name, size in rank.sends.items())
    scores = f"scores of its items for the centres of all, {rank.pass_ms:,.3g} ms"
    selects = f"selects {rank.candidates:,} for each, {rank.selecting_ms:,.3g} ms"
    sizes = ", ".join(f"{name} {size:,}" for name, size in rank.sizes.items())
    yield "computes", f"{scores} on an H200 in bf16, and {selects}; {sizes}"


def _about_sce(found: MemoryPlan) -> tuple[str, str]:
    """Return the line on what fits with sce, or on what would."""
    (sce, row_wise), bucket = _of_sce(found), found.largest_bucket
    if sce.fits:
        flags = (f"--loss.{name.replace('_', '-')} {size}" for name, size in sce.sizes.items())
        most = "of any size" if bucket == found.job.items else f"up to {bucket:,}"
        return "sce", f"{' '.join(flags)}; bucket-size-y {most} fits"
    if sce.largest_batch:
        or_buckets = f", or with --bucket-size-y {bucket}" if bucket else ""
        return "sce", f"fits with --batch-size {sce.largest_batch}{or_buckets}"
    ways = []
    if row_wise.largest_batch:
        more = "" if row_wise.fits else f" --batch-size {row_wise.largest_batch}"
        ways.append(f"--training.row-wise{more}")
    elif found.row_wise_dim:
        ways.append(f"--training.row-wise with --dim {found.row_wise_dim} or less")
    if found.largest_dim:
        ways.append(f"--dim {found.largest_dim} or less")
    least = show_size(predict(replace(found.job, batch=1), "sce").total)
    takes = f"takes {least}, with weights, gradients and Adam's moments"
    fits = ", or ".join(ways) or "nothing on this GPU"
    return "too large", f"with sce, a batch of one sequence {takes}; what would fit: {fits}"


def _of_sce(found: MemoryPlan) -> tuple[PlannedLoss, PlannedLoss]:
    """Return what is planned of sce, as it is and with row-wise updates."""
    by_name = {one.name: one for one in found.losses}
    return by_name["sce"], by_name[ROW_WISE]
