"""SASRec trained by sce or by another library, each run by the interpreter that has it.

    PYTHON train_workers.py '{"library": "rectools", "data": "data/beauty", ...}'

benchmarks/train_peers.py starts it. Each library is used as its documentation says: its model, its
loader, its training loop, its way to recommend. What all share is read here with numpy alone: a
dataset of `sce prepare --split leave-one-out`. When the library is imported, "ready" is printed,
and a line is waited for. The last line printed is JSON: the times at which training steps or epochs
began, memory, seconds of recommending. The items recommended to test users, [users, k] catalogue
indices, -1 where there are fewer, are written to the file `out`.
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from train_shared import Clock, Codes, Enough, Log, import_


def sce(job: Any, log: Log, clock: Clock) -> Iterator[Any]:
    """Sce: `fit` and `Recommender`. Its negatives are shared by a sequence, or as `shared` says."""
    library = import_("sce")
    fit, recommender = library.fit, library.Recommender  # which imports them
    dataset = library.PreparedDataset.load(job.data)
    shape = {"dim": job.dim, "blocks": job.blocks, "max_length": job.length, "dropout": job.dropout}
    if job.ligr:
        model = library.LiGR(dataset.n_items, **shape, sink=False, seed=job.seed)
    else:
        model = library.SASRec(dataset.n_items, **shape, seed=job.seed)
    chunk = 1024 if job.library == "sce-chunked" else None
    loss = library.CrossEntropy(chunk_size=chunk)
    if job.loss == "ce-":
        loss = library.SampledCrossEntropy(job.negatives, shared=job.shared)
    if job.loss == "sce":
        loss = library.ScalableCrossEntropy()
    clock.watch(model)
    settings = library.TrainingSettings(
        batch_size=job.batch,
        learning_rate=job.lr,
        epochs=job.epochs,
        evaluate_every=job.epochs,
        validation_users=100,  # the others are trained without validation
        max_steps=clock.limit,
        seed=job.seed,
        device=job.device,
        precision=job.precision,
    )
    yield

    def ended(record: Any) -> None:
        clock.mark(less=record["seconds"]["evaluation"])

    clock.mark()
    result = fit(model, loss, dataset, settings=settings, progress=False, on_epoch=ended)
    if clock.limit is None:  # without the evaluation of the last epoch
        clock.peak_mib = result.memory_mib["training"]
    yield
    vocabulary = import_("sce.data.vocabulary").Vocabulary
    codes = vocabulary.from_integers(np.arange(dataset.n_items))
    found = recommender(model, codes).recommend(log.histories, k=job.k)
    items = np.full((len(found), job.k), -1)
    for row, one in enumerate(found):
        items[row, : len(one.items)] = one.items
    yield items


def rectools(job: Any, log: Log, clock: Clock) -> Iterator[Any]:
    """RecTools: `SASRecModel`. Each position has negatives of its own."""
    pandas, lightning = import_("pandas"), import_("pytorch_lightning")
    sasrec, datasets = (
        import_("rectools.models.nn.transformers.sasrec"),
        import_("rectools.dataset"),
    )
    yield

    base: Any = sasrec.SASRecModel

    class Watched(base):  # type: ignore[misc]
        def _build_model_from_dataset(self, dataset: Any) -> None:
            super()._build_model_from_dataset(dataset)
            clock.watch(self.lightning_model.torch_model)

    def dataset(users: Codes, sequences: list[Codes]) -> Any:
        lengths = [len(items) for items in sequences]
        time = np.concatenate([np.arange(length) for length in lengths])
        columns: dict[str, Any] = {
            "user_id": np.repeat(users, lengths),
            "item_id": np.concatenate(sequences),
        }
        columns |= {"weight": 1, "datetime": pandas.to_datetime(time, unit="s")}
        return datasets.Dataset.construct(pandas.DataFrame(columns))

    lightning.seed_everything(job.seed)
    blocks = {}
    if job.ligr:
        layers = import_("rectools.models.nn.transformers.ligr").LiGRLayers
        blocks = {"transformer_layers_type": layers, "use_key_padding_mask": True}
    model = Watched(
        **blocks,
        n_blocks=job.blocks,
        n_heads=1,
        n_factors=job.dim,
        dropout_rate=job.dropout,
        session_max_len=job.length,
        loss={"ce": "softmax", "ce-": "sampled_softmax"}[job.loss],
        n_negatives=job.negatives,
        lr=job.lr,
        batch_size=job.batch,
        get_trainer_func=lambda: trainer(lightning, job, clock),
        recommend_torch_device=job.device,
    )
    model.fit(dataset(log.train_users, log.train))
    yield
    known = dataset(log.users, log.histories)
    found = model.recommend(log.users, known, k=job.k, filter_viewed=True)
    items = np.full((len(log.users), job.k), -1)
    items[log.rows(found["user_id"].to_numpy()), found["rank"] - 1] = found["item_id"]
    yield items


LIGHTNING: dict[str, Any] = {
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
}
PRECISIONS = {"float32": "32-true", "bf16": "bf16-mixed"}


def trainer(lightning: Any, job: Any, clock: Clock) -> Any:
    """A trainer of Lightning that notes the epochs, and stops after one when the time is over."""
    base: Any = lightning.Callback

    class Epochs(base):  # type: ignore[misc]
        def on_train_start(self, *_: Any) -> None:
            clock.mark()

        def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
            clock.mark()
            trainer.should_stop = trainer.should_stop or clock.over

    return lightning.Trainer(
        max_epochs=job.epochs,
        max_steps=clock.limit or -1,
        callbacks=[Epochs()],
        precision=PRECISIONS[job.precision],
        accelerator=job.device,
        **LIGHTNING,
    )


def replay(job: Any, log: Log, clock: Clock) -> Iterator[Any]:
    """RePlay: `SasRec`, trimmed; unless plain, with length buckets. Negatives are the batch's."""
    arrow, lightning = import_("pyarrow"), import_("lightning")
    data, nn = import_("replay.data"), import_("replay.data.nn")
    wrapped, transform = import_("replay.nn.lightning"), import_("replay.nn.transform")
    sequential, losses = import_("replay.nn.sequential"), import_("replay.nn.loss")
    templates = import_("replay.nn.transform.template")
    buckets = import_("replay.nn.sequential.length_bucket")
    callbacks = import_("replay.nn.lightning.callback")
    filters = import_("replay.nn.lightning.postprocessor")
    modules = import_("replay.data.nn.parquet.parquet_module")
    yield
    n_items = 1 + max(int(items.max()) for items in log.whole)
    lightning.seed_everything(job.seed)
    source = nn.TensorFeatureSource(data.FeatureSource.INTERACTIONS, "item_id")
    item = nn.TensorFeatureInfo(
        "item_id",
        is_seq=True,
        feature_type=data.FeatureType.CATEGORICAL,
        embedding_dim=job.dim,
        padding_value=n_items,
        cardinality=n_items,
        feature_hint=data.FeatureHint.ITEM_ID,
        feature_sources=[source],
    )
    schema = nn.TensorSchema([item])
    model = sequential.SasRec.from_params(
        schema,
        embedding_dim=job.dim,
        num_heads=1,
        num_blocks=job.blocks,
        max_sequence_length=job.length,
        dropout=job.dropout,
    )
    if job.library == "replay":
        model.body.encoder = buckets.LengthBucketedQueryEncoder(model.body.encoder, bucket_size=32)
    steps = templates.make_default_sasrec_transforms(schema)
    steps["train"].insert(
        2, transform.TargetAwareAdaptiveTrimTransform(["item_id", "positive_labels"])
    )
    if job.loss == "ce-":
        model.loss = losses.CESampled(ignore_index=n_items)
        model.loss.logits_callback = model.get_logits
        steps["train"].append(transform.UniformNegativeSamplingTransform(n_items, job.negatives))
    clock.watch(model)

    def table(users: Codes, sequences: list[Codes], path: Path) -> str:
        columns = {"user_id": users, "item_id": sequences, "seen_ids": sequences}
        import_("pyarrow.parquet").write_table(arrow.table(columns), path)
        return str(path)

    with tempfile.TemporaryDirectory() as made:
        longest = max(len(items) for items in log.histories)
        shape = {"padding": n_items}
        shapes = {
            "train": {"user_id": {}, "item_id": {"shape": job.length + 1, **shape}},
            "predict": {
                "user_id": {},
                "item_id": {"shape": job.length, **shape},
                "seen_ids": {"shape": longest, **shape},
            },
        }

        def module(part: str, batch: int, users: Codes, sequences: list[Codes]) -> Any:
            return modules.ParquetModule(
                batch_size=batch,
                metadata={part: shapes[part]},
                transforms={part: steps[part]},
                **{f"{part}_path": table(users, sequences, Path(made, f"{part}.parquet"))},
            )

        training = module("train", job.batch, log.train_users, log.train)
        learner = wrapped.LightningModule(
            model, optimizer_factory=wrapped.optimizer.OptimizerFactory(learning_rate=job.lr)
        )
        trainer(lightning, job, clock).fit(learner, datamodule=training)
        yield
        known = module("predict", 256, log.users, log.histories)
        best = callbacks.TorchTopItemsCallback(job.k, "user_id", [filters.SeenItemsFilter(n_items)])
        predictor = lightning.Trainer(callbacks=[best], accelerator=job.device, **LIGHTNING)
        predictor.predict(learner, datamodule=known, return_predictions=False)
        users, found, _ = best.get_result()
    items = np.full((len(log.users), job.k), -1)
    items[log.rows(users.numpy())] = found.numpy()
    yield items


def recbole(job: Any, log: Log, clock: Clock) -> Iterator[Any]:
    """RecBole: `SASRec`, a sample for each target. Its batch has as many as the others have."""
    torch, config_of = import_("torch"), import_("recbole.config")
    data, utils = import_("recbole.data"), import_("recbole.utils")
    utils.get_model("SASRec"), utils.get_trainer(utils.ModelType.SEQUENTIAL, "SASRec")
    yield
    with tempfile.TemporaryDirectory() as made:
        Path(made, "log").mkdir()
        with Path(made, "log", "log.inter").open("w") as file:
            file.write("user_id:token\titem_id:token\ttimestamp:float\n")
            for user, items in zip(log.users, log.whole, strict=True):
                file.writelines(f"{user}\t{item}\t{at}\n" for at, item in enumerate(items))
        settings = {
            "data_path": made,
            "checkpoint_dir": made,
            "use_gpu": clock.cuda,
            "gpu_id": "0" if clock.cuda else "",
            "state": "ERROR",
            "show_progress": False,
            "seed": job.seed,
            "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
            "MAX_ITEM_LIST_LENGTH": job.length,
            "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full"},
            "train_neg_sample_args": None,
            "loss_type": "CE",
            "n_layers": job.blocks,
            "n_heads": 1,
            "hidden_size": job.dim,
            "inner_size": job.dim,
            "hidden_act": "relu",
            "hidden_dropout_prob": job.dropout,
            "attn_dropout_prob": job.dropout,
            "epochs": job.epochs,
            "train_batch_size": round(job.batch * log.targets / len(log.train)),
            "eval_batch_size": 256,
            "learning_rate": job.lr,
        }
        sys.argv = sys.argv[:1]  # it reads them too
        config = config_of.Config(model="SASRec", dataset="log", config_dict=settings)
        utils.init_seed(job.seed, True)
        dataset = data.create_dataset(config)
        train, _, test = data.data_preparation(config, dataset)
        model = utils.get_model("SASRec")(config, train.dataset).to(config["device"])
        clock.watch(model.trm_encoder, stop=True)
        trainer = utils.get_trainer(config["MODEL_TYPE"], "SASRec")(config, model)
        one_epoch = trainer._train_epoch

        def epoch(*arguments: Any, **named: Any) -> Any:
            loss = one_epoch(*arguments, **named)
            clock.mark()
            if clock.over:
                raise Enough
            return loss

        trainer._train_epoch = epoch
        clock.mark()
        with suppress(Enough):
            trainer.fit(train, saved=False, verbose=False)
    yield
    model.eval()
    items = np.full((len(log.users), job.k), -1)
    of_token = np.array([-1, *map(int, dataset.field2id_token["item_id"][1:])])
    token_of = np.argsort(of_token)[1:]  # as many items in both
    assert (of_token[token_of] == np.arange(len(token_of))).all()
    for batch, *_ in test:  # with -inf for those seen, which it has no function for
        users = dataset.id2token("user_id", batch["user_id"].numpy()).astype(np.int64)
        rows = log.rows(users)
        with torch.no_grad():
            scores = model.full_sort_predict(batch.to(config["device"]))
        scores[:, 0] = -torch.inf
        seen = [log.histories[row] for row in rows]
        places = np.repeat(np.arange(len(rows)), [len(one) for one in seen])
        scores[places, token_of[np.concatenate(seen)]] = -torch.inf
        items[rows] = of_token[scores.topk(job.k).indices.cpu().numpy()]
    yield items


LIBRARIES = {"sce": sce, "rectools": rectools, "replay": replay, "recbole": recbole}
LIBRARIES |= {"sce-chunked": sce, "replay-plain": replay}
PACKAGES = {"replay": "replay-rec", "replay-plain": "replay-rec", "sce-chunked": "sce"}


def work(job: Any, wait: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Import, wait, train and recommend as a job says."""
    log, clock = Log(job.data), Clock(job)
    parts = LIBRARIES[job.library](job, log, clock)
    next(parts)
    wait()
    next(parts)
    begun = time.perf_counter()
    items = next(parts)
    seconds = time.perf_counter() - begun
    np.save(job.out, items)
    package = PACKAGES.get(job.library, job.library)
    stand_ins = {name for name, one in sys.modules.items() if type(one).__name__ == "StandIn"}
    whole = {name for name in stand_ins if name.rpartition(".")[0] not in stand_ins}
    return {
        "begun": clock.begun,
        "marks": clock.marks,
        "peak MiB": clock.peak_mib,
        "peak MiB in all": max(clock.peak_mib, clock.peak()),
        "recommend s": seconds,
        "targets": log.targets,
        "version": import_("sce").__version__ if package == "sce" else version(package),
        "torch": version("torch"),
        "stand-ins": " ".join(sorted(whole)),  # for what is imported and not used
    }


def main() -> None:
    """Do the job of the command line; whatever it is in, the process ends after `limit` seconds."""
    job = SimpleNamespace(**json.loads(sys.argv[1]))

    def ready() -> None:
        signal.alarm(0)
        print("ready", flush=True)
        if not sys.stdin.readline():
            sys.exit("nobody waits for this any more")
        signal.alarm(job.limit)

    signal.alarm(job.limit + 60)  # without a handler; imports from a cold disk take long
    print("\n" + json.dumps(work(job, ready)), flush=True)


if __name__ == "__main__":
    main()
