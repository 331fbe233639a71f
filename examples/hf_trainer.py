"""transformers' Trainer with checkpoints by ckptlib: the class is made of one more base, and nothing else changes.

    python examples/hf_trainer.py out 40                                  # again after a kill: it goes on
    torchrun --nproc-per-node 2 examples/hf_trainer.py out 40

Lines that end with `# ckpt` are there for ckptlib only.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ckptlib.adapters.huggingface import CkptlibTrainerMixin  # ckpt


class MyTrainer(CkptlibTrainerMixin, Trainer):  # ckpt
    pass


out, steps = sys.argv[1], int(sys.argv[2])
args = TrainingArguments(
    output_dir=out,
    max_steps=steps,
    save_steps=5,
    save_total_limit=2,
    per_device_train_batch_size=4,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
torch.manual_seed(1)
tokens = torch.randint(0, 64, (96, 16))
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
trainer = MyTrainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train(resume_from_checkpoint=trainer.last_checkpoint() is not None)
trainer.save_model(f"{out}/final")  # for from_pretrained
