"""Lets the project, and nothing else, see what Python has on Windows: Linux's own modules and names are not there.

Libraries are those of this system and keep what they use. Files and processes stay Linux's.
"""

import builtins
import errno
import fcntl
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

OURS = tuple(f"{Path(__file__).parents[2] / folder}{os.sep}" for folder in ("memsave_recipes", "recipes"))
NO_MODULES = {
    "crypt",
    "fcntl",
    "grp",
    "posix",
    "pty",
    "pwd",
    "readline",
    "resource",
    "spwd",
    "syslog",
    "termios",
    "tty",
}
OF_SIGNAL = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN", "NSIG", "Signals"}
OF_SIGNAL |= {"Handlers", "signal", "getsignal", "raise_signal", "strsignal", "valid_signals", "set_wakeup_fd"}
OF_SIGNAL |= {"default_int_handler"}
NOT_OF_OS = """
    fork forkpty register_at_fork wait wait3 wait4 waitid WNOHANG WIFEXITED WEXITSTATUS killpg getpgid getpgrp setpgid
    setsid getsid getuid geteuid getgid getegid getgroups setuid setgid initgroups getpriority setpriority nice uname
    sysconf sysconf_names confstr pathconf fpathconf statvfs fstatvfs chown fchown lchown mkfifo mknod getloadavg
    openpty ttyname ctermid tcgetpgrp pread pwrite readv writev sendfile set_blocking get_blocking sync fdatasync lockf
    getxattr setxattr sched_yield sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate posix_spawn major
    minor O_CLOEXEC O_DIRECTORY O_DIRECT O_NOFOLLOW O_NONBLOCK O_SYNC memfd_create eventfd pidfd_open fchmod
"""


class Seen(ModuleType):
    """A module as it is on Windows: without names, and with others in the place of some."""

    def __init__(self, module: ModuleType, *, lacks: set[str], **replaced: Any) -> None:
        vars(self).update(real=module, lacks=lacks, **replaced)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["lacks"]:
            raise AttributeError(f"{vars(self)['real'].__name__}.{name} is not there on Windows")
        return getattr(vars(self)["real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["real"], name, value)


def open_file(path: Any, *args: Any, **kwargs: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "a folder has no descriptor on Windows", str(path))
    return os.open(path, *args, **kwargs)


def fsync(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Windows flushes no file that is open for reading alone")
    os.fsync(descriptor)


def seen(module: ModuleType) -> ModuleType:
    match module.__name__:
        case "os":
            return Seen(module, lacks={*NOT_OF_OS.split()}, open=open_file, fsync=fsync)
        case "signal":
            return Seen(module, lacks={name for name in vars(module) if name[0] != "_"} - OF_SIGNAL)
        case "select":
            return Seen(module, lacks={name for name in vars(module) if name[0] != "_"} - {"select", "error"})
        case "sys":
            return Seen(module, lacks=set(), platform="win32")
        case "psutil":

            class Process(module.Process):  # type: ignore[name-defined, misc]
                def memory_info(self) -> Any:
                    bytes_now = super().memory_info().rss
                    return SimpleNamespace(rss=bytes_now, peak_wset=bytes_now)

            return Seen(module, lacks=set(), Process=Process)
    return module


load = builtins.__import__


def load_as_on_windows(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if not str((globals or {}).get("__file__", "")).startswith(OURS):
        return load(name, globals, locals, fromlist, level)
    if name in NO_MODULES:
        raise ModuleNotFoundError(f"No module named {name!r} on Windows", name=name)
    return seen(load(name, globals, locals, fromlist, level))


builtins.__import__ = load_as_on_windows
