"""One KV cache for several LoRA adapters of one model that read the same text."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hfplug.caching import OURS, MethodCache, MethodLayer
from hfplug.calls import Call
from hfplug.errors import ConfigError, UnsupportedError, nearest
from hfplug.kernels.lragent.config import LRAgentConfig
from hfplug.kernels.lragent.split import ModelSplit, adapted_layers, split_of, until_collected
from hfplug.options import build

_BEGUN, LOW = ("lragent", "begun"), ("lragent", "pending")


class SharedLayer(MethodLayer):
    """One layer's keys, base values and low-rank parts, each of one agent or of all.

    ``state`` holds ``keys``, ``values`` ``(rows, heads, tokens, dim)`` and ``low`` ``(rows, 1, tokens, rank)``; what is an
    agent's own has its name behind, ``low.planner``. A tensor may be longer than is known so far, after a forward that failed.

    Attributes:
        own: which of ``keys``, ``values`` and ``low`` every agent has for itself.
        whole: whether ``values`` are an agent's whole values, base and low-rank part added up.
    """

    own: frozenset[str] = frozenset()
    whole = False

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 while empty."""
        return next((t.shape[0] for t in self.state.values()), 0)

    def name(self, part: str, agent: str) -> str:
        """The name of a part in ``state``."""
        return f"{part}.{agent}" if part in self.own else part

    def extend(self, part: str, agent: str, new: Tensor, start: int, known: int) -> Tensor:
        """Store ``new`` (axis 2: tokens), of which the first ``known - start`` are there already; return all of them.

        Args:
            start: where the first of the new tokens stands.
            known: tokens that are stored in this part.
        """
        name, new = self.name(part, agent), new.detach()
        old = self.state.get(name)
        if old is None:
            alone = new.is_contiguous() and new.untyped_storage().nbytes() == new.nbytes
            self.state[name] = new if alone else new.clone(memory_format=torch.contiguous_format)
        elif start + new.shape[2] > known:
            self.state[name] = torch.cat((old[:, :, :known], new[:, :, known - start :].to(old.dtype)), dim=2)
        return self.state[name][:, :, : start + new.shape[2]]

    def cut(self, lengths: dict[str, int], shared: int) -> None:
        """Keep only so many tokens: of an agent's own parts, and of those of all."""
        for name, t in list(self.state.items()):
            _, _, agent = name.partition(".")
            kept = lengths.get(agent, 0) if agent else shared
            if not kept:
                del self.state[name]
            elif t.shape[2] > kept:
                self.state[name] = t[:, :, :kept].clone()
        self.length = shared

    def formula(self, rows: int, heads: int, key_dim: int, value_dim: int) -> int:
        """Not of one layer alone: :meth:`LowRankValueCache.formula_bytes`."""
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: whose tokens would they be?

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("lragent: this cache holds what several agents share; pass one agent's view(agent) to the model")


class LowRankValueCache(MethodCache):
    """What the agents of one model share of one text; each reads it through its :meth:`view`.

    Agents are LoRA adapters on one base, which read one text, token for token. LRAgent (arXiv 2602.01053), section 3.

    ::

        store = LowRankValueCache(model, mode="base")            # model: a PeftModel with several adapters
        for agent in ("planner", "actor"):
            model.set_adapter(agent)
            model.generate(**batch, cache=store.view(agent))

    Args:
        model: the ``PeftModel``, in evaluation mode when it is used.
        options: an :class:`LRAgentConfig`; or give its fields as keyword arguments.

    Raises:
        ConfigError: no ``PeftModel``, no such adapter, adapters that are no plain LoRA, or options that do not fit them.
        UnsupportedError: the model is of no known family, or has layers without full attention.

    Attributes:
        seen: agent -> tokens it has read (in modes ``base_lr`` and ``full``: that anybody has).
        tokens: ``(rows, length)`` int64, the text; -1 where there is padding.
    """

    method, config_class, layer_class = "lragent", LRAgentConfig, SharedLayer

    def __init__(self, model: Any, options: LRAgentConfig | None = None, **fields: Any) -> None:
        if not hasattr(model, "peft_config"):
            raise ConfigError(f"LowRankValueCache(model={type(model).__name__}) takes a PeftModel, whose adapters are the agents")
        if options is None:
            options = build(LRAgentConfig, fields, where="LowRankValueCache")
            fields = {}
        self.split: ModelSplit = split_of(model)
        super().__init__(self.split.decoder.model.config, options, **fields)
        self.model = model
        kinds = getattr(self.split.decoder.config, "layer_types", None) or []
        if strange := sorted({kind for kind in kinds if kind != OURS}):
            raise UnsupportedError(
                f"lragent: {type(self.split.decoder.config).__name__} has layers of type {strange[0]!r}: what they keep is cut "
                f"to a window, another for each agent; only {OURS!r} can be shared"
            )
        self.agents: tuple[str, ...] = options.agents or tuple(model.peft_config)
        self.seen = dict.fromkeys(self.agents, 0)
        self.tokens: Tensor | None = None
        self._weights: dict[str, list[tuple[int, int]]] = {}
        self._plan()
        self._leave = self.split.join()
        until_collected(self, self._leave)

    @classmethod
    def of(cls, model: Any, options: LRAgentConfig) -> LowRankValueCache:
        """The cache for a model; called by :func:`hfplug.caches.make`."""
        return cls(model, options)

    def _plan(self) -> None:
        options, decoder = self.options, self.split.decoder
        adapted = {agent: adapted_layers(self.model, decoder, agent) for agent in self.agents}
        first = min((i for layers in adapted.values() for i in layers), default=len(self.layers))
        keyed = sorted({i for layers in adapted.values() for i, roles in layers.items() if "k" in roles})
        if keyed and options.mode == "base" and options.keys is None:
            raise ConfigError(
                f"keys=None: an adapter adapts the key projection (layer {keyed[0]}), so keys differ between agents; choose "
                'keys="own" (each agent keeps its own) or keys="shared" (those of the agent that read first; an approximation)'
            )
        if keyed and options.mode == "base_lr" and options.keys is None:
            raise ConfigError(
                f"keys=None: an adapter adapts the key projection (layer {keyed[0]}), and in mode base_lr no agent makes its "
                'own; say keys="shared" to take those of the agent that read first'
            )
        for index, layer in enumerate(self.own_layers):
            apart = options.mode == "exact" and index > first  # here the agents' hidden states differ already
            layer.whole = apart or options.mode == "full"
            if apart:
                layer.own = frozenset(("keys", "values"))
            elif not self.together:
                own_keys = index in keyed and (options.mode == "exact" or options.keys == "own")
                layer.own = frozenset(("keys", "low") if own_keys else ("low",))
        if options.mode == "base_lr":
            self._check_tied()

    def _check_tied(self) -> None:
        head, *others = self.agents
        for layer in self.split.layers:
            for other in others:
                if layer.adapts(head) != layer.adapts(other):
                    raise ConfigError(f'mode="base_lr": adapters {head!r} and {other!r} do not both adapt {layer.path!r}')
                if layer.adapts(head) and not torch.equal(layer.factors(head)[0], layer.factors(other)[0]):
                    raise ConfigError(
                        f'mode="base_lr": adapters {head!r} and {other!r} have different lora_A on {layer.path!r}, and what one '
                        'stored would mean nothing to the other. Train them with tie_value_a, or use mode="base"'
                    )

    # -- for users --------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the text that are stored."""
        return max(self.seen.values())

    @property
    def together(self) -> bool:
        """Whether what one agent has read counts as read by all."""
        return self.options.mode in ("base_lr", "full")

    def view(self, agent: str) -> AgentView:
        """The cache to pass to the model while ``agent`` is its one active adapter.

        Raises:
            ConfigError: no such agent.
        """
        if agent not in self.seen:
            raise ConfigError(f"agent={agent!r} is not one of {list(self.agents)}{nearest(agent, self.agents)}")
        return AgentView(self, agent)

    def close(self) -> None:
        """Take the hooks off the model, unless another shared cache uses them. Views no longer work then."""
        self._leave()

    def formula_bytes(self) -> int:
        """Bytes that the stored tokens take by count: keys and base values once, low-rank parts by agent, where shared so."""
        total = 0
        for layer, source in zip(self.own_layers, self.split.layers, strict=True):
            sizes = {name.partition(".")[0]: t.element_size() * t.shape[0] for name, t in layer.state.items()}
            heads_dim = source.split.sizes[source.split.roles.index("v")]
            for part in ("keys", "values", "low"):
                ranks = [source.factors(a)[0].shape[0] if source.adapts(a) else 0 for a in self.agents]
                width = [heads_dim] * len(ranks) if part != "low" else [0] * len(ranks) if layer.whole else ranks
                tokens = list(self.seen.values()) if part in layer.own else [self.length] + [0] * (len(ranks) - 1)
                total += sizes.get(part, 0) * sum(w * n for w, n in zip(width, tokens, strict=True))
        return total

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as :meth:`SharedLayer.update`."""
        self.own_layers[0].update(key_states, value_states)
        raise AssertionError

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the text that are stored."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens of the text, for every agent.

        Raises:
            ConfigError: a positive number, or more than there are.
        """
        self._check_crop(tokens_to_remove, self.length)
        self._forget({agent: min(n, self.length + tokens_to_remove) for agent, n in self.seen.items()})

    def reset(self) -> None:
        """Forget the text."""
        self._forget(dict.fromkeys(self.seen, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become ``beam_idx`` of the rows there were, for every agent."""
        super().reorder_cache(beam_idx)
        self._rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, for every agent."""
        super().batch_repeat_interleave(repeats)
        self._rows(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, for every agent."""
        super().batch_select_indices(indices)
        self._rows(lambda t: t[indices.to(t.device)])

    def padding(self, attention_mask: Tensor) -> NoReturn:
        """Not needed: padding is read off the attention mask of the call.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "lragent: padding is read off the attention_mask the model is called with; padding() is not needed"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LowRankValueCache:
        """A copy of what is stored, for the same model."""
        made = type(self)(self.model, self.options)
        memo[id(self)] = made
        made.seen, made._weights = dict(self.seen), copy.deepcopy(self._weights)
        made.tokens = None if self.tokens is None else self.tokens.clone()
        for mine, theirs in zip(self.own_layers, made.own_layers, strict=True):
            theirs.state = {name: t.clone() for name, t in mine.state.items()}
            theirs.length, theirs.is_initialized = mine.length, mine.is_initialized
        return made

    # -- what views call --------------------------------------------------------------------------------------------------

    def _rows(self, change: Any) -> None:
        self.tokens = None if self.tokens is None else change(self.tokens)

    @staticmethod
    def _check_crop(tokens_to_remove: int, there: int) -> None:
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}): a number of tokens to take back is negative or 0")
        if -tokens_to_remove > there:
            raise ConfigError(f"crop({tokens_to_remove}): only {there} tokens are there")

    def _forget(self, seen: dict[str, int]) -> None:
        self.seen = seen
        for layer in self.own_layers:
            layer.cut(seen, self.length)
        self.tokens = None if self.tokens is None or not self.length else self.tokens[:, : self.length].clone()
        for agent in [a for a, n in seen.items() if not n]:
            self._weights.pop(agent, None)

    def begin(self, call: Call | None, view: AgentView) -> Tensor:
        """Look at a call before anything of it is stored; returns its tokens, -1 where they are padding.

        Raises:
            UnsupportedError: the call is not one of this agent, or not of this text.
        """
        agent = view.agent
        if call is None or call.cache is not view:
            raise UnsupportedError(
                f"lragent: the view of {agent!r} was used outside of the model it was made for, or after close()"
            )
        if call.training:
            raise UnsupportedError("lragent: the model is in training mode; call model.eval() (nothing stored has a gradient)")
        if call.input_ids is None:
            raise UnsupportedError(
                "lragent: the model was called with inputs_embeds; whether it is the same text is told by input_ids"
            )
        if call.restarts is not None:
            raise UnsupportedError("lragent: packed documents (positions that restart) in a cache of one text")
        self._check_active(agent)
        weights = [
            (id(t), 0 if t.is_inference() else t._version)
            for layer in self.split.layers
            if layer.adapts(agent)
            for t in (layer.projection.lora_A[agent].weight, layer.projection.lora_B[agent].weight)
        ]
        if self.seen[agent] and self._weights.setdefault(agent, weights) != weights:
            raise UnsupportedError(
                f"lragent: the weights of adapter {agent!r} were changed since it stored its part; reset() the cache"
            )
        self._weights[agent] = weights
        tokens = call.input_ids if call.attention_mask is None else call.input_ids.masked_fill(~call.attention_mask, -1)
        if self.tokens is not None and tokens.shape[0] != self.tokens.shape[0]:
            raise UnsupportedError(
                f"lragent: the cache holds {self.tokens.shape[0]} rows, the call has {tokens.shape[0]}; the agents read one batch"
            )
        start = self.seen[agent]
        if self.tokens is not None and (known := self.tokens[:, start : start + tokens.shape[1]]).shape[1]:
            other = (tokens[:, : known.shape[1]] != known).nonzero()
            if len(other):
                row, at = other[0].tolist()
                raise UnsupportedError(
                    f"lragent: token {start + at} of row {row} is {int(tokens[row, at])} for {agent!r}, and was "
                    f"{int(known[row, at])} for the agent that stored it (-1: padding); agents share a cache only where they "
                    "read one text"
                )
        return tokens

    def _check_active(self, agent: str) -> None:
        for module in self.split.loras:
            if module.merged_adapters:
                raise UnsupportedError(
                    f"lragent: adapters {module.merged_adapters} are merged into the weights; call model.unmerge_adapter() first"
                )
            if module.disable_adapters or module.active_adapters != [agent]:
                now = "none" if module.disable_adapters else module.active_adapters
                raise UnsupportedError(
                    f"lragent: the view of {agent!r} is in use while the active adapter is {now}; call "
                    f"model.set_adapter({agent!r})"
                )

    def store(self, agent: str, index: int, call: Call, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's new tokens; return what they attend to."""
        layer, source = self.own_layers[index], self.split.layers[index]
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        start = self.seen[agent]
        known = {part: start if part in layer.own else self.length for part in ("keys", "values", "low")}
        low = None
        if not layer.whole:
            values, low = source.parts(call, index, agent, values)
        keys = layer.extend("keys", agent, keys, start, known["keys"])
        values = layer.extend("values", agent, values, start, known["values"])
        if low is None:
            return keys, values
        low = layer.extend("low", agent, low, start, known["low"])
        up = source.up(agent, values.shape[1], values.dtype)
        if getattr(getattr(source.attention, "config", None), "_attn_implementation", None) == "lora_lowrank":
            call.memo[(*LOW, index)] = low, up
            return keys, values
        return keys, values + low @ up

    def commit(self, agent: str, tokens: Tensor) -> None:
        """Count what a forward that ended well has stored."""
        start, stop = self.seen[agent], self.seen[agent] + tokens.shape[1]
        if stop > self.length:
            fresh = tokens[:, self.length - start :]
            self.tokens = fresh.clone() if self.tokens is None else torch.cat((self.tokens, fresh), dim=1)
        for name in self.agents if self.together else (agent,):
            self.seen[name] = stop
        for layer in self.own_layers:
            layer.length = self.length


class _ViewLayer(CacheLayerMixin):
    """What transformers asks of a layer, of one agent."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, view: AgentView, index: int) -> None:
        super().__init__()
        self.view, self.index = view, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See :meth:`AgentView.update`."""
        return self.view.update(key_states, value_states, self.index)

    def get_seq_length(self) -> int:
        return self.view.store.seen[self.view.agent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class AgentView(Cache):
    """One agent's cache for ``generate(cache=…)`` and ``forward(cache=…)``; what it holds is its store's.

    Made by :meth:`LowRankValueCache.view`. In modes ``exact`` and ``base`` an agent first reads what others have written, with
    its own weights: hand ``generate`` the whole text, as always.
    """

    takes_parts = True

    def __init__(self, store: LowRankValueCache, agent: str) -> None:
        super().__init__(layers=[_ViewLayer(self, index) for index in range(len(store.layers))])
        self.store, self.agent = store, agent

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens of one layer and return all keys and values of this agent up to them.

        They count when the forward has ended without an error.

        Raises:
            UnsupportedError: not this agent's adapter, another text, or values that cannot be taken apart; nothing counts then.
        """
        call = self.store.split.scope.current
        if call is None or _BEGUN not in call.memo:
            tokens = self.store.begin(call, self)
            assert call is not None
            call.memo[_BEGUN] = tokens
        return self.store.store(self.agent, layer_idx, call, key_states, value_states)

    def commit(self, call: Call) -> None:
        """The forward has ended well."""
        if (tokens := call.memo.pop(_BEGUN, None)) is not None:
            self.store.commit(self.agent, tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens this agent has read; what others have read stays.

        Raises:
            ConfigError: a positive number, or more than there are.
        """
        store = self.store
        self.store._check_crop(tokens_to_remove, store.seen[self.agent])
        left = store.seen[self.agent] + tokens_to_remove
        store._forget(dict.fromkeys(store.seen, left) if store.together else {**store.seen, self.agent: left})

    def reset(self) -> None:
        """Forget what this agent has read."""
        self.crop(-self.store.seen[self.agent])

    def _alone(self, what: str) -> None:
        others = [a for a, n in self.store.seen.items() if n and a != self.agent]
        if others and len(self.store.agents) > 1:
            raise UnsupportedError(
                f"lragent: {what} of the view of {self.agent!r} would move the rows of {others} as well; do it on a "
                "copy.deepcopy() of the view, or on the store for all"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become ``beam_idx`` of the rows there were; refused while another agent has stored something."""
        self._alone("reorder_cache (beam search)")
        self.store.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times; refused while another agent has stored something."""
        self._alone("batch_repeat_interleave")
        self.store.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows; refused while another agent has stored something."""
        self._alone("batch_select_indices")
        self.store.batch_select_indices(indices)

    def __deepcopy__(self, memo: dict[int, Any]) -> AgentView:
        """The view of the same agent, of a copy of the store."""
        return AgentView(copy.deepcopy(self.store, memo), self.agent)

    def __repr__(self) -> str:
        store = self.store
        return f"AgentView({self.agent!r}, {store.seen[self.agent]} of {store.length} tokens; mode {store.options.mode!r})"


__all__ = ["LOW", "AgentView", "LowRankValueCache", "SharedLayer"]
