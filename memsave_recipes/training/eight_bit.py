"""8-bit AdamW of bitsandbytes for whole weights and for weights in shards, with state that moves between them.

NOTE [ 8 bits in shards ]
1. bitsandbytes quantises the state of a weight in blocks of 256 numbers of the flattened tensor, which share a scale,
   the largest magnitude among them. Its kernels step the part of each rank. Where a part is a whole number of blocks,
   the blocks are those of the whole weight, and so are the bits of the update, whatever the number of ranks.
2. Where it is none, the state of that weight stays in 32 bits, as bitsandbytes keeps that of small weights on any
   number of ranks. Its updates are then rounded less than those of one rank.
3. Checkpoints hold quantised state with its scales, of the first block to the last one; there may be scales of no block
   behind them. What is in 8 bits before and after keeps its bits. What was in 8 bits and is in 32 now is dequantised,
   which loses nothing; what was in 32 and is in 8 now is quantised, as it is after every update.
"""

from math import ceil
from typing import Any

import torch
from bitsandbytes.functional import quantize_blockwise
from bitsandbytes.optim.adamw import AdamW8bit
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memsave_recipes.core.host.state import StateOnHost, waits
from memsave_recipes.core.sharding.tensors import cut_like, first_row, local, num_parts, with_part
from memsave_recipes.core.step.memory import BITSANDBYTES_BLOCK, has_8bit_state, part_numel

MOMENTS = {"1": "dynamic", "2": "udynamic"}
"""The numbers of the moments in the names of bitsandbytes' state, and the names of their tables of 8-bit values."""


class AdamW8bitInParts(AdamW8bit):
    """``AdamW8bit`` of which parameters may be in shards: NOTE [ 8 bits in shards ]."""

    on_host: StateOnHost | None = None

    def __init__(self, parameters: list[dict[str, Any]], **of_adamw: Any) -> None:
        self._untyped.__init__(parameters, **of_adamw)

    @property
    def _untyped(self) -> Any:
        """The methods of bitsandbytes, which have no types."""
        return super()

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """The settings of a parameter, by bitsandbytes; rule 2."""
        config: dict[str, Any] = self._untyped.get_config(gindex, pindex, group)
        return config if has_8bit_state(group["params"][pindex]) else {**config, "optim_bits": 32}

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Make the state of ``p``: tensors like it, and the scales of this rank's blocks."""
        self._untyped.init_state(group, p, gindex, pindex)
        for number in MOMENTS if isinstance(p, DTensor) and has_8bit_state(p) else ():
            self.state[p][f"absmax{number}"] = _scales_in_shards(torch.zeros(0), p)

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Step ``p``, or this rank's part of it."""
        if not isinstance(p, DTensor):
            self._untyped.update_step(group, p, gindex, pindex)
            return
        part, gradient = nn.Parameter(local(p), requires_grad=False), p.grad
        if part.numel() and gradient is not None:
            part.grad = local(gradient)
            num_blocks = ceil(part.numel() / BITSANDBYTES_BLOCK)
            self.state[part] = {name: _of_part(name, value, num_blocks) for name, value in self.state[p].items()}
            self._untyped.update_step(group, part, gindex, pindex)
            del self.state[part]
        self.state[p]["step"] += 1

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load a state that was saved by whole weights or in shards over any number of ranks: rule 3."""
        stepped = [parameter for group in self.param_groups for parameter in group["params"]]
        state = {number: self._fitted(entry, stepped[number]) for number, entry in state_dict["state"].items()}
        self._untyped.load_state_dict({**state_dict, "state": state}, move_to_device and self.on_host is None)
        for parameter, entry in self.state.items() if self.on_host is not None else ():
            small = {key: value for key, value in entry.items() if isinstance(value, Tensor) and not waits(value)}
            entry.update({key: value.to(parameter.device) for key, value in small.items()})

    def _fitted(self, entry: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        key = self._FSDP_WRAPPED_QUANT_STATE_KEY
        if key not in entry:
            return entry
        found: dict[str, Tensor] = {}
        for number, codes in MOMENTS.items():
            saved = {name[:-1]: value for name, value in entry[key].items() if name.endswith(number)}
            moment = self._fitted_moment(saved, parameter, self.name2qmap[codes])
            found |= {f"{name}{number}": value for name, value in moment.items()}
        return {**entry, key: found}

    def _fitted_moment(self, saved: dict[str, Tensor], parameter: Tensor, codes: Tensor) -> dict[str, Tensor]:
        """The ``state`` of a moment, and in 8 bits its ``absmax`` and ``qmap``."""
        state = cut_like(saved["state"], parameter)
        was_in_8_bits, is_in_8_bits = state.dtype == torch.uint8, has_8bit_state(parameter)
        if was_in_8_bits and is_in_8_bits:
            return {**saved, "state": state, "absmax": _cut_scales(saved["absmax"], parameter)}
        part = local(state)
        if was_in_8_bits:
            value = _dequantised(part, saved["absmax"], saved["qmap"], _first_number(parameter))
            return {"state": with_part(value, state)}
        if is_in_8_bits:
            part = part.to(local(parameter).device)  # whose kernel rounds as at every update
            codes = codes.to(part.device)
            value, scales = _quantised(part, codes)
            return {"state": with_part(value, state), "absmax": _scales_in_shards(scales, parameter), "qmap": codes}
        return {"state": state}


def _of_part(name: str, value: Any, num_blocks: int) -> Any:
    """An entry of the state as bitsandbytes has it for this rank's part."""
    if not isinstance(value, DTensor):
        return value
    return local(value)[:num_blocks] if name.startswith("absmax") else local(value)


def _first_number(parameter: Tensor) -> int:
    """The place in the flattened tensor at which this rank's part begins."""
    if not isinstance(parameter, DTensor):
        return 0
    return first_row(parameter) * (parameter.numel() // parameter.shape[0])


def _cut_scales(scales: Tensor, parameter: Tensor) -> Tensor:
    """Of those of a whole weight, those of this rank's blocks."""
    if isinstance(scales, DTensor):
        return scales
    if not isinstance(parameter, DTensor):
        return scales[: ceil(parameter.numel() / BITSANDBYTES_BLOCK)]
    first = _first_number(parameter) // BITSANDBYTES_BLOCK
    return _scales_in_shards(scales[first : first + _most_blocks(parameter)], parameter)


def _most_blocks(parameter: DTensor) -> int:
    """Of the largest part, that of the first rank."""
    return part_numel(parameter, num_parts(parameter)) // BITSANDBYTES_BLOCK


def _scales_in_shards(scales: Tensor, parameter: Tensor) -> Tensor:
    """Those of this rank's blocks, in shards of one size, for which zeros are added."""
    if not isinstance(parameter, DTensor):
        return scales
    part = torch.zeros(_most_blocks(parameter), dtype=torch.float32, device=local(parameter).device)
    part[: len(scales)] = scales
    scales = DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False)
    return scales.to(part.device)  # from that of the mesh


def _dequantised(part: Tensor, scales: Tensor, codes: Tensor, begin: int) -> Tensor:
    """A part that begins at the number ``begin``, in any block, of the flattened tensor that has the ``scales``."""
    first, last = begin // BITSANDBYTES_BLOCK, ceil((begin + part.numel()) / BITSANDBYTES_BLOCK)
    of_numbers = scales[first:last].to(part.device).repeat_interleave(BITSANDBYTES_BLOCK)
    of_numbers = of_numbers[begin - first * BITSANDBYTES_BLOCK :][: part.numel()]
    return codes.to(part.device)[part.int()] * of_numbers.view_as(part)


def _quantised(part: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """A part that begins with a block in 8 bits, and the scales of its blocks."""
    if not part.numel():
        return part.to(torch.uint8), part.new_zeros(0)
    value, how = quantize_blockwise(part, code=codes, blocksize=BITSANDBYTES_BLOCK)
    return value, how.absmax
