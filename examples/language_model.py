"""A language model over words, trained with each of the losses, judged by exact perplexity.

    python examples/language_model.py novels.txt.gz --loss ce sce sce:bucket_size_y=8192 --steps 800
    python examples/language_model.py *.txt --loss ce-:n_negatives=2048 sce+ce --out rows.jsonl

A loss may have options of its constructor: NAME:OPTION=VALUE,... "ce" is what language models are
usually trained with (all logits at once, products in bfloat16 on a GPU), "chunked" the same in
bounded memory; "sce+ce" takes "chunked" for the last tenth of the steps, "corrected" is explained
below. All losses see the same batches; the perplexity is that of the whole softmax.
"""

import argparse
import ast
import gzip
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sce import CrossEntropy, InputError, SampledCrossEntropy, ScalableCrossEntropy
from sce.losses.buckets import of_length_one, top_rows

Loss = Callable[[Tensor, nn.Linear, Tensor], Tensor]
CHUNK, FINISH, EVERY = 8192, 0.1, 100  # words at once; share of the steps; pieces per held-out one


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the states [b, l, d] of the next layer."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = parts.unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        states: Tensor = x + self.feed(self.norms[1](x))
        return states


class LanguageModel(nn.Module):
    """Words [b, l] to hidden states [b, l, d]; the logits are left to the loss and to `lm_head`."""

    def __init__(self, n_words: int, dim: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(n_words, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, max(1, dim // 64)) for _ in range(layers)))
        self.norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, n_words, bias=False)
        self.lm_head.weight = self.words.weight
        for weight in (w for w in self.parameters() if w.dim() == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """Return the hidden states, from which `lm_head` scores the word after each."""
        x = self.words(words) + self.places.weight[: words.shape[1]]
        states: Tensor = self.norm(self.blocks(x))
        return states


def read_words(files: Sequence[Path], vocabulary: int) -> tuple[Tensor, int]:
    """Return the text as numbers of words, and how many there are; 0 are the rare ones."""
    text = ""
    for file in files:
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(file, "rt", encoding="utf-8", errors="replace") as stream:
            text += stream.read()
    words = re.findall(r"\w+|[^\w\s]", text)
    numbers = {word: n for n, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    return torch.tensor([numbers.get(word, 0) for word in words]), len(numbers) + 1


def split(words: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the text without every hundredth piece, and those pieces [pieces, length + 1]."""
    pieces = words[: len(words) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    held_out = torch.arange(len(pieces)) % EVERY == EVERY // 2
    if not held_out.any():
        least = EVERY * (length + 1)
        raise InputError(f"the text has {len(words):,} words: give {least:,}, or a shorter length")
    return pieces[~held_out].flatten(), pieces[held_out]


def make_loss(text: str) -> Loss:
    """Make a loss of NAME or NAME:OPTION=VALUE,...; its options are those of its constructor."""
    made: dict[str, Callable[..., Loss]] = {
        "ce": lambda: plain_cross_entropy,
        "chunked": partial(CrossEntropy, chunk_size=CHUNK),
        "ce-": partial(SampledCrossEntropy, n_negatives=256),
        "sce": ScalableCrossEntropy,
        "corrected": Corrected,
    }
    name, _, given = text.partition(":")
    try:
        pairs = [option.split("=") for option in given.split(",") if option]
        return made[name](**{key: _value(value) for key, value in pairs})
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"no loss {text!r} ({error}); one of {', '.join(made)}") from None


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # centres=states


class Corrected(nn.Module):
    """Exact for frequent words; Scalable Cross-Entropy for rare ones, a few of which stand for all.

    The loss is log(1 + (F + c R) / p), of the exponentials of the target, p, of the frequent words,
    F, and of those rare ones that are in the bucket, R; c makes it exact on average.

    Args:
        frequent: Words that are scored for every position; they have the lowest numbers.
        measured: Positions on which c is measured in each call, with the logits of all words.
        options: Of `ScalableCrossEntropy`; alpha is 2, for the search is in plain PyTorch.
    """

    def __init__(self, frequent: int = 2048, measured: int = 64, **options: Any) -> None:
        super().__init__()
        self.frequent, self.measured = frequent, measured
        self.loss = ScalableCrossEntropy(reduction="none", **{"alpha": 2.0, **options})

    def forward(self, states: Tensor, lm_head: nn.Linear, labels: Tensor) -> Tensor:
        """Return the mean over all positions."""
        x, labels, weight = states.flatten(0, -2), labels.flatten(), lm_head.weight
        n = min(self.frequent, len(weight) // 2)
        numbers = torch.arange(n, device=x.device)
        logits = functional.linear(x, weight[:n]).float()
        logits = logits.masked_fill(labels[:, None] == numbers, -torch.inf)
        common = logits.logsumexp(1) - (x * weight[labels]).sum(1)  # log(F / p)
        n_buckets, _, size = self.loss.sizes(len(weight), len(x), cpu=not x.is_cuda)
        centres = of_length_one(torch.randn(n_buckets, x.shape[1], device=x.device))
        with torch.autocast(x.device.type, enabled=False):
            items = top_rows(centres, weight[n:], size) + n
        rare = _log_ratio(self.loss.in_buckets(x, weight, labels, centres, items)[0])
        with torch.no_grad():
            some = torch.randint(len(x), (self.measured,), device=x.device)
            exact = CrossEntropy(reduction="none")(x[some], lm_head, labels[some])
            shares = [(part[some] - exact).exp() for part in (common, rare)]
            missing = (_log_ratio(exact) - exact).exp() - shares[0]
            c = (missing.sum() / shares[1].sum()).clamp_min(1)
        return functional.softplus(torch.logaddexp(common, rare + c.log())).mean()


def _log_ratio(losses: Tensor) -> Tensor:
    """Return log(N / p), where a loss is log(1 + N / p)."""
    losses = losses.clamp_min(1e-6)
    return losses + (-torch.expm1(-losses)).log()


def plain_cross_entropy(states: Tensor, lm_head: nn.Linear, labels: Tensor) -> Tensor:
    """Return the usual loss of a language model: all logits, in the precision of autocast."""
    return functional.cross_entropy(lm_head(states).float().flatten(0, -2), labels.flatten())


@torch.no_grad()
def perplexity(model: LanguageModel, pieces: Tensor, batch: int) -> float:
    """Return the exact perplexity of pieces of text: the softmax is over all words."""
    exact, total = CrossEntropy(chunk_size=CHUNK, reduction="sum"), 0.0
    for some in pieces.split(batch):
        with autocast(some.device):
            states = model(some[:, :-1])
        total += exact(states.float(), model.lm_head, some[:, 1:]).item()
    return math.exp(total / pieces[:, 1:].numel())


def autocast(device: torch.device) -> torch.autocast:
    """Products in bfloat16, on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def loss_memory(loss: Loss, states: Tensor, lm_head: nn.Linear, labels: Tensor) -> float | None:
    """Return the peak MiB of the loss beyond inputs and gradients; None without a GPU."""
    if states.device.type != "cuda":
        return None
    states, weight = states.detach().requires_grad_(), lm_head.weight
    for _ in range(2):  # the first call may compile
        states.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with autocast(states.device):
            value = loss(states, lm_head, labels)
        forward = torch.cuda.max_memory_allocated() - before
        value.backward()
        backward = torch.cuda.max_memory_allocated() - before - states.nbytes - weight.nbytes
    states.grad = weight.grad = None
    return max(forward, backward) / 2**20


def train(args: argparse.Namespace, name: str, words: Tensor, n_words: int) -> Iterator[dict]:  # type: ignore[type-arg]
    """Train a model with a loss; yield a row for each point of the curve."""
    torch.manual_seed(args.seed)
    text, held_out = split(words, args.length)
    held_out = held_out[: max(1, args.judge // args.length)]
    model = LanguageModel(n_words, args.dim, args.layers, args.length).to(words.device)
    loss, finish = make_loss(name.removesuffix("+ce")), make_loss("chunked")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=words.is_cuda)
    draw, seconds, memory = torch.Generator().manual_seed(args.seed), 0.0, None
    started, step, done = time.perf_counter(), 0, 0.0
    while done < 1:
        starts = torch.randint(len(text) - args.length, (args.batch, 1), generator=draw)
        batch = text[(starts + torch.arange(args.length + 1)).to(text.device)]
        if name.endswith("+ce") and done + 1 / args.steps > 1 - FINISH:
            loss = finish
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 50, (1 - done) / FINISH)
        with autocast(batch.device):
            states = model(batch[:, :-1])
            value = loss(states, model.lm_head, batch[:, 1:])
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        taken = seconds + time.perf_counter() - started if step > 1 else 0.0  # kernels compile
        done = max(step / args.steps, taken / args.seconds)
        if step == 1 or step % args.every == 0 or done >= 1:
            shown = value.item()  # a sync
            seconds += time.perf_counter() - started if step > 1 else 0.0
            if step == 1:
                memory = loss_memory(loss, states, model.lm_head, batch[:, 1:])
            yield {
                "loss": name,
                "step": step,
                "perplexity": round(perplexity(model, held_out, args.batch), 3),
                "value of the loss": round(shown, 4),
                "loss MiB": memory and round(memory, 1),
                "ms a step": round(1000 * seconds / max(1, step - 1), 2),
                "words": n_words,
                "device": _device_name(words.device),
                **{
                    k: v
                    for k, v in vars(args).items()
                    if isinstance(v, int | float) and v < math.inf
                },
            }
            started = time.perf_counter()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def parser() -> argparse.ArgumentParser:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", nargs="+", type=Path, help="text files, also .gz")
    parser.add_argument("--loss", nargs="+", default=["sce"], help="default: sce")
    parser.add_argument("--vocabulary", type=int, default=250_000, help="most frequent words kept")
    for name, default in {"dim": 256, "layers": 4, "batch": 64, "length": 256, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=800, help="of each loss")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of each loss, at most")
    parser.add_argument("--every", type=int, default=100, help="steps between judgements")
    parser.add_argument("--judge", type=int, default=65_536, help="held-out words, at most")
    parser.add_argument("--out", type=Path, help="rows are appended here, as JSON lines")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Train with each loss in turn."""
    args = parser().parse_args(argv)
    for name in args.loss:
        make_loss(name.removesuffix("+ce"))  # refused before anything is read
    words, n_words = read_words(args.text, args.vocabulary)
    print(f"{len(words):,} words, {n_words:,} different")
    words = words.to("cuda" if torch.cuda.is_available() else "cpu")
    for name in args.loss:
        for row in train(args, name, words, n_words):
            memory = "not measured" if row["loss MiB"] is None else f"{row['loss MiB']:,} MiB"
            print(
                f"{name:30} step {row['step']:>6} perplexity {row['perplexity']:>10,.2f}   "
                f"{row['ms a step']} ms a step, memory of the loss: {memory}",
                flush=True,
            )
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
