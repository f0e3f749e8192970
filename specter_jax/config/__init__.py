"""What a checkpoint says about its model, read once and frozen."""

from specter_jax.config.model import FAMILIES, ModelConfig, layer_name
from specter_jax.config.rope import RopeConfig

__all__ = ["FAMILIES", "ModelConfig", "RopeConfig", "layer_name"]
