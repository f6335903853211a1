"""Triton's interpreter in less time: what it finds out at every call, it finds out once."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def hasten() -> None:
    """Patch Triton's language once a launch, not at every call of a function from a kernel."""
    if not find_spec("triton"):
        return
    interpreter: Any = import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):  # another version: as slow as it is
        return
    scope = interpreter._LangPatchScope
    patch, restore, find_dtype = interpreter._patch_lang, scope.restore, interpreter._get_np_dtype
    find_dtype_once = cache(find_dtype)
    patched: set[int] = set()  # the modules of functions, in this launch

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return scope()
        patched.add(id(function.__globals__))
        return patch(function)

    def restore_all(patches: Any) -> None:
        patched.clear()
        restore(patches)

    def numpy_dtype(dtype: Any) -> Any:  # pointers have no hash
        return find_dtype(dtype) if dtype.scalar.is_ptr() else find_dtype_once(dtype.scalar)

    interpreter._patch_lang, scope.restore = patch_once, restore_all
    interpreter._get_np_dtype = numpy_dtype
