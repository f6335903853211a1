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
