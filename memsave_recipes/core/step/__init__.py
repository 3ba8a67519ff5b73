"""The step that is wanted, as values: how a global batch is cut up, by what it is stepped, and the bytes of both.

Planner and training share it: the one predicts such a step, the other runs it. No flag is read here.
"""
