"""Directories of arrays, described by a manifest with the size and digest of each."""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sce.data.shapes import misfit, parse_json
from sce.data.storage import CHECKSUM, is_same, json_checksum, new_digest, tidy, write_json
from sce.errors import InputError

FILE = {"bytes": int, "blake2b": str}  # shape of `describe_file`


def write_array(path: Path, array: NDArray[Any]) -> None:
    """Write a .npy file; unlike `numpy.save`, a full disk is reported as such."""
    array = np.ascontiguousarray(array)
    with path.open("wb") as file:
        write_header(file, array.dtype, array.shape)
        file.write(array.data)


def write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Write the head of a .npy file, of the same length whatever the length of the array."""
    head = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, head)


def map_array(file: BufferedReader) -> NDArray[Any]:
    """Memory-map an open .npy file of `write_array`, read-only; any other is a ValueError."""
    version = npy.read_magic(file)
    try:
        try:
            shape, _, dtype = npy.read_array_header_1_0(file)
        except MemoryError as error:  # of Python's parser: a head has 10,000 bytes at most
            raise ValueError("not the head of an array: nested too deeply") from error
        if version != (1, 0) or dtype.hasobject:
            raise ValueError(f"not an array of numbers in version 1.0 of the format, but {dtype}")
        mapped: NDArray[Any] = np.memmap(file, dtype, "r", file.tell(), shape)
    except (TypeError, OverflowError, RecursionError, TokenError) as error:
        raise ValueError(f"not the head of an array: {error}") from error
    return mapped.view(np.ndarray)  # indexing a memmap costs more than indexing an array


def describe_file(file: Path) -> dict[str, Any]:
    """Size and digest of a file, for a manifest."""
    with file.open("rb") as opened:
        return {"bytes": os.fstat(opened.fileno()).st_size, "blake2b": _digest(opened)}


@dataclass(frozen=True)
class Manifest:
    """A kind of directory, described by a JSON file with the size and digest of every other."""

    file: str
    format: str
    version: int
    noun: str  # "prepared dataset"
    command: str  # that makes one: "sce prepare INPUT"
    remedy: str  # "prepare it again"
    shape: Mapping[str, Any] = field(default_factory=dict)  # of the content, beside its files

    def write(self, directory: Path, content: Mapping[str, Any]) -> None:
        """Write the manifest of a directory, whole or not at all."""
        head = {"format": self.format, "version": self.version}
        write_json(directory / self.file, head | dict(content))

    def read(self, path: Path) -> dict[str, Any]:
        """The manifest of a directory; refused unless whole and of this format and version."""
        return self.open(path, arrays=False)[0]

    def open(
        self, path: Path, *, arrays: bool = True, verify: bool = True
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The manifest of a directory, and its arrays by the names of their files, memory-mapped.

        A file that is not .npy is an array of its bytes. They belong together, also while the
        directory is being replaced. `verify` compares their digests, of the very bytes that are
        mapped; sizes always are.
        """
        while True:
            if not path.exists():
                tidy(path)
            if not path.exists():
                command = f"{self.command} --out {path}"
                raise InputError(f"{path} does not exist; make it with: {command}")
            if not path.is_dir():
                raise InputError(f"{path} is a file, not a {self.noun} (a directory)")
            directory = os.open(path, os.O_RDONLY)
            try:
                manifest = self._parse(path, directory)
                files = manifest["files"].items() if arrays else ()
                return manifest, {
                    name: self._map(path, directory, name, written, verify)
                    for name, written in files
                }
            except InputError:
                if is_same(directory, path):
                    raise
            except OSError as error:
                file = path / str(error.filename)
                raise InputError(f"cannot read {file}: {error.strerror}") from error
            finally:
                os.close(directory)

    def listed(self, path: Path) -> set[str]:
        """Names of the manifest and its files; none unless it is of this kind, whole or not."""
        try:
            manifest = json.loads((path / self.file).read_bytes())
            return {self.file, *manifest["files"]} if manifest["format"] == self.format else set()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return set()

    def damaged(self, path: Path, what: str) -> InputError:
        """The error of a directory that is not as it was written."""
        return InputError(f"{path} is half-written or altered: {what}; {self.remedy}")

    def _parse(self, path: Path, directory: int) -> dict[str, Any]:
        try:
            with _open_in(directory, self.file) as file:
                manifest = parse_json(file.read())
        except FileNotFoundError:
            raise InputError(
                f"{path} is not a {self.noun}: it has no {self.file}; make one with: {self.command}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise self.damaged(path, f"{self.file} cannot be read") from error
        if not isinstance(manifest, dict) or manifest.get("format") != self.format:
            raise InputError(f"{path} is not a {self.noun}: its {self.file} is of something else")
        if manifest.get("version") != self.version:
            raise InputError(
                f"{path} has format version {manifest.get('version')}, and this sce reads version "
                f"{self.version}; install the sce that wrote it, or {self.remedy}"
            )
        if manifest.pop(CHECKSUM, None) != json_checksum(manifest):
            raise self.damaged(path, f"{self.file} was altered")
        if (wrong := misfit(manifest, {"files": {"*": FILE}, **self.shape})) is not None:
            raise self.damaged(path, f"{wrong} of {self.file} is missing, or of another kind")
        return manifest

    def _map(
        self, path: Path, directory: int, name: str, written: Mapping[str, Any], verify: bool
    ) -> NDArray[Any]:
        """Map a file; refuse it with another size or digest than it was written with."""
        try:
            with _open_in(directory, name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != written["bytes"]:
                    what = f"{name} has {size:,} bytes and was written with {written['bytes']:,}"
                    raise self.damaged(path, what)
                if verify and _digest(file) != written["blake2b"]:
                    raise self.damaged(path, f"the content of {name} was altered")
                file.seek(0)
                if name.endswith(".npy"):
                    return map_array(file)
                return np.memmap(file, np.uint8, "r").view(np.ndarray)
        except FileNotFoundError:
            raise self.damaged(path, f"{name} is missing") from None
        except InputError:
            raise
        except ValueError as error:
            raise self.damaged(path, f"{name}: {error}") from error


def _digest(file: BufferedReader) -> str:
    return hashlib.file_digest(file, new_digest).hexdigest()


def _open_in(directory: int, name: str) -> BufferedReader:
    """Open a file in an open directory; a pipe, a device or a directory is a ValueError."""
    at_once = os.O_NONBLOCK  # else a pipe is waited for
    descriptor = os.open(name, os.O_RDONLY | at_once, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{name} is not a file")
    return os.fdopen(descriptor, "rb")
