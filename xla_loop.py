"""A loop over time as one XLA operation: built once for its shapes, and used again at no cost to the host.

torch_xla unrolls a Python loop, and its scan traces anew at every call. Here a step is traced once, into an XLA
computation that a while loop calls; xla_ops.py builds the GRU layers and CTC on it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch_xla
import torch_xla.core.xla_builder as xb

_loops: dict[tuple, Any] = {}


class At(NamedTuple):
    """Where a step of `time_loop` reads or writes: `array`, by number, at the step's index on `axis`.

    offset: added to that index. start, size: only these entries of the last axis (reads; size 0: all).
    """

    array: int
    axis: int = 0
    offset: int = 0
    start: int = 0
    size: int = 0


def time_loop(
    name: str,
    step: Callable[[list, list, list], tuple[list, list]],
    state: Sequence[torch.Tensor],
    arrays: Sequence[torch.Tensor],
    reads: Sequence[At],
    writes: Sequence[At],
    constants: Sequence[torch.Tensor],
    n_steps: int,
    reverse: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Run `step` n_steps times on the device as one XLA while loop.

    The computation is built at the first call with these shapes and dtypes, and kept: later calls cost the host
    one operation. Nothing here is differentiable.

    Args:
        name: of the loop; with shapes and dtypes it identifies the computation, so one name means one `step`.
        step: (state, values read, constants) -> (new state, values to write), lists of tensors. A number other
            than 0 and 1 in it counts as a tensor and must come in through `constants`.
        state: tensors that a step hands to the next.
        arrays: tensors that are read and written in place, one slice a step.
        reads, writes: the slices of a step; the axis they stand on is dropped from the value.
        constants: tensors that every step sees whole.
        n_steps: the indices are 0 .. n_steps - 1.
        reverse: from the last index to the first.
    Returns:
        the last state, and the arrays after the last step.
    Raises:
        ValueError: if `step` uses a tensor that is not among its arguments.
    """
    operands = [torch.tensor(0, device=state[0].device, dtype=torch.int32), *state, *arrays, *constants]
    groups = (tuple((tuple(t.shape), t.dtype) for t in group) for group in (state, arrays, constants))
    key = (name, n_steps, reverse, tuple(reads), tuple(writes), *groups)
    if key not in _loops:
        with torch.no_grad(), torch.autocast("xla", enabled=False):
            body = _step_computation(name, step, state, arrays, reads, constants)
        _loops[key] = _build_loop(name, body, operands, (len(state), len(arrays)), reads, writes, n_steps, reverse)
    results = torch_xla._XLAC._xla_user_computation("xla::time_loop", operands, _loops[key])
    first = 1 + len(state)
    return results[1:first], results[first : first + len(arrays)]


def _step_computation(name, step, state, arrays, reads, constants) -> tuple[Any, list[int]]:
    """One step as an XLA computation, and for each of its parameters the number of the operand that it is."""

    def slice_shape(at: At) -> list[int]:
        shape = list(arrays[at.array].shape)
        shape[-1] = at.size or shape[-1]
        return shape[: at.axis] + shape[at.axis + 1 :]

    shapes = [(t.shape, t.dtype) for t in state]
    shapes += [(slice_shape(at), arrays[at.array].dtype) for at in reads]
    shapes += [(t.shape, t.dtype) for t in constants]
    operands = [xb.create_placeholder_tensor(torch.Size(shape), dtype) for shape, dtype in shapes]
    values = [operand * 1 for operand in operands]  # a placeholder that is an output itself would be no parameter
    n_state, n_inputs = len(state), len(state) + len(reads)
    new_state, written = step(values[:n_state], values[n_state:n_inputs], values[n_inputs:])
    context = torch_xla._XLAC.lowering.LoweringContext(name)
    context.set_name_string(name)
    context.build([*new_state, *written])
    ids = {context.tensor_parameter_id(operand): number for number, operand in enumerate(operands)}
    ids.pop(-1, None)  # operands that the step does not use
    n_parameters = len(context.device_parameter_id_tensor_mapping())
    if len(ids) != n_parameters:
        raise ValueError(f"{name}: the step uses {n_parameters - len(ids)} tensors or numbers that it was not given")
    return xb.computation_from_module_proto(name, context.hlo()), [ids[i] for i in range(n_parameters)]


def _build_loop(name, body, operands, counts, reads, writes, n_steps, reverse) -> Any:
    computation, parameters = body
    n_state, n_arrays = counts
    builder = xb.create_builder(name)
    loop_operands = [xb.mkparam(builder, i, xb.tensor_shape(operand)) for i, operand in enumerate(operands)]

    def index(value: int, near: xb.Op) -> xb.Op:
        return xb.Op.scalar(near.builder(), value, dtype=xb.Type.S32)

    def indices(array: xb.Op, at: At, time: xb.Op) -> list[xb.Op]:
        found = [index(0, time)] * array.shape().rank
        found[at.axis] = time + index(at.offset, time) if at.offset else time
        found[-1] = index(at.start, time)
        return found

    def read(array: xb.Op, at: At, time: xb.Op) -> xb.Op:
        sizes = list(array.shape().sizes)
        sizes[at.axis], sizes[-1] = 1, at.size or sizes[-1]
        value = array.dynamic_slice(indices(array, at, time), sizes)
        return value.reshape(sizes[: at.axis] + sizes[at.axis + 1 :])

    def write(array: xb.Op, value: xb.Op, at: At, time: xb.Op) -> xb.Op:
        sizes = list(value.shape().sizes)
        value = value.reshape([*sizes[: at.axis], 1, *sizes[at.axis :]])
        return array.dynamic_update_slice(value, indices(array, at, time))

    def condition(i: xb.Op, *_: xb.Op) -> xb.Op:
        return i < index(n_steps, i)

    def loop_body(i: xb.Op, *rest: xb.Op) -> tuple[xb.Op, ...]:
        state, arrays = list(rest[:n_state]), list(rest[n_state : n_state + n_arrays])
        constants = list(rest[n_state + n_arrays :])
        time = index(n_steps - 1, i) - i if reverse else i
        values = [*state, *(read(arrays[at.array], at, time) for at in reads), *constants]
        results = xb.Op.call(computation, [values[number] for number in parameters])
        state = [results.get_tuple_element(j) for j in range(n_state)]
        for j, at in enumerate(writes):
            value = results.get_tuple_element(n_state + j)
            arrays[at.array] = write(arrays[at.array], value, at, time)
        return (i + index(1, i), *state, *arrays, *constants)

    return xb.Op.mkwhile(tuple(loop_operands), condition, loop_body).build(name)
