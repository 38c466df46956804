"""Evaluation on the engine: our own evaluator, and the models that lm-evaluation-harness and HELM ask.

`lm_eval` and `helm_*` need the extras of those names; nothing else here does.
"""
