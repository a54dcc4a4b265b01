"""The XLA inside JAX: it compiles HLO text, for a card or for an H100 that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_UNTUNED = ("xla_gpu_autotune_level", "0")
_H100, WAYS = (Path(__file__).with_name(name) for name in ("h100.textproto", "ways.toml"))


def h100() -> Any:
    """Return an H100 to compile for, where JAX_PLATFORMS is ``cpu``."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        "h100", "cuda", topology="1x1x1", target_config=_H100.read_text()
    ).devices[0]


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
