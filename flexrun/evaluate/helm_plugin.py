"""What helm-run imports by the entry-point group "helm": registers the model of FLEXRUN_HELM_FLAGS.

    FLEXRUN_HELM_FLAGS="-m MODEL --cpu-mem 8GiB" helm-run --run-entries simple_mcqa:model=flexrun/NAME ...
        --runner-class-name flexrun.evaluate.helm_runner.BatchedRunner

NAME is the last part of MODEL, without .gguf. Without the variable nothing happens; ``flexrun helm`` sets
everything by itself.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

FLAGS_VARIABLE = "FLEXRUN_HELM_FLAGS"


def register(flags: Sequence[str]) -> str:
    """Make a model known to HELM in this process; its name there."""
    import cattrs
    from helm.benchmark.model_deployment_registry import ModelDeployments, register_model_deployment
    from helm.benchmark.tokenizer_config_registry import TokenizerConfigs, register_tokenizer_config

    from flexrun.evaluate.helm_engine import deployment_files

    files = deployment_files(flags)
    for config in cattrs.structure(files["tokenizer_configs.yaml"], TokenizerConfigs).tokenizer_configs:
        register_tokenizer_config(config)
    (deployment,) = cattrs.structure(files["model_deployments.yaml"], ModelDeployments).model_deployments
    register_model_deployment(deployment)
    return deployment.name


if os.environ.get(FLAGS_VARIABLE):
    register(shlex.split(os.environ[FLAGS_VARIABLE]))
