"""The longest row of tokens in a given memory: plain, Hugging Face's checkpointing, and plans with a chunked loss.

    python benchmarks/long_context.py --quick     # a tiny model: shows that it runs
    python benchmarks/long_context.py             # two hours on one core
    pip install deepspeed                         # before it, for the row of DeepSpeed's tiling

A step is a forward, a backward and AdamW's update on one row that is one document, in float32: all that it allocates,
with parameters and optimizer state. Bytes are those of the same step on fake tensors; those of one more token are the
average between 32k and 128k tokens. At 2,048 and 4,096 tokens the step really runs, its bytes stand beside these,
and its time is compared with that of Hugging Face's checkpointing, round by round. At 32,768 tokens it runs once,
for its bytes, in the ways that fit in 16 GiB and need no host.

* *plain*: the model's own loss, without checkpointing.
* *HF checkpointing*: the same with ``gradient_checkpointing_enable()``.
* *DeepSpeed's tiling*: its tiled MLPs and tiled loss under Hugging Face's checkpointing, where it is installed.
* *full*, *full_tiled* and *full_tiled_offload*: these strategies with ``CausalLMLoss(model, "chunked")``. Of the last
  one the bytes are those of a device with a host beside it, on fake tensors alone. Where it really runs, what would
  wait there is copied within the CPU's memory: its time has the copies, its bytes are not told.
* *in backward*: with the optimizer in the backward.

Writes docs/results/long_context.json and .md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import deepspeed_tiling
import harness
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memsave_recipes.core.activations import apply_plan, plan_blocks
from memsave_recipes.core.activations.offload import OffloadEngine
from memsave_recipes.core.activations.spans import RUN
from memsave_recipes.core.costs.estimate import fake_batch, fake_model, simulated_offloading
from memsave_recipes.core.costs.fake_step import FakeInstruments
from memsave_recipes.core.costs.targets import find_target
from memsave_recipes.core.costs.trace_events import Meter
from memsave_recipes.core.plans import Action
from memsave_recipes.core.text import GIB, MIB
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.models.packed_attention import set_packed_attention
from memsave_recipes.training.optimizers import step_in_backward

SHAPE = {
    **{"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "vocab_size": 32_000, "max_position_embeddings": 2**20},
    **{"tie_word_embeddings": True},
}
QUICK_SHAPE = {**SHAPE, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2, "vocab_size": 512}
BUDGETS_GIB, QUICK_BUDGETS_GIB = (1.5, 2.0, 4.0), (0.02, 0.04)
STEP_TOKENS = 512
MARGINAL, QUICK_MARGINAL = (32 * 1024, 128 * 1024), (1024, 4096)
BASELINE, PEER = "HF checkpointing", "DeepSpeed's tiling"
IN_BACKWARD = ", in backward"
TILED = ("full_tiled", "full_tiled_offload")
PEERS = (PEER,) if deepspeed_tiling.IS_INSTALLED else ()
WAYS = ("plain", BASELINE, *PEERS, "full", *TILED, *(f"{way}{IN_BACKWARD}" for way in TILED))
LONG_WAYS = (BASELINE, *PEERS, "full", "full_tiled")
HEADINGS = ("way", "longest row", "of HF's", "one more token")

# Without transformers' masks, which it makes for fake tensors alone where a row is one document.
WITHOUT_MASK = "sdpa_without_mask"
AttentionInterface.register(WITHOUT_MASK, sdpa_attention_forward)


@dataclass(frozen=True)
class Training:
    """A way to train a model, real or fake."""

    way: str
    model: LlamaForCausalLM

    @classmethod
    def of(cls, way: str, shape: dict[str, int], *, fake: bool) -> "Training":
        """With a model of that shape."""

        def build() -> LlamaForCausalLM:
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).train()
            if way.startswith("full"):
                set_packed_attention(model, "document")
            else:
                model.set_attn_implementation(WITHOUT_MASK)
            if way in (BASELINE, PEER):
                model.gradient_checkpointing_enable({"use_reentrant": False})
            if way == PEER:
                deepspeed_tiling.tile_mlps(model)
            return model

        return cls(way, fake_model(build) if fake else build())

    @property
    def offloads(self) -> bool:
        """Whether tensors wait on the host."""
        return "offload" in self.way

    @property
    def is_plans(self) -> bool:
        """Whether it is one of ours."""
        return self.way.startswith("full")

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, its state made in the first step."""
        optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        if self.way.endswith(IN_BACKWARD):
            step_in_backward(optimizer)
        return optimizer

    def tokens(self, length: int) -> Tensor:
        """One row (1, T)."""
        tokens = torch.arange(length)[None] % self.model.config.vocab_size
        is_fake = isinstance(self.model.lm_head.weight, FakeTensor)
        return fake_batch(self.model, {"tokens": tokens})["tokens"] if is_fake else tokens

    def step(self, tokens: Tensor) -> None:
        """A forward, a backward and an update."""
        optimizer = self.optimizer
        strategy = self.way.removesuffix(IN_BACKWARD) if self.is_plans else "none"
        with apply_plan(self.model, plan_blocks(self.model, strategy)) if self.is_plans else nullcontext():
            self.loss_of(tokens).backward()
        if not self.way.endswith(IN_BACKWARD):
            optimizer.step()
            optimizer.zero_grad()

    def loss_of(self, tokens: Tensor) -> Tensor:
        """The mean over the tokens."""
        if self.way == PEER:
            return deepspeed_tiling.tiled_loss(self.model, tokens)
        if not self.is_plans:
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            return loss
        lengths = [[tokens.shape[1]]]
        summed: Tensor = CausalLMLoss(self.model, "chunked")(tokens, tokens, document_lengths=lengths)
        return summed / tokens.shape[1]

    @property
    def resident_bytes(self) -> int:
        """Parameters and AdamW's two means."""
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())


class CopiesAtOnce:
    """To and from the host, where that is the device too."""

    def empty_on_host(self, num_bytes: int) -> Tensor:
        """Memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def start(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy each (target, source)."""
        for target, source in pairs:
            target.copy_(source)

    def wait(self, event: None) -> None:
        """They are done."""


@contextmanager
def copying() -> Iterator[None]:
    """Inside, a CPU offloads as an accelerator does."""
    before = RUN[Action.OFFLOAD]
    RUN[Action.OFFLOAD] = OffloadEngine(torch.device("cpu"), CopiesAtOnce()).run
    try:
        yield
    finally:
        RUN[Action.OFFLOAD] = before


def fake_bytes(training: Training, length: int) -> int:
    """All that a step allocates, with what is resident."""
    tokens = training.tokens(length)

    def step(meter: Meter) -> None:
        training.step(tokens)
        meter.mark()

    instruments = FakeInstruments(torch.device("cpu"), seconds_of=lambda *_: 0.0)
    with training.model.lm_head.weight.fake_mode, simulated_offloading(find_target("a100"), instruments.clock):
        if not training.optimizer.state:
            training.step(training.tokens(STEP_TOKENS))
        return training.resident_bytes + instruments.read_memory(step)[-1].peak_bytes


def longest(training: Training, budget_bytes: int) -> int:
    """The longest row, in steps of ``STEP_TOKENS``, as bytes are about linear in them."""
    known: dict[int, int] = {}

    def bytes_of(steps: int) -> int:
        if steps not in known:
            known[steps] = fake_bytes(training, steps * STEP_TOKENS)
        return known[steps]

    low, high = 2, 4
    while True:
        slope = (bytes_of(high) - bytes_of(low)) / (high - low)
        guess = max(1, high + int((budget_bytes - bytes_of(high)) // slope))
        if bytes_of(guess) <= budget_bytes < bytes_of(guess + 1):
            return guess * STEP_TOKENS
        if guess == 1:
            return 0
        low, high = guess, guess + 1


def bytes_a_token(training: Training, shorter: int, longer: int) -> float:
    """Those of one token more, on average between two lengths."""
    return (fake_bytes(training, longer) - fake_bytes(training, shorter)) / (longer - shorter)


def rows_of(shape: dict[str, int], budgets_gib: Sequence[float], lengths: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """A row for each way and memory."""
    for way in WAYS:
        training = Training.of(way, shape, fake=True)
        one_more = bytes_a_token(training, *lengths)
        for budget in budgets_gib:
            tokens = longest(training, int(budget * GIB))
            yield {"way": way, "budget_gib": budget, "tokens": tokens, "bytes_a_token": one_more}


def real_rows(shape: dict[str, int], lengths: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each way at each length: real bytes, where the CPU has them, beside those on paper, and the time."""
    trainings = {way: Training.of(way, shape, fake=False) for way in WAYS}
    for length in lengths:
        steps: dict[str, Callable[[], None]] = {
            way: partial(one.step, one.tokens(length)) for way, one in trainings.items()
        }
        with copying():
            for step in steps.values():
                step()
            seconds = harness.time_in_turns(steps, rounds)
        for way, training in trainings.items():
            middle, quartiles = harness.median_and_quartiles(harness.ratios(seconds[way], seconds[BASELINE]))
            yield {**measured_bytes(training, shape, length), "time_ratio": middle, "quartiles": quartiles}


def long_rows(shape: dict[str, int], lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The same without times, after a short step that makes the optimizer's state."""
    for length in lengths:
        for way in LONG_WAYS:
            training = Training.of(way, shape, fake=False)
            training.step(training.tokens(STEP_TOKENS))
            yield {**measured_bytes(training, shape, length), "time_ratio": None, "quartiles": []}


def measured_bytes(training: Training, shape: dict[str, int], length: int) -> dict[str, Any]:
    """Those of one step more, and those on paper."""
    step = partial(training.step, training.tokens(length))
    real = None if training.offloads else training.resident_bytes + harness.peak_bytes(step, torch.device("cpu"))
    on_paper = fake_bytes(Training.of(training.way, shape, fake=True), length)
    return {"way": training.way, "length": length, "real_bytes": real, "paper_bytes": on_paper}


def to_markdown(results: dict[str, Any]) -> str:
    """The two tables."""
    about = results["machine"]
    of_hf = {row["budget_gib"]: row["tokens"] for row in results["rows"] if row["way"] == BASELINE}
    cells = [
        (
            f"{row['budget_gib']:g} GiB",
            row["way"],
            f"{row['tokens']:,}",
            f"x{row['tokens'] / of_hf[row['budget_gib']]:.1f}" if of_hf[row["budget_gib"]] else "",
            f"{row['bytes_a_token'] / 1024:.1f} KiB",
        )
        for row in sorted(results["rows"], key=lambda row: row["budget_gib"])
    ]
    real = [
        (
            f"{row['length']:,}",
            row["way"],
            "" if row["real_bytes"] is None else f"{row['real_bytes'] / MIB:.1f} MiB",
            f"{row['paper_bytes'] / MIB:.1f} MiB",
            f"x{row['time_ratio']:.2f}" if row["time_ratio"] else "",
            " - ".join(f"x{end:.2f}" for end in row["quartiles"]),
        )
        for row in results["real"]
    ]
    return "\n\n".join(
        [
            "# Long rows",
            f"From `benchmarks/long_context.py` on {about['device']}, torch {about['versions']['torch']}, transformers "
            f"{about['versions']['transformers']}: a Llama of {results['parameters'] / 1e6:.0f}M parameters, AdamW.",
            harness.markdown_table(("memory", *HEADINGS), cells),
            "Steps that really ran, in one thread; time as a multiple of that of Hugging Face's checkpointing.",
            harness.markdown_table(("tokens", "way", "real peak", "on paper", "time", "middle half"), real),
        ]
    )


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure as the flags say; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    shape, budgets_gib, marginal, real, long, rounds = SHAPE, BUDGETS_GIB, MARGINAL, [2048, 4096], [32_768], 5
    if flags.quick:
        shape, budgets_gib, marginal = QUICK_SHAPE, QUICK_BUDGETS_GIB, QUICK_MARGINAL
        real, long, rounds = [512], [1024], 2
    results = {
        "benchmark": "long_context",
        "machine": harness.describe_machine(torch.device("cpu"), "transformers", "deepspeed"),
        "parameters": sum(p.numel() for p in Training.of("plain", shape, fake=True).model.parameters()),
        "rows": list(rows_of(shape, budgets_gib, marginal)),
        "real": [*real_rows(shape, real, rounds), *long_rows(shape, long)],
    }
    page = to_markdown(results)
    harness.write_results(flags.output_dir, "long_context", results, page)
    print(page)
    return results


if __name__ == "__main__":
    main()
