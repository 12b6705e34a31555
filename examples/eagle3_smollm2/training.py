"""An EAGLE-3 draft head from files of hidden states, with speculators' own training code.

What speculators' scripts build_vocab_mapping.py and train.py do, of 0.3.0 and 0.4 alike, with
the settings that a machine without an accelerator needs:

- ``TORCH_COMPILE_DISABLE=1``, before torch is imported: the draft's attention is
  flex_attention, which torch compiles for a CPU only without gradients;
- ``local_rank`` of the trainer is a device here. The trainer uses it for ``Tensor.to``, and
  rank 0 means the first GPU;
- no worker processes and no pinned memory in the data loaders.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.checkpointer import convert_float_dtype, load_safetensors_state_dict
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn, split_files
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.noise_transforms import AddUniformNoise
from speculators.train.trainer import Trainer, TrainerConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch.utils.data import DataLoader
from transformers import AutoConfig, LlamaConfig

CPU = torch.device("cpu")
STEPS_AHEAD = 3  # tokens that the draft proposes at a time

# Of speculators' train.py.
NORM_BEFORE_RESIDUAL = True
NOISE = 0.05


@dataclass
class History:
    """What the trainer reported.

    Attributes:
        train: metrics of each step, by epoch.
        held_out: means over the files that are not trained on: before training, then after
            each epoch.
    """

    train: dict[int, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    held_out: list[dict[str, float]] = field(default_factory=list)

    def loss(self, epoch: int) -> float:
        """Mean loss of an epoch's steps."""
        return float(np.mean([step["loss"] for step in self.train[epoch]]))


class _Listener(logging.Handler):
    """The trainer reports to the logger ``speculators.metrics``, in dicts."""

    def __init__(self, history: History, show: Any) -> None:
        super().__init__()
        self._history, self._show = history, show

    def emit(self, record: logging.LogRecord) -> None:
        report: Any = record.msg
        if "train" in report:
            steps = self._history.train[report["epoch"]]
            steps.append(report["train"])
            self._show(report["epoch"], len(steps), report["train"]["loss"])
        else:
            means = {k.removesuffix("_epoch"): v for k, v in report["val"].items()}
            self._history.held_out.append(means)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Without the warning that it is slow."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def vocabulary_mapping(
    token_frequencies: Path, model: Path, draft_vocabulary: int, folder: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the model's tokens the draft knows: the most frequent ones of the data.

    Writes ``d2t.npy`` and ``t2d.npy`` into `folder`, as build_vocab_mapping.py does.

    Args:
        token_frequencies: what speculators' preprocessing wrote: how often each token occurs
            among those that are trained on.
        model: the target model, for the size of its vocabulary.
        draft_vocabulary: how many tokens the draft is to know.
        folder: for the two files.

    Returns:
        d2t, int64 [draft vocabulary]: what to add to a draft token's id for the target's; and
        t2d, bool [target vocabulary]: which tokens the draft knows.
    """
    d2t, t2d = build_vocab_mappings_from_distribution(
        token_freq_dict=torch.load(token_frequencies, weights_only=True),
        draft_vocab_size=draft_vocabulary,
        target_vocab_size=AutoConfig.from_pretrained(model).vocab_size,
    )
    np.save(folder / "d2t.npy", d2t.numpy())
    np.save(folder / "t2d.npy", t2d.numpy())
    return d2t, t2d


def make_draft(model: Path, d2t: torch.Tensor, t2d: torch.Tensor) -> Eagle3DraftModel:
    """A draft head with random weights, shaped after the target model."""
    target = AutoConfig.from_pretrained(model)
    layer = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        hidden_act=target.hidden_act,
        max_position_embeddings=target.max_position_embeddings,
        initializer_range=target.initializer_range,
        rms_norm_eps=target.rms_norm_eps,
        head_dim=getattr(target, "head_dim", None),
    )
    layer._attn_implementation = "simple_flex_attention"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(d2t),
        norm_before_residual=NORM_BEFORE_RESIDUAL,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS_AHEAD)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(model), architectures=list(target.architectures)
            ),
        ),
    )
    return Eagle3DraftModel(config=config, t2d=t2d, d2t=d2t)


def loader(files: list[Path], tokens_per_step: int, noise: bool) -> DataLoader[Any]:
    """Batches of whole samples, packed to `tokens_per_step` tokens."""
    names = ("hidden_states", "verifier_last_hidden_states")
    dataset = Eagle3SampleFileDataset(
        max_len=tokens_per_step,
        file_list=files,
        transform=AddUniformNoise(std=NOISE, tensors=names) if noise else None,
    )
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=tokens_per_step,
        lengths=dataset.approx_lengths,
        num_replicas=1,
        rank=0,
    )
    return DataLoader(
        dataset, batch_sampler=sampler, collate_fn=create_collate_fn(tokens_per_step)
    )


def train(
    draft: Eagle3DraftModel,
    states: Path,
    checkpoints: Path,
    *,
    epochs: int,
    learning_rate: float,
    tokens_per_step: int,
    show: Any = lambda epoch, step, loss: None,
) -> tuple[History, DataLoader[Any]]:
    """Trains the draft and writes a checkpoint after each epoch.

    Args:
        draft: changed in place.
        states: folder with ``data_*.pt`` and, from speculators 0.4.0 on,
            ``sample_lengths.json``; nothing else that ends in ``pt``.
        checkpoints: for ``0/``, ``1/``, ... with ``model.safetensors`` and ``config.json``.
        epochs: how often each file is used.
        learning_rate: at the first step; it falls linearly to 0.
        tokens_per_step: tokens of a batch.
        show: called with epoch, step and loss.

    Returns:
        What was reported, and the batches that were not trained on: one file in ten.
    """
    train_files, held_out_files = split_files(str(states), ratio=0.9)
    held_out = loader(held_out_files, tokens_per_step, noise=False)
    call = {
        "use_off_policy_tokens": False,
        "ttt_steps": STEPS_AHEAD,
        "ttt_step_loss_decay": 1.0,
    }
    config = TrainerConfig(
        lr=learning_rate,
        num_epochs=epochs,
        save_path=str(checkpoints),
        local_rank=CPU,  # type: ignore[arg-type]
        train_call_kwargs=call,
        val_call_kwargs=call,
    )
    trainer = Trainer(draft, config, loader(train_files, tokens_per_step, noise=True), held_out)

    history = History()
    listener = _Listener(history, show)
    metrics = logging.getLogger("speculators.metrics")
    metrics.addHandler(listener)
    metrics.setLevel(logging.INFO)
    metrics.propagate = False
    try:
        with _uncompiled():
            trainer.val_epoch(0)
            trainer.run_training()
    finally:
        metrics.removeHandler(listener)
    return history, held_out


def load_draft(checkpoint: Path) -> Eagle3DraftModel:
    """A draft from what the trainer saved; all of it comes from there but the target's own.

    As the trainer does when it goes on from a checkpoint (its own function asks for a GPU in
    0.3.0). The embeddings and the target's head come from the target model, by the path in
    ``config.json``.
    """
    weights = load_safetensors_state_dict(checkpoint / "model.safetensors", "cpu")
    config = Eagle3SpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "simple_flex_attention"
    draft = Eagle3DraftModel(config=config, t2d=weights["t2d"], d2t=weights["d2t"])
    lacking, unknown = draft.load_state_dict(
        convert_float_dtype(weights, draft.dtype), strict=False
    )
    trained = {name for name, weight in draft.named_parameters() if weight.requires_grad}
    if unknown or trained & set(lacking):
        raise ValueError(f"{checkpoint} lacks {trained & set(lacking)}; unknown: {unknown}")
    return draft.eval()


@torch.no_grad()
def loss_of(draft: Eagle3DraftModel, batches: DataLoader[Any]) -> float:
    """Mean loss over batches."""
    with _uncompiled():
        return float(np.mean([draft(**b, ttt_steps=STEPS_AHEAD)[1].item() for b in batches]))
