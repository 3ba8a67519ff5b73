"""Ways to train a model on a card, and what saves memory where a run does not fit."""
