"""Several GPUs: the run of one, in every way to cut it up."""

from dataclasses import replace

from gpu_day import judges
from gpu_day.claims import NCCL, TWO_DEVICES, Claim, Command, Step
from gpu_day.machine import Size

PROOF = "recipes/ddp_equals_accumulation.py"
TWO = frozenset({TWO_DEVICES})
MOST_APART = 1e-4  # of losses in float32, whose sums have another order


def ranks(size: Size) -> Step:
    """Two ranks beside one, in float32, saved at a step that is logged, as most are."""
    one, ddp, shards = size.launches
    steps = "--activation_checkpointing full --max_steps 6 --logging_steps 2 --save_every 2"
    alone = size.text("ranks-1", f"{steps} --verify warn", precision="no")
    both = size.text("ranks-2", f"{steps} --verify warn", precision="no", launch=ddp)
    shard = size.text("ranks-shard", f"{steps} --shard full", precision="no", launch=shards)
    deterministic = f"{steps} --full_determinism"
    straight = size.text("ranks-straight", deterministic, precision="no", launch=ddp)
    killed = size.text("ranks-killed", deterministic, precision="no", launch=ddp, is_killed=True)
    bits = [
        size.text(f"ranks-bits-{name}", f"{deterministic} --bitwise_topology", precision="no", launch=launch)
        for name, launch in (("one", one), ("two", ddp))
    ]
    proof = Command(name="ranks-proof-1", words=f"{PROOF} {size.proof}", launch=one, is_run=False)
    proof_of_two = Command(
        name="ranks-proof-2",
        words=lambda run: f"{PROOF} {size.proof} --compare_with {run.folder}",
        launch=ddp,
        after=proof,
        is_run=False,
    )
    fast = [
        size.text(f"ranks-speed-{name}", size.length, launch=launch) for name, launch in (("one", one), ("two", ddp))
    ]
    claims = [
        Claim(text="DDP, full: the step of plain", runs=(both,), judge=judges.proven()),
        Claim(text="DDP: the losses of one rank", runs=(both, alone), judge=judges.same_losses(MOST_APART)),
        Claim(text="DDP: killed and resumed, the same weights", runs=(killed, straight), judge=judges.same_weights),
        Claim(text="--bitwise_topology: the weights of one rank", runs=(bits[1], bits[0]), judge=judges.same_weights),
        Claim(text="--shard full: the losses of one rank", runs=(shard, alone), judge=judges.same_losses(MOST_APART)),
        Claim(text="DDP equals accumulation", runs=(proof_of_two, proof), judge=judges.equals_accumulation),
    ]
    of_speed = Claim(
        text="two GPUs: the step of one, in no more of its time",
        runs=(fast[1], fast[0]),
        judge=judges.ratio(1.0),
        needs=TWO | {NCCL},
        is_of_speed=True,
    )
    return Step("ranks", [*(replace(claim, needs=TWO) for claim in claims), of_speed])
