"""Fine-tuning on conversations as people run it: the loss of replies, the same in every layout, and a usable model."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from lives import curve
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from memsave_recipes.data.text.chat_template import encode, set_chat_template
from memsave_recipes.data.text.conversations import load_conversations
from memsave_recipes.data.text.documents import TextArguments
from memsave_recipes.data.text.rows import RowArguments, load_rows
from memsave_recipes.data.text.tokenizers import load_tokenizer

RECIPE = "language_modeling"
TOY_LOSS = 5.25  # three seeds: 5.12, 5.10, 5.04; untrained 7.64
SHAPES = {
    "gpt2": "n_layer=2,n_head=2,n_embd=32",
    "llama": "num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=1,hidden_size=32,intermediate_size=48",
}
SHORT = [
    *("--block_size", "64", "--global_batch_size", "8", "--micro_batch_size", "3", "--max_steps", "4"),
    *("--logging_steps", "1", "--vocab_size", "300", "--learning_rate", "0.01"),
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def turns(*contents):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, contents, strict=False)]


def scratch(model_type):
    return ["--model_type", model_type, "--config_overrides", SHAPES[model_type]]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    rows = [{"messages": turns(f"{n} and {n}?", f"{2 * n}.", "Why?", "I counted.")} for n in range(60)]
    return write(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


@pytest.fixture
def small(chats):
    """The flags of a small run."""
    return [*SHORT, "--train_file", chats, *scratch("llama")]


@pytest.mark.parametrize("strategy", ["segments:2", "budget:bitwise"])
def test_checkpointing_changes_nothing(train, tmp_path, small, strategy):
    flags = [*small, "--loss", "chunked"]
    plain_gib = train(*flags, output="plain")["memory"]["peak_allocated_gib"]
    budget = ["--memory_budget_gib", f"{0.97 * plain_gib:.6f}"] if strategy.startswith("budget") else []
    train(*flags, "--activation_checkpointing", strategy, *budget, output="planned")
    assert curve(tmp_path / "planned") == curve(tmp_path / "plain")
    plain, planned = (load_file(tmp_path / name / "final/model.safetensors") for name in ("plain", "planned"))
    assert all(torch.equal(plain[name], planned[name]) for name in plain)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, chats):
    """A folder with a small GPT-2 in float64, and its tokenizer with ChatML."""
    folder = tmp_path_factory.mktemp("pretrained")
    conversations = load_conversations(TextArguments(train_file=[chats])).train["messages"]
    contents = (message["content"] for messages in conversations for message in messages)
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
    for messages in load_conversations(TextArguments(train_file=[chats])).train["messages"]:
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


def test_one_and_two_ranks_train_the_same(train, train_on_ranks, chats, tmp_path):
    flags = [*SHORT, "--train_file", chats, *scratch("gpt2"), "--dtype", "float64"]
    train(*flags, output="one")
    train_on_ranks(2, *flags, output="two")
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-12)


def test_the_loss_is_that_of_replies_unless_prompts_count_too(train, tmp_path, small):
    replies = train(*small)["tokens_seen"]
    assert train(*small, "--train_on_prompt", output="prompts")["tokens_seen"] > 1.5 * replies
    figures = json.loads((tmp_path / "run/results.json").read_text())["eval"]
    assert 0 < figures["bits_per_byte"] < 64


def test_what_is_saved_replies_by_its_template_and_stops(train, tmp_path, chats, small, capsys):
    train(*small, "--prompt", "7 and 7?")
    shown = capsys.readouterr().out
    assert "sample: 7 and 7?\n" in shown
    assert "reply: " in shown
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id
    prompt = tokenizer.apply_chat_template(turns("7 and 7?"), add_generation_prompt=True, return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=5).shape[1] > prompt.input_ids.shape[1]


def test_a_run_goes_on_where_it_was_killed(train, tmp_path, small, kill_after):
    train(*small, output="whole")
    flags = [*small, "--save_every", "1", "--resume"]
    with kill_after(2):
        train(*flags)
    train(*flags)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    ("too_long", "words", "num_left_out"),
    [
        ("drop", "20 of 37 training conversations end with the last reply within --block_size 64", 17),
        ("truncate", "30 of 37 training conversations are cut at --block_size 64, most of them without the mark", 7),
    ],
)
def test_cut_and_left_out_conversations_are_counted(train, tmp_path, capsys, too_long, words, num_left_out):
    rows = [{"messages": [*turns(f"{n}?", "a"), *turns("more", "a " * 60)]} for n in range(20)]
    rows += [{"messages": turns(f"{n}?", "a " * 60)} for n in range(10)]
    rows += [{"messages": turns("b " * 100, f"{n}")} for n in range(7)]
    flags = ["--train_file", write(tmp_path / "chats.jsonl", rows), "--validation_file"]
    flags += [write(tmp_path / "held_out.jsonl", rows[:2]), *SHORT, *scratch("llama"), "--too_long", too_long]
    train(*flags)
    shown = "".join(capsys.readouterr())
    assert words in shown
    assert f"{num_left_out} training conversations are left out" in shown


def test_a_run_of_before_cuts_conversations_as_it_began(train, tmp_path, capsys, kill_after):
    rows = [{"messages": [*turns(f"{n}?", "a"), *turns("more", "a " * 60)]} for n in range(20)]
    path = write(tmp_path / "chats.jsonl", rows)
    flags = ["--train_file", path, "--validation_file", path, *SHORT, *scratch("llama"), "--save_every", "1"]
    with kill_after(1):
        train(*flags, "--too_long", "truncate")
    config = tmp_path / "run/config.json"
    entries = json.loads(config.read_text())
    del entries["too_long"]
    config.write_text(json.dumps(entries))
    capsys.readouterr()
    train(*flags, "--resume")
    assert "20 of 20 training conversations are cut at --block_size 64" in "".join(capsys.readouterr())
    assert json.loads(config.read_text())["too_long"] == "truncate"


@pytest.mark.parametrize("too_long", ["drop", "error"])
def test_held_out_conversations_that_are_too_long_are_named_as_such(refuse, tmp_path, too_long):
    short, long = ([{"messages": turns(f"{n}?", "a " * length)} for n in range(4)] for length in (2, 90))
    flags = ["--train_file", write(tmp_path / "a.jsonl", short), "--validation_file", write(tmp_path / "b.jsonl", long)]
    message = refuse(*flags, *SHORT, *scratch("llama"), "--too_long", too_long)
    assert "4 held-out conversations" in message or "4 of 4 held-out conversations" in message


# Bad input

MISTAKES = {
    "no assistant": (turns("a"), [], "row 2 has no turn of the assistant"),
    "an unknown role": ([{"role": "bot", "content": "a"}], [], "row 2 message 1 has the role 'bot'"),
    "empty messages": ([], [], "row 2 has no messages"),
    "a preference pair": (None, [], "row 1 is a preference pair"),
    "no such template": (turns("a", "b"), ["--chat_template", "no.jinja"], "--chat_template no.jinja is not a file"),
    "two sources": (turns("a", "b"), ["--dataset", "docstring-chats"], "exactly one of"),
    "streaming": (turns("a", "b"), ["--streaming"], "--streaming needs --dataset HUB_ID"),
    "a row that ends before replies": (
        turns("a " * 99, "b"),
        ["--block_size", "4"],
        "has no room for a reply of any of the 2 training",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(refuse, tmp_path, mistake):
    messages, flags, expected = MISTAKES[mistake]
    rows = [{"messages": turns("a " * 9, "b")}, {"messages": messages}]
    rows = [{"chosen": "a", "rejected": "b"}] if messages is None else rows
    path = write(tmp_path / "chats.jsonl", rows)
    assert expected in refuse(*SHORT, "--train_file", path, "--validation_file", path, *scratch("gpt2"), *flags)


def test_mixed_formats_name_the_row(refuse, tmp_path):
    path = write(tmp_path / "chats.jsonl", [{"messages": turns("a", "b")}, {"prompt": "a", "completion": "b"}])
    assert "row 2 has prompt and completion" in refuse(*SHORT, "--train_file", path, *scratch("gpt2"))


def test_a_tokenizer_without_a_template_and_one_that_drops_system_messages(refuse, tmp_path, pretrained):
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    template, tokenizer.chat_template = tokenizer.chat_template, None
    tokenizer.save_pretrained(tmp_path / "plain")
    messages = [{"role": "system", "content": "Be brief."}, *turns("a", "b")]
    path = write(tmp_path / "chats.jsonl", [{"messages": messages}])
    flags = ["--train_file", path, "--validation_file", path, "--tokenizer_name", str(tmp_path / "plain")]
    flags += [*SHORT, *scratch("gpt2")]
    assert "no chat template: pass --chat_template chatml" in refuse(*flags)
    dropping = template.replace("in messages %}", "in messages if message.role != 'system' %}")
    (tmp_path / "dropping.jinja").write_text(dropping)
    line = refuse(*flags, "--chat_template", str(tmp_path / "dropping.jinja"))
    assert "row 1: the chat template drops system messages without a word" in line


@pytest.mark.parametrize("flag", [["--chat_template", "chatml"], ["--train_on_prompt"]])
def test_flags_of_conversations_are_not_for_text(refuse, tmp_path, flag):
    path = write(tmp_path / "text.jsonl", [{"text": f"{n} is a number"} for n in range(30)])
    line = refuse(*SHORT, "--train_file", path, *scratch("gpt2"), *flag)
    assert f"{flag[0]} is for conversations" in line


def test_rows_longer_than_the_model_are_refused_before_any_data_are_read(refuse):
    line = refuse(*SHORT, "--block_size", "2048", "--train_file", "no.jsonl", *scratch("gpt2"))
    assert "--block_size 2048 is longer than the model's 1024 positions" in line


TOY = [
    *("--dataset", "docstring-chats", "--model_type", "gpt2", "--config_overrides", "n_layer=4,n_head=4,n_embd=128"),
    *("--vocab_size", "2048", "--block_size", "256", "--global_batch_size", "16", "--micro_batch_size", "8"),
    *("--learning_rate", "2e-3", "--warmup_steps", "20", "--max_steps", "100"),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_toy_set_is_learned(train):
    """The loss on held-out replies, as docs/recipes.md says."""
    untrained = train(*TOY, "--eval_only", output="untrained")["eval"]["loss"]
    assert untrained == pytest.approx(math.log(2048), abs=0.1)
    assert train(*TOY)["eval"]["loss"] < TOY_LOSS < untrained - 2
