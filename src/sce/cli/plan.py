"""`sce plan`: the memory that training will take with each loss, and what fits."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import CoercionError, Parameter, Token
from rich import box
from rich.table import Table

from sce.cli.evaluate import output_console
from sce.data.prepared import PreparedDataset
from sce.errors import InputError
from sce.planning import LOSSES, Job, Plan, Planned, parse_size, predict, show_size
from sce.planning import plan as plan_job
from sce.planning.coefficients import H200
from sce.planning.formula import ROW_WISE
from sce.planning.job import Precision, sizes_of
from sce.planning.search import CONTEXT, margin, most_sequences, usable

_MOMENTS = {
    "forward": "activations and the loss are computed",
    "loss backward": "the loss computes its gradients",
    "model backward": "gradients go back through the model",
    "embedding": "the catalogue's two gradients, by the loss and by the histories, are added",
    "update": "the touched rows of the catalogue are gathered and moved",
}
_WIDE = 116  # columns of a terminal in which the whole table has room


def _read_count(kind: Any, tokens: Sequence[Token]) -> int:
    """Read a whole number, also as 1e6."""
    try:
        value = float(tokens[0].value)
        if value != int(value):
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise CoercionError(token=tokens[0], target_type=int) from error
    return int(value) if "e" in tokens[0].value.lower() else int(tokens[0].value)


def plan(
    *,
    items: Annotated[int | None, Parameter(converter=_read_count)] = None,
    data: Annotated[Path | None, Parameter(name="--data")] = None,
    batch: Annotated[int, Parameter(converter=_read_count)] = 128,
    length: int | None = None,
    mean_length: float | None = None,
    dim: int = 64,
    blocks: int = 2,
    heads: int = 1,
    precision: Annotated[Precision, Parameter(name=["--precision", "--dtype"])] = "float32",
    negatives: int = 256,
    bucket_size_y: int | None = None,
    alpha: float = 2.0,
    beta: float = 1.0,
    chunk_size: int = 1024,
    memory: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", show_default=False)] = False,
) -> None:
    """Predict the peak memory of training with each loss, and say what fits on a GPU.

    Args:
        items: Items in the catalogue, such as 1_000_000 or 1e6.
        data: Prepared dataset, instead of --items: its items and the lengths of its histories.
        batch: Sequences in a step.
        length: Longest history. [default: 200, or the longest in --data if that is less]
        mean_length: Mean history of a user, once it is cut to the longest. [default: the longest]
        dim: Width of item embeddings and states.
        blocks: Transformer blocks.
        heads: Attention heads.
        precision: float32; tf32 in matrix products; or bf16, by autocast.
        negatives: Sampled items against each target, for bce+, gbce and ce-.
        bucket_size_y: Items in a bucket, for sce. [default: a fortieth of the catalogue, 64 to
            4,096, or to 256 with row-wise updates]
        alpha: How densely buckets cover the states, for sce.
        beta: States in a bucket against the number of buckets, for sce.
        chunk_size: Items scored at once, for ce in chunks.
        memory: Of the GPU, such as 16GB, 16GiB or '900 MB'. [default: of the GPU here, if any]
        as_json: Write JSON, for programs.
    """
    sizes = _sizes(items, data, length, mean_length)
    job = Job(
        **sizes,
        batch=batch,
        dim=dim,
        blocks=blocks,
        heads=heads,
        precision=precision,
        n_negatives=negatives,
        bucket_size_y=bucket_size_y,
        alpha=alpha,
        beta=beta,
        chunk_size=chunk_size,
    )
    found = plan_job(job, _memory_here() if memory is None else parse_size(memory))
    if as_json:
        print(json.dumps(_as_dict(found), indent=2))
    else:
        _show(found)


def _sizes(
    items: int | None, data: Path | None, length: int | None, mean_length: float | None
) -> dict[str, Any]:
    """What the catalogue and the histories say, given by hand or by a dataset."""
    if data is None:
        if items is None:
            raise InputError("how large is the catalogue? Give --items N, or --data PREPARED")
        length = 200 if length is None else length
        return {"items": items, "length": length, "mean_length": mean_length}
    if items is not None:
        raise InputError("--data says how many items there are; leave out --items")
    dataset = PreparedDataset.load(data, verify=False)
    lengths = dataset.train.lengths
    if not (lengths >= 2).any():
        raise InputError(f"{data} has nothing to train on: no sequence has two events")
    found = {
        "items": dataset.n_items,
        **sizes_of(lengths, 200 if length is None else length),
        "events": len(dataset.train.items),
        "users": len(dataset.train),
    }
    return found if mean_length is None else found | {"mean_length": mean_length, "longer": None}


def _memory_here() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _as_dict(found: Plan) -> dict[str, object]:
    return {
        "job": asdict(found.job),
        "memory_bytes": found.memory,
        "usable_bytes": None if found.memory is None else int(usable(found.memory)),
        "losses": [
            {
                "loss": one.loss,
                "settings": one.settings,
                "peak_bytes": round(one.forecast.total),
                "parts": {
                    part: round(getattr(one.forecast, part))
                    for part in ("model", "activations", "loss", "other")
                },
                "moment": one.forecast.moment,
                "fits": one.fits,
                "tight": one.tight,
                "largest_batch": one.largest_batch,
            }
            for one in found.losses
        ],
        "most_sequences": most_sequences(found.job),
        "largest_bucket_size_y": found.largest_bucket,
        "largest_dim": found.largest_dim,
        "most_items": found.most_items,
        "calibration": {"source": H200.source, "largest_error": H200.largest_error},
    }


def _show(found: Plan) -> None:
    console = output_console()
    wide = console.width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("loss", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    if found.memory is not None:
        table.add_column("fits", no_wrap=True)
        table.add_column("largest batch", justify="right", no_wrap=True)
    for heading in ("model", "activations", "of the loss", "other") if wide else ():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("highest in", no_wrap=True)
    for one in found.losses:
        cast = one.forecast
        fits = [] if found.memory is None else [_verdict(one), _batch(found, one)]
        parts = (cast.model, cast.activations, cast.loss, cast.other) if wide else ()
        sizes = [show_size(size) for size in parts]
        table.add_row(one.loss, show_size(cast.total), *fits, *sizes, cast.moment)
    console.print(table)
    console.print()
    for name, value in _closing_lines(found, wide):
        console.print(f"{name:<11}{value}", soft_wrap=True, markup=False)


def _verdict(one: Planned) -> str:
    if not one.fits:
        return "[red]no[/red]"
    return "[yellow]just[/yellow]" if one.tight else "[green]yes[/green]"


def _batch(found: Plan, one: Planned) -> str:
    if one.largest_batch != most_sequences(found.job):
        return f"{one.largest_batch:,}"
    return f"{one.largest_batch:,} " + ("(all)" if found.job.users else "or more")


def _closing_lines(found: Plan, wide: bool) -> Iterator[tuple[str, str]]:
    job = found.job
    mean = job.length if job.mean_length is None else job.mean_length
    yield (
        "job",
        f"{job.items:,} items; {job.batch:,} sequences of up to {job.length:,} events, {mean:,.4g} "
        f"on average; dim {job.dim}, {job.blocks} block{'s' * (job.blocks > 1)}, {job.precision}; "
        f"{job.n_negatives:,} negatives; chunks of {job.chunk_size:,} items",
    )
    if found.memory is None:
        yield "memory", "there is no GPU here; give --memory to see what fits, for example 16GB"
    else:
        yield (
            "memory",
            f"{show_size(found.memory)}, of which {show_size(usable(found.memory))} can be used; "
            f'the driver has {show_size(CONTEXT)}; "just": by less than {_reckoned()}',
        )
        yield from _about_sce(found)
    moments = dict.fromkeys(one.forecast.moment for one in found.losses)
    yield "highest in", "; ".join(f"{moment}: {_MOMENTS[moment]}" for moment in moments)
    if wide:
        yield "model", "weights, gradients and Adam's moments; other: data, batch and libraries"
    else:
        yield "parts", f"of the peaks: with --json, or in a terminal of {_WIDE} columns"
    yield (
        "row-wise",
        "--training.row-wise: no moments of the catalogue, and gradients of the touched rows alone",
    )
    yield "numbers", H200.describe()


def _reckoned() -> str:
    """How far off a prediction may be, as far as that is known."""
    if H200.largest_error is None:
        return f"{margin(H200):.0%}; how far off predictions are is a guess until it is measured"
    return f"{margin(H200):.0%}, the error to be reckoned with"


def _about_sce(found: Plan) -> Iterator[tuple[str, str]]:
    sce = next(one for one in found.losses if one.loss == "sce")
    if sce.largest_batch:
        flags = (f"--loss.{name.replace('_', '-')} {size}" for name, size in sce.settings.items())
        if sce.fits:
            all_items = found.largest_bucket == found.job.items
            most = "of any size" if all_items else f"up to {found.largest_bucket:,}"
            yield "sce", f"{' '.join(flags)}; bucket-size-y {most} fits"
        else:
            smaller = found.largest_bucket
            or_buckets = f", or with --bucket-size-y {smaller}" if smaller else ""
            yield "sce", f"fits with --batch-size {sce.largest_batch}{or_buckets}"
        return
    assert found.memory is not None
    if found.memory <= CONTEXT:
        yield "too little", f"the driver of a GPU takes {show_size(CONTEXT)} before training begins"
        return
    if 16 * found.job.parameters <= usable(found.memory):
        others = [one for one in found.losses if one.largest_batch]
        if others:
            batches = ", ".join(f"{one.loss} up to {one.largest_batch:,}" for one in others)
            yield "sce", f"not even a batch of one sequence fits; other losses do: {batches}"
            return
        least = min(predict(replace(found.job, batch=1), loss).total for loss in LOSSES)
        yield (
            "too little",
            "not even a batch of one sequence fits, whatever the loss: it takes "
            f"{show_size(least)}, and {show_size(CONTEXT)} for the driver",
        )
        return
    weights = show_size(16 * found.job.parameters)
    row_wise = next(one for one in found.losses if one.loss == ROW_WISE)
    ways = []
    if row_wise.largest_batch:
        more = "" if row_wise.fits else f" --batch-size {row_wise.largest_batch}"
        ways.append(f"--training.row-wise{more}")
    if found.largest_dim:
        ways.append(f"--dim {found.largest_dim} or less")
    if found.most_items:
        ways.append(f"at most {found.most_items:,} items")
    yield (
        "too large",
        f"with dense updates, weights, their gradients and Adam's moments alone take {weights}, "
        "whatever the loss and the batch; what would fit: "
        f"{', or '.join(ways) or 'nothing on this GPU'}",
    )
