"""Trains a small GPT on the sources of Python's standard library, and can be killed at any time.

    python examples/train_gpt.py --root /tmp/run
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --root /tmp/run

All that the run needs to go on is under --root. Start the same command again, and it goes on with the same bits, as if
nothing had happened. Start it with another number of ranks, and it goes on with the same data.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import math
import os
import random
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this, set this early

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ckptlib
from ckptlib.data import ResumableLoader, ResumableSampler, resumable

# The model


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.proj(seen))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)  # a token is a byte
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                narrow = name.endswith(("proj.weight", "mlp.2.weight"))  # what is added to the residual stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if narrow else 0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.dropout(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


# The data


def read_text(limit: int = 8 << 20) -> torch.Tensor:
    """Real text that is on every machine: bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(os.__file__)), "*.py"))):
        with open(path, "rb") as file:
            text += file.read(limit - len(text))
    return torch.frombuffer(text, dtype=torch.uint8)


class Windows(Dataset[torch.Tensor]):
    """Pieces of a text, each one byte longer than what the model sees."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, item: int) -> torch.Tensor:
        # The jitter draws from Python's global generator. In the trainer, ckptlib puts that back along with torch's and
        # numpy's; in a worker, ResumableSampler seeds it for each batch.
        first = item * self.context + random.randrange(self.context)
        first = min(first, len(self.text) - self.context - 1)
        return self.text[first : first + self.context + 1]


def make_loader(args: argparse.Namespace) -> ResumableLoader:
    """Shuffled windows: each once per epoch, across restarts and changes of the number of ranks."""
    windows = Windows(read_text(), args.context)
    sampler = ResumableSampler(windows, args.batch, seed=args.seed)
    return resumable(DataLoader(windows, batch_sampler=sampler, num_workers=args.workers))


# The run


def main() -> None:
    args = parse_arguments()
    rank, world_size, device = set_up(args)
    seed_everything(args.seed)  # the same on all ranks: so are the weights
    model: nn.Module = GPT(args.layers, args.width, args.heads, args.context).to(device)
    if args.parallel == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif args.parallel == "ddp":
        # DDP reorders its gradient buckets after a process's first step, so from three ranks on a resumed run adds the
        # same numbers in another order. Looking for unused parameters happens to prevent that.
        model = DistributedDataParallel(model, find_unused_parameters=world_size > 2)
    seed_everything(args.seed + 1 + rank)  # different on each: so is the dropout

    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: warm_up_then_cosine(step, args.steps))
    loader = make_loader(args)
    batches = loader.endless()
    losses = open(args.losses, "a") if args.losses and rank == 0 else None  # noqa: SIM115  (open until the process ends)

    status = 0
    try:
        with ckptlib.Checkpointer(
            args.root,
            {"model": model, "optim": optim, "sched": sched, "loader": loader},
            every=ckptlib.Steps(args.every),
            keep=ckptlib.Keep(last=3),
            peers=None if args.copies is None else ckptlib.Peers(args.copies),
        ) as ckpt:
            report = ckpt.restore()
            say(rank, f"pid {os.getpid()}, {world_size} x {device.type}, {args.parallel}: {report}")
            done, began = report.step, time.perf_counter()
            for step in ckpt.loop(report.step, args.steps):
                windows = next(batches).to(device).long()
                loss = model(windows[:, :-1], windows[:, 1:])
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optim.step()
                sched.step()
                optim.zero_grad()

                # Reading it waits for the device; a large run would do that every few steps.
                mean = average(loss.detach())
                if losses:
                    print(json.dumps({"step": step, "loss": mean.hex(), "pid": os.getpid()}), file=losses, flush=True)
                if step % 10 == 0 or step == args.steps - 1:
                    say(rank, f"step {step:5d}  loss {mean:.4f}  {time.perf_counter() - began:6.1f} s")
                done = step + 1
    except ckptlib.Preempted:  # every rank left the loop at the same step, and all it needs to go on is saved
        say(rank, f"stopped after {done} of {args.steps} steps; run the same command again to go on")
        status = 75  # as it would end if it did not catch this: a launcher must not take it for done
    else:
        if args.final:
            write_summary(args.final, model, optim, loader, rank)
    leave(status)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="where checkpoints go: a path or a URL such as s3://bucket/run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--copies", type=int, help="keep each step in memory, with this many copies on other hosts")
    parser.add_argument("--parallel", choices=["fsdp", "ddp", "none"], help="default: fsdp under torchrun, else none")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees")
    parser.add_argument("--batch", type=int, default=16, help="windows per step, over all ranks")
    parser.add_argument("--workers", type=int, default=0, help="processes that read the data, per rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--losses", help="file to which rank 0 appends a line of JSON per step")
    parser.add_argument("--final", help="file for digests of all that the run ended with")
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.parallel = args.parallel or ("fsdp" if world_size > 1 else "none")
    if args.batch % world_size or (world_size > 1 and args.parallel == "none"):
        parser.error(f"{world_size} ranks: --batch must be a multiple of that, and --parallel fsdp or ddp")
    return args


def set_up(args: argparse.Namespace) -> tuple[int, int, torch.device]:
    """This rank, the number of ranks, and the device to train on."""
    torch.use_deterministic_algorithms(True)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # NCCL takes no two ranks on one GPU: with fewer GPUs than ranks, all train on the host.
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= local_world_size else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif local_world_size > (os.cpu_count() or 1) / 2:
        torch.set_num_threads(1)
    if args.parallel == "none":
        return 0, 1, device
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps one key-value store for all restarts, and in torch 2.13 nothing tells the attempts apart: the
        # new ranks would find the addresses of the dead ones. A prefix of our own does. Where torchrun makes a store
        # for each attempt (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, for nodes that are replaced), there must be none: a
        # new node counts its restarts from 0.
        store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return rank, world_size, device


def leave(status: int) -> None:
    if dist.is_initialized() and dist.get_backend() == "gloo":
        # Gloo's threads need the GIL to let go of the last collective's tensors, and the destructor of the group joins
        # them with the GIL held (torch 2.13): a script that ends right behind a collective may hang. All is on disk.
        sys.stdout.flush()
        os._exit(status)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def warm_up_then_cosine(step: int, steps: int, warm_up: int = 20) -> float:
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def average(loss: torch.Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


# The end of the run, for comparing two runs


def write_summary(
    path: str, model: nn.Module, optim: torch.optim.Optimizer, loader: ResumableLoader, rank: int
) -> None:
    """Digests of each tensor, and of each rank's generators and place in the data. All ranks call it."""
    weights, state = {}, {}
    for name, p in model.named_parameters():
        weights[name] = digest(p)
        state[name] = {key: digest(value) for key, value in sorted(optim.state[p].items())}
    mine = (digest_generators(), loader.state_dict())
    ranks = [mine]
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    if rank == 0:
        generators, data = ([each[i] for each in ranks] for i in range(2))
        learning_rate = optim.param_groups[0]["lr"].hex()
        summary = {"weights": weights, "optimizer": state, "learning rate": learning_rate}
        summary |= {"random generators": generators, "place in the data": data}
        with open(path, "w") as file:
            json.dump(summary, file, indent=1)


def digest(tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + data.tobytes()).hexdigest()


def digest_generators() -> dict[str, str]:
    states = {"python": repr(random.getstate()), "numpy": repr(np.random.get_state(legacy=False)["state"])}
    digests = {name: hashlib.sha256(state.encode()).hexdigest() for name, state in states.items()}
    digests["torch"] = digest(torch.get_rng_state())
    if torch.cuda.is_available():
        digests["cuda"] = digest(torch.cuda.get_rng_state())
    return digests


if __name__ == "__main__":
    main()
