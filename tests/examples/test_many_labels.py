from pathlib import Path

import pytest
import torch

import many_labels
from sce import InputError


def test_the_format_of_the_repository(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("3 5 9\n8,0 4:0.5 1:2\n 0:1\n7\n")
    data = many_labels.read_examples(file)
    assert [row.tolist() for row in data.labels] == [[8, 0], [], [7]]
    assert [row.tolist() for row in data.features] == [[4, 1], [0], []]
    assert [row.tolist() for row in data.weights] == [[0.5, 2], [1], []]
    assert (data.n_features, data.n_labels) == (5, 9)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'' is not 'examples features labels'"),
        ("1 2\n", "is not 'examples features labels'"),
        ("1 5 9\n8 4=0.5\n", "'8 4=0.5.n' is not 'label,... feature:value ...'"),
        ("1 5 9\n9 4:1\n", "a label is not from 0 to 8"),
        ("1 5 9\n8 5:1\n", "a feature is not from 0 to 4"),
        ("2 5 9\n8 4:1\n", "line 1 says 2 examples, the file has 1"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InputError, match=complaint):
        many_labels.read_examples(tmp_path / "a.txt")


def test_precision_against_sets(tmp_path: Path) -> None:
    many_labels.synthesize(tmp_path, labels=30, examples=200)
    data = many_labels.read_examples(tmp_path / "test.txt")
    model = many_labels.Classifier(data.n_features, 30, dim=4, mlp=True)
    found = many_labels.precision(model, data, batch=7)
    for k in (1, 3, 5):
        hits = 0
        for row, labels in enumerate(data.labels):
            scores = model.head(model(data, [row]))[0].tolist()
            best = sorted(range(30), key=lambda label: -scores[label])[:k]
            hits += len({*best} & {*labels.tolist()})
        assert found[f"precision@{k}"] == pytest.approx(hits / (k * len(data.labels)))


@pytest.mark.parametrize("targets", ["one", "all"])
def test_it_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str], targets: str) -> None:
    torch.manual_seed(0)
    many_labels.main(["synthesize", str(tmp_path), "--labels", "60", "--examples", "600"])
    files = [str(tmp_path / f"{name}.txt") for name in ("train", "test")]
    sizes = ["--dim=16", "--batch=50", "--lr=0.03", "--epochs=6"]
    many_labels.main([*files, *sizes, "--targets", targets, "--loss", "ce", "sce:bucket_size_y=20"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ce", "sce:bucket_size_y=20"]
    for line in lines:
        assert float(line.split()[2].rstrip(",")) > 0.6  # the most popular label has 0.4
