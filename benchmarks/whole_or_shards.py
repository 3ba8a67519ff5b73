"""Where whole weights end: what a rank needs to train Llama's sizes on 8 and 64 cards, whole and in shards, predicted.

    python benchmarks/whole_or_shards.py --quick     # the smallest size on 8 cards: shows that it runs
    python benchmarks/whole_or_shards.py             # half a minute on one core

`memsave plan` with and without `--shard full`: rows of 4,096 tokens, one a micro-batch, 64 a step, bf16 autocast with
weights and AdamW in float32, the loss in chunks, without checkpointing and with `full`. Nothing is measured. Traffic of
shards goes at the rate of the link to the host; that of DDP is not counted.

Writes docs/results/whole_or_shards.json and .md.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from typing import Any

import harness
from tqdm import tqdm

from memsave_recipes.core.text import GIB
from memsave_recipes.tools.cli import main as memsave

LLAMAS = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
ALL_LLAMAS = {"num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128_256}
TEXT = ("--block_size", "4096", "--loss", "chunked")
STEP = ("--global_batch_size", "64", "--micro_batch_size", "1", "--mixed_precision", "bf16")
CARDS, SHARDS, PLANS = (8, 64), ("none", "full"), ("none", "full")
EVERY_CASE_FITS = "8192GiB"
HEADINGS = ("model", "cards", "plan", "whole", "a step", "in shards", "a step")


def predict(model: str, cards: int, shard: str, plan: str) -> dict[str, Any]:
    """What `memsave plan` says of a case."""
    overrides = ",".join(f"{key}={value}" for key, value in (LLAMAS[model] | ALL_LLAMAS).items())
    command = ["plan", "language_modeling", "--model_type", "llama", "--config_overrides", overrides, *TEXT, *STEP]
    command += ["--activation_checkpointing", plan, "--target_memory", EVERY_CASE_FITS, "--json", "-"]
    with redirect_stdout(StringIO()) as output:
        if memsave([*command, "--num_processes", str(cards), "--shard", shard]):
            raise RuntimeError("memsave plan was refused")
    record = json.loads(output.getvalue())
    (found,) = record["candidates"]
    return {
        **{"model": model, "cards": cards, "shard": shard, "plan": plan},
        **{key: found[key] for key in ("needed_bytes", "parts", "step_s", "exposed_communication_s")},
        "interconnect_bytes_per_s": record["interconnect_bytes_per_s"],
    }


def cells(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The table: whole weights and shards of a case in one line."""
    for whole, shards in zip(rows[::2], rows[1::2], strict=True):
        both = [(f"{row['needed_bytes'] / GIB:,.4g} GiB", f"{row['step_s']:.2f} s") for row in (whole, shards)]
        yield whole["model"], str(whole["cards"]), whole["plan"], *both[0], *both[1]


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Predict all cases; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    models, cards = (("1B",), CARDS[:1]) if flags.quick else (LLAMAS, CARDS)
    cases = [(*case, shard) for case in product(models, cards, PLANS) for shard in SHARDS]
    rows = [
        predict(model, count, shard, plan)
        for model, count, plan, shard in tqdm(cases, desc="whole or shards", unit="case")
    ]
    table = list(cells(rows))
    harness.show(HEADINGS, table)
    results = {"benchmark": "whole_or_shards", "rows": rows}
    page = (
        "`python benchmarks/whole_or_shards.py`: memory of a rank and seconds of a step, predicted. Llama's sizes, "
        "rows of 4,096 tokens, one a micro-batch and 64 a step, bf16 autocast, weights and AdamW in float32, the loss "
        "in chunks. Traffic of shards goes at the rate of the link to the host, that of DDP is not counted.\n\n"
    )
    harness.write_results(flags.output_dir, "whole_or_shards", results, page + harness.markdown_table(HEADINGS, table))
    return results


if __name__ == "__main__":
    main()
