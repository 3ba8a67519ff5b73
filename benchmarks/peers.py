"""Trainers side by side: the memory and time of a step, and how far from the training of whole batches in float64.

    python benchmarks/peers.py            # a quarter of an hour on one core
    python benchmarks/peers.py --quick

All train the same GPT-2 from the same weights on the same documents of uneven length, in the same order, with AdamW at
a constant rate and clipping. Other than the reference they compute a global batch in micro-batches, as trainers do
where memory is short. Each lives in a process of its own and makes a step when it is its turn, in an order that is
drawn anew every round, so that what else the machine does hits all of them alike. A peer that is not installed is left
out. Writes docs/results/peers-DEVICE.json and .md.

NOTE [ what is compared ]
1. *Peak*: weights, gradients, optimizer state, activations and temporaries at the highest moment of a step, as
   ``break_down_peak`` records all allocations of torch, whoever's the loop is. The larger of the last steps, which are
   not timed.
2. *Time*: from one update to the next, with loading and logging, as a ratio to that of the yardstick in the same round;
   the median and the middle half. Of a process's CPU time, too, which other work on the machine stretches less. A
   second yardstick shows what chance makes of equal loops.
3. *Loss*: after each step the mean loss of a token of the next global batch, computed from the weights in float64, for
   all in the same way, outside of the time. What trainers log does not count. The largest distance from the
   reference's, relative to it.
4. *Weights*: the distance from the reference's last weights, divided by how far these are from the first ones.
   Attention does not depend on the biases of its keys, so their gradients are nothing but rounding errors, which AdamW
   makes full steps of: they are left out.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import harness
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from forked import EndStep, Runner
from models import build_work
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import memsave_recipes as memsave
from memsave_recipes.data.text.packing import count_valid
from memsave_recipes.losses import IGNORED_LABEL
from memsave_recipes.models.causal_lm import CausalLMLoss, LossKind
from memsave_recipes.planner.make_plan import static_of, torch_optimizer
from memsave_recipes.profiling.breakdown import PeakOfStep, break_down_peak
from memsave_recipes.run.report import RunReport
from memsave_recipes.run.trackers import resolve_trackers, start_trackers
from memsave_recipes.training.batch_layout import BatchLayout, SampleOrder
from memsave_recipes.training.batching import Batch, GlobalBatch, GlobalBatches
from memsave_recipes.training.launch import start_accelerator

LEARNING_RATE, MAX_GRAD_NORM, LOGGING_STEPS, PADDING = 1e-3, 1.0, 10, 0
KEY_BIASES = "attn.c_attn.bias"
"""The end of the name of the biases of queries, keys and values."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all train: a GPT-2, documents, and their batches.

    Args:
        shortest, longest: documents, in tokens; the logarithm of a length is drawn uniformly.
        num_warmup_steps: before the timed ones.
        num_recorded_steps: after them, for their peak.
        budget_gib: of our loop under ``budget:bitwise``.
    """

    vocab_size: int = 4096
    n_layer: int = 4
    n_embd: int = 128
    shortest: int = 16
    longest: int = 128
    micro_batch_size: int = 4
    accumulation_steps: int = 4
    num_warmup_steps: int = 3
    num_timed_steps: int = 20
    num_recorded_steps: int = 2
    budget_gib: float = 0.0424

    @property
    def total_steps(self) -> int:
        """Of each loop."""
        return self.num_warmup_steps + self.num_timed_steps + self.num_recorded_steps

    @property
    def global_batch_size(self) -> int:
        """Documents of a step."""
        return self.micro_batch_size * self.accumulation_steps

    def make_model(self) -> Any:
        """A ``GPT2LMHeadModel`` without dropout, always with the same weights, in training mode on the device."""
        shape = {name: getattr(self, name) for name in ("vocab_size", "n_layer", "n_embd")}
        return build_work("gpt2", {**shape, "n_head": 4, "batch_size": 1, "length": 2}, harness.this_device()).model

    def make_optimizer(self, model: nn.Module) -> AdamW:
        """Over all parameters."""
        return AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def make_loader(self, batch_size: int) -> DataLoader:
        """The documents in their order."""
        return DataLoader(Documents(self), batch_size=batch_size, collate_fn=padded)


QUICK = Work(
    vocab_size=512,
    n_layer=2,
    n_embd=32,
    shortest=4,
    longest=32,
    micro_batch_size=2,
    accumulation_steps=3,
    num_timed_steps=3,
    num_recorded_steps=1,
    budget_gib=0.0015,
)


class Documents(Dataset):
    """A global batch more than the steps train, of tokens that are as frequent as the words of a language (Zipf)."""

    def __init__(self, work: Work) -> None:
        generator = torch.Generator().manual_seed(0)
        count = (work.total_steps + 1) * work.global_batch_size
        shortest, longest = math.log(work.shortest), math.log(work.longest)
        lengths = torch.exp(shortest + (longest - shortest) * torch.rand(count, generator=generator)).round().int()
        frequencies = 1 / torch.arange(1, work.vocab_size)  # without the token of the padding
        self.rows = [
            1 + torch.multinomial(frequencies, int(length), replacement=True, generator=generator) for length in lengths
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Batch:
        """By a number or our ``SampleKey``."""
        return {"input_ids": self.rows[key if isinstance(key, int) else key.index]}

    def longest(self, count: int) -> list[int]:
        """The numbers of the longest documents, by which our planner measures."""
        return sorted(range(len(self)), key=lambda number: -len(self.rows[number]))[:count]


def padded(documents: Sequence[Batch]) -> Batch:
    """(B, T), as long as the longest of them."""
    ids = pad_sequence([document["input_ids"] for document in documents], batch_first=True, padding_value=PADDING)
    is_padding = ids == PADDING
    labels = ids.masked_fill(is_padding, IGNORED_LABEL)
    return {"input_ids": ids, "attention_mask": (~is_padding).long(), "labels": labels}


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Over the tokens that count."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


class Watch:
    """What every loop calls after each step, with its model and optimizer: rules 1 and 3 of the NOTE."""

    def __init__(self, work: Work, end_step: EndStep) -> None:
        self.work, self.end_step = work, end_step
        self.device = harness.this_device()
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.cpu_seconds: list[float] = []
        self._cpu_began = time.process_time()
        self._precise = work.make_model().double()
        self._micro_batches = islice(work.make_loader(work.micro_batch_size), work.accumulation_steps, None)
        self._peak: PeakOfStep | None = None
        self._recording = ExitStack()

    def __call__(self, model: nn.Module, optimizer: Any) -> None:
        """End a step; the optimizer may be wrapped."""
        self.cpu_seconds.append(time.process_time() - self._cpu_began)
        self.end_step(lambda: self._look(model, torch_optimizer(optimizer)))
        self._cpu_began = time.process_time()

    def _look(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._recording.close()
        if self._peak is not None:
            self.peaks.append(self._peak.breakdown.total_bytes)
        self.model = model
        self.losses.append(self._loss(model))
        if 0 < self.work.total_steps - len(self.losses) <= self.work.num_recorded_steps:
            self._peak = self._recording.enter_context(break_down_peak(model, optimizer, self.device))

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float:
        self._precise.load_state_dict(model.state_dict())
        batch = _on_device(islice(self._micro_batches, self.work.accumulation_steps))
        loss_sum = sum(summed_loss(self._precise, micro_batch).item() for micro_batch in batch)
        return loss_sum / int(sum(map(count_valid, batch)))


def _on_device(micro_batches: Iterable[Batch]) -> list[Batch]:
    device = harness.this_device()
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in micro_batches]


Loop = Callable[[Work, Watch], None]


def torch_loop(
    work: Work, watch: Watch, *, dtype: torch.dtype = torch.float32, micro_batch_size: int | None = None
) -> None:
    """What one would write by hand: the sum of all tokens' losses, divided by how many there are in the step."""
    size = micro_batch_size or work.micro_batch_size
    model = work.make_model().to(dtype)
    optimizer = work.make_optimizer(model)
    micro_batches = iter(work.make_loader(size))
    for _ in range(work.total_steps):
        step = _on_device(islice(micro_batches, work.global_batch_size // size))
        num_tokens = sum(map(count_valid, step))
        for micro_batch in step:
            (summed_loss(model, micro_batch) / num_tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        watch(model, optimizer)


def whole_batch_loop(work: Work, watch: Watch, *, dtype: torch.dtype) -> None:
    """One forward and backward a step."""
    torch_loop(work, watch, dtype=dtype, micro_batch_size=work.global_batch_size)


def our_loop(
    work: Work, watch: Watch, *, strategy: str = "none", is_budget: bool = False, loss: LossKind = "auto"
) -> None:
    """The loop of recipes/language_modeling.py, with all that it measures and writes."""
    with TemporaryDirectory() as folder:
        accelerator = start_accelerator(log_with=resolve_trackers(["none"], Path(folder)))
        bare = work.make_model()
        optimizer = work.make_optimizer(bare)
        model, optimizer = accelerator.prepare(CausalLMLoss(bare, loss), optimizer)
        labels = {"project": "", "group": "", "name": "", "tags": [], "config": {}}
        start_trackers(accelerator, output_dir=Path(folder), **labels)
        documents = Documents(work)
        batches = GlobalBatches(
            accelerator,
            documents,
            order=SampleOrder(num_samples=len(documents), global_batch_size=work.global_batch_size, seed=None),
            layout=BatchLayout.of(work.global_batch_size, work.micro_batch_size, accelerator.num_processes),
            num_steps=work.total_steps,
            seed=0,
            count_valid=count_valid,
            collate_fn=padded,
        )
        plan = memsave.make_plan(
            model,
            batches.largest_micro_batch(work.micro_batch_size),
            strategy=strategy,
            budget_gib=work.budget_gib if is_budget else None,
            static=replace(static_of(optimizer), gradients_resident=True),
        )

        def loss_of(micro_batch: Batch) -> Tensor:
            return model(**micro_batch)

        def train_step(batch: GlobalBatch) -> Tensor:
            for micro_batch in batch.forwards(model):
                batch.backward(loss_of(micro_batch))
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            return grad_norm

        report = RunReport(accelerator, batches, model, optimizer)
        with memsave.apply_plan(model, plan):
            for batch in report.clock.loading(batches):
                report.count_flops(batch, loss_of)
                with report.measured(batch.step):
                    grad_norm = train_step(batch)
                report.count(batch, grad_norm)
                if (batch.step + 1) % LOGGING_STEPS == 0:
                    report.log_window(batch.step + 1, learning_rate=LEARNING_RATE)
                watch(bare, optimizer)


def accelerate_loop(work: Work, watch: Watch, *, is_checkpointed: bool = False) -> None:
    """As Accelerate's examples accumulate: every micro-batch has its own mean, and these have the same weight."""
    accelerator = Accelerator(gradient_accumulation_steps=work.accumulation_steps)
    bare = work.make_model()
    if is_checkpointed:
        bare.gradient_checkpointing_enable()
    loader = work.make_loader(work.micro_batch_size)
    model, optimizer, loader = accelerator.prepare(bare, work.make_optimizer(bare), loader)
    for batch in islice(loader, work.total_steps * work.accumulation_steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            watch(bare, optimizer)


def accelerate_tokens_loop(work: Work, watch: Watch) -> None:
    """As Accelerate's guide accumulates samples of several sizes: the step's tokens are counted before its forwards."""
    accelerator = Accelerator(gradient_accumulation_steps=work.accumulation_steps)
    bare = work.make_model()
    loader = work.make_loader(work.micro_batch_size)
    model, optimizer, loader = accelerator.prepare(bare, work.make_optimizer(bare), loader)
    micro_batches = iter(loader)
    for _ in range(work.total_steps):
        step = list(islice(micro_batches, work.accumulation_steps))
        num_tokens = sum(map(count_valid, step))
        for micro_batch in step:  # Accelerate divides by the number of micro-batches
            accelerator.backward(summed_loss(model, micro_batch) * work.accumulation_steps / num_tokens)
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        watch(bare, optimizer)


def fabric_loop(work: Work, watch: Watch, *, is_checkpointed: bool = False) -> None:
    """Lightning Fabric, as its guide to accumulation writes the loop."""
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=harness.this_device().type, devices=1)
    fabric.launch()
    bare = work.make_model()
    if is_checkpointed:
        bare.gradient_checkpointing_enable()
    model, optimizer = fabric.setup(bare, work.make_optimizer(bare))
    micro_batches = iter(fabric.setup_dataloaders(work.make_loader(work.micro_batch_size)))
    for _ in range(work.total_steps):
        for index, batch in enumerate(islice(micro_batches, work.accumulation_steps), start=1):
            with fabric.no_backward_sync(model, enabled=index < work.accumulation_steps):
                fabric.backward(model(**batch).loss / work.accumulation_steps)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        watch(bare, optimizer)


def trainer_loop(work: Work, watch: Watch, *, is_checkpointed: bool = False) -> None:
    """The Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    with TemporaryDirectory() as folder:
        flags = TrainingArguments(**_flags_of_trainers(work, folder), gradient_checkpointing=is_checkpointed)
        _train(Trainer, watch, work.make_model(), flags, train_dataset=Documents(work), data_collator=padded)


def trl_loop(work: Work, watch: Watch, *, is_checkpointed: bool = True) -> None:
    """TRL's SFTTrainer, with its own collator."""
    import datasets
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    rows = datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in Documents(work).rows]})
    vocabulary = Tokenizer(WordLevel({"<pad>": PADDING, "</s>": 1}, unk_token="<pad>"))  # asked for, and not used
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="</s>")
    with TemporaryDirectory() as folder:
        flags = _flags_of_trainers(work, folder)
        flags = SFTConfig(**flags, gradient_checkpointing=is_checkpointed, bf16=False, max_length=None)
        _train(SFTTrainer, watch, work.make_model(), flags, train_dataset=rows, processing_class=tokenizer)


def _flags_of_trainers(work: Work, folder: str) -> dict[str, Any]:
    on_cpu = harness.this_device().type == "cpu"
    return {
        "output_dir": folder,
        "per_device_train_batch_size": work.micro_batch_size,
        "gradient_accumulation_steps": work.accumulation_steps,
        "max_steps": work.total_steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "optim": "adamw_torch_fused",
        "train_sampling_strategy": "sequential",
        "logging_steps": LOGGING_STEPS,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "remove_unused_columns": False,
    }


def _train(trainer_class: Any, watch: Watch, model: Any, flags: Any, **data: Any) -> None:
    from transformers import PrinterCallback, TrainerCallback

    class Watched(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            watch(parts["model"], parts["optimizer"])

    trainer = trainer_class(model=model, args=flags, callbacks=[Watched()], **data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


@dataclass(frozen=True)
class Peer:
    """A way to train.

    Args:
        package: on the package index; ``module`` is what is imported.
        note: on its loss and its memory, for people.
    """

    loop: Loop
    package: str
    module: str
    note: str


REFERENCE, YARDSTICK, OURS = "torch, whole batches in float64", "torch, by hand", "memsave_recipes"
EXAMPLE, TRAINER, TRL, FABRIC = "Accelerate, example loop", "Trainer", "TRL SFTTrainer", "Lightning Fabric"
CHECKPOINTED = "gradient checkpointing"
TRL_HEAD = "its head works in buffers for 32,768 entries of a vocabulary at a time, whatever there are"
LEAN = f"{OURS}, full"
BUDGET = f"{OURS}, budget"

PEERS = {
    REFERENCE: Peer(partial(whole_batch_loop, dtype=torch.float64), "torch", "torch", "the reference"),
    "torch, whole batches": Peer(
        partial(whole_batch_loop, dtype=torch.float32), "torch", "torch", "how far float32 alone leads away"
    ),
    YARDSTICK: Peer(
        torch_loop, "torch", "torch", "the sum over tokens, divided by those of the step; no checkpointing"
    ),
    "the same again": Peer(torch_loop, "torch", "torch", "how far two equal loops are apart"),
    OURS: Peer(our_loop, "memsave-recipes", "memsave_recipes", "the recipe's loop with its defaults: `--loss auto`"),
    LEAN: Peer(
        partial(our_loop, strategy="full", loss="chunked"),
        "memsave-recipes",
        "memsave_recipes",
        "`--activation_checkpointing full --loss chunked`",
    ),
    BUDGET: Peer(
        partial(our_loop, strategy="budget:bitwise", is_budget=True, loss="chunked"),
        "memsave-recipes",
        "memsave_recipes",
        "`--activation_checkpointing budget:bitwise --loss chunked`, with the budget above",
    ),
    TRAINER: Peer(trainer_loop, "transformers", "transformers", "its defaults"),
    f"{TRAINER}, {CHECKPOINTED}": Peer(
        partial(trainer_loop, is_checkpointed=True), "transformers", "transformers", "`gradient_checkpointing=True`"
    ),
    EXAMPLE: Peer(accelerate_loop, "accelerate", "accelerate", "`accelerator.accumulate` and the model's mean loss"),
    f"{EXAMPLE}, {CHECKPOINTED}": Peer(
        partial(accelerate_loop, is_checkpointed=True),
        "accelerate",
        "accelerate",
        "the same with `model.gradient_checkpointing_enable()`",
    ),
    "Accelerate, loop for several sizes": Peer(
        accelerate_tokens_loop, "accelerate", "accelerate", "its guide's loop that counts the tokens of a step first"
    ),
    f"{TRL}, no checkpointing": Peer(
        partial(trl_loop, is_checkpointed=False),
        "trl",
        "trl",
        f"`gradient_checkpointing=False`; {TRL_HEAD}",
    ),
    TRL: Peer(trl_loop, "trl", "trl", f"its defaults, with gradient checkpointing; {TRL_HEAD}"),
    FABRIC: Peer(fabric_loop, "lightning", "lightning_fabric", "the loop of its guide to accumulation, mean loss"),
    f"{FABRIC}, {CHECKPOINTED}": Peer(
        partial(fabric_loop, is_checkpointed=True),
        "lightning",
        "lightning_fabric",
        "the same with `model.gradient_checkpointing_enable()`",
    ),
}
NOT_QUICK = (
    *("the same again", f"{TRL}, no checkpointing"),
    *(f"{EXAMPLE}, {CHECKPOINTED}", f"{FABRIC}, {CHECKPOINTED}"),
)
OWN_MODELS = (
    "pip resolves it beside torch 2.13, but its recipes train its own classes of models, of which none is a GPT-2"
)
LEFT_OUT = {"torchtune 0.6.1": OWN_MODELS, "litgpt 0.5.13": OWN_MODELS}
"""Peers that have no row, and why."""


def train(name: str, work: Work, folder: Path, end_step: EndStep) -> dict[str, Any]:
    """Run a loop; the last weights go into ``folder``, in float64."""
    watch = Watch(work, end_step)
    PEERS[name].loop(work, watch)
    save_file({key: value.detach().double().cpu() for key, value in watch.model.named_parameters()}, folder / name)
    own_s = time.process_time()
    return {"losses": watch.losses, "peak_bytes": max(watch.peaks), "cpu_seconds": watch.cpu_seconds, "own_s": own_s}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one loop: ``seconds``, ``cpu_seconds`` and ``losses`` of every step, ``own_s`` of CPU time in all."""

    seconds: list[float]
    cpu_seconds: list[float]
    losses: list[float]
    peak_bytes: int
    own_s: float
    weights: dict[str, Tensor]


def measure(work: Work, names: Sequence[str]) -> dict[str, Outcome]:
    """The loops of ``names``, a step of each in every round."""
    with TemporaryDirectory() as folder:
        runners = {name: Runner(partial(train, name, work, Path(folder))) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        steps = harness.turns(names, work.total_steps)
        for name in tqdm(steps, total=work.total_steps * len(names), unit="step"):
            seconds[name].append(runners[name].step())
        return {
            name: Outcome(**runner.close(), seconds=seconds[name], weights=load_file(Path(folder) / name))
            for name, runner in runners.items()
        }


def largest_distance(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Rule 3 of the NOTE."""
    return max(abs(own - other) / other for own, other in zip(losses, expected, strict=True))


def distance(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference of all weights, as far as rule 4 of the NOTE counts them."""
    parts = []
    for name, tensor in weights.items():
        difference = tensor - expected[name]
        if name.endswith(KEY_BIASES):
            queries, _, values = difference.chunk(3)
            difference = torch.cat([queries, values])
        parts.append(difference.norm())
    return torch.stack(parts).norm().item()


def row_of(name: str, outcomes: dict[str, Outcome], work: Work) -> dict[str, Any]:
    """A row of the table."""
    timed = slice(work.num_warmup_steps, work.num_warmup_steps + work.num_timed_steps)
    own, reference, yardstick = outcomes[name], outcomes[REFERENCE], outcomes[YARDSTICK]
    ratio, quartiles = _ratio(own.seconds[timed], yardstick.seconds[timed])
    cpu_ratio, cpu_quartiles = _ratio(own.cpu_seconds[timed], yardstick.cpu_seconds[timed])
    first = {key: value.detach().double().cpu() for key, value in work.make_model().named_parameters()}
    return {
        "loop": name,
        "package": PEERS[name].package,
        "note": PEERS[name].note,
        "peak_bytes": own.peak_bytes,
        "peak_ratio": own.peak_bytes / yardstick.peak_bytes,
        "step_s": median(own.seconds[timed]),
        "time_ratio": ratio,
        "time_ratio_quartiles": quartiles,
        "cpu_time_ratio": cpu_ratio,
        "cpu_time_ratio_quartiles": cpu_quartiles,
        "loss_distance": largest_distance(own.losses, reference.losses),
        "weights_distance": distance(own.weights, reference.weights) / distance(reference.weights, first),
        "losses": own.losses,
    }


def _ratio(own: Sequence[float], yardstick: Sequence[float]) -> tuple[float, list[float]]:
    return harness.median_and_quartiles(harness.ratios(own, yardstick))


HEADINGS = ("loop", "peak", "of torch by hand", "time", "CPU time", "loss", "weights")


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""
    times = [f"x{row[name]:.2f}<br>{_range(row[f'{name}_quartiles'])}" for name in ("time_ratio", "cpu_time_ratio")]
    distances = [f"{row[name]:.1e}" if row[name] else "0" for name in ("loss_distance", "weights_distance")]
    return [
        row["loop"],
        f"{harness.to_mib(row['peak_bytes']):,.1f} MiB",
        f"{100 * row['peak_ratio']:.0f} %",
        *times,
        *distances,
    ]


def _range(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def as_markdown(results: dict[str, Any]) -> str:
    """The page: conditions, the table, what each loop does."""
    work, rows = results["work"], results["rows"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    threads = "1 thread" if results["num_threads"] == 1 else f"{results['num_threads']} threads"
    size = f"{work['n_layer']} layers, {work['n_embd']} wide, vocabulary {work['vocab_size']:,}"
    lines = [
        f"`python benchmarks/peers.py` on {results['device']}, {threads}; {versions}.",
        f"A GPT-2 ({size}) in float32, {work['micro_batch_size']} x {work['accumulation_steps']} documents of "
        f"{work['shortest']} to {work['longest']} tokens a step, {work['num_timed_steps']} timed steps of "
        f"{results['num_steps']}. The budget is {work['budget_gib'] * 1024:.0f} MiB.",
        "Peak: all that a step holds. Time and CPU time: of a step, as a ratio to torch by hand in the same round, the "
        "median and the middle half. Loss and weights: the distance from the training of whole batches in float64; "
        "the loss is the largest over the steps, relative, the weights are relative to how far they have moved.",
        f"Other work kept {results['busy_with_others']:.2f} of {results['num_cpus']} CPUs busy meanwhile: times are "
        "as uncertain as the two equal loops are apart, bytes and distances do not depend on it.",
        "",
        harness.markdown_table(HEADINGS, map(cells, rows)),
        "",
        *(f"* {row['loop']}: {row['note']}." for row in rows),
        *(f"* {name} has no row: {reason}." for name, reason in results["left_out"].items()),
    ]
    return "\n".join(lines)


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure all loops that are installed; returns the content of the JSON file."""
    flags = harness.read_flags(harness.make_parser(__doc__), args)
    work = QUICK if flags.quick else Work()
    wanted = {name: peer for name, peer in PEERS.items() if not flags.quick or name not in NOT_QUICK}
    names = [name for name, peer in wanted.items() if find_spec(peer.module)]
    missing = {peer.package: "it is not installed here" for name, peer in wanted.items() if name not in names}
    device, other_work = harness.this_device(), harness.OtherWork()
    outcomes = measure(work, names)
    results = {
        "benchmark": "peers",
        **harness.describe_machine(device, *dict.fromkeys(PEERS[name].package for name in names)),
        **other_work.figures(sum(outcome.own_s for outcome in outcomes.values())),
        "work": asdict(work),
        "num_steps": work.total_steps,
        "left_out": missing | LEFT_OUT,
        "rows": [row_of(name, outcomes, work) for name in names],
    }
    harness.show(HEADINGS, map(cells, results["rows"]))
    harness.write_results(flags.output_dir, f"peers-{device.type}", results, as_markdown(results))
    return results


if __name__ == "__main__":
    main()
