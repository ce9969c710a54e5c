"""MXFP4 quantising against torchao's ``to_mx``, the cost of emulated products, and what the Triton kernels take on four chips.

Expected before measuring (one CPU thread): quantising at least as fast as ``to_mx`` for every shared rule, block and dtype, by 3
times or more; the static macro factor under twice the plain time, the dynamic choice over 16 factors about 10 to 16 times it. A
linear layer that dequantises at every call: at most twice a stored float32 layer at 512 rows, several times it at one row.
Runs are taken in turn; a ratio above 1 in "times as fast" means that ours is faster. Compiling says nothing about time.

    python benchmarks/mxfp4_speed.py            # --quick: fewer repeats, one chip; writes nothing
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _bench import ResultRow, interleave, ratios, write

from hfplug.kernels.mxfp4_plus import codec, ops
from hfplug.kernels.mxfp4_plus.formats import Format, Packed
from hfplug.testing.kernels import CHIPS, compile_only

METHODS = ("mxfp4_plus",)
SIZE = 1024


def quantising(repeats: int) -> dict[str, Any]:
    """Of ``SIZE`` squared normal numbers: torchao's CPU time over ours, turn by turn; and ours with factors over ours without."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
        for block in (16, 32):
            for mode in ScaleCalculationMode:
                fmt = Format(block, mode.value)
                times = interleave(
                    {
                        "torchao": lambda x=x, b=block, m=mode: to_mx(x, torch.float4_e2m1fn_x2, b, m),
                        "ours": lambda x=x, f=fmt: codec.quantize(x, f),
                    },
                    repeats,
                )
                name = f"{mode.value}, block {block}, {str(dtype)[6:]}: times as fast as torchao"
                out[name] = ratios(times["torchao"].cpu, times["ours"].cpu)
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    forms = {mbs: Format(mbs=mbs) for mbs in ("none", "static", "dynamic")}
    times = interleave({mbs: (lambda f=fmt: codec.quantize(x, f)) for mbs, fmt in forms.items()}, repeats)
    for mbs in ("static", "dynamic"):
        out[f"{mbs} factor, time over none"] = ratios(times[mbs].cpu, times["none"].cpu)
    return out


def products(repeats: int) -> dict[str, Any]:
    """CPU time of a layer of 1536 by 576 over that of the same layer stored in float32."""
    out: dict[str, Any] = {}
    weight = torch.randn(1536, 576, generator=torch.Generator().manual_seed(1))
    p, fmt = codec.quantize(weight, Format(mbs="hybrid")), Format(mbs="hybrid")
    for rows in (1, 512):
        x = torch.randn(rows, 576, generator=torch.Generator().manual_seed(2))
        runs = {
            "stored": lambda x=x: torch.nn.functional.linear(x, weight),
            "W4A16": lambda x=x: ops.linear(x, p),
            "W4A4": lambda x=x: ops.linear(x, p, act_format=fmt),
        }
        times = interleave(runs, repeats)
        for name in ("W4A16", "W4A4"):
            out[f"{name}, {rows} rows, time over float32"] = ratios(times[name].cpu, times["stored"].cpu)
    return out


def compiled(chips: list[str]) -> list[dict[str, Any]]:
    """Registers, spilled bytes and shared memory of each launch of a layer of 4096 by 4096."""
    from hfplug.kernels.mxfp4_plus import triton

    def empty(fmt: Format) -> Packed:
        sizes = (2048, 4096 // fmt.block, 4096 // fmt.macro)
        codes, scales, factors = (torch.empty(4096, size, dtype=torch.uint8, device="meta") for size in sizes)
        return Packed(codes, scales, None if fmt.mbs == "none" else factors, (4096, 4096), fmt)

    rows = []
    for chip in chips:
        torch.version.hip = "6.4" if CHIPS[chip].backend == "hip" else None  # launches differ on AMD
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for fmt in (Format(mbs="hybrid"), Format(32, "even")):
                x, y = (torch.empty(4096, 4096, dtype=dtype, device="meta") for _ in range(2))
                a, p = empty(fmt.activations), empty(fmt.weights)
                made = {
                    "quantize": triton.quantize_launch(x, a),
                    "W4A16": triton.weights_launch(x, p, None, y),
                    "W4A4": triton.both_launch(a, p, None, y),
                }
                for name, launch in made.items():
                    found = compile_only(launch.kernel, launch.arguments, chip, **launch.options)
                    fits = found.spills == 0 and found.shared <= CHIPS[chip].shared_limit
                    rows.append({
                        "chip": chip, "launch": name, "dtype": str(dtype)[6:], "block": fmt.block, "mbs": fmt.mbs,
                        "registers": found.registers, "spilled_bytes": found.spills, "shared_bytes": found.shared, "fits": fits,
                    })  # fmt: skip
    return rows


def results_row(result: dict[str, Any]) -> ResultRow:
    """What stands on the results page."""
    fast = {name: v["median"] for name, v in result["quantising"].items() if "times as fast" in name}
    layers = "; ".join(f"{name} {v['median']:.2f}" for name, v in result["products"].items())
    fit = sum(row["fits"] for row in result["compiled"])
    met = min(fast.values()) >= 1 and fit == len(result["compiled"])
    return ResultRow(
        "quantising at least as fast as torchao's to_mx on CPU; no kernel spills or exceeds shared memory on four chips",
        "none; limits of our own",
        f"{min(fast.values()):.1f} to {max(fast.values()):.1f} times as fast; {layers}; "
        f"{fit} of {len(result['compiled'])} launches fit",
        "target met" if met else "target missed",
    )


def main() -> None:
    """Measure, print medians, write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    result: dict[str, Any] = {"claim": str(__doc__).splitlines()[0]}
    result |= {"quantising": quantising(3 if quick else 15), "products": products(3 if quick else 15)}
    for part in ("quantising", "products"):
        for name, found in result[part].items():
            print(f"{name}: {found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})", flush=True)
    result["compiled"] = compiled(["sm_80"] if quick else list(CHIPS))
    for row in result["compiled"]:
        if not row["fits"]:
            print("does not fit:", row)
    print(len(result["compiled"]), "launches compiled;", sum(row["fits"] for row in result["compiled"]), "fit")
    if not quick:
        print(write("mxfp4_speed", result, results_row))


if __name__ == "__main__":
    main()
