"""A folder of images: its splits, its class folders and the files in them, each checked by name before one is read.

docs/data.md has the layout. Files next to class folders are not read, and a class folder without images is no class.
In class folders, files with other endings than those of images are counted.
Links to images and to class folders are followed. Images come by class, then by path, whatever order the file system
has.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from memsave_recipes.core.errors import InputError, is_text, packages_of
from memsave_recipes.core.text import first_of
from memsave_recipes.data.sources import (
    SPLIT_NAMES,
    Splits,
    choose_splits,
    generated,
    of_left_out,
    progress_bars,
)

with packages_of("vision", "images"):
    from PIL import Image

ENDINGS = frozenset(ImageFolder.EXTENSIONS) | ({".avif", ".avifs"} & Image.registered_extensions().keys())
LEFT_BEHIND = ("__MACOSX", "@eaDir")
"""Folders of archives made on macOS, and of thumbnails on Synology's disks."""


def find_images(data_dir: str) -> "ImageFiles":
    """Find the images of a folder, without reading one.

    Raises:
        InputError: no such folder, split or images; a folder inside a class folder; a link that leads nowhere; a name
            that is not UTF-8; a file of metadata.
    """
    if not os.path.isdir(data_dir):  # unlike pathlib, without an error for what can be no path
        raise InputError(f"--data_dir {data_dir} is not a directory: name one that holds a folder per class")
    files = ImageFiles(data_dir)
    folders = dict(files.splits())
    files.paths = {split: files.classes_in(folder) for split, folder in folders.items()}
    if files.lost_links:
        raise files.refused(
            f"{first_of(files.lost_links, 1)} is a link that leads nowhere: mount its disk, or delete it"
        )
    for split, folder in folders.items():
        if not files.paths[split]:
            place = os.path.join(folder, "CLASS", "")
            raise InputError(f"--data_dir {data_dir} has no images in {place}: make a folder per class and fill it")
    return files


def read_folder(files: "ImageFiles", source: str) -> Splits:
    """Read each split with the columns ``image`` (a path) and ``label``; cached until a file changes."""
    names = files.label_names
    features = datasets.Features(image=datasets.Image(decode=False), label=datasets.ClassLabel(names=names))
    splits = {}
    for split, classes in files.paths.items():
        labelled = [(path, label) for label, name in enumerate(names) for path in classes.get(name, [])]
        states = [file_state(path) for path, _ in labelled]
        version = [f"{state.st_size} {state.st_mtime_ns}" for state in states]
        with progress_bars(False):
            splits[split] = generated(_rows, features, source, images=tuple(labelled), version=tuple(version))
    return splits


def _rows(images: tuple[tuple[str, int], ...], version: tuple[str, ...]) -> Iterator[dict[str, str | int]]:
    for path, label in images:
        yield {"image": path, "label": label}


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Raise ``InputError`` in the place of an ``OSError`` of the file at ``path``."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check file and disk") from error


def file_state(path: str) -> os.stat_result:
    """Return the size and times of a file; raises as ``readable``."""
    with readable(path):
        return os.stat(path)


class ImageFiles:
    """The images of a folder: absolute ``paths`` by split and class; ``lost_links``, which lead nowhere.

    ``left_out`` counts the endings of other files in class folders.
    """

    def __init__(self, data_dir: str) -> None:
        self.data_dir = data_dir
        self.root = os.path.abspath(data_dir)
        self.paths: dict[str, dict[str, list[str]]] = {}
        self.lost_links: list[str] = []
        self.left_out: Counter[str] = Counter()

    @property
    def label_names(self) -> list[str]:
        """The classes of all splits."""
        return sorted({name for classes in self.paths.values() for name in classes})

    @property
    def notes(self) -> list[str]:
        """A line on the files that are left out, if there are any."""
        return of_left_out(sum(len(found) for split in self.paths.values() for found in split.values()), self.left_out)

    def splits(self) -> Iterator[tuple[str, str]]:
        """Yield each split with the name of its folder; a flat folder is ``train``."""
        folders = [entry.name for entry in _visible(self.root) if entry.is_dir()]
        if any(name in names for names in SPLIT_NAMES.values() for name in folders):
            source = f"--data_dir {self.data_dir}"
            yield from choose_splits(folders, source, "or name no folder as a split").items()
        else:
            yield "train", ""

    def classes_in(self, folder: str) -> dict[str, list[str]]:
        """Return the paths of the images in a split's folder, by class."""
        classes = {}
        for entry in self._entries(os.path.join(self.root, folder)):
            if entry.is_dir():
                self._check_name(entry)
                if images := sorted(self._images_in(entry.path)):
                    classes[entry.name] = images
        return classes

    def _images_in(self, folder: str) -> Iterator[str]:
        for entry in self._entries(folder):
            self._check_name(entry)
            if entry.is_dir():
                raise self.refused(
                    f"{self._name_of(entry)} is a folder inside a class folder: move its images up, or name the folder "
                    "that holds the class folders"
                )
            if entry.name in ImageFolder.METADATA_FILENAMES:
                raise self.refused(
                    f"{self._name_of(entry)} describes images in a way of its own, and their class is the name of "
                    "their folder: move it away"
                )
            if entry.is_file() and (ending := Path(entry.name).suffix.lower()) in ENDINGS:
                yield entry.path
            elif entry.is_file():
                self.left_out[ending] += 1

    def _entries(self, folder: str) -> Iterator["os.DirEntry[str]"]:
        for entry in _visible(folder):
            if entry.is_symlink() and not os.path.exists(entry.path):
                self.lost_links.append(self._name_of(entry))
            else:
                yield entry

    def _check_name(self, entry: "os.DirEntry[str]") -> None:
        if not is_text(entry.name):
            raise self.refused(f"the name {self._name_of(entry)!r} is not UTF-8 text: rename it")

    def _name_of(self, entry: "os.DirEntry[str]") -> str:
        return os.path.relpath(entry.path, self.root)

    def refused(self, message: str) -> InputError:
        """Return the refusal of the folder."""
        return InputError(f"--data_dir {self.data_dir}: {message}")


def _visible(folder: str) -> list["os.DirEntry[str]"]:
    with readable(folder), os.scandir(folder) as entries:
        found = [entry for entry in entries if entry.name not in LEFT_BEHIND and not entry.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name)
