"""The first twelve minutes on a device: what the README's launch, its plans and a Llama of 1B take a step.

Each run has a limit, and the limits add up to ``MINUTES``. What the runs read before they train is made by ``prepare``,
on a machine that needs no device.

NOTE [ kernels are not prepared ]
1. Torch's key of a compiled graph has the device's name, and torch loads the kernels before it stores the graph. So it
   breaks off without a driver, even where all else is told that a card is there (``tests/triton_kernels/card.py``).
2. Triton's key has the architecture alone, and Triton does store machine code without a card. For a layer of a GPT-2,
   forward and backward, it takes 10 s of one core, which the many cores of a device's machine share. Whether inductor
   writes the same kernels on the card cannot be told without it, so this is left out, too.
3. What one run has compiled the next one reads; so does a later day on a card of that name, with the same torch.
"""

import runpy
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness import ROOT

from gpu_day import judges
from gpu_day.claims import FLASH_3, FLOAT8, SHEET, TRITON, Claim, Command, Step
from gpu_day.machine import TEXT, Size
from gpu_day.plain_gpt2 import PEERS
from memsave_recipes.data.text.rows import load_rows
from memsave_recipes.training.parsing import parse_arguments

MINUTES = 12
NEEDS = frozenset({TRITON})
DETERMINISTIC = {"TORCHINDUCTOR_DETERMINISTIC": "1"}


def first_minutes(size: Size) -> Step:
    """The README's launch, then one thing changed at a time, in the order of what they tell."""
    launch = _gpt2(size, "launch", size.launch_budget, limit_s=110)
    words_of_none = f"{size.gpt2_micro} --activation_checkpointing none --loss full"
    none = _gpt2(size, "none", words_of_none, limit_s=30)
    claims = [
        Claim(text="README's launch, as it is", runs=(launch,), judge=judges.speed),
        _figure("none", none),
        _figure(
            "none, operators not fused", _gpt2(size, "none-unfused", f"{words_of_none} --fused_ops none", limit_s=30)
        ),
        Claim(
            text="none: memsave plan expects its seconds within a fifth",
            runs=(_plan(size), none),
            judge=judges.seconds_expected(0.2),
            is_of_speed=True,
        ),
        _compiled(size, "1", limit_s=45),
        _compiled(size, "0.7"),
    ]
    whole = f"{size.gpt2_whole} --activation_checkpointing compiled:0.7 --loss full"
    claims.append(_figure("compiled:0.7, one micro-batch", _gpt2(size, "compiled-whole", whole), NEEDS))
    claims += _profiles(size)
    for dtype in ("float32", "bfloat16"):
        flags = f"{TEXT} {size.llama_1b} --dtype {dtype} --activation_checkpointing compiled:1"
        run = _within(65, size, size.command(f"first-llama-{dtype}", flags))
        claims.append(_figure(f"Llama, weights in {dtype}", run, NEEDS))
    flags = f"{size.gpt2_micro} --activation_checkpointing compiled:1 --max_steps 5"
    twice = tuple(
        _gpt2(size, f"deterministic-{name}", flags, limit_s=limit_s, environment=DETERMINISTIC)
        for name, limit_s in (("one", 35), ("two", 30))
    )
    same = Claim(
        text="compiled:1, TORCHINDUCTOR_DETERMINISTIC: equal weights",
        runs=twice,
        judge=judges.same_weights,
        needs=NEEDS,
    )
    return Step("first_minutes", [*claims, same])


def next_minutes(size: Size) -> Step:
    """What the first minutes have no time for: half of what layers save, an odd vocabulary beside a padded one, torch's
    own flash attention, where the other runs have another, and float8.
    """
    claims = [_compiled(size, "0.5")]
    flags = f"{size.gpt2_micro} --activation_checkpointing compiled:1 --loss full --fused_ops none"
    torchs = _figure("compiled:1, torch's flash attention", _gpt2(size, "flash", flags), NEEDS | {FLASH_3})
    words = f"{TEXT} {size.llama_1b} --activation_checkpointing compiled:1"
    in_8_bits = _within(65, size, size.command("first-llama-fp8", words, precision="fp8"))
    claims += [torchs, _figure("Llama, float8", in_8_bits, NEEDS | {FLOAT8})]
    for words in size.vocabularies:
        flags = f"{size.gpt2_micro} --activation_checkpointing compiled:1 --config_overrides vocab_size={words}"
        claims.append(_figure(f"{words:,} words", _gpt2(size, f"words-{words}", flags), NEEDS))
    return Step("next_minutes", claims)


def _profiles(size: Size) -> list[Claim]:
    """GPT-2 with 50,257 words and the loops by hand, as ``mfu.py`` runs them; it writes after each of them."""
    run = _within(205, size, Command(name="first-profile", words="benchmarks/mfu.py --quick --output_dir {folder}"))
    judged = {f"{plan}: milliseconds by class": judges.profiled(plan) for plan in ("none", "compiled")}
    judged |= {f"{name}: beside compiled": judges.profiled(name, "compiled") for name in PEERS}
    needs = NEEDS | {SHEET}
    return [Claim(text=text, runs=(run,), judge=judge, needs=needs) for text, judge in judged.items()]


def _compiled(size: Size, ratio: str, limit_s: int = 40) -> Claim:
    flags = f"{size.gpt2_micro} --activation_checkpointing compiled:{ratio} --loss full"
    return _figure(f"compiled:{ratio}", _gpt2(size, f"compiled-{ratio}", flags, limit_s), NEEDS)


def _gpt2(size: Size, name: str, flags: str, limit_s: int = 40, **others: Any) -> Command:
    return _within(limit_s, size, size.command(f"first-{name}", f"{TEXT} {size.gpt2} {flags}", **others))


def _within(limit_s: int, size: Size, run: Command) -> Command:
    """Limit a run on a GPU; what is small may run on a CPU that is busy."""
    return run if size.is_small else replace(run, limit_s=limit_s)


def _figure(text: str, run: Command, needs: frozenset[str] = frozenset()) -> Claim:
    return Claim(text=text, runs=(run,), judge=judges.speed, needs=needs)


def _plan(size: Size) -> Command:
    flags = f"{size.gpt2} {size.gpt2_micro} --activation_checkpointing none --loss full --mixed_precision bf16"
    words = f"-m memsave_recipes.tools.cli plan {TEXT} {flags} --output_dir {{folder}} --json {{folder}}/plan.json"
    return _within(25, size, Command(name="first-plan", words=words))


def prepare(steps: Sequence[Step]) -> int:
    """Make tokenizers and tokens of all runs on texts, in the cache of ``datasets``; return how many runs there are."""
    flags_of_recipe = runpy.run_path(str(ROOT / TEXT))["Arguments"]
    all_flags = sorted({words for step in steps for words in _words_of(step)})
    for words in all_flags:
        (args,) = parse_arguments(flags_of_recipe, args=[*shlex.split(words), "--output_dir", "out"])
        names = {"tokenizer_name": args.tokenizer_name_or_path, "model_type": args.model_type}
        load_rows(args, **names, vocab_size=args.vocab_size)
    return len(all_flags)


def _words_of(step: Step) -> Iterator[str]:
    """Yield the flags of the runs of language models that no other run decides on."""
    for claim in step.claims:
        for run in claim.runs:
            if isinstance(run.words, str) and run.words.startswith(TEXT):
                yield run.words.removeprefix(TEXT)
