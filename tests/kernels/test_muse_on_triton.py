"""The whole of MuSe on its Triton kernels, in the interpreter: forward and backward against the torch forms."""

from __future__ import annotations

import pytest
import torch

from hfplug.testing.kernels import assert_rms, interpret

pytest.importorskip("triton")

CASES = {"plain": (0, False, 70), "retrieving": (2, False, 41), "leaking": (0, True, 33)}


def both_ways():
    """Runs in the interpreter: name -> (torch, Triton), each ``(o, dq, dk, dv)``."""
    from hfplug.kernels.muse import primitives, scheme, triton

    found = {}
    for name, (retrieve, leaky, n) in CASES.items():
        generator = torch.Generator().manual_seed(n)
        q, k, v, grad = (torch.randn(*s, generator=generator) for s in ((2, 2, n, 8), (2, n, 8), (2, n, 8), (2, 2, n, 8)))
        s = scheme.Setting(4, 3, 8, retrieve, 1, leaky, 0.4)
        pair = []
        for kernels in (None, triton):
            primitives._kernels = lambda _, kernels=kernels: kernels
            o, lse, made = scheme.forward(q, k, v, s)
            pair.append((o, *scheme.backward(q, k, v, s, o, lse, made, grad, (grad * o).sum(-1))))
        found[name] = tuple(pair)
    return found


@pytest.mark.slow
def test_b60_the_kernels_make_what_torch_makes():
    for name, (ours, theirs) in interpret(both_ways).items():
        for what, expected, found in zip(("o", "dq", "dk", "dv"), ours, theirs, strict=True):
            assert_rms(found, expected, 1e-6 if what == "o" else 1e-5, f"{name}: {what}")
