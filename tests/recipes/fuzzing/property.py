"""What holds of every command line: it runs and has what was asked for, or ends in one line that costs nothing."""

import json
import shutil
from pathlib import Path
from stat import S_ISDIR

from fuzzing.lines import Line
from fuzzing.programs import End, RunProgram, end_of_program

YES, NO = ("true", "yes", "1", "y", "t"), ("false", "no", "0", "n", "f")
Snapshot = dict[str, tuple[int, int]]


def end_of(line: Line, run_program: RunProgram, folder: Path, files: Path) -> End:
    """How ``line`` ends in a new ``folder``.

    Raises:
        AssertionError: not as it should.
    """
    folder.mkdir()
    (folder / "f").symlink_to(files)
    (folder / "file").touch()
    if line.preset is not None:
        (folder / "preset.yaml").write_bytes(line.preset)
    if line.on_a_run:
        shutil.copytree(files / "done", folder / "run")
    before = _snapshot(folder)
    end = end_of_program(run_program, line.program, line.words, folder)
    told = f"{line}\nended with {end.code} and said\n{end.out}\n{end.err}"
    assert end.code is not None, f"it hangs: {told}"
    assert end.code in {0, 2, *line.codes}, told
    assert "Traceback" not in end.out + end.err, told
    if end.code == 2:
        assert _has_one_error(end.err), told
        assert line.program == "memsave" or _snapshot(folder) == before, f"files have changed: {told}"
    if end.code == 0:
        assert not line.refused, told
        if line.program != "memsave" and "usage:" not in end.out:
            _check_flags(line, folder, told)
    return end


def _has_one_error(err: str) -> bool:
    """The last line; what libraries say before it is theirs."""
    *others, last = err.strip().split("\n")
    return last.startswith("error: ") and not any(line.startswith("error: ") for line in others)


def _snapshot(folder: Path) -> Snapshot:
    """Size and time of every file, and the names of folders; links are not followed."""
    found = {str(path.relative_to(folder)): path.lstat() for path in folder.rglob("*")}
    return {
        name: (0, 0) if S_ISDIR(state.st_mode) else (state.st_size, state.st_mtime_ns) for name, state in found.items()
    }


def _check_flags(line: Line, folder: Path, told: str) -> None:
    """``config.json`` holds what was typed."""
    written = json.loads((folder / str(line.asked["output_dir"]) / "config.json").read_text())
    for flag, value in line.asked.items():
        assert flag not in written or _is_same(value, written[flag]), f"--{flag} became {written[flag]!r}: {told}"


def _is_same(typed: str | None, written: object) -> bool:
    if isinstance(written, bool):
        return typed is None or typed.lower() in (YES if written else NO)
    if written is None:  # --save_best
        return str(typed).lower() in NO
    if isinstance(written, list):
        return len(written) == 1 and _is_same(typed, written[0])
    if isinstance(written, int | float):
        return float(str(typed)) == written
    is_chosen = typed == "auto" or (written == "none" and typed in NO)  # by the run, or as --compile says it
    is_meant = written in ("stop", "loss") and (typed is None or typed.lower() in YES)  # by --verify and --save_best
    return is_chosen or is_meant or typed == written
