"""Compile an XLA program for a TPU on a machine that has none, and count what the compiler says of it.

Called by tpu_compile_check.py, by the Python of an environment of its own (./setup_env.sh --tpu_compiler), since
torch_xla and jaxlib each bring their own XLA. It needs nothing else of this project:

    python tpu_compiler.py program.json     # prints one JSON object

program.json names the serialised HLO module ("hlo"), the arguments that outputs may overwrite ("aliases", argument
number to output number), "topology", "replicas", and a file for the compiled program's text ("text", or null).

A TPU's compiler estimates the cycles of each operation that it schedules. Their sum, each loop's body times its
trips, is a model of the step's time: good for comparing two versions, and not a measurement.
"""

import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

CLOCK_HZ = 1.5e9  # a v5e's: 197 TFLOP/s = 4 units of 128 x 128 products x 2 x 1.5 GHz
# Operations that take no time, or whose time is that of another: the ends of a copy that runs beside the computing.
FREE = {
    *("bitcast", "constant", "get-tuple-element", "parameter", "tuple", "while", "call", "custom-call", "iota"),
    *("copy-start", "copy-done", "slice-start", "slice-done", "after-all", "partition-id", "replica-id"),
    *("optimization-barrier", "opt-barrier", "add-dependency", "all-reduce-done"),
}
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
ELEMENT_BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2}


def compile_for_tpu(hlo: bytes, aliases: dict[int, int], topology: str, replicas: int) -> tuple[Any, float]:
    """The executable and the floating-point operations of its products.

    Raises:
        RuntimeError: the compiler's refusal, RESOURCE_EXHAUSTED where the program does not fit into the memory.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"), ("TPU_ACCELERATOR_TYPE", "v5litepod-8"), ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_WORKER_ID", "0"),
    ):  # fmt: skip
        os.environ.setdefault(name, value)
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax, xla_client
    from jax.experimental import topologies
    from jaxlib.mlir import ir

    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    if replicas > len(devices):
        raise RuntimeError(f"{replicas} replicas do not fit on {topology}, which has {len(devices)} chips")
    devices = devices[:replicas]
    options = compiler.get_compile_options(
        num_replicas=replicas, num_partitions=1, device_assignment=np.arange(replicas).reshape(replicas, 1)
    )
    stablehlo = _jax.mlir.hlo_to_stablehlo(hlo)
    with mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        functions = {f.attributes["sym_name"].value: f for f in module.body.operations}
        products = count_products(functions["main"].regions[0], functions)
        n_arguments = len(functions["main"].regions[0].blocks[0].arguments)
        functions["main"].attributes["arg_attrs"] = ir.ArrayAttr.get(
            [
                ir.DictAttr.get(
                    {"tf.aliasing_output": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), aliases[i])}
                    if i in aliases
                    else {}
                )
                for i in range(n_arguments)
            ]
        )
        executable = devices[0].client.compile(
            mlir.module_to_bytecode(module), xla_client.DeviceList(tuple(devices)), options
        )
    return executable, products


def count_products(region: Any, functions: dict[str, Any]) -> float:
    """Floating-point operations of all matrix products in a region, loops with their trips."""
    total = 0.0
    for operation in region.blocks[0].operations:
        name = operation.operation.name
        if name in ("stablehlo.dot", "stablehlo.dot_general"):
            left, out = operation.operands[0].type.shape, operation.results[0].type.shape
            contracted = re.search(r"contracting_dims = \[([\d, ]+)\]", str(operation))
            dimensions = map(int, contracted.group(1).split(",")) if contracted else [len(left) - 1]
            total += 2.0 * math.prod(out) * math.prod(left[dimension] for dimension in dimensions)
        elif name == "func.call":
            total += count_products(_callee(operation, functions).regions[0], functions)
        elif name == "stablehlo.while":
            condition = operation.regions[0].blocks[0]
            calls = [o for o in condition.operations if o.operation.name == "func.call"]
            texts = [str(condition), *(str(_callee(call, functions)) for call in calls)]
            limits = [int(n) for text in texts for n in re.findall(r"dense<(\d+)>", text)]
            total += max(limits, default=1) * count_products(operation.regions[1], functions)
    return total


def _callee(call: Any, functions: dict[str, Any]) -> Any:
    return functions[call.attributes["callee"].value]


def split_computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation of a compiled program's text by name, and the entry's name."""
    computations: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if head:
            current = head.group(2)
            computations[current] = []
            entry = current if head.group(1) else entry
        elif current:
            computations[current].append(line)
    return computations, entry


def count_cycles(text: str, parts: list[str]) -> dict[str, Any]:
    """The compiler's cycles in all and by part, the loops, the operations without an estimate, and collectives.

    Args:
        text: of the compiled, scheduled program.
        parts: names of scopes; an operation belongs to the innermost of them in its op_name.
    """
    computations, entry = split_computations(text)
    by_part = dict.fromkeys([*parts, "rest"], 0.0)
    loops: list[dict[str, Any]] = []
    unestimated: dict[str, int] = {}
    collectives = {"count": 0, "bytes": 0}

    def part_of(line: str) -> str:
        scopes = re.search(r'op_name="([^"]*)"', line)
        found = [s.split(".")[0] for s in scopes.group(1).split("/")] if scopes else []
        return next((scope for scope in reversed(found) if scope in by_part), "rest")

    def trips(line: str) -> int:
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        if known:
            return int(known.group(1))
        condition = computations[re.search(r"condition=%?([\w.\-]+)", line).group(1)]
        return max((int(n) for text in condition for n in re.findall(r"constant\((\d+)\)", text)), default=1)

    def walk(name: str, times: int, inherited: str) -> float:
        total = 0.0
        for line in computations[name]:
            instruction = INSTRUCTION.match(line)
            if instruction is None:
                continue
            shape, opcode = instruction.groups()
            part = part_of(line)
            part = inherited if part == "rest" else part
            if opcode == "while":
                n_trips = trips(line)
                body = re.search(r"body=%?([\w.\-]+)", line).group(1)
                if part == "rest":
                    part = next((p for p in map(part_of, computations[body]) if p != "rest"), "rest")
                cycles = walk(body, times * n_trips, part)
                loops.append({"part": part, "trips": n_trips, "cycles_a_trip": round(cycles)})
                total += n_trips * cycles
                continue
            if opcode in ("all-reduce", "all-reduce-start"):
                collectives["count"] += times
                collectives["bytes"] += times * shape_bytes(shape)
            estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
            if estimate:
                by_part[part] += times * int(estimate.group(1))
                total += int(estimate.group(1))
            elif opcode not in FREE and shape_bytes(shape) > 4096:  # what is smaller takes no time that counts
                unestimated[opcode] = unestimated.get(opcode, 0) + 1
        return total

    return {
        "cycles": walk(entry, 1, "rest"),
        "by_part": by_part,
        "loops": loops,
        "unestimated": unestimated,
        "all_reduces": collectives["count"],
        "all_reduce_bytes": collectives["bytes"],
    }


def shape_bytes(shape: str) -> int:
    """Bytes of a shape as the text of a program has it: f32[3,4]{1,0}, or a tuple of such."""
    total = 0
    for element, dimensions in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        size = ELEMENT_BYTES.get(element, 1)
        for extent in dimensions.split(",") if dimensions else ():
            size *= int(extent)
        total += size
    return total


def main() -> None:
    program = json.loads(Path(sys.argv[1]).read_text())
    start = time.perf_counter()
    try:
        executable, products = compile_for_tpu(
            Path(program["hlo"]).read_bytes(),
            {int(argument): output for argument, output in program["aliases"].items()},
            program["topology"],
            program["replicas"],
        )
    except Exception as error:  # of several types, by version: the compiler's own words are the result
        print(json.dumps({"error": str(error)}))
        return
    text = executable.hlo_modules()[0].to_string()
    if program["text"]:
        Path(program["text"]).write_text(text)
    memory = executable.get_compiled_memory_stats()
    print(
        json.dumps(
            {
                "compile_s": time.perf_counter() - start,
                "argument_bytes": memory.argument_size_in_bytes,
                "output_bytes": memory.output_size_in_bytes,
                "aliased_bytes": memory.alias_size_in_bytes,
                "temp_bytes": memory.temp_size_in_bytes,
                "peak_bytes": memory.peak_memory_in_bytes,
                "product_flops": products,
                **count_cycles(text, program["parts"]),
            }
        )
    )


if __name__ == "__main__":
    main()
