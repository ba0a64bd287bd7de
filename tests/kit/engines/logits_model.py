"""The step's blocks in MAX, giving logits: for tests that compare them with another form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import Module

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.device.graph_cache import Built, GraphCache
from srm.engine.device.model import build_logits_graph, graph_shape
from srm.engine.device.runner import host_weights
from srm.engine.steps.batch import F32, I32
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import Weights, fold

NUM_SLOTS = 24

Pool = tuple[Buffer, Buffer]
Row = tuple[I32, int, int, int]
"""Token ids, read slot, write slot, position of the first token."""


class LogitsModel:
    """One model."""

    def __init__(self, config: ModelConfig, model: Model) -> None:
        self.config = config
        self._model = model

    def pool(self) -> Pool:
        """States that start as garbage."""
        states = np.full((NUM_SLOTS, self.config.state_width), 1e3, np.float32)
        return Buffer.from_numpy(states), Buffer.from_numpy(np.zeros(NUM_SLOTS, np.int32))

    def run_batch(self, pool: Pool, rows: list[Row]) -> F32:
        """One batch: logits [tokens, vocab]."""
        tokens = np.concatenate([row[0] for row in rows]).astype(np.int32)
        read, write, positions = (np.array([row[i] for row in rows], np.int32) for i in (1, 2, 3))
        offsets = np.cumsum([0, *(len(row[0]) for row in rows)]).astype(np.int32)
        inputs = (Buffer.from_numpy(a) for a in (tokens, read, write, positions, offsets))
        logits: F32 = self._model.execute(*pool, *inputs)[0].to_numpy()
        return logits

    def feed_in_chunks(self, texts: list[I32], rng: np.random.Generator) -> list[F32]:
        """The texts in chunks of random lengths, in a new order each step: logits of each."""
        slots, fed = rng.permutation(NUM_SLOTS)[: len(texts)], [0] * len(texts)
        results = [np.empty((0, self.config.vocab_size), np.float32) for _ in texts]
        pool, longest = self.pool(), max(len(text) for text in texts)
        while any(done < len(text) for done, text in zip(fed, texts, strict=True)):
            rows, who = [], []
            for i in rng.permutation(len(texts)):
                count = int(rng.choice([0, 1, 1, 2, 7, 30, longest // 3]))
                count = min(count, len(texts[i]) - fed[i])
                if count:
                    slot = int(slots[i])
                    rows.append((texts[i][fed[i] : fed[i] + count], slot, slot, fed[i]))
                    who.append((i, count))
                    fed[i] += count
            if rows:
                ends = np.cumsum([count for _, count in who])[:-1]
                for (i, _), part in zip(
                    who, np.split(self.run_batch(pool, rows), ends), strict=True
                ):
                    results[i] = np.concatenate([results[i], part])
        return results


class LogitsGraphs:
    """Graphs of different shapes, compiled as one module, or read from disk where they were."""

    def __init__(self, wanted: Iterable[tuple[ModelConfig, DType]]) -> None:
        shapes = {graph_shape(*item): item for item in wanted}
        self._scopes = {shape: f"shape_{number}" for number, shape in enumerate(shapes)}
        self._session = InferenceSession(devices=[CPU()])

        def build() -> Built:
            module = Module()
            for shape, (config, dtype) in shapes.items():
                scope = f"{self._scopes[shape]}."
                graph = build_logits_graph(config, dtype, CPU(), scope, module)
            return module, graph.kernel_libraries_paths

        folder = EngineConfig().cache_dir.expanduser()
        cache = GraphCache(self._session, CPU(), folder)
        self._compiled = cache.load("logits", tuple(shapes), build)
        self._registry: dict[str, Buffer] = {}  # of all graphs: MAX binds no single one
        for config, dtype in shapes.values():
            self._register(fold(config, random_tensors(config), "any"), dtype)

    def _register(self, weights: Weights, dtype: DType) -> str:
        """Name what is to be bound to the graph of these weights; returns the graph's name."""
        scope = self._scopes[graph_shape(weights.config, dtype)]
        bound = host_weights(weights, dtype, CPU())
        self._registry |= {f"{scope}.{name}": value for name, value in bound.items()}
        return f"{scope}.srm_logits"

    def bind(
        self, models: Mapping[str, Weights], dtype: DType = DType.float32
    ) -> dict[str, LogitsModel]:
        """Models by name. Raises KeyError for one whose shape was not compiled."""
        entries, left = {}, dict(models)
        while left:
            graphs: dict[str, str] = {}  # one model of each graph at a time
            for name, weights in list(left.items()):
                if self._scopes[graph_shape(weights.config, dtype)] + ".srm_logits" not in graphs:
                    graphs[self._register(left.pop(name), dtype)] = name
            bound = self._session.init_all(self._compiled, weights_registry=self._registry)
            for graph, name in graphs.items():
                entries[name] = LogitsModel(models[name].config, bound[graph])
        return entries
