"""A record of the engine as a picture."""

from __future__ import annotations

import json
from pathlib import Path

from training.plot_engine import main


def test_every_model_and_run_is_drawn_the_same_each_time(tmp_path: Path) -> None:
    batches = [{"batch_size": size, "tokens_per_s": 9.0 * size} for size in (1, 4)]
    runs = [
        {"by": by, "dtype": dtype, "batches": batches}
        for by in ("srm", "PyTorch eager", "PyTorch compiled")
        for dtype in ("float32", "bfloat16")
    ]
    models = [{"name": name, "flops_per_token": 10**9, "runs": runs} for name in ("one", "other")]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"peak_gflops": {"float32": 50.0}, "models": models}))
    main([str(path)])
    picture = path.with_suffix(".svg").read_text()
    labels = ["one", "other", *(f"{run['by']}, {run['dtype']}" for run in runs)]
    assert all(f"<!-- {label} -->" in picture for label in labels)
    main([str(path)])
    assert path.with_suffix(".svg").read_text() == picture
