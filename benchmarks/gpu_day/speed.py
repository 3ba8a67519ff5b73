"""Seconds: what the host waits for, the loop beside a plain one, kernels, and the planner's data sheets."""

from gpu_day import judges
from gpu_day.claims import CUDA, LIGER, SHEET, TRITON, WAIT_WARNINGS, Claim, Command, Step
from gpu_day.exactness import word
from gpu_day.machine import IMAGES, TEXT, Size
from gpu_day.memory import full, plain

HERE = "benchmarks/gpu_day"
LABELS = "recipes/text_classification.py"


def waits(size: Size) -> Step:
    """Where the host waits for the device, by line, in steps that are not logged."""
    flags = {
        "text": f"{TEXT} {size.text_flags}",
        "images": f"{IMAGES} {size.image_flags}",
        "labels": f"{LABELS} {BERT} {size.digits}",
        "muon": f"{TEXT} {size.text_flags} --optimizer muon",
    }
    claims = []
    for name, recipe in flags.items():
        words = f"{HERE}/waits.py {{folder}}/waits.json {recipe} --max_steps 8 --logging_steps 8"
        run = Command(name=f"waits-{name}", words=words, launch=size.launches[0], precision="bf16")
        needs = frozenset({WAIT_WARNINGS})
        claims.append(Claim(text=f"{name}: no waits", runs=(run,), judge=judges.waits_at_most(0.0), needs=needs))
    return Step("waits", claims)


BERT = (
    "--model_type bert --max_length 64 "
    "--config_overrides hidden_size=64,num_hidden_layers=2,num_attention_heads=2,intermediate_size=128,vocab_size=512"
)


def throughput(size: Size) -> Step:
    """A step beside that of a plain loop of torch, of the same Llama on whole rows; then what makes it faster."""
    words = f"{HERE}/plain_loop.py {{folder}} --config_overrides {size.llama} {size.rows} {size.length}"
    loop = Command(name="speed-plain-loop", words=words)
    document = size.text("speed-document", f"--loss full {size.length}")
    highest, high = (
        size.text(f"speed-{name}", f"--matmul_precision {name} --loss full {size.length}", precision="no")
        for name in ("highest", "high")
    )
    others = {
        "chunked loss": ("--loss chunked", frozenset[str]()),
        "compiled layers": ("--activation_checkpointing compiled:1", frozenset({TRITON})),
        "Liger's loss": ("--loss liger", frozenset({LIGER, TRITON})),
    }
    on_device = frozenset({CUDA})
    claims = [
        _beside("none: at most 1.1 of a plain loop's time", document, loop, 1.1, on_device),
        _beside("TF32: faster than float32", high, highest, 0.9),
    ]
    for name, (flags, needs) in others.items():
        run = size.text(word(f"speed-{name}"), f"{flags} {size.length}")
        claims.append(_beside(f"{name}: beside none", run, document, None, needs))
    return Step("throughput", claims)


def _beside(text: str, run: Command, other: Command, most: float | None, needs: frozenset[str] = frozenset()) -> Claim:
    return Claim(text=text, runs=(run, other), judge=judges.ratio(most), needs=needs, is_of_speed=True)


def data_sheets(size: Size) -> Step:
    """``memsave plan`` for the device that is here, made of its data sheet, beside the steps that have run."""
    claims = []
    for strategy, run in (("none", plain(size)), ("full", full(size))):
        flags = f"{size.text_flags} --activation_checkpointing {strategy} --mixed_precision bf16"
        words = f"-m memsave_recipes.tools.cli plan {TEXT} {flags} --output_dir {{folder}} --json {{folder}}/plan.json"
        plan = Command(name=f"plan-{strategy}", words=words)
        claims += [
            Claim(
                text=f"{strategy}: the seconds of the data sheet are a lower bound",
                runs=(plan, run),
                judge=judges.seconds_by_sheet,
                needs=frozenset({SHEET}),
                is_of_speed=True,
            ),
            Claim(
                text=f"{strategy}: the peak of the data sheet is not below the step's",
                runs=(plan, run),
                judge=judges.peak_by_sheet,
                needs=frozenset({CUDA, SHEET}),
            ),
        ]
    return Step("data_sheets", claims)


def article(size: Size) -> Step:
    """VGG16 as in the article that this project grew from."""
    words = f"benchmarks/vgg16_article.py {'--quick ' if size.is_small else ''}--output_dir {{folder}}"
    run = Command(name="article", words=words, is_benchmark=True)
    claim = Claim(text="VGG16 as in the article", runs=(run,), judge=judges.article_rows(size.device))
    return Step("article", [claim])
