"""PRICE: what every block of a model costs in bytes and seconds, on this device and with this batch."""

from memsave_recipes.costs.block_costs import Measurement, Workload, measure, measure_in_groups, num_runs
from memsave_recipes.costs.meters import DeviceInstruments
from memsave_recipes.costs.paper import PaperInstruments, Rates
from memsave_recipes.costs.undisturbed import running_blocks

__all__ = [
    "DeviceInstruments",
    "Measurement",
    "PaperInstruments",
    "Rates",
    "Workload",
    "measure",
    "measure_in_groups",
    "num_runs",
    "running_blocks",
]
