"""Runs the token stack so that states of upper layers reach lower layers of later tokens."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hfplug.calls import Call, named_arguments, parameter_names
from hfplug.errors import UnsupportedError
from hfplug.modeling_patches.turboconn.connections import Connections
from hfplug.modeling_patches.turboconn.pieces import Pieces, merged
from hfplug.modeling_patches.turboconn.state import FeedbackLayer, States, attach, feedback_of, joined, scratch, width
from hfplug.positions import first_tensor

if TYPE_CHECKING:
    from hfplug.modeling_patches.turboconn.patch import TurboConn

logger = logging.getLogger(__name__)


class _Frame(threading.local):
    """The stock forward that runs in this thread: what goes into its layers, and what came out."""

    def __init__(self) -> None:
        self.active = False
        self.feeds: States = {}
        self.real: Tensor | None = None
        self.always = False
        self.caught: States = {}


class Driver:
    """The forward of a patched token stack.

    Tokens are computed in groups of ``g``, with a KV cache, so that a group knows the states of the one before; or in full
    passes, each of which takes the states of the pass before, moved on by ``g`` tokens. After ``ceil(tokens / g)`` passes the
    results are those of the groups.

    Args:
        patch: the options.
        stack: the token stack.
        layers: name of its list of layers.
        targets: target layer -> its source layers.
        former: a forward that stood on the stack itself (accelerate's); ``None``: that of its class.
    """

    def __init__(
        self, patch: TurboConn, stack: nn.Module, layers: str, targets: Mapping[int, tuple[int, ...]], former: Any
    ) -> None:
        self.patch, self.stack, self.layers, self.former = patch, stack, layers, former
        self.awake = False
        self.said: set[str] = set()
        self.targets = dict(targets)
        self.sources = {s for sources in targets.values() for s in sources}
        self.names = parameter_names(stack)
        self._frame = _Frame()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frame": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _frame=_Frame())

    # -- inside the stock forward ------------------------------------------------------------------------------------------

    def after_layer(self, index: int, module: Any, args: Any, output: Any) -> Any:
        """Hook of a layer: add the feedback to what it returns, and keep what it returns.

        Under gradient checkpointing it stands outside of what is computed again.
        """
        frame = self._frame
        if not frame.active:
            return None
        hidden = first_tensor(output)
        if index in self.targets and (frame.feeds or frame.always):
            # A training step without any feedback still uses every parameter, or DDP would wait for the gradient.
            states = [frame.feeds[s] if frame.feeds else torch.zeros_like(hidden) for s in self.targets[index]]
            hidden = module.turboconn(hidden, states)
        if index in self.sources:
            real = frame.real
            frame.caught[index] = hidden if real is None else hidden.masked_fill(~real[..., None].to(hidden.device), 0)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _stock(self, arguments: Mapping[str, Any]) -> Any:
        return type(self.stack).forward(self.stack, **arguments) if self.former is None else self.former(**arguments)

    def _run(self, arguments: Mapping[str, Any], feeds: States, real: Tensor | None, training: bool) -> tuple[Any, States]:
        frame = self._frame
        frame.active, frame.feeds, frame.real, frame.always, frame.caught = True, feeds, real, training, {}
        try:
            output = self._stock(arguments)
            caught = frame.caught
        finally:
            frame.active, frame.feeds, frame.real, frame.caught = False, {}, None, {}
        if missing := sorted(self.sources - set(caught)):
            raise UnsupportedError(f"turboconn: layer {missing[0]} did not run (LayerDrop), so it has no state to pass on")
        return output, caught

    # -- around it -----------------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the forward of the stack; torch.compile leaves it as it is, since the loop and the state are Python's.

        Raises:
            UnsupportedError: the cache was filled without TurboConn, or has no place for its state.
        """
        arguments = named_arguments(self.stack, args, kwargs, self.names)
        if arguments.get("past_key_values") is not None and arguments.get("cache") is None:
            arguments["cache"] = arguments.pop("past_key_values")
        grad = torch.is_grad_enabled()
        if self._asleep(grad):
            return self._stock(arguments)
        config: Any = self.stack.config
        returns = arguments.pop("return_dict", None)
        whole = returns if returns is not None else getattr(config, "return_dict", True)
        output = self._output({**arguments, "return_dict": True}, self.stack.training and grad)
        return output if whole else output.to_tuple()

    def _asleep(self, grad: bool) -> bool:
        """Whether all feedback is 0 and no gradient of it is asked for; the model is then the stock one, bit for bit."""
        if self.awake:
            return False
        layers: Any = self.stack.get_submodule(self.layers)
        for target in self.targets:
            connections = layers[target].turboconn
            if not isinstance(connections, Connections):  # inside PEFT
                return False
            if grad and any(p.requires_grad for p in connections.parameters()):
                return False
            if not connections.silent:
                self.awake = True  # not asked again: projections that went back to 0 cost time, but change nothing
                return False
        return True

    def _output(self, arguments: dict[str, Any], training: bool) -> Any:
        config: Any = self.stack.config
        call, size = Call(arguments, self.stack.training), self.patch.group_size
        checkpointing = training and any(getattr(m, "gradient_checkpointing", False) for m in self.stack.modules())
        use_cache = arguments.get("use_cache")
        if call.cache is None and not checkpointing and (getattr(config, "use_cache", False) if use_cache is None else use_cache):
            call.cache = DynamicCache(config=config)
        arguments["cache"] = call.cache
        place = None if call.cache is None else self._place(call.cache, call.past)
        before = None if place is None else place.last(size)
        mode = self.patch.training if training else self.patch.prefill
        cut = self._cut(arguments, call, checkpointing) if mode == "exact" and call.length > size else None
        if cut is not None:
            output, states = self._by_groups(cut, call, before, training)
        else:
            output, states = self._by_passes(arguments, call, before, training, mode)
        if call.cache is not None and not checkpointing:  # which takes the cache away from the layers
            place = place or attach(call.cache, size)
            for each in states:
                place.append(each)
        return output

    def _place(self, cache: Any, past: int) -> FeedbackLayer | None:
        if not hasattr(cache, "layers") or not hasattr(cache, "get_mask_sizes"):
            raise UnsupportedError(
                f"turboconn: {type(cache).__name__} is no transformers Cache with layers and has no place for the states that "
                "later tokens need; continuous batching is not supported"
            )
        place = feedback_of(cache)
        seen = 0 if place is None else place.length
        if seen != past:
            raise UnsupportedError(
                f"turboconn: the cache holds {past} tokens, but states of {seen}; it was filled without turboconn, or changed by "
                "other means than its own methods. Fill a new cache with the patched model"
            )
        return place

    def _cut(self, arguments: dict[str, Any], call: Call, checkpointing: bool) -> Pieces | None:
        """The arguments by groups; ``None`` where only full passes give the same."""
        config: Any = self.stack.config
        attentions = arguments.get("output_attentions")
        if checkpointing:
            why = "gradient checkpointing allows no cache"
        elif getattr(config, "output_attentions", False) if attentions is None else attentions:
            why = "attention maps are asked for"
        elif call.cache is None and call.restarts is not None:
            why = "packed documents are told apart without a cache only"
        else:
            given = dict(arguments)
            if call.cache is None:
                given |= {"cache": DynamicCache(config=config), "use_cache": True}
            cut = Pieces(given, call.length, config)
            if not cut.obstacle:
                return cut
            why = f"{cut.obstacle} cannot be cut into groups of tokens"
        if why not in self.said:
            self.said.add(why)
            logger.warning("turboconn: exact feedback by as many full passes as there are groups of tokens: %s", why)
        return None

    # -- the two ways ----------------------------------------------------------------------------------------------------------

    def _by_groups(self, cut: Pieces, call: Call, before: States | None, training: bool) -> tuple[Any, list[States]]:
        size, real, links = self.patch.group_size, call.attention_mask, self._links(call)
        outputs, states, sizes = [], [], []
        for start in range(0, call.length, size):
            stop = min(start + size, call.length)
            feeds = self._feeds(before, None, stop - start, None if links is None else links[:, start:stop])
            here = None if real is None else real[:, start:stop]
            output, before = self._run(cut.arguments_of(start, stop), feeds, here, training)
            outputs.append(output)
            states.append(before)
            sizes.append(stop - start)
        return merged(outputs, sizes, {} if call.cache is not None else {"cache": None}), states

    def _by_passes(
        self, arguments: dict[str, Any], call: Call, before: States | None, training: bool, mode: str
    ) -> tuple[Any, list[States]]:
        enough = -(-self._longest(call) // self.patch.group_size)
        passes = enough if mode == "exact" or self.patch.passes is None else min(self.patch.passes, enough)
        with_gradient = passes if not training or self.patch.backward_passes is None else self.patch.backward_passes
        links, own, output = self._links(call), None, None
        for turn in range(passes):
            given = arguments
            if turn < passes - 1:
                given = {**arguments, "cache": scratch(call.cache), "use_cache": call.cache is not None}
            feeds = self._feeds(before, own, call.length, links)
            with torch.no_grad() if turn < passes - with_gradient else contextlib.nullcontext():
                output, own = self._run(given, feeds, call.attention_mask, training)
        return output, [] if own is None else [own]

    def _feeds(self, before: States | None, own: States | None, length: int, links: Tensor | None) -> States:
        """For each source its states ``group_size`` tokens before each of ``length`` tokens, 0 where there is none.

        Args:
            before: states of the last tokens before these.
            own: states of these tokens, as far as they are known.
            length: number of tokens.
            links: ``(batch or 1, length)`` bool, whether a token is of the document that its state would come from.
        """
        parts = [part for part in (before, own) if part is not None]
        if not parts:
            return {}
        early = self.patch.group_size - (0 if before is None else width(before))
        late = max(0, length - early - sum(map(width, parts)))
        feeds = joined(parts)
        if early or late:
            feeds = {s: nn.functional.pad(t, (0, 0, early, late)) for s, t in feeds.items()}
        feeds = {s: t[:, :length] for s, t in feeds.items()}
        return feeds if links is None else {s: t.masked_fill(~links[..., None].to(t.device), 0) for s, t in feeds.items()}

    def _links(self, call: Call) -> Tensor | None:
        if call.restarts is None:
            return None
        document, size = call.restarts.cumsum(1), self.patch.group_size
        links = document == 0
        links[:, size:] = document[:, size:] == document[:, :-size]
        return links

    def _longest(self, call: Call) -> int:
        if call.restarts is None:
            return call.length
        place = torch.arange(call.length, device=call.restarts.device)
        start = torch.where(call.restarts, place, 0).cummax(1).values
        return int((place - start).max()) + 1


__all__ = ["Driver"]
