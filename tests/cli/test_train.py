import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from sce import training
from sce.cli import app, main
from sce.cli.train import _DAILY
from sce.config import Config, is_exact_faster, setting_names
from sce.data.prepared import PreparedDataset
from sce.data.vocabulary import Vocabulary
from sce.errors import TrainingWarning
from sce.losses import LOSSES
from sce.recommend import Recommender
from sce.training.checkpoint import read_tensors
from sce.training.run import Run
from sce.training.step import TrainingStep
from tests.complaint import complaint
from tests.cycle_data import make_cycle
from tests.tiny_run import make_dataset

SOURCES = sorted(Path(training.__file__).parent.glob("*.py"))
Capture = pytest.CaptureFixture[str]

SMALL = ["--model.dim", "8", "--model.blocks", "1", "--model.max-length", "6"]
QUICK = [*SMALL, "--batch-size", "16", "--epochs", "1", "--device", "cpu", "--loss", "ce"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cycle(tmp_path_factory.mktemp("data") / "cycle").path


# --- what is shown and written


def test_a_run_from_the_command_line(data: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    more = ["--loss.chunk-size", "5", "--learning-rate", "0.01", "--seed", "3"]
    assert main(["train", str(data), "--out", str(out), *QUICK, *more]) == 0
    captured = capsys.readouterr()
    assert re.search(r"ndcg +ce( +0\.\d{4}){5}", captured.out)
    assert re.search(r"popularity( +0\.\d{4}){5}", captured.out)
    assert captured.out.endswith(
        f"next        sce evaluate {out}\n            sce recommend {out} --out FILE.csv\n"
        f"            sce recommend {out} --histories FILE.jsonl -k 10\n"
        f"            sce report {out}\n"
    )
    assert re.search(r"training +\d+\.\d s, [\d,]+ tokens/s, peak [\d,]+ MiB", captured.out)
    assert re.fullmatch(r"epoch 1/1  loss \d\.\d{4}  ndcg@10 0\.\d{4} \*  .*\n", captured.err)
    config = Run.open(out).config
    assert config["model"]["dim"] == 8
    assert config["loss"]["name"] == "ce"
    assert config["loss"]["chunk_size"] == 5
    assert config["training"]["learning_rate"] == 0.01
    assert config["training"]["seed"] == 3
    assert config["training"]["betas"] == [0.9, 0.98]


def test_a_file_of_settings_and_options_over_it(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        '[model]\ndim = 8\nblocks = 1\nmax_length = 6\n[loss]\nname = "sce"\nbucket_size_y = 6\n'
        'centres = "mix"\n[training]\nepochs = 1\nbatch_size = 16\ndevice = "cpu"\ncompile = true\n'
    )
    options = ["--loss.centres", "states", "--training.no-compile", "--model.dim", "4"]
    out = tmp_path / "run"
    assert main(["train", str(data), "--out", str(out), "--config", str(file), *options]) == 0
    config = Run.open(out).config
    assert (config["model"]["dim"], config["model"]["blocks"]) == (4, 1)
    assert (config["loss"]["centres"], config["loss"]["bucket_size_y"]) == ("states", 6)
    assert config["training"]["compile"] is False


def test_a_file_for_another_loss(data: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "settings.toml"
    arguments = ["train", str(data), "--out", str(tmp_path / "run"), "--config", str(file), *QUICK]
    file.write_text("[training]\nepoch = 3\n")
    line = complaint(arguments, capsys)
    assert f"{file}: [training] epoch is unknown; the nearest valid key is epochs in" in line
    file.write_text("[loss]\nbucket_size_y = 6\nalpha = 1.0\n")
    line = complaint([*arguments, "--loss.alpha", "3"], capsys)
    assert "loss.alpha belongs to sce, and the loss is ce" in line
    assert main(arguments) == 0
    first, *others = capsys.readouterr().err.splitlines()
    note = f"sce: {file} is for another loss than ce: leaving out its bucket_size_y, alpha"
    assert first == note
    assert len(others) == 1  # the epoch


def test_without_out_the_run_is_named_after_data_and_loss(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(data), *QUICK]) == 0
    assert (tmp_path / "runs" / "cycle-ce" / "result.json").exists()


def test_without_a_loss_a_small_catalogue_on_a_cpu_is_trained_exactly(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def train(name: str, *options: str, epochs: str = "1") -> tuple[dict[str, Any], str]:
        out = tmp_path / name
        given = [*SMALL, "--batch-size", "16", "--device", "cpu", "--epochs", epochs, *options]
        assert main(["train", str(data), "--out", str(out), *given]) == 0
        return Run.open(out).config["loss"], capsys.readouterr().err

    exact = {"name": "ce", "chunk_size": 512}
    loss, said = train("small")
    assert loss == exact
    why = "with 12 items it takes less time than SCE on a CPU; --loss sce takes the latter"
    assert said.startswith(f"sce: exact cross-entropy: {why}\n")
    for number, options in enumerate(
        (["--loss", "sce"], ["--loss.alpha", "2.0"], ["--training.row-wise"])
    ):
        loss, said = train(f"given{number}", *options)
        assert loss["name"] == "sce"
        assert "exact" not in said
    monkeypatch.setattr("sce.config.EXACT_ITEMS", 3)
    loss, said = train("large")
    assert loss["name"] == "sce"
    assert "exact" not in said
    # As on another device: a run goes on with the loss that it was begun with.
    assert train("small", "--resume", epochs="2")[0] == exact
    monkeypatch.undo()
    assert train("large", "--resume", epochs="2")[0]["name"] == "sce"


def test_the_choice_is_by_the_targets_of_a_batch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(
        "sce.cli.train.is_exact_faster", lambda _, targets, *more: asked.append(targets)
    )
    given = ["train", str(data), *SMALL, "--epochs", "1", "--device", "cpu"]
    for size in ("16", "64"):
        assert main([*given, "--out", str(tmp_path / size), "--batch-size", size]) == 0
    each = PreparedDataset.load(data).train.lengths.clip(max=7).mean() - 1
    assert asked == pytest.approx([16 * each, 48 * each])


def test_without_a_directory_the_run_of_another_device_is_resumed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["train", str(data), *SMALL, "--batch-size", "16", "--device", "cpu"]
    assert main([*given, "--epochs", "1"]) == 0
    monkeypatch.setattr("sce.config.EXACT_ITEMS", 3)  # as on a GPU
    assert main([*given, "--epochs", "2", "--resume"]) == 0
    assert [path.name for path in Path("runs").iterdir()] == ["cycle-ce"]
    assert len(Run.open("runs/cycle-ce").metrics()) == 2


def test_a_run_is_resumed_with_its_own_settings(
    data: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    given = ["--loss", "gbce", "--model.name", "gru4rec", "--model.dim", "8", "--seed", "3"]
    command = ["train", str(data), "--out", str(run)]
    assert main([*command, *given, "--training.betas", "0.8", "0.9", "--epochs", "1"]) == 0
    before = Run.open(run).config
    assert main([*command, "--resume", "--epochs", "2"]) == 0
    assert len(Run.open(run).metrics()) == 2
    assert main([*command, "--resume"]) == 0  # two epochs are all that were asked for
    after = Run.open(run).config
    assert len(Run.open(run).metrics()) == 2
    assert after == {**before, "training": before["training"] | {"epochs": 2}}
    capsys.readouterr()
    for option, was in (("--model.dim 16", "8"), ("--loss.name sce", "'gbce'")):
        line = complaint([*command, "--resume", *option.split()], capsys)
        assert "cannot be resumed with other settings: " in line
        assert f"{option.split()[0]} was {was} and is now " in line


def test_where_nothing_is_nothing_is_resumed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", str(data), *QUICK]
    near = Path("runs/clicks")
    assert main([*command, "--out", str(near)]) == 0
    capsys.readouterr()
    for attempt in "01":  # of torchrun's, which is not to begin what it has refused
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        line = complaint([*command, "--out", "runs/click", "--resume"], capsys)
        assert line.startswith("sce: error: there is nothing to resume at runs/click: leave out ")
        assert line.endswith("--resume to begin a run there, or mend --out; beside it are clicks\n")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    for loss in ([], ["--loss", "sce"]):
        line = complaint(["train", str(data), *loss, "--resume"], capsys)
        assert f"nothing to resume at runs/cycle-{'sce' if loss else 'ce'}: " in line
    assert [path.name for path in Path("runs").iterdir()] == ["clicks"]


def test_killed_before_its_first_save_a_run_begins_again_with_its_settings(
    data: Path, tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    command = ["train", str(data), "--out", str(run), *QUICK, "--resume"]
    assert main(command[:-1]) == 0
    result = final(run)
    for left in ("resume.safetensors", "best.safetensors", "result.json", "metrics.jsonl"):
        (run / left).unlink()
    capsys.readouterr()
    line = complaint([*command, "--learning-rate", "0.1"], capsys)
    assert "cannot be resumed with other settings: --training.learning-rate was" in line
    assert main(command) == 0
    assert f"sce: nothing to resume in {run}: starting" in capsys.readouterr().err
    assert final(run) == result


HALF = {"training": {"precision": "bf16"}}


@pytest.mark.parametrize(
    ("items", "targets", "device", "settings", "faster"),
    [
        (4096, 1e9, "cpu", {}, True),
        (4200, 1e9, "cpu", {}, False),
        (5734, 25_600, "cpu", {}, True),
        (5735, 25_600, "cpu", {}, False),
        (12_834, 900, "cpu", {}, True),
        (12_835, 1, "cpu", {}, False),
        (12, 900, "cuda", {}, False),
        (12, 900, "cuda", {"training": {"precision": "tf32"}}, False),
        (20_000, 900, "cuda", HALF, True),
        (20_001, 900, "cuda", HALF, False),
        (12, 900, "cuda", HALF | {"model": {"dim": 65}}, False),
        (12, 900, "cuda", {"training": {"precision": "bf16", "batch_size": 129}}, False),
    ],
)
def test_exact_cross_entropy_is_chosen_where_it_was_measured(
    items: int,
    targets: float,
    device: str,
    settings: Any,
    faster: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kernels in (True, False):
        monkeypatch.setattr("sce.config.has_kernels", lambda _, kernels=kernels: kernels)
        found = is_exact_faster(items, targets, Config.compose(settings), torch.device(device))
        assert found is (faster and (kernels or device == "cpu"))


def test_warnings_are_one_line_each(tmp_path: Path, capsys: Capture) -> None:
    make_cycle(tmp_path / "data", single=2)
    options = [*SMALL, "--batch-size", "64", "--epochs", "1", "--device", "cpu", "--loss", "ce"]
    assert main(["train", str(tmp_path / "data"), "--out", str(tmp_path / "run"), *options]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("sce: warning: 2 of 50 training users have a single event")
    assert lines[1].startswith("sce: warning: there are 48 training users")
    assert lines[1].endswith("; consider a smaller --batch-size")
    assert len(lines) == 3


def test_the_same_command_again_needs_force_or_resume(
    data: Path, tmp_path: Path, capsys: Capture
) -> None:
    arguments = ["train", str(data), "--out", str(tmp_path / "run"), *QUICK]
    assert main(arguments) == 0
    first = (tmp_path / "run" / "result.json").read_bytes()
    capsys.readouterr()
    line = complaint([*arguments], capsys)
    assert "exists; go on with --resume, replace it with --force" in line
    assert (tmp_path / "run" / "result.json").read_bytes() == first
    assert main([*arguments, "--force", "--seed", "1"]) == 0
    said = f"sce: {tmp_path / 'run'} will be replaced when training begins, before the new run has"
    assert said in capsys.readouterr().err
    assert (tmp_path / "run" / "result.json").read_bytes() != first


def test_help_shows_daily_options_first_and_every_setting(capsys: Capture) -> None:
    app(["train", "--help"], console=Console(width=400), result_action="return_value")
    text = capsys.readouterr().out
    places = [
        text.index(part)
        for part in [
            "PREPARED",
            "--out",
            "--loss.name --loss ",
            "--epochs",
            "--resume",
            "Model",
            "Loss",
        ]
    ]
    assert places == sorted(places)
    for setting in setting_names():
        flag = _DAILY.get(setting, f"--{setting.replace('_', '-')}")
        (line,) = re.findall(rf"│ (?:--loss.name )?{re.escape(flag)} .*", text)
        assert re.search(r"[a-z]{3} .*\[default: .+\]", line), line
    for name, entry in LOSSES.items():
        assert f"{name} ({entry.summary})" in text
    assert re.search(r"bce\+, gbce, ce-.*: Negatives drawn", text)
    assert re.search(r"\[default: bce: position; bce\+, gbce, ce-.*: sequence\]", text)
    assert re.search(r"--training.betas FLOAT FLOAT .*\[default: 0.9 0.98\]", text)


# --- wrong input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss", "ce", "--loss.t", "0.5"], "loss.t belongs to gbce, and the loss is ce"),
        (["--loss", "softmax"], '"softmax"'),
        (["--epochs", "many"], '"many"'),
        (["--epochs", "0"], "error: --training.epochs must be from 1 to 2**31 - 1; got 0"),
        (["--epochs", "1", "--training.epochs", "2"], "--training.epochs specified multiple"),
        (["--loss", "ce", "--loss.name", "ce"], "--loss.name specified multiple times"),
        (["--model.name", "bert"], '"bert" for --model.name. Choose from: "sasrec"'),
        (["--epoch", "3"], "Did you mean --epochs?"),
        (["--model.heads", "3"], "dim 64 is not a multiple of 3 heads"),
        (["--model.with", "3"], "--model.with"),
        (["--config", "absent.toml"], "cannot read absent.toml: No such file"),
        (["--resume", "--force"], "choose one"),
        (["--device", "gpu"], "--device is auto, cpu, cuda or cuda:N; got 'gpu'"),
        (["--device", "meta"], "device is auto, cpu, cuda or cuda:N; got 'meta'"),
        (["--seed", "-1"], "error: --seed lies between 0 and 2**63 - 1; got -1"),
        (
            ["--seed", str(10**30)],
            f'Invalid value for --seed: unable to convert "{10**30}" into int',
        ),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], message: str, data: Path, tmp_path: Path, capsys: Capture
) -> None:
    line = complaint(["train", data, "--out", tmp_path / "run", *options], capsys)
    assert message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_is_one_line(data: Path, tmp_path: Path, capsys: Capture) -> None:
    line = complaint(["train", data, "--out", tmp_path / "run", "--device", "cuda"], capsys)
    assert "device cuda was asked for, but" in line
    assert "use --device cpu or auto" in line


def test_a_directory_that_is_no_run_is_left_alone(
    data: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for option in ("--force", "--resume"):
        line = complaint(["train", data, "--out", tmp_path, option, *QUICK], capsys)
        assert "is not a run: it has no run.json" in line
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_missing_data_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    line = complaint(["train", tmp_path / "none", "--out", tmp_path / "run"], capsys)
    assert "does not exist; make it with: sce prepare" in line


def test_a_run_stopped_before_its_first_evaluation_can_be_used(
    data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, call = tmp_path / "run", TrainingStep.__call__

    def interrupted(*given: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return call(*given, **options)

    monkeypatch.setattr(TrainingStep, "__call__", interrupted)
    assert main(["train", str(data), "--out", str(out), *QUICK]) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert not (out / "best.safetensors").exists()
    capsys.readouterr()
    notice = f"sce: warning: {out} was stopped before its first evaluation: these are its latest "
    notice += "weights; go on with --resume\n"
    assert main(["evaluate", str(out), "--device", "cpu", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == notice
    assert json.loads(captured.out)["users"] == 24
    (tmp_path / "histories.jsonl").write_text('{"history": [100, 101]}\n')
    found = ["--histories", str(tmp_path / "histories.jsonl"), "-k", "3", "--device", "cpu"]
    assert main(["recommend", str(out), *found]) == 0
    assert notice in capsys.readouterr().err
    with pytest.warns(TrainingWarning, match="these are its latest weights; go on with resume=Tr"):
        recommender = Recommender.load(out, "cpu")
    weights = read_tensors(out / "resume.safetensors")[0]["model.catalogue"]
    assert torch.equal(recommender.model.catalogue, weights)


def test_settings_that_messages_name_are_flags() -> None:
    found = {
        name for file in SOURCES for name in re.findall(r"named\(['\"]([\w.]+)", file.read_text())
    }
    short = {flag.removeprefix("--").replace("-", "_") for flag in _DAILY.values()}
    assert {"batch_size", "training.clip_norm", "loss"} < found
    assert found <= setting_names() | short | {"resume", "force", "data", "from", "out"}


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_messages_name_settings_by_named_alone(file: Path) -> None:
    tree = ast.parse(file.read_text())
    documentation = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    texts = [_literal(node) for node in ast.walk(tree) if node not in documentation]
    words = {name.partition(".")[2] for name in setting_names() if "_" in name}
    setting = rf"--[a-z]|\b(training|loss|model)\.[{{a-z]|\b({'|'.join(words)})\b"
    assert [text for text in texts if " " in text and re.search(setting, text)] == []


def _literal(node: ast.AST) -> str:
    """What is written in a string; what it fills in is {}."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) or "{}" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


# --- interrupted and resumed, as real processes

DRIVER = """
import json, os, pathlib, signal, sys, time

import torch._dynamo  # once, for all the processes below
import sce.cli.train
from sce.cli import main
from sce.data.prepared import PreparedDataset

command, directory = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])

def begin(name, pipe=None):
    arguments = [*command, "--out", str(directory / name)]
    arguments += ["--resume"] * (directory / name).exists()
    process = os.fork()
    if process == 0:
        file = directory / f"{name}.err"
        os.dup2(pipe[1] if pipe else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        for end_of_pipe in pipe or ():
            os.close(end_of_pipe)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(arguments))
    return process


def end(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def wait(name, epochs):
    metrics = directory / name / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\\n") < epochs:
        time.sleep(0.001)


assert end(begin("unbroken")) == 0

codes = {}
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    name = number.name
    process = begin(name)
    wait(name, 2)
    os.kill(process, number)
    codes[name] = [end(process), (directory / f"{name}.err").read_text(), end(begin(name))]

# As with 2>&1 | head: the reader goes away.
pipe = os.pipe()
process = begin("unread", pipe)
os.close(pipe[1])
wait("unread", 2)
os.close(pipe[0])
unread = [end(process), end(begin("unread"))]
print(json.dumps({"codes": codes, "unread": unread}))
"""


def final(out: Path) -> dict[str, Any]:
    result = Run.open(out).result()
    assert result is not None
    weights = read_tensors(out / "best.safetensors")[0]
    return {
        "numbers": {name: result[name] for name in ("best_epoch", "epochs", "test", "validation")},
        "losses": [record["loss"] for record in Run.open(out).metrics()],
        "weights": {name: tensor.tolist() for name, tensor in weights.items()},
    }


def test_interrupted_and_resumed_gives_the_same_numbers(data: Path, tmp_path: Path) -> None:
    command = ["train", str(data), *SMALL, "--batch-size", "4", "--epochs", "7", "--device", "cpu"]
    command += ["--loss.bucket-size-y", "6", "--training.patience", "0"]
    command += ["--training.save-minutes", "0"]  # within epochs too
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(command), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    unbroken = final(tmp_path / "unbroken")
    assert unbroken["numbers"]["epochs"] == 7
    assert report["unread"] == [128 + signal.SIGPIPE, 0]
    assert final(tmp_path / "unread") == unbroken
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        code, said, after = report["codes"][name]
        assert code == 128 + signal.Signals[name]
        assert "sce: stopping after this batch, then saving; once more to stop at once" in said
        assert "go on with the same command and --resume" in said
        assert after == 0
        assert final(tmp_path / name) == unbroken


# --- going on from another run


def test_going_on_from_another_run(data: Path, tmp_path: Path, capsys: Capture) -> None:
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    more = ["--loss.chunk-size", "5", "--learning-rate", "0.01", "--training.betas", "0.8", "0.9"]
    assert main(["train", str(data), "--out", old, *QUICK, *more, "--seed", "3"]) == 0
    capsys.readouterr()
    options = ["--device", "cpu", "--training.clip-norm", "9"]
    command = ["train", str(data), "--out", new, "--from", old, *options]
    assert main([*command, "--epochs", "1"]) == 0
    captured = capsys.readouterr()
    told = "going on from .*old \\(epoch 1\\): 12 items carried over, 0 new; optimizer"
    assert re.search(f"sce: {told} state carried over", captured.err)
    assert re.search(r"epoch 0/1  as it begins  ndcg@10 0\.\d{4} \*", captured.err)
    run = Run.open(new)
    before = Run.open(old).config
    given = {"training": before["training"] | {"seed": 0, "clip_norm": 9.0}}
    assert run.config == before | given | {"start": run.config["start"]}
    assert [record["epoch"] for record in run.metrics()] == [0, 1]
    assert (run.result() or {})["start"] == run.config["start"]
    assert main([*command, "--epochs", "2", "--resume"]) == 0
    capsys.readouterr()
    command = ["train", str(data), "--out", str(tmp_path / "other"), "--from", old, *options]
    refused = complaint([*command, "--model.dim", "16"], capsys)
    assert "--model.dim was 8 and is now 16; leave out" in refused
    # How many epochs it takes from new weights that run does not say.
    begin = ["train", str(data), "--out", str(tmp_path / "begun"), "--like", new]
    assert "say how long to train the like of it with --epochs" in complaint(begin, capsys)
    # Settings like those of another run, and another loss.
    assert main([*command, "--like", new]) == 0
    training = Run.open(tmp_path / "other").config["training"]
    assert (training["patience"], training["clip_norm"], training["learning_rate"]) == (0, 9, 0.01)
    command = ["train", str(data), "--out", str(tmp_path / "bce"), "--from", old, "--epochs", "1"]
    assert main([*command, "--loss", "bce"]) == 0
    assert Run.open(tmp_path / "bce").config["training"]["learning_rate"] == 0.01


def test_items_without_an_event_in_the_new_data_are_kept(
    data: Path, tmp_path: Path, capsys: Capture
) -> None:
    old, new, third = (str(tmp_path / name) for name in ("old", "new", "third"))
    ids = Vocabulary.from_strings(["101", "104", "105", "a"])
    later = str(make_dataset(tmp_path / "later", ids, Vocabulary.from_integers(range(30))).path)
    assert main(["train", str(data), "--out", old, *QUICK]) == 0
    options = ["--batch-size", "16", "--device", "cpu", "--loss", "ce", "--learning-rate", "1e-30"]
    command = ["train", later, "--out", new, "--from", old, *options]
    assert main([*command, "--epochs", "1"]) == 0
    said = capsys.readouterr().err
    assert "12 items carried over (9 of them without an event to" in said
    few = r"warning: .*later has \d+ events to train on, and .*old had \d+: is it the whole log"
    assert re.search(few, said)
    before, after = (Recommender.load(run, "cpu") for run in (old, new))
    assert after.item_ids.decode(range(13)) == [*map(str, range(100, 112)), "a"]
    assert torch.equal(after.model.catalogue[:12], before.model.catalogue)
    shutil.move(old, tmp_path / "gone")
    assert main([*command, "--epochs", "2", "--resume"]) == 0
    # All that reads a run finds them.
    capsys.readouterr()
    assert main(["evaluate", new, "--json"]) == 0
    tested = (Run.open(new).result() or {})["test"]
    assert json.loads(capsys.readouterr().out)["model"] == tested
    assert main(["recommend", new, "--users", "1", "-k", "13", "--keep-seen"]) == 0
    assert "110" in capsys.readouterr().out
    assert main(["similar", new, "110"]) == 0
    capsys.readouterr()
    # Once more, with numbers as ids, and nothing is lost.
    assert main(["train", str(data), "--out", third, "--from", new, *options, "--epochs", "1"]) == 0
    assert "13 items carried over (1 of them without an event to" in capsys.readouterr().err
    last = Recommender.load(third, "cpu")
    assert last.item_ids == Run.open(new).item_ids
    assert main(["evaluate", third]) == 0
