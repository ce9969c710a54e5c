"""Two methods of a stranger: a tuner and a callback (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl

PAPER = Paper(title="none: an example", venue="none", url="https://example.org", fidelity="our reading")


@hookimpl
def hfplug_methods() -> list[Method]:
    """The methods of this plugin."""
    return [
        Method(
            name="rowscale",
            kind=Kind.TUNER,
            target="hfplug_stranger.rowscale:RowScaleModel",
            config="hfplug_stranger.rowscale:RowScaleConfig",
            summary="one trained factor per output feature, started at 1",
            paper=PAPER,
            requires=("peft>=0.21",),
        ),
        Method(
            name="token_counter",
            kind=Kind.CALLBACK,
            target="hfplug_stranger.token_counter:TokenCounterCallback",
            config="hfplug_stranger.token_counter:TokenCounterConfig",
            summary="real tokens per row, and the number seen so far",
            paper=PAPER,
        ),
    ]
