"""Trains with and without a plan in Trainer, TRL's SFTTrainer and a loop of one's own: the same losses, in less memory.

    python benchmarks/gpu_day/other_loops.py LOOP FOLDER

Writes loops.json. Needs an accelerator, whose allocator tells the peaks.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before torch: the same bits in every run

import harness
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

import memsave_recipes as memsave

ROWS, LENGTH, STEPS, MICRO_BATCH = 16, 64, 2, 4
WORDS = [f"word{number}" for number in range(500)]
OPTIONS: dict[str, Any] = {
    **{"max_steps": STEPS, "per_device_train_batch_size": MICRO_BATCH, "gradient_accumulation_steps": 2},
    **{"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "bf16": False},
}
TEMPLATE = "{% for turn in messages %}{{ turn.content }} </s> {% endfor %}"


def llama() -> Any:
    """The same weights at each call, on the device."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, pad_token_id=0, use_cache=False, **shape))
    return model.to(torch.accelerator.current_accelerator()).train()


def token_rows() -> torch.Tensor:
    """The same random tokens at each call."""
    return torch.randint(3, 500, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def trainer_loop(strategy: str, folder: Path) -> list[float]:
    """The losses of transformers' ``Trainer``."""
    data = Dataset.from_dict({"input_ids": (ids := token_rows().tolist()), "labels": ids})
    return _losses(Trainer(llama(), TrainingArguments(str(folder), **OPTIONS), train_dataset=data), strategy)


def trl_loop(strategy: str, folder: Path) -> list[float]:
    """The losses of TRL's ``SFTTrainer``, on conversations."""
    from trl import SFTConfig, SFTTrainer

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", "</s>", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    texts = [" ".join(WORDS[number - 3] for number in row) for row in token_rows()[:, : LENGTH - 8].tolist()]
    chats = [[{"role": "user", "content": text[:80]}, {"role": "assistant", "content": text}] for text in texts]
    config = SFTConfig(str(folder), gradient_checkpointing=False, **OPTIONS)
    data = Dataset.from_dict({"messages": chats})
    return _losses(SFTTrainer(llama(), args=config, train_dataset=data, processing_class=tokenizer), strategy)


def own_loop(strategy: str, folder: Path) -> list[float]:
    """The losses of a loop under autocast, with a plan of ``make_plan`` that ``verify`` has passed."""
    model, losses = llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = token_rows()[:MICRO_BATCH].to(model.device)
    batch = {"input_ids": ids, "labels": ids}

    def forward_backward() -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss: torch.Tensor = model(**batch).loss
        loss.backward()
        return loss.detach()

    plan = memsave.make_plan(model, batch, strategy=strategy)
    assert memsave.verify(model, plan, forward_backward).passed
    with memsave.apply_plan(model, plan):
        for _ in range(STEPS):
            losses.append(forward_backward().item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _losses(trainer: Any, strategy: str) -> list[float]:
    if strategy != "none":
        trainer.add_callback(memsave.MemsaveCallback(strategy=strategy))
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


LOOPS: dict[str, Callable[[str, Path], list[float]]] = {
    "Trainer": trainer_loop,
    "TRL": trl_loop,
    "make_plan": own_loop,
}


def main() -> None:
    """Train both ways and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("folder", type=Path)
    flags = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    found: dict[str, Any] = {}
    for prefix, strategy in (("plain_", "none"), ("", "full")):
        harness.empty_device()
        torch.accelerator.reset_peak_memory_stats()
        found[f"{prefix}losses"] = LOOPS[flags.loop](strategy, flags.folder)
        found[f"{prefix}peak_bytes"] = torch.accelerator.max_memory_allocated()
    (flags.folder / "loops.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
