"""What transformers drives when a model is loaded with ``Mxfp4PlusConfig``."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from hfplug.kernels.mxfp4_plus.calibration import read_importance
from hfplug.kernels.mxfp4_plus.linear import Mxfp4PlusLinear
from hfplug.packed import PackedLinear
from hfplug.seams.quantizer import PluginQuantizer


class Mxfp4PlusQuantizer(PluginQuantizer):
    """Packs linear layers into MXFP4 blocks; with ``importance``, by the inputs that each layer meets."""

    method = "mxfp4_plus"
    linear_cls: ClassVar[type[PackedLinear]] = Mxfp4PlusLinear

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        file = quantization_config.importance
        self._importance = None if file is None or self.pre_quantized else read_importance(file)

    def pack(self, name: str, module: Any, weight: Tensor) -> dict[str, Tensor]:
        """As the base class's, with the importance of the layer's inputs where a file of them is given.

        Raises:
            ConfigError: the file does not know the layer, or another size of it.
        """
        if self._importance is None:
            return super().pack(name, module, weight)
        return Mxfp4PlusLinear.pack(weight, module.config, self._importance.of(name, weight.shape[1]).to(weight.device))
