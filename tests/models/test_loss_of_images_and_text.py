"""The loss of models that take images: without all logits it is that with them, and images count in both."""

import image_text_models
import pytest
import torch
from lives import loaded
from transformers import AutoModelForImageTextToText
from zoo.tiny import tiny_config

from memsave_recipes.core.errors import InputError
from memsave_recipes.models.causal_lm import CausalLMLoss
from memsave_recipes.models.image_text import build_image_text_model


def in_float64(batch):
    return {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}


@pytest.mark.parametrize("model_type", image_text_models.TYPES)
def test_chunked_is_full_with_images(model_type):
    model = image_text_models.build(model_type).double().eval()
    batch = in_float64(image_text_models.batch(model_type, model))
    own = model(**batch, use_cache=False).loss * (batch["labels"][:, 1:] != -100).sum()
    found = {}
    for loss in ("full", "chunked:5"):
        model.zero_grad()
        found[loss] = CausalLMLoss(model, loss)(**batch)
        found[loss].backward()
        found[loss, "gradients"] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found["full"], own.double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["chunked:5"], found["full"], rtol=1e-10, atol=0)
    assert found["full", "gradients"].keys() == found["chunked:5", "gradients"].keys()
    for name, gradient in found["full", "gradients"].items():
        torch.testing.assert_close(found["chunked:5", "gradients"][name], gradient, rtol=1e-7, atol=1e-10)
    others = {**batch, "pixel_values": batch["pixel_values"].flip(-1)}
    assert CausalLMLoss(model, "chunked:5")(**others) != found["chunked:5"]


def test_text_alone_is_the_decoders():
    model = image_text_models.build("llava").double().eval()
    tokens = torch.arange(3, 19).view(2, 8)
    full, chunked = (CausalLMLoss(model, loss)(input_ids=tokens, labels=tokens) for loss in ("full", "chunked:5"))
    torch.testing.assert_close(chunked, full, rtol=1e-12, atol=0)


def test_states_without_labels_are_refused():
    """GIT puts the states of the image before those of the text."""
    model = AutoModelForImageTextToText.from_config(tiny_config("git")).eval()
    tokens = torch.arange(3, 19).view(2, 8)
    with pytest.raises(InputError, match=r"GitForCausalLM makes [\d,]+ states for 16 labels"):
        CausalLMLoss(model, "full")(input_ids=tokens, labels=tokens, pixel_values=torch.randn(2, 3, 64, 64))


def test_a_model_from_scratch_has_the_image_token_of_its_tokenizer():
    """That of Gemma 3's processor is one before images."""
    processor = image_text_models.make_processor("gemma3")
    with loaded("image_text") as recipe, torch.device("meta"):
        args = recipe.Arguments(model_type="gemma3", processor_name="FOLDER", output_dir="OUT")
        model = build_image_text_model(args, processor, with_weights=False)
    assert model.config.image_token_id == processor.tokenizer.image_token_id != processor.image_token_id
