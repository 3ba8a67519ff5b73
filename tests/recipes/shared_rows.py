"""Small language models whose rows ranks share, and the text that they train on, in float64."""

from lives import write_rows

WIDE = "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=48"
SHAPES = {
    "gpt2": "n_layer=2,n_head=4,n_embd=32",
    "llama": f"{WIDE},num_key_value_heads=1",
    "qwen3": f"{WIDE},num_key_value_heads=2,head_dim=8",
    "mistral": f"{WIDE},num_key_value_heads=2,sliding_window=9,num_hidden_layers=4",
    "gemma3_text": f"{WIDE},num_key_value_heads=1,head_dim=8,sliding_window=9,num_hidden_layers=6",
}
SHARED = ("--sequence_parallel", "2")


def of(model_type, *entries):
    """The flags of a model, from scratch."""
    return "--model_type", model_type, "--config_overrides", ",".join([SHAPES[model_type], "vocab_size=300", *entries])


def flags_of_data(folder):
    """Rows that neither 2 nor 4 ranks divide, and three micro-batches a step on one rank or group."""
    texts = [f"{n} and {n} are {2 * n}, and {n} times {n} are {n * n}." for n in range(60)]
    path = write_rows(folder / "text.jsonl", [{"text": text} for text in texts])
    return [
        *("--train_file", path, "--block_size", "47", "--global_batch_size", "5", "--micro_batch_size", "2"),
        *("--logging_steps", "1", "--dtype", "float64"),
        *("--lr_scheduler_type", "constant"),
    ]
