"""That nothing changes what is trained: kernels, plans, kills, the scaled loss."""

from gpu_day import judges
from gpu_day.claims import CUDA, TRITON, Claim, Command, Step
from gpu_day.machine import IMAGES, TEXT, Size

TESTS_ON_DEVICES = (
    *("tests/core/test_losses.py", "tests/core/costs/test_device_memory.py", "tests/core/costs/test_breakdown.py"),
    "tests/models/test_varlen.py",
)
ROUND = ("full_tiled", "compiled")  # strategies whose kernels may round otherwise than plain's


def kernels(size: Size) -> Step:
    """The tests that have cases for CUDA, a file a claim."""
    return Step(
        "kernels",
        [
            Claim(
                text=f"{file} passes on this device",
                runs=(
                    Command(
                        name=f"tests-{file[6:-3].replace('/', '-')}", words=f"-m pytest -q -p no:cacheprovider {file}"
                    ),
                ),
                judge=judges.passes,
                needs=frozenset({CUDA}),
            )
            for file in TESTS_ON_DEVICES
        ],
    )


def proofs(size: Size) -> Step:
    """``--verify`` of every strategy, tiles in bf16 first: only a GPU can say whether flash attention takes them."""
    steps = "--max_steps 2 --verify warn --eval_steps 2"
    claims = [
        Claim(
            text=f"Llama, {strategy}: the step of plain",
            runs=(size.text(f"verify-{word(strategy)}", f"--activation_checkpointing {strategy} {steps}"),),
            judge=judges.proven(may_round=strategy.startswith(ROUND)),
            needs=frozenset({TRITON} if strategy.startswith("compiled") else ()),
        )
        for strategy in size.strategies
    ]
    for strategy in size.convnet_strategies:
        flags = f"--activation_checkpointing {strategy} {steps}"
        run = size.images(f"verify-images-{word(strategy)}", flags, precision="no")
        claims.append(Claim(text=f"DenseNet, {strategy}: the step of plain", runs=(run,), judge=judges.proven()))
    return Step("proofs", claims)


def resumed(size: Size) -> Step:
    """Twice without a kill, or killed after the first checkpoint and gone on: the same weights."""
    claims = []
    for name, make in ((TEXT, size.text), (IMAGES, size.images)):
        kind, flags = word(name[8:-3]), f"--full_determinism {size.saves}"
        straight, again = (make(f"{which}-{kind}", flags) for which in ("straight", "again"))
        killed = make(f"killed-{kind}", flags, is_killed=True)
        for text, run in (("two runs, equal weights", again), ("killed and resumed, equal weights", killed)):
            claims.append(Claim(text=f"{kind}: {text}", runs=(run, straight), judge=judges.same_weights))
    return Step("resumed", claims)


def half_precision(size: Size) -> Step:
    """A loss that is scaled."""
    runs = {"text": size.text("half-text", size.length, precision=size.half)}
    runs["images"] = size.images("half-images", size.length, precision=size.half)
    claims = [
        Claim(text=f"{name} under {size.half}: the loss falls", runs=(run,), judge=judges.loss_falls)
        for name, run in runs.items()
    ]
    return Step("half_precision", claims)


def word(name: str) -> str:
    """A part of a folder's name."""
    return name.replace(":", "-").replace(" ", "-").replace("_", "-")
