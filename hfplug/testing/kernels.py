"""The kernel kit: what a Triton kernel can be held to on a machine without a GPU.

Three instruments, for the kernels of hfplug and for anyone else's:

- :func:`interpret` runs a function of a test module in a process of its own under Triton's interpreter;
- :func:`compile_only` compiles a kernel for a chip that is not there and reports registers, spills and shared memory;
  :func:`assert_fits` bounds them;
- :func:`poisoned`, :func:`fenced`, :func:`assert_written` and :func:`assert_fence` show that a kernel writes every element of
  its output, and reads and writes nothing else.

:func:`rms_ratio` and :func:`assert_rms` compare numbers. A test of a kernel looks like this::

    def products():                                   # runs in the interpreter; returns tensors
        with poisoned():
            return my_op(torch.ones(5, 3))

    def test_product():
        out = interpret(products)
        assert_written(out)
        assert_rms(out, reference(torch.ones(5, 3)), 1e-6)

    @pytest.mark.parametrize("chip", CHIPS)
    def test_it_fits(chip):
        assert_fits(compile_only(my_kernel, {"x": torch.empty(4096, device="meta"), "n": 4096, "BLOCK": 128}, chip))

The interpreter has traps of its own (Triton 3.9): it keeps bfloat16 as bit patterns, so a kernel has to convert to float32
right after a load; it truncates float32 to bfloat16 where a GPU rounds (at most one unit in the last place); it runs the
programs of a grid one after the other, so it shows no race; it refuses autotuning over several configurations.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfplug.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Chip:
    """A compilation target: Triton's backend, architecture and warp size, and the shared memory one block may take in bytes."""

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


CHIPS: dict[str, Chip] = {
    "sm_80": Chip("cuda", 80, 32, 163 * 1024),  # A100; CUDA C++ programming guide, maximum shared memory per block
    "sm_90": Chip("cuda", 90, 32, 227 * 1024),  # H100, H200
    "sm_100": Chip("cuda", 100, 32, 227 * 1024),  # B200
    "gfx942": Chip("hip", "gfx942", 64, 64 * 1024),  # MI300; CDNA3 guide, local data share
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    ``registers``: per thread (AMD: vector registers, accumulation registers included). ``spills``: bytes per thread stored to
    memory for want of registers (AMD: 4 for each spilled register). ``shared``: bytes per block. ``code``: the assembly.
    """

    kernel: str
    chip: str
    registers: int
    spills: int
    shared: int
    code: str

    def __str__(self) -> str:
        return (
            f"{self.kernel} on {self.chip}: {self.registers} registers, {self.spills} bytes spilled, {self.shared} bytes shared"
        )


# -- the interpreter ---------------------------------------------------------------------------------------------------

# The module is executed under a name of its own: what __main__ would run must not run.
_CHILD = """
import importlib.util, sys
file, function, folder = sys.argv[1:]
import torch, triton
assert triton.knobs.runtime.interpret
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("hfplug_interpreted", file)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
args, kwargs = torch.load(folder + "/arguments.pt")
torch.save(getattr(module, function)(*args, **kwargs), folder + "/result.pt")
"""


def interpret(function: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any) -> Any:
    """Call a function in a process of its own, where every kernel runs under Triton's interpreter, on the CPU.

    Triton decides when a kernel is decorated, so ``TRITON_INTERPRET=1`` has to stand before the first import: hence the
    process, and hence the function is named by its file. One process takes seconds to start: give it many cases at once.

    Args:
        function: defined at the top level of a file (a test module); it is imported there anew.
        args, kwargs: tensors, dtypes, numbers, strings, and lists, tuples and dicts of them; the result likewise.
        timeout: seconds.

    Raises:
        ConfigError: the function has no name at the top level of a file.
        RuntimeError: it raised, with the traceback of the other process; or Triton is not installed there.
        subprocess.TimeoutExpired: it took longer than ``timeout``.
    """
    import torch

    name, file = function.__qualname__, Path(function.__code__.co_filename)
    if not name.isidentifier() or not file.is_file():
        raise ConfigError(f"function is {name!r} in {str(file)!r}; it must be defined at the top level of a file")
    with tempfile.TemporaryDirectory() as folder:
        torch.save((args, kwargs), Path(folder) / "arguments.pt")
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-c", _CHILD, str(file), name, folder]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} failed in the interpreter (exit status {done.returncode}):\n{done.stderr}")
        return torch.load(Path(folder) / "result.pt")


# -- compilation -------------------------------------------------------------------------------------------------------


def compile_only(
    kernel: Any, arguments: Mapping[str, Any], chip: str, *, num_warps: int = 4, num_stages: int = 3, **options: Any
) -> Resources:
    """Compile a kernel as a launch with these arguments would, for a chip that need not be there. Launches nothing.

    Triton's specialisations are those of a launch: an integer equal to 1 is a constant, one divisible by 16 is known to be,
    and tensors are taken to be aligned to 16 bytes, as torch allocates them.

    Args:
        kernel: decorated with ``@triton.jit`` (of an autotuned one, its ``.fn``), not under the interpreter.
        arguments: a value for every parameter of the kernel. Of tensors only the dtype counts: ``device="meta"`` will do.
        chip: a key of :data:`CHIPS`.
        num_warps, num_stages, options: as for a launch.

    Raises:
        ConfigError: unknown chip; a parameter without a value or a value without a parameter; not a compiled kernel.
        triton.CompilationError: the kernel is not valid for this chip.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if chip not in CHIPS:
        raise ConfigError(f"chip is {chip!r}; it must be one of {', '.join(CHIPS)}{nearest(chip, CHIPS)}")
    if not isinstance(kernel, triton.JITFunction):
        raise ConfigError(
            f"kernel is a {type(kernel).__name__}; it must be a function under @triton.jit, without TRITON_INTERPRET"
        )
    if set(arguments) != set(kernel.arg_names):
        missing, unknown = set(kernel.arg_names) - set(arguments), set(arguments) - set(kernel.arg_names)
        raise ConfigError(f"arguments of {kernel.__name__}: missing {sorted(missing)}, unknown {sorted(unknown)}")

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else _kind(parameter.name, value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif kind.startswith("*") or (isinstance(value, int) and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    target = CHIPS[chip]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    chosen = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, **options}
    log = io.StringIO()
    knobs = triton.knobs
    # The log of triton's own call of ptxas: figures of the very code a launch would run. A cached kernel has no log.
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=chosen)
    read = _read_amd if target.backend == "hip" else _read_nvidia
    registers, spills, shared, code = read(compiled, log.getvalue())
    return Resources(kernel.__name__, chip, registers, spills, shared, code)


def _kind(name: str, value: Any) -> str:
    """A value's place in a kernel's signature."""
    import torch
    from triton.runtime.jit import mangle_type

    if value is None or (type(value) is int and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor) or type(value) in {int, float, bool}:
        return str(mangle_type(value))
    raise ConfigError(f"arguments[{name!r}] is a {type(value).__name__}; it must be a tensor, an int, a float, a bool or None")


def _number(pattern: str, text: str) -> int:
    if found := re.search(pattern, text):
        return int(found[1])
    raise RuntimeError(f"the compiler reported no {pattern!r}:\n{text}")


def _read_nvidia(compiled: Any, log: str) -> tuple[int, int, int, str]:
    spills = _number(r"(\d+) bytes spill stores", log)
    return _number(r"Used (\d+) registers", log), spills, int(compiled.metadata.shared), compiled.asm["ptx"]


def _read_amd(compiled: Any, _log: str) -> tuple[int, int, int, str]:
    code = compiled.asm["amdgcn"]
    vectors, scalars = (_number(rf"\.{kind}_spill_count:\s*(\d+)", code) for kind in ("vgpr", "sgpr"))
    # Static memory is in the code's metadata; what triton asks for at launch is in its own.
    shared = max(_number(r"\.group_segment_fixed_size:\s*(\d+)", code), int(compiled.metadata.shared))
    return _number(r"\.vgpr_count:\s*(\d+)", code), 4 * (vectors + scalars), shared, code


def assert_fits(resources: Resources) -> None:
    """No register spilled, and no more shared memory than a block may take: triton itself checks that only at a launch."""
    limit = CHIPS[resources.chip].shared_limit
    assert resources.spills == 0, str(resources)
    assert resources.shared <= limit, f"{resources}; the chip has {limit}"


# -- memory ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that torch hands out uninitialised is NaN (integers: the largest), whoever allocates it.

    An element that no kernel wrote is then visible to :func:`assert_written`. This is torch's own switch for deterministic
    runs; operations without a deterministic form warn.
    """
    import torch
    from torch.utils import deterministic as module

    deterministic: Any = module  # its switch is a property of the module, which type checkers do not see
    mode, fill = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fill


def assert_written(*tensors: torch.Tensor) -> None:
    """No element is NaN."""
    for tensor in tensors:
        left = tensor.isnan()
        assert not left.any(), f"{int(left.sum())} of {tensor.numel()} elements are NaN, first at {left.nonzero()[0].tolist()}"


def fenced(tensor: torch.Tensor, margin: int | None = None) -> torch.Tensor:
    """A contiguous copy between two margins of NaN in one allocation, of floating point.

    A kernel that reads past either end gets NaN, and 0 · NaN is NaN; one that writes there is found by :func:`assert_fence`.

    Args:
        tensor: floating point, any shape.
        margin: elements on each side; by default as many as the tensor has, at least 65536. It has to exceed a tile.
    """
    import torch

    if not tensor.is_floating_point():
        raise ConfigError(f"tensor is {tensor.dtype}; it must be of floating point, as the margins are NaN")
    size, margin = tensor.numel(), max(tensor.numel(), 1 << 16) if margin is None else margin
    memory = torch.full((size + 2 * margin,), float("nan"), dtype=tensor.dtype, device=tensor.device)
    memory[margin : margin + size] = tensor.detach().flatten()
    return memory[margin : margin + size].view(tensor.shape)


def assert_fence(tensor: torch.Tensor) -> None:
    """The margins of a tensor made by :func:`fenced` are still NaN."""
    import torch

    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = torch.as_strided(tensor.detach(), (size,), (1,), 0)
    start = tensor.storage_offset()
    outside = torch.ones(size, dtype=torch.bool, device=tensor.device)
    outside[start : start + tensor.numel()] = False
    assert outside.any(), "the tensor has no margins: make it with fenced()"
    hit = outside.logical_and(memory.isnan().logical_not())
    assert not hit.any(), f"{int(hit.sum())} elements written outside, first {int(hit.nonzero()[0]) - start} from the start"


# -- numbers -----------------------------------------------------------------------------------------------------------


def rms_ratio(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``expected``, in float64; 0 where both are empty or equal.

    Shapes must agree. A reference of zeros gives infinity unless it is met exactly; NaN gives NaN.
    """
    assert found.shape == expected.shape, f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    error = (found.double() - expected.double()).norm().item()
    size = expected.double().norm().item()
    return 0.0 if error == 0 else error / size if size else float("inf")


def assert_rms(found: torch.Tensor, expected: torch.Tensor, bound: float, what: str = "") -> None:
    """:func:`rms_ratio` is at most ``bound``; NaN is not."""
    ratio = rms_ratio(found, expected)
    assert ratio <= bound, f"{what or 'result'}: RMS error {ratio:.2e} of the reference, more than {bound:.0e}"
