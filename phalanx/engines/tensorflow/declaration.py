"""What every config knows of TensorFlow; loaded with it, so without a heavy import."""

from __future__ import annotations

from phalanx.config.rows import Backend, Package, StrategyRow

BACKEND = Backend(
    "local",
    "mirrored",
    "multiworker",
    strategies=("mirrored", "multiworker", "parameter-server"),
    engine="phalanx.engines.tensorflow",
    package=Package("tensorflow", "TensorFlow", "Run: pip install 'phalanx[tensorflow]'"),
    framework="Keras",
    trainer="TensorFlowDistributedTrainer(model_fn=...)",
    model_packages=("keras", "tf_keras"),
)
STRATEGIES = (
    StrategyRow(
        "tensorflow",
        "--backend tensorflow --strategy mirrored|multiworker|parameter-server (extra: tensorflow)",
        "tf.distribute for Keras models: replicas in one process, one process per worker, or parameter servers",
        "the model is a Keras model",
        "mixed precision, backups, restarts; other options of Keras are given to compile()",
    ),
)
