"""Plans in the loops of others, and in one's own."""

from gpu_day import judges
from gpu_day.claims import CUDA, TRL, Claim, Command, Step
from gpu_day.machine import Size


def loops(size: Size) -> Step:
    """``MemsaveCallback`` in Trainer and TRL, ``make_plan`` in a loop."""
    claims = [
        Claim(
            text=f"{name}: the losses of the same loop without a plan, in less memory",
            runs=(Command(name=f"loop-{name}", words=f"benchmarks/gpu_day/other_loops.py {name} {{folder}}"),),
            judge=judges.trains_alike,
            needs=frozenset({CUDA, *({TRL} if name == TRL else ())}),
        )
        for name in ("Trainer", "TRL", "make_plan")
    ]
    return Step("loops", claims)
