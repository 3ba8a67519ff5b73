"""The train state of a checkpoint: weights, optimizer, schedule, loss scaler and a record, exactly and without pickle.

Each is a pytree of tensors and plain values. Tensors go to ``STEM-K.safetensors`` under the path of their keys, those
of the same memory once; everything else goes to ``STEM.json``, where floats keep every bit. Of weights in shards every
rank writes one file (``shard_files.py``). Frozen parameters are known by their digest alone.

Accelerate's ``save_state`` pickles the optimizer and every rank's random state, names weights after the DDP around
them, and leaves out a schedule that it has not prepared. Randomness needs no saving: NOTE [ the exact global batch ].
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host.masters import MASTERS, masters_beside_weights, masters_in
from memsave_recipes.core.host.state import copies_on_host
from memsave_recipes.core.sharding.tensors import cut_like, is_sharded, local, whole
from memsave_recipes.core.step.memory import parameters_by_optimizer, state_bytes
from memsave_recipes.core.text import MIB
from memsave_recipes.training.checkpoints.shard_files import NAME, read_shards, shards_of

PART_BYTES = 256 * MIB
"""The size of a file, about: a device's tensors are copied to the host file by file, and digests run in parallel."""
RECORD, FROZEN = "record", "frozen"
KERNELS = ("fused", "foreach")
"""Entries of an optimizer's groups that change how it computes, and not what."""
PyTree = Any
"""Tensors, dicts with keys of text or whole numbers, lists, tuples, None, truth values, numbers and text."""
Record = dict[str, Any]


class Unreadable(Exception):
    """A file holds no pytree; the message names it."""


@dataclass(frozen=True, eq=False)
class RankState:
    """What a rank writes of a state.

    Args:
        tensors: of each safetensors file, by its name.
        texts: the other files, by their names.
        headers: of the files with shards, by their names.
    """

    tensors: dict[str, dict[str, Tensor]]
    texts: dict[str, str]
    headers: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, trees: dict[str, PyTree]) -> Self:
        """Return whole ``trees``, each by the stem of its files.

        Raises:
            TypeError: something in one is of no known kind.
        """
        files: dict[str, dict[str, Tensor]] = {}
        texts: dict[str, str] = {}
        for stem, tree in trees.items():
            tensors: dict[str, Tensor] = {}
            skeleton = _pack(tree, stem, tensors, {})
            parts = _split(tensors)
            files |= {_name(stem, index): part for index, part in enumerate(parts)}
            texts[f"{stem}.json"] = _text(skeleton, len(parts))
        return cls(files, texts)

    @classmethod
    def in_shards(cls, rank: int, trees: dict[str, PyTree], whole_trees: dict[str, PyTree]) -> Self:
        """Return what ``rank``, which calls this, writes: its shards of ``trees``; rank 0 also what is no tensor."""
        tensors: dict[str, Tensor] = {}
        texts = {f"{stem}.json": _text(_pack(tree, stem, tensors, {}), None) for stem, tree in trees.items()}
        mine, header = shards_of(rank, tensors)
        name = NAME.format(rank + 1)
        rest = cls.of(whole_trees)
        files = ({name: mine} if mine else {}) | rest.tensors
        return cls(files, texts | rest.texts if rank == 0 else {}, {name: header})

    def write(self, folder: Path) -> list[Path]:
        """Write the files, and return their paths. What is on a device is copied file by file."""
        for name, tensors in self.tensors.items():
            save_file(_on_host(tensors), folder / name, metadata=self.headers.get(name))
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return [folder / name for name in (*self.tensors, *self.texts)]


class TrainState:
    """The state that changes while a model is trained.

    Args:
        accelerator: with the loss scaler, if there is one.
        model, optimizer: prepared or not.
        scheduler: any whose ``state_dict`` holds plain values, such as a ``LambdaLR``.
        others: more parts with a ``state_dict``, such as an average of the weights, by the stem of their files;
            ``None`` where there is none.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        **others: Any,
    ) -> None:
        self.model = accelerator.unwrap_model(model)
        self.stateful: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler}
        self._masters = masters_beside_weights(optimizer)
        if accelerator.scaler is not None:
            self.stateful["scaler"] = accelerator.scaler
        self.stateful |= {stem: other for stem, other in others.items() if other is not None}
        self._on_cpu = accelerator.device.type == "cpu"  # where an optimizer keeps the tensors that it loads
        self.is_sharded = is_sharded(self.model)
        self._frozen_digest: str | None = None
        if self.is_sharded:
            self._digest_of_frozen()  # here, where all ranks are

    def num_bytes(self) -> int:
        """Return the bytes of the tensors of a checkpoint."""
        return sum(num_bytes(tree) for tree in self._trees().values())

    def num_bytes_in_the_end(self, optimizer: str, momentum: float) -> int:
        """Return ``num_bytes()`` after a step, when ``--optimizer`` has made its state."""
        shares, masters = parameters_by_optimizer(optimizer, self.model), masters_in(self.stateful["optimizer"])
        of = {} if masters is None else masters.of
        stepped = {name: [of.get(one, one) for one in share] for name, share in shares.items()}
        state = sum(state_bytes(name, share, momentum=momentum) for name, share in stepped.items())
        trees = self._trees()
        state = max(state, num_bytes(trees.pop("optimizer")))
        return state + sum(num_bytes(tree) for tree in trees.values())

    def num_bytes_of_weights(self, *, whole: bool = False) -> int:
        """Return the bytes of the weights that are trained, or of the ``whole`` model."""
        weights = self.model.state_dict() if whole else self._trees()["model"]
        return num_bytes(weights)

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Return whether all weights that train (of this rank) are finite; copy none, wait for the device once."""
        trained = (local(parameter) for parameter in self.model.parameters() if parameter.requires_grad)
        found: defaultdict[torch.device, list[Tensor]] = defaultdict(list)  # some weights may wait on the host
        for part in trained:
            if part.numel():
                found[part.device] += [extreme.isfinite() for extreme in part.aminmax()]  # NaN is extreme
        return all(bool(torch.stack(extremes).all()) for extremes in found.values())

    def rank_state(self, rank: int, record: Record) -> RankState:
        """Return what ``rank``, which calls this, writes of everything and ``record``; whole weights rank 0 alone."""
        rest = {FROZEN: self._digest_of_frozen(), RECORD: record} if rank == 0 else {}
        if self.is_sharded:
            return RankState.in_shards(rank, self._trees(), rest)
        return RankState.of(self._trees() | rest if rank == 0 else {})

    def read(self, folder: Path) -> None:
        """Restore everything from ``folder``, on every rank.

        Raises:
            InputError: a file cannot be read, or does not fit this model, optimizer or schedule.
        """
        try:
            if read_pytree(folder, FROZEN) != self._digest_of_frozen():
                raise ValueError("the frozen weights are others than those it was trained with")
            shards = read_shards(folder, self._owners()) if is_in_shards(folder) else None
            trees = {stem: read_pytree(folder, stem, mapped=not self._on_cpu, shards=shards) for stem in self.stateful}
            self._cut_up_state(trees["optimizer"])
            self._load_model(read_pytree(folder, "model", mapped=True, shards=shards))
            _settle_groups(trees["optimizer"], self.stateful["optimizer"].state_dict())
            for stem, tree in trees.items():
                _check_numbers(tree, self.stateful[stem].state_dict(), stem)
            for stem, tree in trees.items():
                self.stateful[stem].load_state_dict(tree)
        except torch.OutOfMemoryError:  # a RuntimeError, but nothing that another flag of the model would mend
            raise
        except (Unreadable, ValueError, RuntimeError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise InputError(_misfit(folder, error)) from error

    def _owners(self) -> Callable[[str], Tensor | None]:
        """Return a function from a tensor's name in a checkpoint to the weight in whose shards it is wanted."""
        weights: dict[str, Tensor] = self.model.state_dict()
        stepped = self._stepped

        def owner(name: str) -> Tensor | None:
            stem, _, key = name.partition(".")
            match [stem, *key.split(".")]:
                case ["optimizer", kind, number, *_] if kind in ("state", MASTERS):
                    return stepped[int(number)]
                case [part, "tensors", *names] if part in self.stateful:  # by the names of weights
                    return weights.get(".".join(names))
            return weights.get(key) if stem == "model" else None

        return owner

    @property
    def _stepped(self) -> list[Tensor]:
        """The parameters of the optimizer, in the order in which it numbers them."""
        return [parameter for group in self.stateful["optimizer"].param_groups for parameter in group["params"]]

    def _cut_up_state(self, saved: PyTree) -> None:
        """Cut whole state of an optimizer into shards, where its parameters are in shards."""
        stepped = self._stepped
        entries = [(entry, dict.fromkeys(entry, stepped[number])) for number, entry in saved["state"].items()]
        entries.append((saved.get(MASTERS, {}), dict(enumerate(stepped))))
        for entry, parameters in entries if self.is_sharded else ():
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.shape == parameters[key].shape:
                    entry[key] = cut_like(value, parameters[key])

    def _trees(self) -> dict[str, PyTree]:
        frozen = self._frozen()
        weights = {name: tensor for name, tensor in self.model.state_dict().items() if name not in frozen}
        trees = {"model": weights, **{stem: one.state_dict() for stem, one in self.stateful.items()}}
        if self._masters is not None:
            trees["model"] = weights | self._named_masters()
            trees["optimizer"].pop(MASTERS, None)
        return trees

    def _named_masters(self) -> dict[str, nn.Parameter]:
        """The masters on the device, in whose place a checkpoint has no weights, by the names of these."""
        of = {} if self._masters is None else self._masters.of
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: of[weight] for name, weight in named if weight in of}

    def _frozen(self) -> dict[str, Tensor]:
        """The entries of ``state_dict`` that belong to frozen parameters, such as the scales of quantized ones."""
        named = self.model.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in named if not parameter.requires_grad}
        if not frozen:
            return {}
        state = self.model.state_dict()
        return {key: value for key, value in state.items() if any(f"{key}.".startswith(f"{name}.") for name in frozen)}

    def _digest_of_frozen(self) -> str:
        if self._frozen_digest is None:
            self._frozen_digest = _digest(self._frozen())
        return self._frozen_digest

    def _load_model(self, weights: dict[str, Tensor]) -> None:
        here = self.model.state_dict()
        weights = {name: cut_like(tensor, here.get(name)) for name, tensor in weights.items()}
        outcome = self.model.load_state_dict(weights, strict=False)
        wrong = [*outcome.unexpected_keys, *(set(outcome.missing_keys) - self._frozen().keys())]
        if wrong:
            raise ValueError(f"{sorted(wrong)[0]} is in one of them only")
        if self._masters is not None:
            self._masters.load({master: weights[name] for name, master in self._named_masters().items()})


def _digest(tensors: dict[str, Tensor]) -> str:
    """Digest whole tensors: a collective where they are in shards."""
    digest = hashlib.sha256()
    for name, tensor in ((name, whole(tensor)) for name, tensor in tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _settle_groups(saved: PyTree, present: PyTree) -> None:
    """Keep the kernels of this run's optimizer: not all of them step shards.

    Refuse the state of another optimizer, which torch loads without an error, to fail at the next step.
    """
    if [group.keys() for group in saved["param_groups"]] != [group.keys() for group in present["param_groups"]]:
        raise ValueError("it holds the state of another optimizer")
    for group, own in zip(saved["param_groups"], present["param_groups"], strict=True):
        group.update({name: own[name] for name in KERNELS if name in own})


def _check_numbers(saved: PyTree, present: PyTree, path: str) -> None:
    """Refuse text in place of a number, which torch loads without an error, to fail at the next step."""
    match present:
        case bool():
            return
        case int() | float():
            if not isinstance(saved, int | float):
                raise ValueError(f"{path} is no number")
        case dict():
            for key in present.keys() & saved.keys():
                _check_numbers(saved[key], present[key], f"{path}.{key}")
        case list() | tuple():
            for index, items in enumerate(zip(saved, present, strict=False)):
                _check_numbers(*items, f"{path}.{index}")


def read_record(folder: Path, keys: set[str]) -> Record:
    """Read the record that was saved.

    Raises:
        InputError: it cannot be read, or has other keys.
    """
    try:
        record = read_pytree(folder, RECORD)
        if not isinstance(record, dict) or record.keys() != keys:
            raise Unreadable(f"{RECORD}.json is none of ours")
        return record
    except Unreadable as error:
        raise InputError(_misfit(folder, error)) from error


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Turn the errors that an incomplete record in ``folder`` causes inside into one line.

    Raises:
        InputError: it is no record of a run.
    """
    try:
        yield
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(_misfit(folder, error)) from error


def _misfit(folder: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())
    return f"--resume: {folder} does not fit this run ({reason[:300]}): give the flags that it was started with"


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous ``tensors`` on the host, of which those on a device are copies."""
    on_device = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
    return {name: tensor.contiguous() for name, tensor in (tensors | copies_on_host(on_device)).items()}


def is_in_shards(folder: Path) -> bool:
    """Return whether the tensors of a checkpoint were written in shards."""
    return any(folder.glob(NAME.format(1)))


def read_pytree(folder: Path, stem: str, *, mapped: bool = False, shards: dict[str, Tensor] | None = None) -> PyTree:
    """Read the pytree whose files begin with ``stem``, with every tensor on the CPU.

    Args:
        mapped: leave the tensors in the file, without memory, for a reader who copies them.
        shards: the tensors of a checkpoint in shards, which have been read.

    Raises:
        Unreadable: a file is missing or holds something else.
    """
    path = folder / f"{stem}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = {}
        for index in range(content["parts"] or 0):
            path = folder / _name(stem, index)
            tensors |= load_file(path)
        if content["parts"] is None:
            tensors = shards or {}
        elif not mapped:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return _unpack(content["tree"], tensors)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise Unreadable(f"{path.name} cannot be read") from error


def num_bytes(tree: PyTree) -> int:
    """Return the bytes of the tensors in a pytree, each once."""
    tensors: dict[str, Tensor] = {}
    _pack(tree, "", tensors, {})
    return sum(tensor.nbytes for tensor in tensors.values())


def _text(skeleton: Any, num_files: int | None) -> str:
    """Return the JSON of a pytree whose tensors are in ``num_files`` files; ``None``: in those of all ranks."""
    return json.dumps({"parts": num_files, "tree": skeleton})


def _name(stem: str, index: int) -> str:
    return f"{stem}-{index}.safetensors"


def _split(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split ``tensors``, in their order, into files of about ``PART_BYTES``."""
    files: list[dict[str, Tensor]] = []
    free_bytes = 0
    for name, tensor in tensors.items():
        if not files or tensor.nbytes > free_bytes:
            files.append({})
            free_bytes = PART_BYTES
        files[-1][name] = tensor
        free_bytes -= tensor.nbytes
    return files


def _pack(tree: PyTree, path: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    """Return the JSON of ``tree``; put its tensors into ``tensors``, and into ``seen`` by their memory."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case Tensor():
            name = seen.setdefault(_identity(tree, path), path)
            tensors.setdefault(name, tree.detach() if tree.requires_grad else tree)
            return {"tensor": name} if tree.is_contiguous() else {"tensor": name, "strides": _strides(tree)}
        case dict():
            return {"dict": [[_key(key), _pack(tree[key], f"{path}.{key}", tensors, seen)] for key in tree]}
        case list() | tuple():
            kind = "list" if isinstance(tree, list) else "tuple"
            return {kind: [_pack(item, f"{path}.{index}", tensors, seen) for index, item in enumerate(tree)]}
    raise TypeError(f"{path} is a {type(tree).__name__}, which has no place in a checkpoint")


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> PyTree:
    match packed:
        case {"tensor": name, "strides": strides}:
            return torch.empty_strided(tensors[name].shape, strides, dtype=tensors[name].dtype).copy_(tensors[name])
        case {"tensor": name}:
            return tensors[name]
        case {"dict": entries}:
            return {key: _unpack(item, tensors) for key, item in entries}
        case {"list": items}:
            return [_unpack(item, tensors) for item in items]
        case {"tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
        case None | bool() | int() | float() | str():
            return packed
    raise ValueError("it is no pytree")


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides of a dense tensor like this one, such as one in ``channels_last``.

    Fused kernels are silently wrong where those of state and parameter differ (AdamW on the CPU, torch 2.13).
    """
    return list(torch.empty_like(tensor, device="meta").stride())


def _key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(f"{key!r} is neither text nor a whole number, so no key of a checkpoint")
    return key


def _identity(tensor: Tensor, path: str) -> Any:
    """Return the same for tensors of the same memory; one without elements on this rank has none."""
    part = local(tensor)
    if not part.numel() or tensor.device.type == "meta":
        return path
    return part.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
