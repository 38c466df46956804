"""Model files on disk: which file `-m` means, what tensors it holds, and how their bytes are read.

Everything exported here is torch-free; `flexrun.checkpoint.reading` and
`flexrun.checkpoint.dequantize` make tensors.
"""

from flexrun.checkpoint.base import Checkpoint, CheckpointError, TensorInfo
from flexrun.checkpoint.resolve import ResolvedModel, is_packed_folder, open_checkpoint, resolve_model

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ResolvedModel",
    "TensorInfo",
    "is_packed_folder",
    "open_checkpoint",
    "resolve_model",
]
