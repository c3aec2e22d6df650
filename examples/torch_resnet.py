"""A ResNet of torchvision as an engine: which layers run sparse, and how far its outputs are from PyTorch's.

It needs PyTorch and torchvision (`pip install torch torchvision`), and gpu_runtime with the extra `build` and one that runs
engines (`cuda13`, or `emulator` without a GPU). Weights are random unless --weights names some, as DEFAULT, which torchvision
downloads. Continuous integration has no PyTorch and does not run it.

    python examples/torch_resnet.py --device l4 --sparsity force
"""

import argparse

import torch
import torchvision

import gpu_runtime as gr


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    given.add_argument("--model", default="resnet18")
    given.add_argument("--weights")
    given.add_argument("--device", help="plan for this GPU (h200, a100, l4, ...); without it for the one at hand")
    given.add_argument("--sparsity", default="enable", choices=("disable", "enable", "force"))
    given.add_argument("--batch", type=int, default=1)
    options = given.parse_args()
    torch.manual_seed(0)
    model = torchvision.models.get_model(options.model, weights=options.weights).eval()
    x = torch.randn(options.batch, 3, 224, 224)
    engine = gr.build(model, example_inputs=(x,), sparsity=options.sparsity, device=options.device)
    print(engine.explain())
    name = engine.inputs[0].name
    with engine.context() as context, torch.inference_mode():
        ours, theirs = next(iter(context.run({name: x.numpy()}).values())), model(x).numpy()
    error = abs(ours - theirs).max() / abs(theirs).max()
    print(f"largest difference from PyTorch: {error:.2%} of the largest output", "(pruned)" * (options.sparsity == "force"))


if __name__ == "__main__":
    main()
