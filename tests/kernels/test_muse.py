"""MuSe as an attention implementation: the contract, and what its card and options promise."""

from __future__ import annotations

import pytest
import torch

from hfplug.kernels.muse.backend import left_to_exact
from hfplug.kernels.muse.reference import clusters_of, reference
from hfplug.kernels.muse.scheme import Setting
from hfplug.seams.attention import options_of
from hfplug.testing.attention import AttentionContract

SMALL = {"clusters": 4, "query_clusters": 3, "block": 16, "min_length": 0}


def own_reference(call):
    """MuSe of a call in fp64, document by document, the slow way; exact where MuSe leaves it."""
    config = options_of(call.config, "muse")
    if left_to_exact(call, config) is not None:
        return None
    batch, heads, tokens, _ = call.query.shape
    groups = call.key.shape[1]
    out = torch.zeros(batch, tokens, heads, call.value.shape[3], dtype=torch.float64)
    numbers = (config.clusters, config.query_clusters, config.block, config.retrieve, config.iterations)
    setting = Setting(*numbers, False, call.scaling)
    for row, start, stop in call.rows():
        for group in range(groups):
            mine = slice(group * heads // groups, (group + 1) * heads // groups)
            q, k, v = call.query[row, mine, start:stop], call.key[row, group, start:stop], call.value[row, group, start:stop]
            with torch.no_grad():  # the clusters of fp32, as the method makes them: a tie may fall otherwise in fp64
                made = clusters_of(q, k, v, setting)
            made = [m.double() if m.is_floating_point() else m for m in made]
            found = reference(q.double(), k.double(), v.double(), setting, made)
            out[row, start:stop, mine] = found.transpose(0, 1)
    return out


class TestMuSeContract(AttentionContract):
    method, options, exact_when_short = "muse", SMALL, 32

    def reference(self, call):
        return own_reference(call)


@pytest.mark.slow
class TestMuSeRetrievingContract(TestMuSeContract):
    options = SMALL | {"retrieve": 2}
