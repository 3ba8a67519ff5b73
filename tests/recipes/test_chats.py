"""Fine-tuning on conversations as people run it: the loss of replies, the same in every layout, and a usable model."""

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from lives import curve, scratch, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from memsave_recipes.data.text.chat_template import encode, set_chat_template
from memsave_recipes.data.text.conversations import load_conversations
from memsave_recipes.data.text.documents import TextArguments
from memsave_recipes.data.text.rows import RowArguments, load_rows
from memsave_recipes.data.text.tokenizers import load_tokenizer

RECIPE = "language_modeling"
TOY_LOSS = 5.25  # three seeds: 5.12, 5.10, 5.04; untrained 7.64
SHORT = [
    *("--block_size", "64", "--global_batch_size", "8", "--micro_batch_size", "3", "--max_steps", "4"),
    *("--logging_steps", "1", "--learning_rate", "0.01"),
]


def turns(*contents):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, contents, strict=False)]


def trained_on(path):
    rows = load_conversations(TextArguments(train_file=[path])).train["conversation"]
    return [json.loads(row)["messages"] for row in rows]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    rows = [{"messages": turns(f"{n} and {n}?", f"{2 * n}.", "Why?", "I counted.")} for n in range(60)]
    return write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


@pytest.fixture
def small(chats):
    """The flags of a small run."""
    return [*SHORT, "--train_file", chats, *scratch("llama")]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, chats):
    """A folder with a small GPT-2 in float64, and its tokenizer with ChatML."""
    folder = tmp_path_factory.mktemp("pretrained")
    contents = (message["content"] for messages in trained_on(chats) for message in messages)
    tokenizer = load_tokenizer(None, contents, vocab_size=298)
    set_chat_template(tokenizer, "chatml", is_new=True)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": len(tokenizer)}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(**shape, **dropouts)).double().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("packing", "loss"), [(True, "chunked"), (False, "full")])
def test_one_step_is_that_of_a_loop_by_hand(train, tmp_path, chats, pretrained, packing, loss):
    """Conversation by conversation: the mean over the tokens of the replies, and the gradient of it."""
    rows = load_rows(RowArguments(train_file=[chats], block_size=64, packing=packing), tokenizer_name=pretrained).train
    flags = ["--model_name_or_path", pretrained, "--train_file", chats, "--block_size", "64", "--loss", loss]
    flags += ["--packing" if packing else "--no_packing", "--global_batch_size", str(len(rows))]
    flags += ["--micro_batch_size", "5", "--max_steps", "1", "--logging_steps", "1", "--dtype", "float64"]
    flags += ["--optimizer", "sgd", "--learning_rate", "0.1", "--warmup_steps", "0", "--max_grad_norm", "0"]
    train(*flags, "--lr_scheduler_type", "constant")

    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for messages in trained_on(chats):
        tokens, is_assistant = map(torch.from_numpy, encode(messages, tokenizer))
        targets = torch.where(is_assistant, tokens.long(), -100)[1:]
        total = total + F.cross_entropy(model(tokens.long()[None]).logits[0, :-1], targets, reduction="sum")
        count += int(is_assistant.sum())
    (total / count).backward()
    assert curve(tmp_path / "run")[0] == pytest.approx(float(total.detach()) / count, rel=1e-9)
    trained = load_file(tmp_path / "run/final/model.safetensors")
    for name, before in model.named_parameters():
        if name in trained:  # the head is that of the embedding
            torch.testing.assert_close(trained[name], before - 0.1 * before.grad, rtol=0, atol=1e-9, msg=name)


def test_what_is_saved_replies_by_its_template_and_stops(train, tmp_path, chats, small, capsys):
    assert 0 < train(*small)["eval"]["bits_per_byte"] < 64
    assert re.search(r"sample: \d+ and \d+\?\nreply: ", capsys.readouterr().out)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id
    prompt = tokenizer.apply_chat_template(turns("7 and 7?"), add_generation_prompt=True, return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=5).shape[1] > prompt.input_ids.shape[1]


TOOLS = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content and loop.last %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- (message.content or '') + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_calls_and_reasoning_from_the_file_to_the_reply(train, tmp_path, capsys):
    call = {"name": "add", "arguments": {"a": 1}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{number} and 1?"},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "dropped"},
                {"role": "tool", "content": f"{number + 1}"},
                {"role": "assistant", "content": f"{number + 1}.", "reasoning_content": "kept"},
            ],
            "tools": [TOOLS],
        }
        for number in range(40)
    ]
    (tmp_path / "tools.jinja").write_text(TEMPLATE)
    flags = [*SHORT, "--block_size", "512", "--train_file", write_rows(tmp_path / "chats.jsonl", rows)]
    train(*flags, *scratch("llama"), "--chat_template", str(tmp_path / "tools.jinja"))
    shown = "".join(capsys.readouterr())
    assert "the chat template leaves out reasoning, or text beside a call, in 38 training replies" in shown
    assert re.search(r"sample: \d+ and 1\?\nreply: ", shown)


def test_cut_and_left_out_conversations_are_counted(train, tmp_path, capsys):
    rows = [{"messages": [*turns(f"{n}?", "a"), *turns("more", "a " * 60)]} for n in range(20)]
    rows += [{"messages": turns(f"{n}?", "a " * 60)} for n in range(10)]
    rows += [{"messages": turns("b " * 100, f"{n}")} for n in range(7)]
    flags = ["--train_file", write_rows(tmp_path / "chats.jsonl", rows), "--validation_file"]
    flags += [write_rows(tmp_path / "held_out.jsonl", rows[:2]), *SHORT, *scratch("llama")]
    train(*flags)
    shown = "".join(capsys.readouterr())
    assert "20 of 37 training conversations end with the last reply within --block_size 64" in shown
    assert "17 training conversations are left out" in shown


# Bad input


def test_a_mistake_is_one_line_and_exit_code_2(refuse, tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", [{"chosen": "a", "rejected": "b"}])
    assert "row 1 is a preference pair" in refuse(*SHORT, "--train_file", path, *scratch("gpt2"))


def test_a_template_is_not_for_text(refuse, tmp_path):
    path = write_rows(tmp_path / "text.jsonl", [{"text": f"{n} is a number"} for n in range(30)])
    line = refuse(*SHORT, "--train_file", path, *scratch("gpt2"), "--chat_template", "chatml")
    assert "--chat_template is for conversations" in line


def test_rows_longer_than_the_model_are_refused_before_any_data_are_read(refuse):
    line = refuse(*SHORT, "--block_size", "2048", "--train_file", "no.jsonl", *scratch("gpt2"))
    assert "--block_size 2048 is longer than the model's 1024 positions" in line


TOY = [
    *("--dataset", "docstring-chats", "--model_type", "gpt2"),
    *("--config_overrides", "n_layer=4,n_head=4,n_embd=128,vocab_size=2048"),
    *("--block_size", "256", "--global_batch_size", "16", "--micro_batch_size", "8"),
    *("--learning_rate", "2e-3", "--warmup_steps", "20", "--max_steps", "100"),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_toy_set_is_learned(train):
    """The loss on held-out replies, as docs/recipes.md says."""
    untrained = train(*TOY, "--eval_only", output="untrained")["eval"]["loss"]
    assert untrained == pytest.approx(math.log(2048), abs=0.1)
    assert train(*TOY)["eval"]["loss"] < TOY_LOSS < untrained - 2
