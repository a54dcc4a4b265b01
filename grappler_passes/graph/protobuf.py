"""The protobuf types of graphs, for annotations: who imports them from here imports no TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorflow.core.framework.graph_pb2 import GraphDef as GraphDef
    from tensorflow.core.framework.node_def_pb2 import NodeDef as NodeDef
