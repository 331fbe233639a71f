"""From a checkpoint to files that others read: safetensors, Hugging Face, torch. No torch, but for torch's own."""
