"""The compute device: plain CPU, CPU with an emulated third tier, or whatever torch.accelerator finds."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offload.host import HostMemory, format_bytes, free_disk_bytes, host_memory, parse_bytes
from policy.tiers import Tier
from quant.kernel_choice import has_native_bf16, has_triton

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

__all__ = [
    "Device",
    "DtypeName",
    "HostMemory",
    "format_bytes",
    "free_disk_bytes",
    "host_memory",
    "make_device",
    "parse_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where units are computed.

    kind: "cpu" (two tiers), "emulated" (three tiers, the gpu tier carved from RAM) or the accelerator's type
        ("cuda", which is also ROCm's name, "xpu", ...).
    gpu_mem_bytes: the budget of the gpu tier as given; None = not given, or no gpu tier.
    notes: what the user should be told of how the device was chosen.
    """

    kind: str
    torch_device: torch.device
    gpu_mem_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind in ("cpu", "emulated")) != (self.torch_device.type == "cpu"):
            raise ValueError(f"device kind {self.kind!r} does not go with torch device {self.torch_device}")
        if self.kind == "cpu" and self.gpu_mem_bytes is not None:
            raise ValueError("a plain cpu device has no gpu tier, so it takes no gpu memory budget")
        if self.kind == "emulated" and not self.gpu_mem_bytes:
            raise ValueError("an emulated gpu tier needs a gpu memory budget above zero")

    @property
    def is_accelerator(self) -> bool:
        return self.torch_device.type != "cpu"

    @property
    def first_tier(self) -> Tier:
        return Tier.CPU if self.kind == "cpu" else Tier.GPU

    def compute_dtype(self, requested: str = "auto") -> torch.dtype:
        """The dtype to multiply in. auto: bfloat16 where it is native, else float32 (CPU) or float16.

        Raises ValueError for an unknown name and for float16 on a CPU, where it is many times slower.
        """
        names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if requested == "auto":
            if self.is_accelerator:
                return torch.bfloat16 if _accelerator_has_bf16(self.torch_device) else torch.float16
            return torch.bfloat16 if _cpu_has_bf16() else torch.float32
        if requested not in names:
            raise ValueError(f"dtype must be auto, {', '.join(names)}; got {requested!r}")
        if requested == "float16" and not self.is_accelerator:
            raise ValueError(
                "dtype float16 is not supported on the CPU, where it is many times slower than float32; "
                "use --dtype auto, float32 or bfloat16 (float16 checkpoints load with any of them)"
            )
        return names[requested]

    def gpu_memory(self) -> tuple[int, int] | None:
        """(free, total) bytes of the gpu tier: the accelerator's, or the emulated budget; else None."""
        if self.is_accelerator:
            module: Any = torch.get_device_module(self.torch_device)
            free, total = module.mem_get_info(self.torch_device)
            return int(free), int(total)
        if self.gpu_mem_bytes is None:
            return None
        return self.gpu_mem_bytes, self.gpu_mem_bytes

    def current_stream(self) -> torch.Stream:
        """The calling thread's stream on the accelerator."""
        return torch.accelerator.current_stream(self.torch_device)

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self.torch_device)

    def new_event(self) -> torch.Event:
        """An event that measures time."""
        return torch.Event(self.torch_device, enable_timing=True)

    def synchronize_compute(self) -> None:
        """Wait for what the calling thread has enqueued on its own stream: before its results are read."""
        if self.is_accelerator:
            torch.accelerator.current_stream(self.torch_device).synchronize()

    def synchronize(self) -> None:
        """Wait for everything on the accelerator. Only for the start and the end of a run."""
        if self.is_accelerator:
            torch.accelerator.synchronize(self.torch_device)


def make_device(name: str = "auto", gpu_mem_bytes: int | None = None) -> Device:
    """The device called `name`: "auto", "cpu", or an accelerator such as "cuda" or "cuda:1".

    On a CPU a gpu budget turns on the emulated third tier, carved from RAM. "auto" takes the accelerator if
    there is one. Raises ValueError if the named accelerator is not there.
    """
    if gpu_mem_bytes is not None and gpu_mem_bytes < 0:
        raise ValueError(f"gpu memory budget must not be negative, got {gpu_mem_bytes}")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        name = found.type if found is not None else "cpu"
        notes: tuple[str, ...] = ()
        if found is None and gpu_mem_bytes:
            notes = ("no accelerator found: the gpu tier is emulated in main memory",)
    else:
        notes = ()
    if name == "cpu":
        return Device(
            kind="emulated" if gpu_mem_bytes else "cpu",
            torch_device=torch.device("cpu"),
            gpu_mem_bytes=gpu_mem_bytes or None,
            notes=notes,
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known: {str(error).splitlines()[0]}") from None
    if found is None or device.type != found.type:
        have = f"only {found.type}" if found is not None else "no accelerator"
        raise ValueError(f"device {name!r} was asked for, but torch finds {have}; use --device auto or cpu")
    n_devices = torch.accelerator.device_count()
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    if index >= n_devices:
        raise ValueError(f"device {name!r} was asked for, but there are only {n_devices} of that kind")
    if gpu_mem_bytes == 0:
        raise ValueError("a gpu memory budget of 0 leaves the accelerator nothing; use --device cpu")
    has_triton(device.type)  # compiles and allocates on its first call: not in a pass that is measured
    return Device(
        kind=device.type, torch_device=torch.device(device.type, index), gpu_mem_bytes=gpu_mem_bytes
    )


def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 natively, not by widening."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    # On x86 the library also says yes for AVX512 without bf16 instructions, which widens to float32.
    return has_native_bf16()


def _accelerator_has_bf16(device: torch.device) -> bool:
    probe: Any = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if probe is None:
        return True
    try:
        return bool(probe(including_emulation=False))
    except TypeError:
        return bool(probe())
