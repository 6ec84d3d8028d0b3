"""Scores of traces by Bergson, through its pipelines, on one CPU. Imports nothing of the package.

    python tests/experiments/peer_bergson.py METHOD MODEL TRACES POOL OUTPUT

Run by `peer_scores.py` and `benchmarks/peer_scoring.py` with the Python of an environment that has Bergson. TRACES and
POOL are JSON lines of {"input_ids", "labels"}, MODEL is a Hugging Face folder, of a model or of an adapter. OUTPUT
receives the scores in the order of TRACES, the CPU seconds of the whole pipeline and the bytes of the files that it
leaves. The methods:

    dot         gradient of a trace times the gradient of the pool's mean loss
    output      the same for each token's loss, by one forward-mode pass; 0 of tokens that are not supervised
    cosine      dot of unit vectors
    trackstar   cosine of projected gradients, preconditioned by their autocorrelation (arXiv:2410.17413)
    ekfac       influence with a factored Hessian whose eigenvalues are corrected (arXiv:2308.03296)
"""

import json
import os
import resource
import shutil
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported
import numpy as np
import torch
from bergson import DataConfig, IndexConfig, PreprocessConfig, QuerySetConfig, ScoreConfig
from bergson.build import build_query
from bergson.cli.trackstar import trackstar
from bergson.config.config import HessianConfig, HessianPipelineConfig, TrackstarConfig, TrackstarIndexConfig
from bergson.data import load_scores
from bergson.hessians.pipeline import hessian_pipeline
from bergson.score.score import score_dataset


def score(method: str, model: str, traces: str, pool: str, folder: Path) -> None:
    """Write the scores to `folder / "scores"`."""
    kind = TrackstarIndexConfig if method == "trackstar" else IndexConfig
    index = kind(
        run_path=str(folder), model=model, precision="fp32", loss_reduction="mean", data=DataConfig(dataset=traces)
    )
    index.distributed.nproc_per_node = 1
    query = QuerySetConfig(dataset=pool, aggregation="mean")
    if method == "trackstar":
        trackstar(index, TrackstarConfig(query=query, preprocess_cfg=PreprocessConfig(unit_normalize=True)))
        return
    if method == "ekfac":
        hessian = HessianConfig(method="kfac", ev_correction=True)
        hessian_pipeline(index, hessian, ScoreConfig(), PreprocessConfig(), HessianPipelineConfig(query=query))
        return
    preprocess = PreprocessConfig(unit_normalize=method == "cosine")
    index.run_path = str(folder / "query")
    build_query(index, query, preprocess)
    index.run_path, index.data = str(folder / "scores"), DataConfig(dataset=traces)
    index.attribute_tokens = method == "output"
    influence = "output" if method == "output" else "gradient"
    score_dataset(index, ScoreConfig(query_path=str(folder / "query"), token_influence=influence), preprocess)


def main() -> None:
    method, model, traces, pool, output = sys.argv[1:]
    torch.set_num_threads(1)
    folder = Path(output).with_suffix(".bergson")
    shutil.rmtree(folder, ignore_errors=True)
    score(method, model, traces, pool, folder)
    scores = np.asarray(load_scores(folder / "scores")[:], dtype=np.float64).reshape(-1)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    result = {
        "scores": scores.tolist(),
        "cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in used),
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    }
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
