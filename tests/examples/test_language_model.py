import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import language_model as lm
from sce import InputError

SIZES = {"dim": 16, "layers": 1, "batch": 4, "length": 8, "steps": 50, "every": 50, "lr": 2e-2}
TINY = [f"--{name}={size}" for name, size in SIZES.items()]


def test_words_are_numbered_by_frequency(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b, a b, a\n")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("c b, a")
    words, n = lm.read_words([tmp_path / "a.txt", tmp_path / "b.txt.gz"], 4)
    assert (words.tolist(), n) == ([1, 2, 3, 1, 2, 3, 1, 0, 2, 3, 1], 4)


def test_what_is_held_out_is_not_trained_on() -> None:
    text, held_out = lm.split(torch.arange(2005), 9)
    assert held_out.tolist() == [[*range(500, 510)], [*range(1500, 1510)]]
    assert {*text.tolist()} == {*range(2000)} - {*held_out.flatten().tolist()}
    with pytest.raises(InputError, match="the text has 100 words"):
        lm.split(torch.arange(100), 9)


def test_the_model_does_not_look_ahead() -> None:
    model, words = lm.LanguageModel(50, 128, 2, 10), torch.randint(50, (3, 10))
    changed = words.clone()
    changed[:, 6:] = 7
    torch.testing.assert_close(model(words)[:, :6], model(changed)[:, :6])
    assert not torch.allclose(model(words)[:, 6:], model(changed)[:, 6:])
    assert model.lm_head.weight is model.words.weight


def test_the_perplexity_is_exact() -> None:
    model, pieces = lm.LanguageModel(50, 16, 1, 7), torch.randint(50, (5, 8))
    torch.nn.init.normal_(model.words.weight)
    logits = model(pieces[:, :-1]) @ model.words.weight.T
    naive = functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten()).exp()
    assert lm.perplexity(model, pieces, 2) == pytest.approx(naive.item(), rel=1e-4)


def test_corrected_with_all_words_in_a_bucket_is_exact() -> None:
    head, labels = torch.nn.Linear(8, 50, bias=False), torch.randint(50, (4, 6))
    found = []
    for loss in (lm.Corrected(20, bucket_size_y=50), lm.plain_cross_entropy):
        states = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        value = loss(states, head, labels)
        found.append((value, *torch.autograd.grad(value, (states, head.weight))))
    torch.testing.assert_close(*found)


def test_corrected_is_near_the_exact_loss() -> None:
    head, states = torch.nn.Linear(8, 3000, bias=False), 2 * torch.randn(400, 8)
    labels = torch.randint(3000, (400,))
    exact = lm.plain_cross_entropy(states, head, labels).item()
    few = lm.make_loss("sce:bucket_size_y=100")(states, head, labels).item()
    corrected = lm.make_loss("corrected:bucket_size_y=100,frequent=100")(
        states, head, labels
    ).item()
    assert abs(corrected - exact) < 0.2 < abs(few - exact) / 10


def test_every_loss_learns(text: Path, tmp_path: Path) -> None:
    names = ["ce", "ce-:n_negatives=20", "sce", "sce:bucket_size_y=8+ce", "corrected"]
    out = tmp_path / "rows.jsonl"
    lm.main([str(text), *TINY, "--loss", *names, "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["loss"], row["step"]) for row in rows] == [(n, s) for n in names for s in (1, 50)]
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        assert before["perplexity"] > 30 > 15 > after["perplexity"], after["loss"]
        assert after["words"] == 41


def test_training_ends_when_its_time_is_over(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    lm.main([str(text), *TINY, "--seconds", "1e-9", "--out", str(out)])
    assert [json.loads(line)["step"] for line in out.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("name", ["softmax", "sce:size=3", "sce:alpha", "sce:alpha=-1"])
def test_no_such_loss(name: str) -> None:
    with pytest.raises(InputError, match=f"no loss '{name}'"):
        lm.make_loss(name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is measured on a GPU")
def test_memory_of_the_loss() -> None:
    head = torch.nn.Linear(64, 50_000, bias=False).cuda()
    states, labels = torch.randn(2048, 64).cuda(), torch.randint(50_000, (2048,)).cuda()
    plain, bucketed = (
        lm.loss_memory(lm.make_loss(name), states, head, labels) for name in ("ce", "sce")
    )
    assert plain is not None
    assert bucketed is not None
    assert plain > 4 * 2048 * 50_000 / 2**20 > 4 * bucketed
