import pytest

from sce.experiments.runner import explain_failure

CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."


@pytest.mark.parametrize(
    ("status", "said", "kind", "message"),
    [
        (2, "epoch 1\nsce: error: memory ran out (3 GiB); try less\n", "out of memory", "memory"),
        (1, f"Traceback\n  File x\n{CUDA}\n", "out of memory", "torch.Out"),
        (1, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "out of memory", "Runtime"),
        (1, "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.",
         "out of memory", "OpenBLAS"),
        (2, "sce: error: a model of 9 items does not fit into memory; choose another",
         "out of memory", "a model"),
        (2, "sce: error: the loss became nan at step 3 of epoch 1", "diverged", "the loss"),
        (2, "sce: error: the weights stopped being numbers in epoch 2", "diverged", "the weights"),
        (1, "Traceback\nZeroDivisionError: division by zero", "error", "ZeroDivision"),
        (1, "", "error", "it said nothing"),
        (-9, "epoch 3/100", "killed", "ended by signal 9: perhaps the system ran out of memory"),
        (-11, "epoch 3/100", "killed", "ended by signal 11; last words: epoch 3/100"),
    ],
)  # fmt: skip
def test_kinds(status: int, said: str, kind: str, message: str) -> None:
    found = explain_failure(status, said)
    assert found[0] == kind
    assert found[1].startswith(message)


def test_a_message_has_an_end_and_an_old_word_about_memory_is_not_the_reason() -> None:
    said = "sce: warning: this may run out of memory\n" + "epoch\n" * 9 + "KeyError: " + "x" * 1000
    kind, message = explain_failure(1, said)
    assert (kind, len(message)) == ("error", 404)


def test_no_advice_to_go_on_from_what_is_not_kept() -> None:
    said = "sce: error: the loss became nan; try a lower --learning-rate, with --resume to go on "
    said += "from the last good state; the best epoch so far, 3, is in runs/x"
    expected = "the loss became nan; try a lower training.learning_rate"
    assert explain_failure(2, said)[1] == expected
    said = said.partition(" with ")[0] + " with --force to begin anew: there is no state yet"
    assert explain_failure(2, said)[1] == expected


@pytest.mark.parametrize(
    ("of_training", "of_sweep"),
    [
        (
            "a smaller --batch-size, or --loss sce",
            "a smaller training.batch_size, or loss.name sce",
        ),
        ("--training.clip-norm 1", "training.clip_norm 1"),
        ("a smaller --model.dim or --model.max-length", "a smaller model.dim or model.max_length"),
        ("start anew: --force", "start anew: --retry-failed"),
        ("a - b -- c --data x", "a - b -- c --data x"),
    ],
)
def test_advice_is_in_the_words_of_a_sweep(of_training: str, of_sweep: str) -> None:
    assert explain_failure(2, f"sce: error: {of_training}")[1] == of_sweep
