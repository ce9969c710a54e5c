from hfplug.testing.loss import LossContract


class TestNITP(LossContract):
    method = "nitp"
