"""The bytes of a step that no plan changes: state and update of the optimizer, and clipping.

``optimizer_memory`` tells those of the optimizer that settings name, ``memory_of_optimizer`` of one that is there.
State for each 32-bit parameter: AdamW 8 bytes, Muon 4 for its matrices, 8-bit AdamW 2, Adafactor a row and a column of
each matrix, SGD 4 (0 without momentum).
"""

import copy
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Adafactor, Optimizer

from memsave_recipes.core.activations.blocks import CONV1D, MODEL, is_of
from memsave_recipes.core.activations.streaming import streamed_parameters
from memsave_recipes.core.errors import InputError
from memsave_recipes.core.host.state import SMALLEST_BYTES, is_on_host, kind_of, pieces_of, pinned_bytes, waits
from memsave_recipes.core.host.step import masters_of, ring_bytes
from memsave_recipes.core.plans.chain import CPU, CUDA, StaticMemory, allocated_bytes
from memsave_recipes.core.sharding.tensors import num_parts
from memsave_recipes.core.step.batch_layout import BatchLayout
from memsave_recipes.core.step.settings import OptimizerSettings

MIN_8BIT_NUMEL = 4096  # bitsandbytes keeps smaller tensors in 32 bits
BITSANDBYTES_BLOCK = 256  # its 8-bit values share a float32 scale in blocks of this many
BITSANDBYTES_CODES = 2 * 256 * 4  # the values of its two kinds of 8-bit state, which all parameters share
SLICE_NUMEL = 2**18
"""Numbers of a slice on a CPU. An accelerator takes more at a time, or it would wait for kernels to be launched."""
SLICE_NUMEL_ON_ACCELERATORS = 2**22
BYTES_OF_A_NUMBER = 5 * 4 + 1  # gradient, moments, root and weight in float32, whether it is NaN
RANDOM_BYTES = 4  # of each number of the slice, also of those that other ranks have
TILE = 64  # rows and columns: oneDNN packs matrices of bfloat16 in whole tiles
ACCUMULATORS = 2**15  # bytes of a thread of oneDNN
MOST_PACKED = 2**21, 192  # bytes that a thread packs at a time, at most, or of every row of a long matrix
TRANSPOSING = 2 * 60**2  # of torch, which copies a transposed matrix of bfloat16 tile by tile
RENEWED_BYTES = 2 + 4 + 4 + 1  # of each number of a weight that is compared with its master
NUMBERS = 16  # in 32 bits, that an update or clipping makes, at most
NUMBERS_OF_A_LOSS = 8  # likewise: what counts in it, its weighted sum, and what that is made of
NUMBER_BYTES = 4
NEVER_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""In names of weights, lower case: norms and biases, by the rule of transformers' ``Trainer``."""
TOUCHED = {"adamw": 7, "sgd": 5, "adafactor": 7}
"""How often an update on the host reads or writes each number of 32 bits: weight, gradient and state."""
SLOWER = {"adamw_8bit": 20, "adamw_bf16": 22}
"""How often longer than AdamW's an update takes whose arithmetic counts: docs/results/host_step.md."""
NORM_CHUNK = 2**16
"""Numbers of a gradient to whose norm a block of CUDA's kernel adds a partial sum (``kChunkSize``, ForeachReduceOp.cu,
which makes as many sums for every gradient as the largest has)."""


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers of ``model`` that train, without its head and those that are also an embedding."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) or is_of(CONV1D, module)]
    left_out = {layer.weight for layer in _head(model, layers)}
    left_out |= {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = dict.fromkeys(layer.weight for layer in layers if isinstance(layer.weight, nn.Parameter))  # each once
    return [weight for weight in weights if weight.requires_grad and weight.ndim == 2 and weight not in left_out]


def _head(model: nn.Module, layers: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """Of the linear layers, those outside the body of a model of transformers; of another model, the last one."""
    body: Any = next((module.base_model for module in model.modules() if is_of(MODEL, module)), model)
    inside = set(body.modules())
    return [layer for layer in layers if layer not in inside] or layers[-1:]


def parameters_by_optimizer(optimizer: str, model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of ``model`` that train, by the name of what steps them: beside Muon that is AdamW.

    Raises:
        InputError: ``muon`` for a model that trains no matrix of a hidden layer.
    """
    trained = trained_parameters(model)
    if optimizer != "muon":
        return {optimizer: trained}
    matrices = hidden_matrices(model)
    if not matrices:
        raise InputError(
            "optimizer muon is for matrices of hidden linear layers, and this model trains none: take adamw"
        )
    known = set(matrices)
    return {"muon": matrices, "adamw": [parameter for parameter in trained if parameter not in known]}


def decay_groups(optim: OptimizerSettings, model: nn.Module, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """``parameters`` in groups for an optimizer: those that decay, then those that do not.

    Norms and biases do not decay, by the rule of transformers' ``Trainer``, and no vector does, as in nanoGPT.
    Without weight decay there is one group.
    """
    if not optim.weight_decay:
        return [{"params": parameters}]
    in_norms = {one for norm in model.modules() if isinstance(norm, nn.LayerNorm) for one in norm.parameters()}
    decayed = {
        one
        for name, one in model.named_parameters()
        if one.ndim > 1 and one not in in_norms and not NEVER_DECAYED.search(name.lower())
    }
    groups: list[dict[str, Any]] = [
        {"params": [one for one in parameters if one in decayed]},
        {"params": [one for one in parameters if one not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that train, in their order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What ``--ema_decay`` averages, by name: the parameters that train, and the statistics of BatchNorm."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    statistics = {f"{name}.{key}": buffer for name, norm in norms for key, buffer in norm.named_buffers(recurse=False)}
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return weights | {name: buffer for name, buffer in statistics.items() if buffer.is_floating_point()}


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Parameters that are stepped at a time: the state that stays, sizes of that which waits, and their update."""

    parameters: Sequence[Tensor]
    stays_bytes: int
    waiting: list[int]
    visits_bytes: int
    update_bytes: int


def optimizer_memory(
    optim: OptimizerSettings,
    model: nn.Module,
    device: torch.device,
    *,
    num_ranks: int | None = None,
    accumulates: bool = False,
) -> StaticMemory:
    """The memory of the optimizer of ``model``, in shards that of the first rank.

    NOTE [ state on the host ] and NOTE [ steps on the host ] say what is where.

    Args:
        device: that it steps on; no state leaves a CPU.
        num_ranks: that are to hold the weights in shards; ``None``: each rank has all of them.
        accumulates: whether the gradients of a step are sums of several.
    """
    shares = parameters_by_optimizer(optim.optimizer, model)
    averaged, averaged_on_host = _averaged_bytes(optim, model, num_ranks, device)
    if optim.steps_on_host(device):
        host_bytes = averaged_on_host + _bytes_of_masters(optim, model, num_ranks, accumulates=accumulates)
        updated = sum(_updated_bytes(optim, name, one, num_ranks) for name, share in shares.items() for one in share)
        return StaticMemory(state_bytes=averaged, host_bytes=host_bytes, updated_bytes=updated)
    trained = [one for share in shares.values() for one in share]
    masters = [one for one in trained if num_ranks is None and has_master(optim, one, device)]
    pieces = [
        _piece(optim, name, parameters, num_ranks, device)
        for name, share in shares.items()
        for parameters in _stepped_together(optim, model, share, num_ranks, device)
    ]
    visits = [piece.visits_bytes for piece in pieces]
    needs = [piece.update_bytes + piece.visits_bytes for piece in pieces]
    in_backward: dict[str, int] = {}
    if optim.optimizer_in_backward:
        of_each = {id(piece.parameters[0]): need for piece, need in zip(pieces, needs, strict=True)}
        in_backward = {name: of_each[id(one)] for name, one in model.named_parameters() if one.requires_grad}
        awaited = 2 * sum(visits)
    else:  # the state of the next piece is copied ahead
        needs = [need + following for need, following in zip(needs, [*visits[1:], 0], strict=True)]
        awaited = sum(map(max, pairwise([0, *visits, 0])))
    if masters:
        needs.append(max(one.numel() for one in masters) * RENEWED_BYTES)
    kept = [NUMBER_BYTES * one.numel() for one in masters]
    kept_bytes = averaged + allocated_bytes(kept, device)
    counters = sum(counters_bytes(name, len(share), device) for name, share in shares.items())
    return StaticMemory(
        state_bytes=counters + sum(piece.stays_bytes for piece in pieces) + kept_bytes,
        optimizer_bytes=max(needs, default=0),
        in_backward=in_backward,
        host_bytes=averaged_on_host + pinned_bytes(size for piece in pieces for size in piece.waiting),
        awaited_bytes=awaited,
    )


def _averaged_bytes(
    optim: OptimizerSettings, model: nn.Module, num_ranks: int | None, device: torch.device
) -> tuple[int, int]:
    """The average of the weights: on the device, and on the host, where that of streamed weights is."""
    if optim.ema_decay is None:
        return 0, 0
    on_host = {one for one in streamed_parameters(model) if one.requires_grad}
    on_device = [one for one in averaged_tensors(model).values() if one not in on_host]
    weights = as_stepped(optim, (one for one in on_device if isinstance(one, nn.Parameter)), device)
    sizes = [part_numel(one, num_ranks or 1) * one.element_size() for one in weights]
    sizes += [one.nbytes for one in on_device if not isinstance(one, nn.Parameter)]
    return allocated_bytes(sizes, device), sum(one.nbytes for one in on_host)


def has_master(optim: OptimizerSettings, weight: Tensor, device: torch.device) -> bool:
    """Whether a weight that trains has a float32 master on the device."""
    return keeps_masters(optim, device) and weight.element_size() < NUMBER_BYTES


def keeps_masters(optim: OptimizerSettings, device: torch.device) -> bool:
    """Whether float32 masters are on the device."""
    return optim.has_masters and not optim.steps_on_host(device)


def as_stepped(optim: OptimizerSettings, weights: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors like those that the optimizer steps on the device, and like their gradients; without memory for masters.

    Only their shapes and dtypes count.
    """

    def stepped(weight: Tensor) -> Tensor:
        return torch.empty(weight.shape, device="meta") if has_master(optim, weight, device) else weight

    return list(map(stepped, weights))


def _bytes_of_masters(optim: OptimizerSettings, model: nn.Module, num_ranks: int | None, *, accumulates: bool) -> int:
    """Pinned for masters, gradients and the ring of copies, if any; not pinned for the state of masters and updates."""

    def master(weight: nn.Parameter) -> Tensor:
        least = weight.dtype if optim.rounds_at_random else torch.float32
        dtype = torch.promote_types(weight.dtype, least)
        return torch.empty(weight.shape, dtype=dtype, device="meta")

    def size(weight: nn.Parameter) -> int:
        return part_numel(weight, num_ranks or 1) * master(weight).element_size()

    shares = parameters_by_optimizer(optim.optimizer, model)
    trained = [weight for share in shares.values() for weight in share]
    own = {id(weight) for weight in streamed_parameters(model) if weight.dtype == master(weight).dtype}
    digests = 2 * [len(trained) * torch.int64.itemsize]
    pinned = pinned_bytes([*(size(one) for one in trained if id(one) not in own), *map(size, trained), *digests])
    sizes = [part_numel(one, num_ranks or 1) * one.element_size() for one in trained]
    is_cast = any(one.dtype != master(one).dtype for one in trained)
    ring = ring_bytes(sizes) if accumulates or is_cast else 0
    stepped = {name: [*map(master, share)] for name, share in shares.items()}
    states = (_state_sizes(name, share, optim.momentum, num_ranks) for name, share in stepped.items())
    updates = (update_bytes(name, share, CPU, num_ranks=num_ranks or 1) for name, share in stepped.items())
    counters = sum(counters_bytes(name, len(share), CPU) for name, share in stepped.items())
    return pinned + ring + sum(map(sum, states)) + counters + max(updates, default=0)


def _updated_bytes(optim: OptimizerSettings, name: str, weight: nn.Parameter, num_ranks: int | None) -> int:
    """That the host reads and writes to step a master, and to cast it; as many as AdamW would in the same time."""
    touched = 3 if name == "sgd" and not optim.momentum else TOUCHED.get(name, 0) or SLOWER[name] * TOUCHED["adamw"]
    is_cast = weight.element_size() < NUMBER_BYTES and not optim.rounds_at_random
    cast_bytes = NUMBER_BYTES + weight.element_size() if is_cast else 0
    return part_numel(weight, num_ranks or 1) * (touched * NUMBER_BYTES + cast_bytes)


def _stepped_together(
    optim: OptimizerSettings, model: nn.Module, share: list[nn.Parameter], num_ranks: int | None, device: torch.device
) -> Sequence[Sequence[Tensor]]:
    """The parameters of one update rule, in the order and the pieces in which they are stepped."""
    if optim.optimizer_in_backward:
        return [[one] for one in reversed(share)]
    found = decay_groups(optim, model, share)
    groups = [as_stepped(optim, group["params"], device) for group in found]
    if optim.waits_on_host(device):
        return [piece for group in groups for piece in pieces_of(group, num_ranks)]
    return [[one for group in groups for one in group]]


def _piece(
    optim: OptimizerSettings, name: str, parameters: Sequence[Tensor], num_ranks: int | None, device: torch.device
) -> _Piece:
    """SGD, which is not fused for shards, adds the decay of the weights to a copy of the gradients."""
    stepped = as_stepped(optim, parameters, device)
    sizes = _state_sizes(name, stepped, optim.momentum, num_ranks)
    smallest = SMALLEST_BYTES if optim.waits_on_host(device) else inf
    waiting = [size for size in sizes if size >= smallest]
    copies = stepped if num_ranks and name == "sgd" and optim.weight_decay else []
    decayed = [part_numel(one, num_ranks or 1) * one.element_size() for one in copies]
    update = update_bytes(name, stepped, device, num_ranks=num_ranks or 1)
    return _Piece(
        parameters=parameters,
        stays_bytes=allocated_bytes([size for size in sizes if size < smallest], device),
        waiting=waiting,
        visits_bytes=allocated_bytes(waiting, device),
        update_bytes=update + allocated_bytes(decayed, device),
    )


def state_bytes(optimizer: str, parameters: Iterable[Tensor], *, momentum: float = 0.0) -> int:
    """Bytes of the state of ``parameters``, all of which ``optimizer`` steps; 0 for an unknown optimizer."""
    return sum(_state_sizes(optimizer, parameters, momentum, None))


def _state_sizes(optimizer: str, parameters: Iterable[Tensor], momentum: float, num_ranks: int | None) -> list[int]:
    """Of each tensor of the state."""
    if optimizer == "sgd" and not momentum:
        return []
    return [size for parameter in parameters for size in _state_of_one(optimizer, parameter, num_ranks)]


def _state_of_one(optimizer: str, parameter: Tensor, num_ranks: int | None) -> list[int]:
    """Of each tensor."""
    numel, size = parameter.numel() if num_ranks is None else part_numel(parameter, num_ranks), parameter.element_size()
    if optimizer == "adamw_8bit":
        in_8_bits = has_8bit_state(parameter, num_ranks)
        return 2 * [numel, 4 * ceil(numel / BITSANDBYTES_BLOCK)] if in_8_bits else 2 * [4 * numel]
    if optimizer == "adafactor" and parameter.ndim > 1:
        return [size * (numel // length) for length in parameter.shape[-2:]]
    return {"adamw": 2, "adamw_bf16": 2, "muon": 1, "adafactor": 1, "sgd": 1}.get(optimizer, 0) * [numel * size]


def counters_bytes(optimizer: str, num_parameters: int, device: torch.device) -> int:
    """Besides ``state_bytes``: counters of steps, and the values that 8-bit state stands for.

    The fused AdamW counts on the device, Adafactor always on the host.
    """
    if optimizer == "adamw_8bit":
        return BITSANDBYTES_CODES
    counted = ("adamw", "adafactor") if device.type == "cpu" else ("adamw",)
    return allocated_bytes([NUMBER_BYTES] * num_parameters, device) if optimizer in counted else 0


def update_bytes(optimizer: str, parameters: Iterable[Tensor], device: torch.device, *, num_ranks: int = 1) -> int:
    """The most bytes that the optimizer's update takes besides its state, on the first rank of ``num_ranks`` in shards.

    The fused AdamW and SGD take none but a counter. Adafactor makes the change of a parameter while that of the one
    before is still there. 8-bit AdamW takes five copies of a parameter on a CPU, and is one kernel on an accelerator.
    Muon goes by parameter, AdamW with stochastic rounding by slice.
    """
    trained, numbers_bytes = list(parameters), allocated_bytes([NUMBER_BYTES] * NUMBERS, device)
    if optimizer == "muon":
        sizes = (_muon_bytes(parameter, device, num_ranks) for parameter in trained)
        return numbers_bytes + max(sizes, default=0)
    if optimizer == "adamw_bf16":
        sizes = (slice_bytes(parameter, device, num_ranks) for parameter in trained)
        return numbers_bytes + max(sizes, default=0)
    if optimizer == "adamw_8bit" and device.type == "cpu":
        return numbers_bytes + 5 * 4 * max((part_numel(parameter, num_ranks) for parameter in trained), default=0)
    if optimizer != "adafactor":
        return numbers_bytes
    changes = [0, *(parameter.nbytes for parameter in trained)]
    means = [_means_bytes(parameter) for parameter in trained]
    vectors = [parameter.nbytes for parameter in trained if parameter.ndim < 2]
    matrices = [before + change + mean for (before, change), mean in zip(pairwise(changes), means, strict=True)]
    return numbers_bytes + max(matrices, default=0) + max(vectors, default=0)


def _muon_bytes(matrix: Tensor, device: torch.device, num_ranks: int) -> int:
    """In bfloat16 what is orthogonalised, two iterates and two square matrices; or the update and the stepped weight.

    On a CPU the update is cast to be added, and oneDNN takes ``_packed_bytes`` where it multiplies bfloat16. torch
    itself does where there is neither AVX-512 nor its like, and takes ``TRANSPOSING``. Of shards the direction of the
    next matrix is made beside a collected one, and cast twice.
    """
    numel, iterate, square = part_numel(matrix, num_ranks), 2 * matrix.numel(), 2 * min(matrix.shape) ** 2
    part, scratch = numel * matrix.element_size(), 0
    if device.type == "cpu":
        scratch = _packed_bytes(matrix) if onednn_multiplies_bfloat16() else TRANSPOSING
    collecting = iterate + part + (2 + 2) * numel if num_ranks > 1 else 0
    stepping = iterate + part + (part if device.type == "cpu" and matrix.dtype != torch.bfloat16 else 0)
    return max(collecting, stepping, 3 * iterate + 2 * square + scratch)


def _packed_bytes(matrix: Tensor) -> int:
    """The most that oneDNN takes to multiply ``matrix``, in bfloat16, by its transpose.

    With AVX-512 that is a float32 copy. With AMX each thread packs both factors in tiles, and copies a tall one before.
    The bound held for 400 shapes of up to 3 million numbers on 1 to 8 threads of an Intel Xeon.
    """
    copy, (most, of_a_row) = 2 * matrix.numel(), MOST_PACKED
    rows, columns = (TILE * ceil(length / TILE) for length in matrix.shape)
    packed = 2 * 2 * rows * columns + copy + ACCUMULATORS
    return 2 * copy + torch.get_num_threads() * min(packed, max(most, of_a_row * max(matrix.shape)))


def onednn_multiplies_bfloat16() -> bool:
    """Whether torch leaves products of bfloat16 on this CPU to oneDNN; ``ONEDNN_MAX_CPU_ISA`` counts."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _means_bytes(parameter: Tensor) -> int:
    """Adafactor's means over rows, over columns and over both, of the matrices of a parameter."""
    if parameter.ndim < 2:
        return 0
    rows, columns = parameter.shape[-2:]
    numel = parameter.numel()
    return parameter.element_size() * (numel // rows + numel // columns + numel // (rows * columns))


def clipping_bytes(parameters: Iterable[Tensor], device: torch.device) -> int:
    """The norm of every gradient, and all of them once more in one tensor; on an accelerator also partial sums."""
    trained = list(parameters)
    norms = [parameter.element_size() for parameter in trained]
    largest = 0 if device.type == "cpu" else max((one.numel() for one in trained), default=0)
    sums = len(trained) * ceil(largest / NORM_CHUNK)
    sizes = [*norms, sum(norms), NUMBER_BYTES * sums, *[NUMBER_BYTES] * NUMBERS]
    return allocated_bytes(sizes, device)


def losses_bytes(layout: BatchLayout, logging_steps: int, device: torch.device) -> int:
    """Loss and norm of every step that nobody has read, and the numbers that make a loss: each a tensor."""
    parts = layout.accumulation_steps if layout.is_bitwise else 0
    of_a_step = parts + NUMBERS_OF_A_LOSS * layout.accumulation_steps // layout.forwards_per_step
    return allocated_bytes([NUMBER_BYTES] * (of_a_step + 2 * logging_steps), device)


def num_rows(parameter: Tensor) -> int:
    """Entries of the first dimension."""
    return parameter.shape[0] if parameter.ndim else 1


def slice_rows(parameter: Tensor, device: torch.device) -> int:
    """Of a slice: entries of the first dimension, at least one."""
    numel = SLICE_NUMEL if device.type == "cpu" else SLICE_NUMEL_ON_ACCELERATORS
    return max(1, numel * num_rows(parameter) // max(1, parameter.numel()))


def slice_bytes(parameter: Tensor, device: torch.device, num_ranks: int = 1) -> int:
    """The temporaries of an update of ``parameter``, in shards over ``num_ranks``, by ``StochasticAdamW``."""
    length = max(1, num_rows(parameter))
    rows = min(length, slice_rows(parameter, device))
    row = parameter.numel() // length
    return row * (BYTES_OF_A_NUMBER * min(rows, -(-length // num_ranks)) + RANDOM_BYTES * rows)


def part_numel(parameter: Tensor, num_ranks: int) -> int:
    """Numbers of the largest part of ``parameter`` in shards over ``num_ranks``."""
    length = max(1, num_rows(parameter))
    return parameter.numel() // length * -(-length // num_ranks)


def has_8bit_state(parameter: Tensor, num_ranks: int | None = None) -> bool:
    """Whether 8-bit AdamW keeps the state of ``parameter`` in 8 bits.

    Args:
        num_ranks: that hold it in shards; default: as it is.
    """
    if parameter.numel() < MIN_8BIT_NUMEL:
        return False
    num_ranks = num_parts(parameter) if num_ranks is None else num_ranks
    return num_ranks == 1 or part_numel(parameter, num_ranks) % BITSANDBYTES_BLOCK == 0


ASSUMED_COPIES = 2
"""Copies of a parameter in the state of an optimizer that cannot step on the ``meta`` device: those of AdamW."""
PLAIN = {"fused": False, "foreach": False}
"""Options of torch's optimizers that choose a kernel for a device, and change no state."""


def memory_of_optimizer(optimizer: Optimizer) -> StaticMemory:
    """Return the memory of an optimizer that is there, or in a wrapper: its state, and the temporaries of its update.

    State that waits on the host counts among these, for two pieces of the parameters; one that steps there has none.
    """
    optimizer = torch_optimizer(optimizer)
    if masters_of(optimizer) is not None:
        return StaticMemory()
    update_bytes = update_bytes_of(optimizer) + _visiting_bytes(optimizer)
    return StaticMemory(state_bytes=state_bytes_of(optimizer), optimizer_bytes=update_bytes)


def memory_of_adamw(parameters: Sequence[Tensor], device: torch.device) -> StaticMemory:
    """Return that of AdamW, where the optimizer of a training is not known."""
    return StaticMemory(state_bytes=_bytes_on(device, ASSUMED_COPIES * list(parameters)))


def torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside the wrappers of Accelerate, Lightning and Fabric."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    found: Optimizer = optimizer
    return found


def state_bytes_of(optimizer: Optimizer) -> int:
    """Return the bytes of the state on the device after a step, without what waits on the host."""
    on_host = is_on_host(optimizer)
    return sum(
        _bytes_on(parameter.device, (tensor for tensor in tensors if not (on_host and waits(tensor))))
        for parameter, tensors in _state_after_a_step(optimizer).items()
    )


def _visiting_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the state that waits on the host, of the two consecutive pieces that have most."""
    if not is_on_host(optimizer):
        return 0
    sizes = {
        parameter: allocated_bytes((tensor.nbytes for tensor in tensors if waits(tensor)), CUDA)
        for parameter, tensors in _state_after_a_step(optimizer).items()
    }
    pieces = [piece for group in optimizer.param_groups for piece in pieces_of(group["params"])]
    visits = [sum(sizes.get(parameter, 0) for parameter in piece) for piece in pieces]
    return max(map(sum, pairwise([*visits, 0])), default=0)


def _state_after_a_step(optimizer: Optimizer) -> dict[Tensor, list[Tensor]]:
    """Return the tensors of the state of each parameter; leaves the optimizer as it is.

    Where it has not stepped yet, a copy of it steps a parameter of each shape on torch's ``meta`` device.
    """
    there = {
        parameter: [value for value in entry.values() if isinstance(value, Tensor)]
        for parameter, entry in optimizer.state.items()
    }
    if any(there.values()):
        return there
    return {parameter: _state_to_come(optimizer, group, parameter) for group, parameter in _parameters(optimizer)}


def update_bytes_of(optimizer: Optimizer) -> int:
    """Return the temporaries of a step: a copy of all parameters where the update is neither fused nor by parameter.

    That is what torch's documentation of ``foreach`` states, which is the default on CUDA but for Adafactor.
    """
    by_parameter = (False, None) if isinstance(optimizer, Adafactor) else (False,)
    return sum(
        _bytes_on(parameter.device, [parameter])
        for group, parameter in _parameters(optimizer)
        if parameter.is_cuda and not group.get("fused") and group.get("foreach", False) not in by_parameter
    )


def _parameters(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    return ((group, p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad)


def _state_to_come(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> list[Tensor]:
    alone = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    alone.grad = torch.empty_like(alone)
    options = {name: PLAIN.get(name, value) for name, value in group.items()}
    if "capturable" in group:  # with either of them steps are counted where the parameter is
        options["capturable"] = bool(group["capturable"] or group.get("fused"))
    twin = copy.copy(optimizer)
    vars(twin).update(
        state=defaultdict(dict),
        param_groups=[{**options, "params": [alone]}],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    stepped = False
    with suppress(Exception):  # a kernel of the device, after the state has been made
        kind_of(optimizer).step(twin)  # not the instance's, which a schedule may have bound to the optimizer itself
        stepped = True
    made = twin.state[alone].values() if stepped or twin.state[alone] else ASSUMED_COPIES * [alone]
    return [value for value in made if isinstance(value, Tensor)]


def _bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """Add up those of ``tensors`` that are on a device: an accelerator has none of the host's."""
    there = (tensor.nbytes for tensor in tensors if device.type == "cpu" or not tensor.is_cpu)
    return allocated_bytes(there, device)
