"""To and from Transformers: models.py turns a Decoder into a Llama or Qwen3 and back, convert.py has the names, configs
and weights of those, tokenizer_files.py the tokenizer's files, command.py `train import` and `train export`.
"""

from .command import main_export, main_import
from .models import (
    Foreign,
    decoder_from_transformers,
    export,
    import_model,
    load_transformers,
)

__all__ = [
    "Foreign",
    "decoder_from_transformers",
    "export",
    "import_model",
    "load_transformers",
    "main_export",
    "main_import",
]
