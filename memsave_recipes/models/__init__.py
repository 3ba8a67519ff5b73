"""Models that the recipes train, and weight files from disk, without pickle.

NOTE [ decisions ]
* A causal language model and its loss are one module (``causal_lm.py``), so that DDP and autocast see one forward.
  How hidden states become logits is read from the model's configuration and then tried on a few tokens; so is whether
  it keeps packed documents apart. A model that fails the trial is refused by name, or its loss is computed the usual
  way.
* Adapters go into the model where it stands: the names of its blocks, and so its plans, stay the same.
"""
