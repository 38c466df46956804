"""A runner for helm-run that hands a client all requests of a run spec at once.

HELM's own executor asks with a few threads, one request each, which leaves a batch engine idle. Use with
``helm-run --runner-class-name flexrun.evaluate.helm_runner.BatchedRunner``; clients without `make_requests` are
asked as HELM does it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import ExecutionSpec, Executor, ExecutorError
from helm.benchmark.metrics.metric_service import MetricService
from helm.benchmark.runner import Runner
from helm.benchmark.window_services.tokenizer_service import TokenizerService
from helm.common.general import parallel_map
from helm.common.hierarchical_logger import hwarn
from helm.common.request import GeneratedOutput, RequestResult


class BatchedExecutor(Executor):
    """Executes a run spec's requests, those of each deployment in one call to its client."""

    def execute(self, scenario_state: ScenarioState) -> ScenarioState:
        """Fill in the results. Raises ExecutorError for a request that failed for good."""
        dispatcher = getattr(self.context, "client", None)  # a remote context has none
        if self.execution_spec.dry_run or dispatcher is None:
            return super().execute(scenario_state)
        states: list[RequestState] = list(scenario_state.request_states)
        by_deployment: dict[str, list[int]] = defaultdict(list)
        for i, state in enumerate(states):
            by_deployment[state.request.model_deployment].append(i)
        for name, indices in by_deployment.items():
            client: Any = dispatcher._get_client(name)
            if hasattr(client, "make_requests"):
                results = client.make_requests([states[i].request for i in indices])
                done = [_filled(states[i], result) for i, result in zip(indices, results, strict=True)]
            else:
                done = parallel_map(
                    self.process, [states[i] for i in indices], parallelism=self.execution_spec.parallelism
                )
            for i, state in zip(indices, done, strict=True):
                states[i] = state
        return ScenarioState(
            adapter_spec=scenario_state.adapter_spec,
            request_states=states,
            annotator_specs=scenario_state.annotator_specs,
        )


def _filled(state: RequestState, result: RequestResult) -> RequestState:
    if not result.success:
        if result.error_flags is None or result.error_flags.is_fatal is not False:
            raise ExecutorError(f"{result.error} Request: {state.request}")
        hwarn(f"Non-fatal error treated as empty completion: {result.error}")
        result.completions = [GeneratedOutput(text="", logprob=0, tokens=[])]
    return replace(state, result=result)


class BatchedRunner(Runner):
    """HELM's runner with a `BatchedExecutor`."""

    def __init__(self, execution_spec: ExecutionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(execution_spec, *args, **kwargs)
        self.executor = BatchedExecutor(execution_spec)
        self.tokenizer_service = TokenizerService(self.executor.context)
        self.metric_service = MetricService(self.executor.context)
