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
    """Return the library's path; compile it first where no process has done so yet (a minute of a processor).

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
    torch = _torch()
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    _run([["g++", *FLAGS, *includes, "-c", source, "-o", made] for source, made in zip(sources, objects, strict=True)])
    lib = torch / "lib"
    unfinished = library.with_suffix(".part")
    _run([["g++", "-shared", *objects, "-o", unfinished, f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]])
    unfinished.rename(library)


def _run(commands: list[list[str | Path]]) -> None:
    """Run all at once; a compiler that Python itself starts must not look for a stand-in."""
    environment = {name: value for name, value in os.environ.items() if name != "STANDIN"}
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        if process.returncode:
            raise ImportError(f"the stand-in for CUDA does not compile against this torch:\n{error[-4000:]}")
