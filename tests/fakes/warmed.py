"""The entry of a zygote whose trainers find transformers and scikit-learn imported: that takes
seconds, and every rank would do it for itself.
"""

import sklearn.datasets  # type: ignore[import-untyped]
import transformers
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from trainer.main import run

__all__ = ["modeling_gpt2", "modeling_llama", "run", "sklearn", "transformers"]
