"""Transformers: a tiny Llama with penalties beside its own loss, all of them in the log history.

Random weights, no download: the language counts upwards in steps of one to three. The trainer
accumulates gradients over two micro-batches; every penalty keeps the scale it is written with.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainingArguments

import equipoise as eq
from equipoise import Pipeline, Term, schedules, tracking, transforms
from equipoise.integrations.transformers import PipelineCallback, PipelineTrainer

STEPS = 120
PIPELINE = Pipeline(
    explore=Term(
        eq.entropy,
        inputs="logits",
        weight=schedules.linear(0.05, 0.0, steps=STEPS),
        options={"mode": "bonus", "from_logits": True},
    ),
    activity=Term(eq.output_magnitude, inputs="hidden", weight=0.02, options={"dim": -1}),
    orthogonal=Term(eq.orthogonality, inputs="head", weight=1e-3, every=4),
)


class RegularizedTrainer(PipelineTrainer):
    """Says what the pipeline reads of the model, its batch and its outputs."""

    def pipeline_inputs(self, model: nn.Module, _batch: Any, outputs: Any) -> dict[str, Any]:
        """Logits, the last hidden states, and the weights of the head."""
        return {
            "logits": outputs.logits,
            "hidden": outputs.hidden_states[-1],
            "head": model.get_output_embeddings().weight,
        }


def sequences(number: int = 1024, length: int = 12) -> list[dict[str, Tensor]]:
    """Counting in steps of one, two or three, modulo the vocabulary."""
    starts, steps = torch.randint(32, (number, 1)), torch.randint(1, 4, (number, 1))
    ids = (starts + steps * torch.arange(length)) % 32
    return [{"input_ids": row, "labels": row} for row in ids]


def main() -> None:
    """Train, and show the history."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    model.config.output_hidden_states = True
    with tempfile.TemporaryDirectory() as folder:
        trainer = RegularizedTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                max_grad_norm=0.0,  # the chain below clips, where its order can be seen
                logging_steps=20,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=sequences(),
            eval_dataset=sequences(64),
        )
        regularize = PipelineCallback(
            PIPELINE,
            track=tracking.every(10),
            transform=transforms.chain(
                transforms.clip_by_norm_history(90, 50), transforms.clip_by_global_norm(1.0)
            ),
            prefix="",
        )
        regularize.add_to(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    columns = ["loss", "base", "explore", "activity", "orthogonal", "explore_grad_norm_weighted"]
    print(PIPELINE, end="\n\n")
    print("step".rjust(4), *(name.rjust(max(len(name), 8)) for name in columns), sep="  ")
    for row in trainer.state.log_history:
        if "loss" in row:
            figures = [f"{row[c]:.3g}".rjust(max(len(c), 8)) for c in columns]
            print(f"{row['step']:>4}", *figures, sep="  ")
    print(f"\nThe loss of the evaluation, without any penalty: {evaluated:.2f}")


if __name__ == "__main__":
    main()
