"""One line per method joins the contract of its kind."""

from hfplug.testing.callback import CallbackContract
from hfplug.testing.tuner import TunerContract


class TestRowScale(TunerContract):
    method, merge, merges_quantized = "rowscale", {}, False


class TestTokenCounter(CallbackContract):
    method = "token_counter"
