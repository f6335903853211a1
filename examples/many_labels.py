"""Classification into very many labels, several of which are right; judged by exact precision.

    python examples/many_labels.py synthesize data/many --labels 100_000
    python examples/many_labels.py data/many/train.txt data/many/test.txt --loss chunked sce

Files are in the format of the Extreme Classification Repository: a line "examples features labels",
then for each example "label,label feature:value feature:value ...". --targets all makes every label
of an example a target of its own; one draws one label of each example and step.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from language_model import make_loss
from sce import InputError

KS = (1, 3, 5)


@dataclass
class Examples:
    """What was read from a file: of each example its features, their weights, and its labels."""

    features: Sequence[Tensor]
    weights: Sequence[Tensor]
    labels: Sequence[Tensor]
    n_features: int
    n_labels: int


def read_examples(file: Path) -> Examples:
    """Read a file of the repository's format."""
    features, weights, labels, ends = [], [], [], [(0, 0)]
    wanted = "examples features labels"
    with file.open(encoding="utf-8") as lines:
        try:
            n, n_features, n_labels = map(int, (line := next(lines, "")).split())
            wanted = "label,... feature:value ..."
            for line in lines:
                found, *pairs = line.rstrip("\n").split(" ")
                labels += [int(label) for label in found.split(",") if label]
                split = [pair.split(":") for pair in pairs if pair]
                features += [int(feature) for feature, _ in split]
                weights += [float(weight) for _, weight in split]
                ends.append((len(features), len(labels)))
        except ValueError:
            raise InputError(f"{file}: {line[:50]!r} is not '{wanted}'") from None
    for name, values, size in (("feature", features, n_features), ("label", labels, n_labels)):
        if values and not 0 <= min(values) <= max(values) < size:
            raise InputError(f"{file}: a {name} is not from 0 to {size - 1}, as line 1 says")
    if len(ends) != n + 1:
        raise InputError(f"{file}: line 1 says {n} examples, the file has {len(ends) - 1}")
    of_features, of_labels = torch.tensor(ends)[1:-1].T
    return Examples(
        torch.tensor(features, dtype=torch.int64).tensor_split(of_features),
        torch.tensor(weights).tensor_split(of_features),
        torch.tensor(labels, dtype=torch.int64).tensor_split(of_labels),
        n_features,
        n_labels,
    )


def synthesize(folder: Path, labels: int, examples: int, seed: int = 0) -> None:
    """Write train.txt and test.txt: labels as skewed as 1 / rank, each with features of its own."""
    draw, n_features, own = torch.Generator().manual_seed(seed), max(50, labels // 2), 8
    kinds = torch.randint(n_features, (labels, own), generator=draw)
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in (("train", examples), ("test", max(1, examples // 10))):
        right = (labels ** torch.rand(n, 3, generator=draw)).long() - 1
        noise = torch.randint(n_features, (n, 6), generator=draw)
        shown = torch.rand(n, 3, own, generator=draw) < 0.6
        with (folder / f"{name}.txt").open("w", encoding="utf-8") as file:
            file.write(f"{n} {n_features} {labels}\n")
            for some, mask, others in zip(right, shown, noise, strict=True):
                features = sorted({*kinds[some][mask].tolist(), *others.tolist()})
                pairs = " ".join(f"{feature}:{len(features) ** -0.5:.4f}" for feature in features)
                file.write(f"{','.join(map(str, sorted({*some.tolist()})))} {pairs}\n")


class Classifier(nn.Module):
    """Sparse features to a hidden state, through a layer more with `mlp`."""

    def __init__(self, n_features: int, n_labels: int, dim: int, mlp: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(n_features, dim, mode="sum")
        self.more = nn.Sequential(nn.ReLU(), nn.Linear(dim, dim)) if mlp else nn.Identity()
        self.head = nn.Linear(dim, n_labels, bias=False)

    def forward(self, data: Examples, rows: Sequence[int]) -> Tensor:
        """Return the hidden states of some examples."""
        lengths = torch.tensor([len(data.features[row]) for row in rows])
        given = (torch.cat([some[row] for row in rows]) for some in (data.features, data.weights))
        features, weights, offsets = (
            tensor.to(self.head.weight.device) for tensor in (*given, lengths.cumsum(0) - lengths)
        )
        states: Tensor = self.more(self.bag(features, offsets, per_sample_weights=weights))
        return states


@torch.no_grad()
def precision(model: Classifier, data: Examples, batch: int = 256) -> dict[str, float]:
    """Return the exact precision@k: of the k best of all labels, the share that is right."""
    hits = torch.zeros(max(KS))
    for rows in torch.arange(len(data.labels)).split(batch):
        best = model.head(model(data, rows.tolist())).topk(max(KS)).indices.cpu()
        for row, found in zip(rows.tolist(), best, strict=True):
            hits += torch.isin(found, data.labels[row])
    return {f"precision@{k}": hits[:k].sum().item() / (k * len(data.labels)) for k in KS}


def train(data: Examples, name: str, args: argparse.Namespace) -> Classifier:
    """Train a classifier with a loss."""
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier(data.n_features, data.n_labels, args.dim, args.mlp).to(device)
    loss, optimizer = make_loss(name), torch.optim.Adam(model.parameters(), lr=args.lr)
    labelled = torch.tensor([row for row, labels in enumerate(data.labels) if len(labels)])
    for _ in range(args.epochs):
        for rows in labelled[torch.randperm(len(labelled))].split(args.batch):
            states, labels = model(data, rows.tolist()), [data.labels[row] for row in rows]
            if args.targets == "one":
                labels = [some[torch.randint(len(some), (1,))] for some in labels]
            states = states.repeat_interleave(torch.tensor([*map(len, labels)]).to(device), 0)
            optimizer.zero_grad()
            loss(states, model.head, torch.cat(labels).to(device)).backward()
            optimizer.step()
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Write files, or train with each loss in turn."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["synthesize"]:
        parser.add_argument("folder", type=Path)
        parser.add_argument("--labels", type=int, default=100_000)
        parser.add_argument("--examples", type=int, default=100_000)
        args = parser.parse_args(argv[1:])
        return synthesize(args.folder, args.labels, args.examples)
    parser.add_argument("files", nargs=2, type=Path, metavar="FILE", help="train, test")
    parser.add_argument("--loss", nargs="+", default=["sce"], help="ce, chunked, ce-, sce")
    parser.add_argument("--targets", choices=("one", "all"), default="all")
    parser.add_argument("--mlp", action="store_true", help="a layer more")
    parser.add_argument("--lr", type=float, default=3e-3)
    for option, size in {"dim": 64, "batch": 512, "epochs": 5, "seed": 0}.items():
        parser.add_argument(f"--{option}", type=int, default=size)
    args = parser.parse_args(argv)
    known, unseen = map(read_examples, args.files)
    for name in args.loss:
        started = time.perf_counter()
        model = train(known, name, args)
        seconds, found = time.perf_counter() - started, precision(model, unseen)
        told = ", ".join(f"{key} {value:.4f}" for key, value in found.items())
        print(f"{name:30} {told}, {seconds:.1f} s", flush=True)
    return None


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
