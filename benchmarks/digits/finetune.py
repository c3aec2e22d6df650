"""Fine-tune a pruned digits network with its zeros held fixed, and say what that brings back.

    gpu-runtime prune benchmarks/digits/digits_dense.onnx --permute -o pruned.onnx
    python benchmarks/digits/finetune.py pruned.onnx finetuned.onnx     (needs the extras `train` and `test`)

docs/pruning.md tells the steps. The weights come out of the pruned file, so its order of channels does too.
"""

import sys
import time
from pathlib import Path

from gpu_runtime.pruning.finetune import Masks

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train import HELDOUT, HERE, SEED, Torch, accuracy, nn, save_onnx, split, torch, train  # noqa: E402

STEPS = {"epochs": 5, "rate": 0.02}  # the rate is 0.4 of that of dense training


def parameters(model):
    """Returns name in the ONNX file -> parameter or buffer of the PyTorch model, as `train.Onnx` writes them."""
    found: dict[str, torch.Tensor] = {}
    for name, layer in model.layers.items():
        if isinstance(layer, nn.Linear):
            found |= {f"{name}/gemm.weight": layer.weight, f"{name}/gemm.bias": layer.bias}
            continue
        conv, norm = layer
        bn = name.replace("conv", "bn").replace("proj", "proj_bn")
        found |= {f"{name}.weight": conv.weight, f"{bn}.scale": norm.weight, f"{bn}.bias": norm.bias}
        found |= {f"{bn}.mean": norm.running_mean, f"{bn}.var": norm.running_var}
    return found


def main(source, target):
    start = time.monotonic()
    torch.manual_seed(SEED)
    x, heldout_x, y, heldout_y = split()
    model = Torch()
    hold = Masks(parameters(model), source)
    train(model, torch.from_numpy(x), torch.from_numpy(y), **STEPS, after_step=hold)
    save_onnx(model, Path(target))
    for path in (HERE / "digits_dense.onnx", Path(source), Path(target)):
        print(f"{path.name}: {accuracy(path, heldout_x, heldout_y):.2%} of {HELDOUT} held-out images")
    print(f"{len(hold.zeros)} masks, {STEPS['epochs']} epochs, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
