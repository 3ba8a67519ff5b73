"""What is predicted, kept and saved of the device's memory, and of the host's."""

from functools import partial

from gpu_day import judges
from gpu_day.claims import BITSANDBYTES, CUDA, OWN_MEMORY, SHEET, Claim, Command, Outcome, Step
from gpu_day.exactness import word
from gpu_day.machine import TEXT, Size

ON_DEVICE = frozenset({CUDA})
MEASURED_FULL = "--activation_checkpointing full --micro_batch_size auto --max_steps 6 --logging_steps 2"
"""The micro-batch is searched for the peak to be predicted; recomputation leaves it to the update."""


def plain(size: Size) -> Command:
    """The run that others are measured by."""
    return size.text("plain", f"--activation_checkpointing none {size.length}")


def full(size: Size) -> Command:
    """The same with every block recomputed."""
    return size.text("full", f"--activation_checkpointing full {size.length}")


def budgets(size: Size) -> Step:
    """Parts of what plain takes above its weights, their gradients and the optimizer's state."""
    base, reserved = plain(size), "little is reserved beside the tensors"
    claims = [Claim(text=f"plain: {reserved}", runs=(base,), judge=judges.little_is_reserved, needs=ON_DEVICE)]
    for part in size.budgets:
        name = f"{part:.0%} of plain's activations"
        run = size.text(f"budget-{100 * part:.0f}", "", words=partial(_under_budget, size, part), after=base)
        times = "the measured seconds of the plan are the step's within a quarter"
        claims += [
            Claim(
                text=f"{name}: the budget is kept, the peak not predicted below", runs=(run,), judge=judges.budget_kept
            ),
            Claim(text=f"{name}: {reserved}", runs=(run,), judge=judges.little_is_reserved, needs=ON_DEVICE),
            Claim(text=f"{name}: {times}", runs=(run,), judge=judges.seconds_measured(0.25), is_of_speed=True),
            Claim(text=f"{name}: time beside plain's", runs=(run, base), judge=judges.ratio()),
        ]
    return Step("budgets", claims)


def _under_budget(size: Size, part: float, base: Outcome) -> str:
    memory = base.memory
    kept = sum(memory["breakdown"][f"{name}_gib"] for name in ("parameters", "gradients", "optimizer_state"))
    budget = judges.outside_gib(memory) + kept + part * (memory["peak_allocated_gib"] - kept)
    flags = f"--activation_checkpointing budget --memory_budget_gib {budget:.6f} {size.length}"
    return f"{TEXT} {size.text_flags} {flags}"


def predictions(size: Size) -> Step:
    """Random cases of ``prediction.py``, on a GPU with larger micro-batches."""
    words = f"benchmarks/prediction.py --device {size.device} --cases {size.cases} --times {size.times}"
    run = Command(name="prediction", words=f"{words} --output_dir {{folder}}", is_benchmark=True)
    judge, text = judges.cases_predicted(size.device), "no predicted peak is below the measured one"
    return Step("predictions", [Claim(text=text, runs=(run,), judge=judge, needs=frozenset({SHEET}))])


def techniques(size: Size) -> Step:
    """Optimizers and adapters whose memory on a device is not that on a CPU: measured plans of ``full``."""
    flags = {
        **OPTIMIZERS,
        "LoRA": "--lora",
        "LoRA, frozen weights on the host": "--lora --stream_weights host",
    }
    runs = {name: size.text(word(f"technique-{name}"), f"{MEASURED_FULL} {more}") for name, more in flags.items()}
    four_bits = f"{TEXT} {size.rows} {MEASURED_FULL} --lora --load_in_4bit --model_name_or_path"
    runs["LoRA on 4 bits"] = size.text(
        "technique-4-bits", "", words=lambda base: f"{four_bits} {base.folder / 'final'}", after=plain(size)
    )
    claims = [
        Claim(
            text=f"{name}: the peak is predicted",
            runs=(run,),
            judge=judges.predicted,
            needs=ON_DEVICE | ({BITSANDBYTES} if name in PACKED else set()),
        )
        for name, run in runs.items()
    ]
    return Step("techniques", claims)


OPTIMIZERS = {
    "Adafactor": "--optimizer adafactor",
    "Muon": "--optimizer muon",
    "bf16 stochastic rounding": "--dtype bfloat16 --optimizer adamw_bf16",
    "8-bit AdamW": "--optimizer adamw_8bit",
}
PACKED = ("8-bit AdamW", "LoRA on 4 bits")


def offloading(size: Size) -> Step:
    """Time and memory beside recomputation, and the host's memory."""
    base, claims = plain(size), []
    for strategy in size.offloads:
        run = size.text(word(strategy), f"--activation_checkpointing {strategy} {size.length}")
        claims += [
            Claim(text=f"{strategy}: beside plain", runs=(run, base), judge=judges.ratio()),
            Claim(text=f"{strategy}: beside full", runs=(run, full(size)), judge=judges.ratio()),
        ]
        if "offload" in strategy:
            host = judges.host_memory_predicted
            text = f"{strategy}: the host's memory is what the run says"
            claims.append(Claim(text=text, runs=(run, base), judge=host, needs=frozenset({OWN_MEMORY})))
    return Step("offloading", claims)


def full_device(size: Size) -> Step:
    """A batch that no device has memory for; a CPU has no limit of its own."""
    run = size.images("too-large", size.too_large, precision="no")
    text = "a full device ends in a page with a way out"
    return Step("full_device", [Claim(text=text, runs=(run,), judge=judges.ends_in_a_page, needs=ON_DEVICE)])
