"""SinkProbe: a linear detector of wrong answers on the attention sinks of an answer (manifest; imports no torch)."""

from hfplug import Kind, Method, Paper, hookimpl

_HERE = "hfplug.callbacks.sink_probe"

METHOD = Method(
    name="sink_probe",
    kind=Kind.CALLBACK,
    target=f"{_HERE}.callback:SinkProbeCallback",
    config=f"{_HERE}.config:SinkProbeConfig",
    summary="logistic probe on the strongest attention sinks of prompt and answer: how likely the answer is wrong",
    paper=Paper(
        title="SinkProbe: Attention Sinks as Internal Signals for Hallucination Detection",
        venue="ICML 2026",
        url="https://arxiv.org/abs/2604.10697",
        fidelity="our reading",
    ),
    requires=("transformers>=5.24",),
    capabilities={
        "sdpa, eager, flex attention, attention methods of hfplug": True,
        "left and right padding": True,
        "fitting": "needs scikit-learn (extra probes); prediction needs numpy alone",
        "heat map": "needs matplotlib (extra plots)",
        "another model, other layers, heads or k than fitted on": "refused",
        "encoder-decoder models": False,
    },
    limits=(
        "No fitted probe is shipped, and one works for no other model: features are tied to layers and heads.",
        "Scores depend on the length of the text: compare with the features prompt_length and answer_length on your data.",
        "A change of the prompt's format (chat template) shifts the features; the format is recorded and checked.",
    ),
    example='Trainer(..., callbacks=[SinkProbeCallback(probe="probe/", records="held_out.jsonl")])',
    exports=(
        f"{_HERE}.probe:SinkProbe",
        f"{_HERE}.features:FeatureTable",
        f"{_HERE}.extract:extract",
        f"{_HERE}.evaluate:auroc",
        f"{_HERE}.evaluate:baselines",
        f"{_HERE}.evaluate:cross_validate",
        f"{_HERE}.records:groups_of",
        f"{_HERE}.records:read_records",
    ),
)


@hookimpl
def hfplug_methods() -> list[Method]:
    """Declare the method."""
    return [METHOD]
