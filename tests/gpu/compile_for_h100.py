"""Compiles HLO for an H100 without one, in a Python with JAX; each line of its input is a module to compile.

A line is JSON: ``hlo``, a file; ``dump``, the folder that XLA writes to; ``flags``, pairs of name and value.
Each gets a line back, also JSON: XLA's message, or null.
"""

import json
import os
import re
import sys
from pathlib import Path

# Without the three versions XLA leaves cuBLAS and cuDNN out of CUDA graphs.
H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
 registers_per_block_limit: 65536 driver_version: "13.0.0" runtime_version: "13.0.0"
 compile_time_toolkit_version: "13.0.0" } platform_name: "CUDA"
 dnn_version_info { major: 9 minor: 10 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3" """


def main():
    os.environ["JAX_PLATFORMS"] = "cpu"
    from jax.experimental import topologies

    described = topologies.get_topology_desc("h100", "cuda", topology="1x1x1", target_config=H100)
    for line in sys.stdin:
        error = None
        try:
            compile_for(described.devices[0], **json.loads(line))
        except Exception as raised:  # the test says what is wrong, and the next module is compiled
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps(error), flush=True)


def compile_for(device, hlo, dump, flags):
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jaxlib import _hlo, _jax
    from jaxlib.mlir import ir

    # StableHLO, which JAX is fed with, has no copy.
    text = re.sub(r"(= \S+) copy\(", r"\1 reshape(", Path(hlo).read_text())
    module = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    proto = _hlo.XlaComputation(module).as_serialized_hlo_module_proto()
    program = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(proto), jax_mlir.make_ir_context())
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    flags = [("xla_gpu_autotune_level", "0"), ("xla_dump_to", dump), ("xla_dump_hlo_as_text", "True"), *flags]
    options.env_option_overrides = [tuple(flag) for flag in flags]
    device.client.compile(program, xla_client.DeviceList((device,)), options)


if __name__ == "__main__":
    main()
