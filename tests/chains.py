"""Blocks of chains, with costs by hand."""

from memsave_recipes.core.plans.chain import BlockCosts, BlockOption
from memsave_recipes.core.plans.plan import Action


def option(action=Action.KEEP, *, added_s=0.0, saved=0, forward=0, backward=0, saves=""):
    """The costs of an action; ``saves`` names the input (``i``) and the output (``o``)."""
    return BlockOption(
        action=action,
        added_s=added_s,
        saved_bytes=saved,
        saves_input="i" in saves,
        saves_output="o" in saves,
        forward_transient_bytes=forward,
        backward_transient_bytes=backward,
    )


def block(name, *options, stack=0, output=0, seconds=1.0, gradient=0, passes=False):
    """A block whose backward takes twice the time of its forward."""
    return BlockCosts(
        name=name,
        stack=stack,
        forward_s=seconds,
        backward_s=2 * seconds,
        output_bytes=output,
        passes_input=passes,
        gradient_bytes=gradient,
        options=options,
    )
