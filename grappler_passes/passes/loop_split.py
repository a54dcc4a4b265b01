"""One gradient loop in two: the second sums up weight gradients, from lists that the first one stores."""

from __future__ import annotations

from tensorflow.core.framework import node_def_pb2, types_pb2

from grappler_passes.analysis.loops import Loop
from grappler_passes.graph.contexts import ENTERS, SWITCHES
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.passes.edit import GraphEditor, tensor

_DTYPES = {
    "float16": types_pb2.DT_HALF,
    "bfloat16": types_pb2.DT_BFLOAT16,
    "float32": types_pb2.DT_FLOAT,
    "float64": types_pb2.DT_DOUBLE,
    "int32": types_pb2.DT_INT32,
    "int64": types_pb2.DT_INT64,
    "bool": types_pb2.DT_BOOL,
}
_INT32, _VARIANT = types_pb2.DT_INT32, types_pb2.DT_VARIANT

Tensor = tuple[int, int]


class LoopSplit:
    """One loop taken apart: ``plan`` finds what crosses, ``apply`` edits."""

    def __init__(
        self,
        index: GraphIndex,
        editor: GraphEditor,
        loop: Loop,
        moved: set[int],
        dtypes: dict[str, tuple[str, ...]],
    ) -> None:
        self.index, self.editor, self.loop, self.moved, self.dtypes = index, editor, loop, moved, dtypes
        condition = editor.nodes[index.names[loop.condition]]
        self.device = condition.device
        self.prefix = f"{condition.name}/ooo_dW"
        self.frame = f"{loop.frame[0]}/ooo_dW"
        self.stored: dict[Tensor, int] = {}  # what a step hands over, with its dtype
        self.invariant: dict[Tensor, str] = {}  # the same in every step: the tensor outside
        self.constants: set[int] = set()

    def plan(self) -> str:
        """Sort what the moved nodes read of the others; the reason where something cannot cross."""
        for i in sorted(self.moved, key=lambda n: self.index.position[n]):
            if self.index.ops[i] in ENTERS:
                continue
            for source, port in self.index.data_preds[i]:
                if source not in self.moved and source != self.loop.condition:
                    reason = self._crossing(source, port)
                    if reason:
                        return reason
        return "" if self.stored else "the weight gradient reads nothing of a step"

    def _crossing(self, source: int, port: int) -> str:
        index, name = self.index, self.index.names[source]
        outside = self._outside(source)
        if outside is not None:
            self.invariant[source, port] = outside
        elif index.ops[source] == "Const":
            self.constants.add(source)
        else:
            dtype = self.dtypes[name][port]
            if dtype not in _DTYPES:
                return f"the weight gradient reads a {dtype} of each step: {name}"
            if (
                index.contexts[source].branches - index.contexts[self.loop.condition].branches
                and len(index.contexts[source].branches) > 1
            ):
                return f"the weight gradient reads the result of a conditional in the loop: {name}"
            self.stored[source, port] = _DTYPES[dtype]
        return ""

    def _outside(self, source: int) -> str | None:
        """The tensor outside the loop that ``source`` hands on unchanged in every step."""
        index = self.index
        if index.ops[source] in SWITCHES:
            merge = index.data_preds[source][0][0]
            following = index.back_preds.get(merge, [])
            if len(following) != 1 or index.data_preds[following[0]][0] != (source, 1):
                return None
            source = index.data_preds[merge][0][0]
        elif source not in index.constant_enters:
            return None
        return tensor(index.names[index.data_preds[source][0][0]], index.data_preds[source][0][1])

    def apply(self) -> None:
        """Store in the first loop, build the second around the moved nodes, rewire these."""
        self._scalar("minus_one", -1)
        lists = {key: self._store(k, key, dtype) for k, (key, dtype) in enumerate(self.stored.items())}
        self._counter(next(iter(lists.values())))
        now: dict[Tensor, str] = {(self.loop.condition, 0): f"{self.prefix}/condition"}
        for k, (key, outside) in enumerate(self.invariant.items()):
            now[key] = self._enter_constant(f"invariant_{k}", outside, self._type(key))
        for source in sorted(self.constants):
            now[source, 0] = self._clone(source)
        for k, (key, dtype) in enumerate(self.stored.items()):
            now[key] = self._load(k, key, lists[key], dtype)
        for i in self.moved:
            self._rewire(i, now)

    def _type(self, key: Tensor) -> int:
        name = self.dtypes[self.index.names[key[0]]][key[1]]
        return int(types_pb2.DataType.Value(f"DT_{name.upper()}")) if name not in _DTYPES else _DTYPES[name]

    def _rewire(self, i: int, now: dict[Tensor, str]) -> None:
        name = self.index.names[i]
        node = self.editor.nodes[name]
        if self.index.ops[i] in ENTERS:
            node.attr["frame_name"].s = self.frame.encode()
            return

        def replace(producer: str, port: int) -> list[str]:
            source = self.index.index[producer]
            if source in self.moved:
                return [tensor(producer, port)]
            return [f"^{self.prefix}/step"] if port < 0 else [now[source, port]]

        self.editor.map_inputs(name, replace)

    def _add(self, suffix: str, op: str, *inputs: str, device: str | None = None, **types: int) -> str:
        where = self.device if device is None else device
        node = self.editor.add(f"{self.prefix}/{suffix}", op, inputs, where)
        for key, value in types.items():
            node.attr[key].type = value
        return f"{self.prefix}/{suffix}"

    def _scalar(self, suffix: str, value: int, *inputs: str) -> str:
        name = self._add(suffix, "Const", *inputs, dtype=_INT32)
        content = self.editor.nodes[name].attr["value"].tensor
        content.dtype = _INT32
        content.tensor_shape.SetInParent()
        content.int_val.append(value)
        return name

    def _enter(self, suffix: str, outside: str, dtype: int, frame: str, constant: bool) -> str:
        name = self._add(suffix, "Enter", outside, T=dtype)
        node = self.editor.nodes[name]
        node.attr["frame_name"].s = frame.encode()
        node.attr["is_constant"].b = constant
        node.attr["parallel_iterations"].i = self._parallel_iterations()
        return name

    def _enter_constant(self, suffix: str, outside: str, dtype: int) -> str:
        return self._enter(suffix, outside, dtype, self.frame, constant=True)

    def _parallel_iterations(self) -> int:
        enter = next(i for i in self.loop.members if self.index.ops[i] in ENTERS)
        return int(self.editor.nodes[self.index.names[enter]].attr["parallel_iterations"].i) or 10

    def _variable(
        self, suffix: str, enter: str, condition: str, dtype: int
    ) -> tuple[str, node_def_pb2.NodeDef]:
        """Merge, Switch and NextIteration of a new loop variable; the last still lacks its input."""
        following = f"{self.prefix}/{suffix}/next"
        merge = self._add(f"{suffix}/merge", "Merge", enter, following, T=dtype)
        self.editor.nodes[merge].attr["N"].i = 2
        switch = self._add(f"{suffix}/switch", "Switch", merge, condition, T=dtype)
        self._add(f"{suffix}/next", "NextIteration", T=dtype)
        return switch, self.editor.nodes[following]

    def _store(self, k: int, key: Tensor, dtype: int) -> str:
        """Collect one tensor of each step of the first loop; the list, outside."""
        source, at = self.index.names[key[0]], f"store_{k}"
        device = self.editor.nodes[source].device
        limit = f"{self.prefix}/minus_one"
        empty = self._add(
            f"{at}/empty",
            "EmptyTensorList",
            limit,
            limit,
            device=device,
            element_dtype=dtype,
            shape_type=_INT32,
        )
        enter = self._enter(f"{at}/enter", empty, _VARIANT, self.loop.frame[0], constant=False)
        condition = self.index.names[self.loop.condition]
        switch, following = self._variable(at, enter, condition, _VARIANT)
        pushed = self._add(
            f"{at}/push",
            "TensorListPushBack",
            f"{switch}:1",
            tensor(source, key[1]),
            device=device,
            element_dtype=dtype,
        )
        following.input.append(pushed)
        return self._add(f"{at}/exit", "Exit", switch, T=_VARIANT)

    def _counter(self, stacked: str) -> None:
        """The second loop's frame: it makes as many steps as the lists are long."""
        length = self._add("length", "TensorListLength", stacked)
        limit = self._enter_constant("limit", length, _INT32)
        start = self._enter("start", self._scalar("zero", 0), _INT32, self.frame, constant=False)
        condition = f"{self.prefix}/condition"
        switch, following = self._variable("count", start, condition, _INT32)
        less = self._add("less", "Less", f"{self.prefix}/count/merge", limit, T=_INT32)
        self._add("condition", "LoopCond", less)
        step = self._add("step", "Identity", f"{switch}:1", T=_INT32)
        increment = self._scalar("one", 1, f"^{step}")
        following.input.append(self._add("add", "AddV2", step, increment, T=_INT32))
        self._scalar("any_shape", -1, f"^{step}")

    def _load(self, k: int, key: Tensor, stacked: str, dtype: int) -> str:
        entered = self._enter_constant(f"load_{k}/list", stacked, _VARIANT)
        device = self.editor.nodes[self.index.names[key[0]]].device
        return self._add(
            f"load_{k}/get",
            "TensorListGetItem",
            entered,
            f"{self.prefix}/step",
            f"{self.prefix}/any_shape",
            device=device,
            element_dtype=dtype,
        )

    def _clone(self, source: int) -> str:
        old = self.editor.nodes[self.index.names[source]]
        name = self._add(f"const_{source}", "Const", f"^{self.prefix}/step", device=old.device)
        for key, value in old.attr.items():
            if key != "_class":
                self.editor.nodes[name].attr[key].CopyFrom(value)
        return name
