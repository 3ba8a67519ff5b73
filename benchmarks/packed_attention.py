"""What attention by document saves on packed rows: peak and time of a step, beside masks and beside one document a row.

    python benchmarks/packed_attention.py --quick   # 256 and 512 tokens: shows that it runs
    python benchmarks/packed_attention.py

Each row of the table is a step (forward and backward, no optimizer) on one row of tokens, plain and with every layer
recomputed (`full`):

* *one document*: no packing, the baseline of all ratios; transformers makes no mask;
* *masks*: documents of equal length in the row, kept apart by transformers' mask;
* *by document*: the same documents, each attended by itself.

Prints the table and writes docs/results/packed_attention.json.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import harness
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.models.packed_attention import set_packed_attention

SHAPE = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 4096},
}
BASELINE, DOCUMENTS = "one document", 4
HEADINGS = ("tokens", "plan", "attention", "time", "middle half", "peak", "of one document")


def main(args: Sequence[str] | None = None) -> None:
    """Measure every way at every length."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    lengths, rounds = ((256, 512), 3) if flags.quick else ((1024, 2048, 4096), 9)
    device = harness.this_device()
    rows = [row for length in lengths for plan in ("none", "full") for row in rows_of(length, plan, rounds, device)]
    cells = [
        (
            f"{row['tokens']:,}",
            row["plan"],
            row["attention"],
            f"x{row['time_ratio']:.2f}",
            " - ".join(f"x{end:.2f}" for end in row["quartiles"]),
            f"{row['peak_mib']:.1f} MiB",
            f"x{row['peak_ratio']:.2f}",
        )
        for row in rows
    ]
    harness.show(HEADINGS, cells)
    results = {"machine": harness.describe_machine(device, "transformers"), "documents": DOCUMENTS, "rows": rows}
    harness.write_results(flags.output_dir, "packed_attention", results)


def rows_of(length: int, plan: str, rounds: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each way to attend."""
    ways = ways_of(length, plan, DOCUMENTS, device)
    peaks = {way: harness.peak_bytes(step, device) for way, step in ways.items()}
    seconds = harness.time_in_turns(ways, rounds, before=harness.empty_device)
    for way in ways:
        middle, quartiles = harness.median_and_quartiles(harness.ratios(seconds[way], seconds[BASELINE]))
        yield {
            "tokens": length,
            "plan": plan,
            "attention": way,
            "time_ratio": middle,
            "quartiles": quartiles,
            "peak_mib": harness.to_mib(peaks[way]),
            "peak_ratio": peaks[way] / peaks[BASELINE],
        }


def ways_of(length: int, plan: str, documents: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """The ways by name, each a step that leaves the gradients cleared."""
    torch.manual_seed(0)
    masks = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(device).train()
    by_document = copy.deepcopy(masks)
    set_packed_attention(by_document, "document")
    lengths = [length // documents] * documents
    return {
        BASELINE: partial(step_of, masks, plan, [length], device),
        "masks": partial(step_of, masks, plan, lengths, device),
        "by document": partial(step_of, by_document, plan, lengths, device),
    }


def step_of(model: LlamaForCausalLM, plan: str, lengths: Sequence[int], device: torch.device) -> None:
    """A forward and backward of one row of documents."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    module = CausalLMLoss(model, "chunked", chunk_bytes=2**20)
    with apply_plan(model, plan_blocks(model, plan)):
        module(positions % 512, positions % 512, position_ids=positions, document_lengths=[lengths]).backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
