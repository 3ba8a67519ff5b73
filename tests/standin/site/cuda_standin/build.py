"""Builds the library for the torch that is there, once, into the checkout's ``.pytest_cache``."""

import fcntl
import hashlib
import os
import runpy
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "cpp"
CACHE = Path(__file__).parents[4] / ".pytest_cache" / "standin"
FLAGS = ["-std=c++20", "-O0", "-fPIC", "-w"]


def why_not() -> str | None:
    """Return why the stand-in cannot be had here; ``None`` where it can."""
    if shutil.which("g++") is None:
        return "the stand-in for CUDA needs g++"
    if runpy.run_path(str(_torch() / "version.py"))["cuda"] is not None:
        return "the stand-in for CUDA needs a torch that was built without CUDA"
    return None


def build() -> Path:
    """Return the library's path; compile it first where no process has done so yet (half a minute).

    Raises:
        ImportError: it cannot be had here, or does not compile against this torch.
    """
    if reason := why_not():
        raise ImportError(reason)
    folder = CACHE / _digest()
    library = folder / "libstandin.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(folder, library)
    return library


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _digest() -> str:
    parts = [(_torch() / "version.py").read_bytes(), str(_torch()).encode(), " ".join(FLAGS).encode()]
    parts += [source.read_bytes() for source in sorted(SOURCES.iterdir())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(folder: Path, library: Path) -> None:
    """As one unit, since torch's headers take most of the time; a compiler must not look for a stand-in itself."""
    torch = _torch()
    unit, unfinished, lib = folder / "standin.cpp", library.with_suffix(".part"), torch / "lib"
    unit.write_text("".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp"))))
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
    environment = {name: value for name, value in os.environ.items() if name != "STANDIN"}
    command = ["g++", *FLAGS, *includes, "-shared", unit, "-o", unfinished, *libraries]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ImportError(f"the stand-in for CUDA does not compile against this torch:\n{done.stderr[-4000:]}")
    unfinished.rename(library)
