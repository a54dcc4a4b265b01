"""The XLA inside JAX: it compiles HLO text, for a card or for an H100 that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_UNTUNED = ("xla_gpu_autotune_level", "0")
# Without the versions XLA keeps cuBLAS and cuDNN out of graphs, as for drivers before 12.3.
_H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
 registers_per_block_limit: 65536 driver_version: "13.0.0" runtime_version: "13.0.0"
 compile_time_toolkit_version: "13.0.0" } platform_name: "CUDA"
 dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3" """


def h100() -> Any:
    """Return an H100 to compile for, where JAX_PLATFORMS is ``cpu``."""
    from jax.experimental import topologies

    return topologies.get_topology_desc("h100", "cuda", topology="1x1x1", target_config=_H100).devices[0]


def executable_of(hlo: str, device: Any, flags: Iterable[tuple[str, str]], on_paper: bool = False) -> Any:
    """Compile a module with these flags of XLA; ``on_paper``: for a device that is not there, untuned."""
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jaxlib import _hlo, _jax
    from jaxlib.mlir import ir

    # StableHLO, which JAX is fed with, has no copy: they become reshapes.
    text = re.sub(r"(= \S+) copy\(", r"\1 reshape(", hlo)
    module = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    proto = _hlo.XlaComputation(module).as_serialized_hlo_module_proto()
    program = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(proto), jax_mlir.make_ir_context())
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.env_option_overrides = [*flags, *([_UNTUNED] if on_paper else [])]
    make = device.client.compile if on_paper else device.client.compile_and_load
    return make(program, xla_client.DeviceList((device,)), options)
